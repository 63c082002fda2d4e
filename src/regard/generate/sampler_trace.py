"""What every stage of a chain did on the way to a token."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.generate.chain import Chain, StageTrace, said, widened
from regard.generate.sampler_context import SamplerContext
from regard.generate.samplers.logits_processor import entropy


@dataclass(frozen=True, slots=True)
class Change:
    """A token whose probability a stage changed; to 0 where it removed it."""

    id: int
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Step:
    """What one stage did to one row."""

    stage: str  # the word it is made from
    left: int  # tokens that can still be drawn
    mass: float  # the share of probability it left; 1 where it removed nothing
    bits: float  # entropy of what is left
    removed: int  # tokens it removed
    lost: list[Change]  # the likeliest of them
    moved: list[Change]  # of those it kept, the ones whose probability changed most


@dataclass(frozen=True, slots=True)
class Token:
    """How one token came to be drawn."""

    id: int
    model: float  # its probability in the eyes of the model
    drawn: float  # its probability in the end
    bits: float  # entropy of what the model said
    steps: list[Step]


@dataclass(frozen=True, slots=True)
class TracedChain(Chain):
    """A chain that notes, for every token it draws, what its stages did.

    chain = TracedChain(chain.stages)
    generate(model, prompts, chain, tokens=20)
    chain.tokens[number][row]
    """

    shown: int = 5  # how many tokens a stage is shown to remove or change
    tokens: list[list[Token]] = field(default_factory=list)
    passed: list[StageTrace] = field(default_factory=list, repr=False)  # of the token at hand

    @property
    def capturable(self) -> bool:
        """Never: to look is to wait for the device."""
        return False

    def steps(
        self, logits: Float[Tensor, "rows vocab"], context: SamplerContext
    ) -> Iterator[StageTrace]:
        """Go through the stages, and keep what each was given and left."""
        self.passed.clear()
        for each in Chain.steps(self, logits, context):
            self.passed.append(each)
            yield each

    def pick(
        self,
        logits: Float[Tensor, "rows vocab"],
        context: SamplerContext,
        decide: Callable[[Tensor], Tensor] | None = None,
    ) -> Int[Tensor, " rows"]:
        """The next id of each row, noting how it came about."""
        ids = Chain.pick(self, logits, context, decide)
        self.tokens.append([self._token(logits, row, id) for row, id in enumerate(ids.tolist())])
        return ids

    def _token(self, logits: Tensor, row: int, id: int) -> Token:
        model = widened(logits)[row]
        p = before = model.softmax(-1)
        steps = []
        for each in self.passed:
            left = each.by_id(each.after)[row]
            after = left.softmax(-1)
            steps.append(self._step(said(each.stage, row), before, left, after))
            before = after
        return Token(id, p[id].item(), before[id].item(), _bits(model), steps)

    def _step(self, stage: str, before: Tensor, left: Tensor, after: Tensor) -> Step:
        gone = (left == -torch.inf) & (before > 0)
        return Step(
            stage=stage,
            left=int((left > -torch.inf).sum()),
            mass=before.masked_fill(gone, 0.0).sum().item(),
            bits=_bits(left),
            removed=int(gone.sum()),
            lost=self._largest(before.where(gone, 0.0), before, after),
            moved=self._largest((after - before).abs().masked_fill(gone, 0.0), before, after),
        )

    def _largest(self, by: Tensor, before: Tensor, after: Tensor) -> list[Change]:
        """The tokens with the largest `by`, as far as it is above rounding."""
        best = by.topk(min(self.shown, len(by)))
        pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        return [Change(id, before[id].item(), after[id].item()) for x, id in pairs if x > 1e-6]


def _bits(logits: Tensor) -> float:
    return entropy(logits).item() / math.log(2)
