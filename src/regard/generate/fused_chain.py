"""The last stages of a chain and its draw as two fused kernels, on a GPU."""

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

MAX_TOP_K = 512  # half of what the kernels sort, since more tokens may tie with the k-th
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# the kernel's name of a stage and its two settings; min_keep is passed separately
KernelOp = tuple[str, float, float]
KERNEL_OPS: Mapping[type, Callable[[Any], KernelOp]] = {
    TopK: lambda stage: ("exact_top_k" if stage.exact else "top_k", stage.k, 0),
    Typical: lambda stage: ("typical", stage.mass, 0),
    TopP: lambda stage: ("top_p", stage.p, 0),
    MinP: lambda stage: ("min_p", stage.m, 0),
    TopNSigma: lambda stage: ("top_n_sigma", stage.n, 0),
    XTC: lambda stage: ("xtc", stage.probability, stage.threshold),
    Temperature: lambda stage: ("temperature", 1 / stage.value, 0),
}


@dataclass(frozen=True, slots=True)
class FusedTail:
    """Stages as the kernels take them: top-k first, or second after a `top_n_sigma_of_row`."""

    start: int  # how many stages come before; they need token ids and run unfused
    ops: tuple[str, ...]
    gaps: tuple[bool, ...]  # whether an earlier stage may have removed a token and kept a rarer
    settings: tuple[tuple[float, float, float], ...]  # two settings and min_keep

    @classmethod
    def from_stages(cls, stages: Sequence[LogitsProcessor]) -> "FusedTail | None":
        """The fused tail of these stages, none of them neutral; None if no kernel can run it.

        The kernels sort only what a top-k keeps. Before the top-k there may be temperatures,
        which keep the order and can run after it, and one top-n-sigma, which can run after it
        too if it uses the statistics of the whole row.
        """
        start = max((i + 1 for i, stage in enumerate(stages) if stage.needs_ids), default=0)
        rest = stages[start:]
        top_k = next((stage for stage in rest if isinstance(stage, TopK)), None)
        if any(stage.stateful for stage in stages) or not all(map(_has_kernel, rest)):
            return None
        if top_k is None or top_k.k > MAX_TOP_K:
            return None
        first = rest.index(top_k)
        sigmas = [stage for stage in rest[:first] if isinstance(stage, TopNSigma)]
        temperatures = [stage for stage in rest[:first] if isinstance(stage, Temperature)]
        if len(sigmas) > 1 or len(sigmas) + len(temperatures) < first:
            return None
        fused = [*sigmas, top_k, *temperatures, *rest[first + 1 :]]
        kernel_ops = [KERNEL_OPS[type(stage)](stage) for stage in fused]
        ops = ["top_n_sigma_of_row"] * len(sigmas) + [
            name for name, *_ in kernel_ops[len(sigmas) :]
        ]
        gaps = [any(stage.may_leave_gaps for stage in fused[:i]) for i in range(len(fused))]
        settings = [
            (first_setting, second_setting, min(getattr(stage, "min_keep", 1), 2 * MAX_TOP_K))
            for stage, (_, first_setting, second_setting) in zip(fused, kernel_ops, strict=True)
        ]
        return cls(start, tuple(ops), tuple(gaps), tuple(settings))

    def sample(
        self,
        logits: Float[Tensor, "rows vocab"],
        context: SamplerContext,
        failed: Int[Tensor, " rows"],
    ) -> Int[Tensor, " rows"]:
        """The next id of each row, from logits that the stages before have processed."""
        from regard.accel.kernels.fused_sampling import sample

        settings = context.constant(
            ("tail", self.settings),
            lambda: torch.tensor(self.settings, dtype=torch.double, device=logits.device),
        )
        generators = context.generators
        has_min_keep = tuple(min_keep > 1 for *_, min_keep in self.settings)
        return sample(
            logits if logits.stride(1) == 1 else logits.contiguous(),
            self.ops,
            self.gaps,
            has_min_keep,
            settings,
            generators.keys,
            generators.used,
            context.lengths,
            failed,
        )


def supports_fused_tail(logits: Float[Tensor, "rows vocab"]) -> bool:
    """Whether the fused kernels can run on the device and dtype of these logits."""
    return usable(logits) and logits.dtype in DTYPES


def _has_kernel(stage: LogitsProcessor) -> bool:
    """Whether a kernel implements the stage with these settings."""
    greedy = isinstance(stage, Temperature) and stage.greedy
    # with threshold 0, XTC's kernel would count removed tokens as top choices
    zero_threshold = isinstance(stage, XTC) and stage.threshold == 0
    return type(stage) in KERNEL_OPS and not greedy and not zero_threshold
