"""Record the effect of each sampler of a chain on the distribution of every sampled token."""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.generate.chain import Chain, SamplerTrace, at_least_float32
from regard.generate.sampler_spec import format_sampler
from regard.generate.samplers.logits_processor import entropy
from regard.generate.sampling_state import SamplingState

MIN_CHANGE = 1e-6  # smaller changes of a probability are not reported


@dataclass(frozen=True, slots=True)
class ProbabilityChange:
    """A token whose probability a sampler changed; to 0 if the sampler removed it."""

    id: int
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class SamplerEffect:
    """The effect of one sampler on one row."""

    sampler: str  # a spec for `parse_sampler`
    remaining: int  # tokens that can still be sampled
    mass: float  # the probability mass it kept; 1 if it removed nothing
    entropy: float  # after the sampler, in bits
    removed: int  # tokens it removed
    top_removed: list[ProbabilityChange]  # the most probable of them
    top_changed: list[ProbabilityChange]  # the kept tokens that changed most


@dataclass(frozen=True, slots=True)
class TokenTrace:
    """How one token was sampled."""

    id: int
    model_prob: float  # its probability according to the model
    final_prob: float  # its probability after all samplers
    entropy: float  # of the model's distribution, in bits
    samplers: list[SamplerEffect]


@dataclass(frozen=True, slots=True)
class TracedChain(Chain):
    """A chain that records, for every token it samples, the effect of each sampler.

    After decoding one prompt, `tokens[step][0]` is the trace of each token, that of a stop id
    included:

        chain = TracedChain(chain.samplers)
        generate(model, [prompt], chain, max_new_tokens=20)
        chain.tokens[0][0].samplers

    Of several prompts, `tokens[step]` has one trace for each row that is still decoded: `generate`
    drops rows that have ended, so the index of a prompt changes.
    """

    top: int = 5  # how many removed or changed tokens of a sampler are recorded
    tokens: list[list[TokenTrace]] = field(default_factory=list, repr=False)
    traces: list[SamplerTrace] = field(default_factory=list, repr=False)  # of the current token

    @property
    def capturable(self) -> bool:
        """False: recording needs host synchronization."""
        return False

    def run_samplers(
        self, logits: Float[Tensor, "rows vocab"], sampling: SamplingState
    ) -> Iterator[SamplerTrace]:
        """Apply the samplers and keep the logits before and after each."""
        self.traces.clear()
        for trace in Chain.run_samplers(self, logits, sampling):
            self.traces.append(trace)
            yield trace

    def sample(
        self,
        logits: Float[Tensor, "rows vocab"],
        sampling: SamplingState,
        sample_ids: Callable[[Tensor], Tensor] | None = None,
        *,
        use_kernel: bool = False,
    ) -> Int[Tensor, " rows"]:
        """Sample the next id of each row, and append its `TokenTrace` to `tokens`."""
        ids = Chain.sample(self, logits, sampling, sample_ids, use_kernel=use_kernel)
        self.tokens.append([self._token(logits, row, id) for row, id in enumerate(ids.tolist())])
        return ids

    def table(self, piece: Callable[[int], str]) -> list[dict[str, Any]]:
        """The traces of one prompt as plain dicts, for JSON; `piece` gives the text of an id."""

        def with_pieces(value: Any) -> Any:
            if isinstance(value, list):
                return [with_pieces(item) for item in value]
            if not isinstance(value, dict):
                return value
            entry = {key: with_pieces(item) for key, item in value.items()}
            return {"piece": piece(entry["id"]), **entry} if "id" in entry else entry

        return [with_pieces(asdict(row[0])) for row in self.tokens]

    def _token(self, logits: Tensor, row: int, id: int) -> TokenTrace:
        model_logits = at_least_float32(logits)[row]
        model_probs = before = model_logits.softmax(-1)
        samplers = []
        for trace in self.traces:
            processed = trace.by_id(trace.after)[row]
            after = processed.softmax(-1)
            samplers.append(
                self._effect(format_sampler(trace.sampler, row), before, processed, after)
            )
            before = after
        return TokenTrace(
            id, model_probs[id].item(), before[id].item(), _entropy_in_bits(model_logits), samplers
        )

    def _effect(
        self, sampler: str, before: Tensor, processed: Tensor, after: Tensor
    ) -> SamplerEffect:
        removed = (processed == -torch.inf) & (before > 0)
        change = (after - before).abs().masked_fill(removed, 0.0)
        return SamplerEffect(
            sampler=sampler,
            remaining=int((processed > -torch.inf).sum()),
            mass=before.masked_fill(removed, 0.0).sum().item(),
            entropy=_entropy_in_bits(processed),
            removed=int(removed.sum()),
            top_removed=self._largest(before.where(removed, 0.0), before, after),
            top_changed=self._largest(change, before, after),
        )

    def _largest(self, sizes: Tensor, before: Tensor, after: Tensor) -> list[ProbabilityChange]:
        """The tokens with the largest `sizes`; a size of at most `MIN_CHANGE` is ignored."""
        best = sizes.topk(min(self.top, len(sizes)))
        return [
            ProbabilityChange(id, before[id].item(), after[id].item())
            for size, id in zip(best.values.tolist(), best.indices.tolist(), strict=True)
            if size > MIN_CHANGE
        ]


def _entropy_in_bits(logits: Tensor) -> float:
    return entropy(logits).item() / math.log(2)
