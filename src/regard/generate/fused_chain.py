"""The last samplers of a chain and `sample_token` as two fused kernels, on a GPU."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.accel.kernels import MAX_RANKED, can_run_kernels
from regard.generate.samplers.logits_processor import LogitsProcessor
from regard.generate.samplers.temperature import Temperature
from regard.generate.samplers.truncation import XTC, MinP, TopK, TopNSigma, TopP, Typical
from regard.generate.sampling_state import SamplingState

MAX_TOP_K = MAX_RANKED // 2  # more tokens may tie with the k-th
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# the kernel's name of a sampler and its two settings; min_keep is passed separately
KernelOp = tuple[str, float, float]
KERNEL_OPS: Mapping[type, Callable[[Any], KernelOp]] = {
    TopK: lambda sampler: ("exact_top_k" if sampler.exact else "top_k", sampler.k, 0),
    Typical: lambda sampler: ("typical", sampler.mass, 0),
    TopP: lambda sampler: ("top_p", sampler.p, 0),
    MinP: lambda sampler: ("min_p", sampler.p, 0),
    TopNSigma: lambda sampler: ("top_n_sigma", sampler.n, 0),
    XTC: lambda sampler: ("xtc", sampler.probability, sampler.threshold),
    Temperature: lambda sampler: ("temperature", 1 / sampler.value, 0),
}


@dataclass(frozen=True, slots=True)
class FusedTail:
    """The fused samplers as kernel operations: top-k first, or after `top_n_sigma_of_row`."""

    start: int  # index of the first fused sampler; the one before it needs token ids
    ops: tuple[str, ...]
    # of each op: an earlier sampler may have removed a token and kept a less likely one
    has_gaps: tuple[bool, ...]
    settings: tuple[tuple[float, float, float], ...]  # two settings and min_keep

    @classmethod
    def from_samplers(cls, samplers: Sequence[LogitsProcessor]) -> "FusedTail | None":
        """The fused tail of these samplers, none of them off; None if no kernel can run it.

        The kernels sort only the tokens that a top-k keeps. Before the top-k there may be
        temperatures, which keep the order and can run after it, and one top-n-sigma, which can run
        after it too if it uses the statistics of the whole row.
        """
        start = max((i + 1 for i, sampler in enumerate(samplers) if sampler.needs_ids), default=0)
        tail = samplers[start:]
        top_k = next((sampler for sampler in tail if isinstance(sampler, TopK)), None)
        if any(sampler.stateful for sampler in samplers) or not all(map(_has_kernel, tail)):
            return None
        if top_k is None or top_k.k > MAX_TOP_K:
            return None
        top_k_index = tail.index(top_k)
        top_n_sigmas = [sampler for sampler in tail[:top_k_index] if isinstance(sampler, TopNSigma)]
        temperatures = [
            sampler for sampler in tail[:top_k_index] if isinstance(sampler, Temperature)
        ]
        if len(top_n_sigmas) > 1 or len(top_n_sigmas) + len(temperatures) < top_k_index:
            return None
        fused = [*top_n_sigmas, top_k, *temperatures, *tail[top_k_index + 1 :]]
        kernel_ops = [KERNEL_OPS[type(sampler)](sampler) for sampler in fused]
        ops = ["top_n_sigma_of_row"] * len(top_n_sigmas) + [
            name for name, *_ in kernel_ops[len(top_n_sigmas) :]
        ]
        has_gaps = [any(sampler.may_leave_gaps for sampler in fused[:i]) for i in range(len(fused))]
        settings = [
            (first_setting, second_setting, min(getattr(sampler, "min_keep", 1), MAX_RANKED))
            for sampler, (_, first_setting, second_setting) in zip(fused, kernel_ops, strict=True)
        ]
        return cls(start, tuple(ops), tuple(has_gaps), tuple(settings))

    def sample(
        self,
        logits: Float[Tensor, "rows vocab"],
        sampling: SamplingState,
        failure_lengths: Int[Tensor, " rows"],
    ) -> Int[Tensor, " rows"]:
        """Sample the next id of each row from the logits that the unfused samplers returned."""
        from regard.accel.kernels.fused_sampling import sample

        settings = sampling.constant(
            ("tail", self.settings),
            lambda: torch.tensor(self.settings, dtype=torch.double, device=logits.device),
        )
        generators = sampling.generators
        has_min_keep = tuple(min_keep > 1 for *_, min_keep in self.settings)
        return sample(
            logits if logits.stride(1) == 1 else logits.contiguous(),
            self.ops,
            self.has_gaps,
            has_min_keep,
            settings,
            generators.keys,
            generators.counters,
            sampling.lengths,
            failure_lengths,
        )


def supports_fused_tail(logits: Float[Tensor, "rows vocab"]) -> bool:
    """Whether the fused kernels can run on the device and dtype of these logits."""
    return can_run_kernels(logits) and logits.dtype in DTYPES


def _has_kernel(sampler: LogitsProcessor) -> bool:
    """Whether a kernel implements the sampler with these settings."""
    greedy = isinstance(sampler, Temperature) and sampler.greedy
    # with threshold 0, XTC's kernel would count removed tokens as top choices
    zero_threshold = isinstance(sampler, XTC) and sampler.threshold == 0
    return type(sampler) in KERNEL_OPS and not greedy and not zero_threshold
