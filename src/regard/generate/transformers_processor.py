"""A chain as a logits processor of Hugging Face `transformers`."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard.errors import ConfigError
from regard.generate.chain import Chain, SamplerTrace, record_failures, record_rng_counts
from regard.generate.sampling_state import RowGenerators, SamplingState


@dataclass(slots=True)
class ChainProcessor:
    """Applies the samplers of a chain inside `model.generate`, which samples the token.

        model.generate(ids, do_sample=True, top_k=0, logits_processor=[ChainProcessor(chain)])

    `top_k=0` switches off the default top-k of 50 of `transformers`. The ids of the first call
    are the prompt, left padding included, as for the processors of `transformers`. The sampled id
    is known one call later, and stateful samplers are updated then.
    """

    chain: Chain
    seed: int | None = None  # for samplers that use random numbers
    stop: Sequence[int] = ()  # ids that end a sequence
    sampling: SamplingState | None = field(default=None, init=False)
    traces: list[SamplerTrace] = field(default_factory=list, init=False)  # of the last call

    def __post_init__(self) -> None:
        if not isinstance(self.chain, Chain):
            raise ConfigError(f"chain must be a Chain, as parse_chain makes it, not {self.chain!r}")

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Apply the samplers to the scores (logits)."""
        rows, length = input_ids.shape
        sampling = self.sampling
        continues = sampling is not None and torch.equal(sampling.history, input_ids[:, :-1])
        if sampling is None or not continues:
            lengths = torch.full((rows,), length, device=input_ids.device)
            generators = RowGenerators.from_seed(self.seed, rows, input_ids.device)
            stop = tuple(self.stop)
            sampling = SamplingState(input_ids, lengths, lengths.clone(), generators, stop)
        else:
            for trace in self.traces:
                if trace.sampler.stateful:
                    before, after = trace.by_id(trace.before), trace.by_id(trace.after)
                    trace.sampler.update_state(before, after, input_ids[:, -1], sampling)
            sampling.history, sampling.lengths = input_ids, sampling.lengths + 1
        record_rng_counts(sampling)
        self.sampling, self.traces = sampling, list(self.chain.run_samplers(scores, sampling))
        processed = scores
        if self.traces:
            last = self.traces[-1]
            processed = last.by_id(last.after).to(scores.dtype)
        record_failures(processed, sampling)
        self.chain.raise_if_failed(sampling, lambda row, length: scores[row : row + 1])
        return processed
