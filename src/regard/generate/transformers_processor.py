"""A chain inside another library's `generate`, for those who want only the samplers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard.errors import ConfigError
from regard.generate.chain import Chain, StageTrace, note_failed, note_used
from regard.generate.sampler_context import RowGenerators, SamplerContext


@dataclass(slots=True)
class ChainProcessor:
    """A chain as a logits processor of `transformers`; it draws nothing, `generate` does.

        model.generate(ids, do_sample=True, top_k=0, logits_processor=[ChainProcessor(chain)])

    `top_k=0` switches off the 50 that `transformers` would add. The prompt is what the first
    call sees; padding on the left counts as text, as for the processors of `transformers`. What
    was drawn is known one call later, and samplers with a memory learn it then.
    """

    chain: Chain
    seed: int | None = None  # for samplers that toss coins
    stop: Sequence[int] = ()  # ids that end a text
    context: SamplerContext | None = field(default=None, init=False)
    passed: list[StageTrace] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.chain, Chain):
            raise ConfigError(f"a chain is wanted, as parse_chain makes it, not {self.chain!r}")

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Reshape and narrow the scores."""
        rows, length = input_ids.shape
        context = self.context
        goes_on = context is not None and torch.equal(context.history, input_ids[:, :-1])
        if context is None or not goes_on:
            lengths = torch.full((rows,), length, device=input_ids.device)
            generators = RowGenerators.from_seed(self.seed, rows, input_ids.device)
            context = SamplerContext(
                input_ids, lengths, lengths.clone(), generators, tuple(self.stop)
            )
        else:
            for each in self.passed:
                if each.stage.learns:
                    before, after = each.by_id(each.before), each.by_id(each.after)
                    each.stage.learn(before, after, input_ids[:, -1], context)
            context.history, context.lengths = input_ids, context.lengths + 1
        note_used(context)
        self.context, self.passed = context, list(self.chain.steps(scores, context))
        last: Any = self.passed[-1] if self.passed else None
        left = scores if last is None else last.by_id(last.after).to(scores.dtype)
        note_failed(left, context)
        self.chain.check(context, lambda row, length: scores[row : row + 1])
        return left
