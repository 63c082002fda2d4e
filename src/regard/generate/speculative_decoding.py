"""Speculative decoding (assisted generation): a draft proposes tokens, the model verifies them.

The model verifies all draft tokens in one forward pass.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import one_hot

from regard.errors import ConfigError
from regard.generate.chain import Chain, record_failures, sample_token
from regard.generate.decode import check_prompts
from regard.generate.sampling_state import SamplingState, pad_rows
from regard.models.base import Language, State, is_prefix_lm
from regard.nn.state import Source

_DRAFT_KEY = 0x5851F42D4C957F2D  # XORed with the keys: drafts use other random numbers


def generate_speculative(
    model: Language,
    prompts: Sequence[Sequence[int]],
    chain: Chain,
    *,
    draft: "Language | PromptLookup",
    draft_tokens: int = 4,
    max_new_tokens: int,
    stop: Collection[int] = (),
    seed: int | Sequence[int] | None = None,
    source: Source | None = None,
) -> list[list[int]]:
    r"""Continue every prompt as `generate` does, with fewer forward passes of the model.

    `draft`, a smaller model or prompt lookup, proposes up to `draft_tokens` tokens x, sampled
    from Q. One forward pass of the model gives P at each of them. They are verified in turn:

        accept x with probability min(1, P(x) / Q(x)),  else sample from max(0, P - Q), renormalized

    up to the first that is rejected; if all are accepted, one more is sampled from P. The result
    is distributed as P for any Q; greedy decoding gives the same tokens. P and Q are the
    distributions of the two models after the chain.
    Leviathan et al. 2023, Chen et al. 2023.
    """
    completions: list[list[int]] = [[] for _ in prompts]
    options = (draft, draft_tokens, max_new_tokens, stop, seed, source)
    for new_ids in _decode_with_draft(model, prompts, chain, *options):
        for completion, ids in zip(completions, new_ids, strict=True):
            completion += ids
    return completions


def stream_speculative(
    model: Language,
    prompt: Sequence[int],
    chain: Chain,
    *,
    draft: "Language | PromptLookup",
    draft_tokens: int = 4,
    max_new_tokens: int,
    stop: Collection[int] = (),
    seed: int | None = None,
    source: Source | None = None,
) -> Iterator[int]:
    """Continue one prompt, a few ids at a time: the same ids as `generate_speculative`."""
    options = (draft, draft_tokens, max_new_tokens, stop, seed, source)
    for (ids,) in _decode_with_draft(model, [prompt], chain, *options):
        yield from ids


@torch.inference_mode()
def _decode_with_draft(
    model: Language,
    prompts: Sequence[Sequence[int]],
    chain: Chain,
    draft: "Language | PromptLookup",
    draft_tokens: int,
    max_new_tokens: int,
    stop: Collection[int],
    seed: int | Sequence[int] | None,
    source: Source | None,
) -> Iterator[list[list[int]]]:
    """Yield the ids that each forward pass of the model adds to each prompt."""
    check_prompts(prompts, max_new_tokens, source)
    if draft_tokens < 1:
        raise ConfigError(f"draft_tokens={draft_tokens} must be at least 1")
    if not isinstance(draft, PromptLookup) and draft.vocab_size != model.vocab_size:
        raise ConfigError(
            f"the draft has vocab_size={draft.vocab_size} and the model "
            f"vocab_size={model.vocab_size}; both must have the same vocabulary"
        )
    if is_prefix_lm(model):
        raise ConfigError(
            "speculative decoding does not support a prefix LM (model.prefix=true), whose "
            "attention within the prompt is bidirectional; leave out draft"
        )
    if not prompts:
        return
    chain.check_rows(len(prompts))
    target = _TargetModel(
        model, prompts, max(map(len, prompts)) + max_new_tokens + draft_tokens, source
    )
    device = target.state.lengths.device
    sampling = SamplingState.from_prompts(
        prompts, max_new_tokens + draft_tokens, seed=seed, stop=sorted(stop), device=device
    )
    drafter: Drafter = draft if isinstance(draft, PromptLookup) else _DraftModel(draft, source)
    remaining = dict.fromkeys(
        range(len(prompts)), max_new_tokens
    )  # ids that each prompt may still get
    proposal = Proposal.empty(sampling)  # the first forward pass has none
    while True:
        accepted = _verify(target.score(proposal), proposal, chain, sampling)
        new_ids: list[list[int]] = [[] for _ in prompts]
        for prompt, ids in zip(list(remaining), accepted, strict=True):
            ended = ids[-1] in stop
            new_ids[prompt] = ids[:-1] if ended else ids
            remaining[prompt] = 0 if ended else remaining[prompt] - len(ids)
        yield new_ids
        unfinished = [row for row, limit in enumerate(remaining.values()) if limit]
        unfinished = target.accept(accepted, unfinished)
        if not unfinished:
            return
        if len(unfinished) < len(remaining):
            remaining = dict(
                item for row, item in enumerate(remaining.items()) if row in unfinished
            )
            rows = torch.tensor(unfinished, device=device)
            sampling, chain, drafter = (
                sampling.select(rows),
                chain.select(rows),
                drafter.select(rows),
            )
        count = min(draft_tokens, target.free_positions)
        proposal = drafter.propose(sampling, chain, count) if count else Proposal.empty(sampling)
        proposal = proposal.truncate([limit - 1 for limit in remaining.values()])


@dataclass(frozen=True, slots=True)
class Proposal:
    """The draft tokens of each row, and the distribution Q they were sampled from."""

    ids: Int[Tensor, "rows drafted"]
    counts: Int[Tensor, " rows"]  # how many of a row's ids are draft tokens; the rest is padding
    logits: Float[Tensor, "rows drafted vocab"] | None = None  # of Q; None: Q(id) = 1

    @classmethod
    def empty(cls, sampling: SamplingState) -> "Proposal":
        """No draft token for any row."""
        return cls(sampling.history[:, :0], torch.zeros_like(sampling.lengths))

    def truncate(self, limits: list[int]) -> "Proposal":
        """The first tokens of each row, up to its limit."""
        bound = torch.tensor(limits, device=self.counts.device)
        return replace(self, counts=self.counts.minimum(bound))

    def token(
        self, rows: Int[Tensor, " selected"], index: int, vocab_size: int
    ) -> tuple[Int[Tensor, " selected"], Float[Tensor, "selected vocab"]]:
        """Draft token `index` of these rows and its Q; -1 and zeros for a row without one."""
        # float64 where the device has it, as in `sample_token`
        dtype = torch.float32 if rows.device.type == "mps" else torch.float64
        if index == self.ids.shape[1]:
            zeros = torch.zeros(len(rows), vocab_size, dtype=dtype, device=rows.device)
            return torch.full_like(rows, -1), zeros
        ids, valid = self.ids[rows, index], index < self.counts[rows]
        if self.logits is None:
            q = one_hot(ids, vocab_size).to(dtype)
        else:
            q = self.logits[rows, index].to(dtype).softmax(-1)
        return ids.where(valid, -1), q * valid.unsqueeze(1)


@runtime_checkable
class Drafter(Protocol):
    """Proposes the draft tokens of speculative decoding."""

    def propose(self, sampling: SamplingState, chain: Chain, count: int) -> Proposal:
        """Up to `count` draft tokens for each row."""

    def select(self, rows: Int[Tensor, " selected"]) -> "Drafter":
        """The drafter for a subset of the rows."""


@dataclass(frozen=True, slots=True)
class PromptLookup:
    """Prompt lookup decoding (Saxena 2023): propose the ids after an earlier match of an n-gram.

    It looks for an earlier occurrence of the last `max_ngram` ids of a row, then of shorter
    n-grams. It needs no model, and helps where a completion quotes its prompt.
    """

    max_ngram: int = 3

    def __post_init__(self) -> None:
        if self.max_ngram < 1:
            raise ConfigError(f"max_ngram={self.max_ngram} must be at least 1")

    def propose(self, sampling: SamplingState, chain: Chain, count: int) -> Proposal:
        """The ids that followed the latest earlier occurrence of a row's last n-gram."""
        rows = zip(sampling.history.tolist(), sampling.lengths.tolist(), strict=True)
        continuations = [self._continuation(ids[:length])[:count] for ids, length in rows]
        width, device = max(map(len, continuations)), sampling.lengths.device
        return Proposal(
            pad_rows(continuations, width).to(device),
            torch.tensor([len(ids) for ids in continuations], device=device),
        )

    def _continuation(self, ids: list[int]) -> list[int]:
        for size in range(min(self.max_ngram, len(ids) - 1), 0, -1):
            for begin in range(len(ids) - size - 1, -1, -1):
                if ids[begin : begin + size] == ids[-size:]:
                    return ids[begin + size :]
        return []

    def select(self, rows: Int[Tensor, " selected"]) -> "PromptLookup":
        """Itself: it has no state."""
        return self


class _DraftModel:
    """Samples draft tokens from a smaller model, through the same chain.

    Its state holds accepted tokens only, and draft tokens are decoded on a copy, so that a model
    whose state cannot be rewound works too. When its context is full, it keeps the newer half of
    the ids.
    """

    def __init__(self, model: Language, source: Source | None) -> None:
        self.model, self.source = model, source
        self.state: State | None = None
        self.starts: Tensor | None = None  # the position in each row at which the state starts

    def propose(self, sampling: SamplingState, chain: Chain, count: int) -> Proposal:
        """Sample one token after the other from the smaller model."""
        context = self.model.context or sampling.history.shape[1]
        count = min(count, context - max(1, context // 2))
        if count < 1:
            return Proposal.empty(sampling)
        logits, state = self._feed_accepted(sampling, context, count)
        all_rows = torch.arange(len(logits), device=logits.device)
        draft_sampling, state = sampling.select(all_rows), state.select(all_rows)
        generators = draft_sampling.generators
        draft_sampling.generators = replace(generators, keys=generators.keys ^ _DRAFT_KEY)
        chain = Chain(chain.samplers)  # a `TracedChain` does not trace draft tokens
        ids: list[Tensor] = []
        model_logits: list[Tensor] = []
        draft_logits: list[Tensor] = []

        def sample_ids(processed: Tensor) -> Tensor:
            record_failures(processed, draft_sampling)
            draft_logits.append(processed)
            return sample_token(processed, draft_sampling.generators)

        for step in range(count):
            if step:
                scored, state = self.model.step(ids[-1].unsqueeze(1), state)
                logits = scored[:, -1]
            model_logits.append(logits)
            ids.append(chain.sample(logits, draft_sampling, sample_ids))
            draft_sampling.append(ids[-1])
        accepted = sampling.lengths.tolist()
        chain.raise_if_failed(
            draft_sampling, lambda row, length: model_logits[length - accepted[row]][row : row + 1]
        )
        counts = torch.full_like(sampling.lengths, count)
        return Proposal(torch.stack(ids, 1), counts, torch.stack(draft_logits, 1))

    def _feed_accepted(
        self, sampling: SamplingState, context: int, count: int
    ) -> tuple[Tensor, State]:
        """Feed the tokens accepted since the last call to the model; return logits and state."""
        ends, state = sampling.lengths, self.state
        starts = torch.zeros_like(ends) if self.starts is None else self.starts
        if state is not None:
            new = ends - starts - state.lengths
            if int(state.lengths.max()) + int(new.max()) + count > context:
                state = None
        if state is None:
            starts = starts.where(ends - starts <= context - count, ends - max(1, context // 2))
            state = self.model.start(len(ends), context, self.source)
        first_new = starts + state.lengths
        counts = ends - first_new
        positions = first_new.unsqueeze(1) + torch.arange(int(counts.max()), device=ends.device)
        ids = sampling.history.gather(1, positions.clamp_max(sampling.history.shape[1] - 1))
        scored, self.state = self.model.step(ids, state, counts=counts)
        self.starts = starts
        return scored[:, -1], self.state

    def select(self, rows: Int[Tensor, " selected"]) -> "_DraftModel":
        """The drafter for a subset of the rows."""
        selected = _DraftModel(self.model, self.source and self.source.select(rows))
        if self.state is not None and self.starts is not None:
            selected.state, selected.starts = self.state.select(rows), self.starts[rows]
            # the longest row may be gone: shrink the state to the remaining rows
            selected.state = selected.state.rewind(selected.state.lengths)
        return selected


class _TargetModel:
    """The model and its state (KV cache), which holds all ids of each row but the last.

    A full context is handled as in `generate`: a row drops the older half, or ends.
    """

    def __init__(
        self,
        model: Language,
        prompts: Sequence[Sequence[int]],
        capacity: int,
        source: Source | None,
    ) -> None:
        self.model, self.source = model, source
        self.limit = capacity if model.context is None else min(capacity, model.context)
        self.rows = [list(prompt[-self.limit :]) for prompt in prompts]
        self.state = self._prefill()

    @property
    def free_positions(self) -> int:
        """How many draft tokens still fit into the context."""
        return self.limit - max(map(len, self.rows))

    def score(self, proposal: Proposal) -> Float[Tensor, "rows scored vocab"]:
        """The logits after the last id of each row and after each draft token."""
        last = torch.tensor([row[-1:] for row in self.rows], device=proposal.ids.device)
        ids, counts = torch.cat([last, proposal.ids], 1), 1 + proposal.counts
        logits, self.state = self.model.step(ids, self.state, counts=counts, all_logits=True)
        return logits

    def accept(self, accepted: list[list[int]], unfinished: list[int]) -> list[int]:
        """Append accepted ids, rewind the state to them, and return the unfinished rows."""
        for row, ids in zip(self.rows, accepted, strict=True):
            row += ids
        if self.source is not None:
            unfinished = [row for row in unfinished if len(self.rows[row]) <= self.limit]
        device = self.state.lengths.device
        if not unfinished:
            return unfinished
        if len(unfinished) < len(self.rows):
            self.state = self.state.select(torch.tensor(unfinished, device=device))
            self.rows = [self.rows[row] for row in unfinished]
        if any(len(row) > self.limit for row in self.rows):
            keep = max(1, self.limit // 2)
            self.rows = [row[-keep:] if len(row) > self.limit else row for row in self.rows]
            self.state = self._prefill()
        else:
            lengths = torch.tensor([len(row) - 1 for row in self.rows], device=device)
            self.state = self.state.rewind(lengths)
        return unfinished

    def _prefill(self) -> State:
        state = self.model.start(len(self.rows), self.limit, self.source)
        longest = max(map(len, self.rows)) - 1
        if not longest:
            return state
        device = state.lengths.device
        ids = pad_rows([row[:-1] for row in self.rows], longest).to(device)
        counts = torch.tensor([len(row) - 1 for row in self.rows], device=device)
        return self.model.step(ids, state, counts=counts)[1]


def _verify(
    logits: Float[Tensor, "rows scored vocab"],
    proposal: Proposal,
    chain: Chain,
    sampling: SamplingState,
) -> list[list[int]]:
    """The ids each row accepts: draft tokens up to the first rejected, and one newly sampled id."""
    accepted: list[list[int]] = [[] for _ in logits]
    rows = torch.arange(len(logits), device=logits.device)  # those without a rejection so far
    for index in range(logits.shape[1]):
        row_chain, row_sampling = chain.select(rows), sampling.select(rows)
        row_logits = logits[rows, index]
        draft_ids, q = proposal.token(rows, index, logits.shape[-1])
        ids = row_chain.sample(
            row_logits, row_sampling, _accept_or_resample(draft_ids, q, row_sampling)
        )
        row_chain.raise_if_failed(row_sampling, partial(_logits_of_row, row_logits))
        row_sampling.append(ids)
        sampling.update_rows(rows, row_sampling)
        verified = []
        columns = (rows.tolist(), ids.tolist(), draft_ids.tolist())
        for row, token, draft_id in zip(*columns, strict=True):
            accepted[row].append(token)
            verified.append(token == draft_id and token not in sampling.stop)
        if not any(verified):
            break
        rows = rows[torch.tensor(verified, device=rows.device)]
    return accepted


def _logits_of_row(logits: Tensor, row: int, length: int) -> Tensor:
    """The logits of one row: `logits_of` of `Chain.raise_if_failed`."""
    return logits[row : row + 1]


def _accept_or_resample(
    draft_ids: Int[Tensor, " rows"], q: Float[Tensor, "rows vocab"], sampling: SamplingState
) -> Callable[[Tensor], Tensor]:
    """A `sample_ids` of `Chain.sample`: accept the draft token, or sample from max(0, P - Q)."""

    def sample_ids(processed: Tensor) -> Tensor:
        record_failures(processed, sampling)
        u, index = sampling.generators.uniform(), draft_ids.clamp_min(0).unsqueeze(1)
        p = processed.to(u.dtype).softmax(-1)
        draft_q, draft_p = q.gather(1, index).squeeze(1), p.gather(1, index).squeeze(1)
        accept = (draft_ids >= 0) & (u * draft_q < draft_p)
        residual = (p - q).clamp_min(0)
        # where P and Q differ only by rounding, the residual may be 0 for all tokens
        residual = residual.where(residual.sum(-1, keepdim=True) > 0, p)
        return draft_ids.where(accept, sample_token(residual.log(), sampling.generators))

    return sample_ids
