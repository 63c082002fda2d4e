"""The end of a chain that two kernels do on a GPU, draw and all."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.accel.kernels import usable
from regard.generate.sampler_context import SamplerContext
from regard.generate.samplers.logits_processor import LogitsProcessor
from regard.generate.samplers.temperature import Temperature
from regard.generate.samplers.truncation import XTC, MinP, TopK, TopNSigma, TopP, Typical

LARGEST_K = 512  # half of what they rank, since more may tie with the last
WIDTHS = (torch.float32, torch.bfloat16, torch.float16)

# what a kernel calls a stage, and its settings: but for min_keep, which every kind may have
Said = tuple[str, float, float]
SAID: Mapping[type, Callable[[Any], Said]] = {
    TopK: lambda stage: ("exact_top_k" if stage.exact else "top_k", stage.k, 0),
    Typical: lambda stage: ("typical", stage.mass, 0),
    TopP: lambda stage: ("top_p", stage.p, 0),
    MinP: lambda stage: ("min_p", stage.m, 0),
    TopNSigma: lambda stage: ("top_n_sigma", stage.n, 0),
    XTC: lambda stage: ("xtc", stage.probability, stage.threshold),
    Temperature: lambda stage: ("temperature", 1 / stage.value, 0),
}


@dataclass(frozen=True, slots=True)
class Tail:
    """Stages as a kernel knows them: top-k first, or second behind what it calls `near`."""

    begin: int  # the stages before, which must know ids
    ops: tuple[str, ...]
    holes: tuple[bool, ...]  # whether one before may have removed a token and kept an unlikelier
    numbers: tuple[tuple[float, float, float], ...]  # settings and min_keep

    @classmethod
    def of(cls, stages: Sequence[LogitsProcessor]) -> "Tail | None":
        """The tail of these stages, none of them neutral; None if there is no kernel for it.

        Only tokens that a top-k leaves are ranked. Before that there may be temperatures, which
        change no order and so can as well come after it, and one top-n-sigma, which keeps or
        removes the same of the k largest before and after, if it is told of the whole row.
        """
        begin = max((at + 1 for at, stage in enumerate(stages) if stage.by_id), default=0)
        rest = stages[begin:]
        top_k = next((stage for stage in rest if isinstance(stage, TopK)), None)
        if any(stage.learns for stage in stages) or not all(map(_plain, rest)):
            return None
        if top_k is None or top_k.k > LARGEST_K:
            return None
        first = rest.index(top_k)
        sigmas = [stage for stage in rest[:first] if isinstance(stage, TopNSigma)]
        warm = [stage for stage in rest[:first] if isinstance(stage, Temperature)]
        if len(sigmas) > 1 or len(sigmas) + len(warm) < first:
            return None
        acting = [*sigmas, top_k, *warm, *rest[first + 1 :]]
        said = [SAID[type(stage)](stage) for stage in acting]
        ops = ["near"] * len(sigmas) + [name for name, *_ in said[len(sigmas) :]]
        holes = [any(stage.leaves_holes for stage in acting[:at]) for at in range(len(acting))]
        numbers = [
            (one, other, min(getattr(stage, "min_keep", 1), 2 * LARGEST_K))
            for stage, (_, one, other) in zip(acting, said, strict=True)
        ]
        return cls(begin, tuple(ops), tuple(holes), tuple(numbers))

    def pick(
        self,
        logits: Float[Tensor, "rows vocab"],
        context: SamplerContext,
        failed: Int[Tensor, " rows"],
    ) -> Int[Tensor, " rows"]:
        """The next id of each row, from logits that have passed the stages before."""
        from regard.accel.kernels.fused_sampling import tail

        numbers = context.constant(
            ("tail", self.numbers),
            lambda: torch.tensor(self.numbers, dtype=torch.double, device=logits.device),
        )
        generators, keeps = context.generators, tuple(least > 1 for *_, least in self.numbers)
        return tail(
            logits if logits.stride(1) == 1 else logits.contiguous(),
            self.ops,
            self.holes,
            keeps,
            numbers,
            generators.keys,
            generators.used,
            context.lengths,
            failed,
        )


def takes(logits: Float[Tensor, "rows vocab"]) -> bool:
    """Whether the kernels can be given these."""
    return usable(logits) and logits.dtype in WIDTHS


def _plain(stage: LogitsProcessor) -> bool:
    """Whether a kernel has its formula, for numbers that all rows share."""
    greedy = isinstance(stage, Temperature) and stage.greedy
    empty = isinstance(stage, XTC) and stage.threshold == 0  # what was removed is likely enough
    return type(stage) in SAID and not greedy and not empty
