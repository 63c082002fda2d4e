"""Truncation samplers: top-k, nucleus (top-p), min-p, typical, XTC and others.

They remove tokens by their logits, and compute the softmax over the remaining tokens. Samplers with
a threshold keep the tokens that tie with it. Those with a setting `min_keep` keep at least so many
tokens: the most probable ones, or with typical sampling those nearest to the entropy.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.accel.kernels import can_run_kernels
from regard.errors import ConfigError
from regard.generate.samplers.constraints import token_mask
from regard.generate.samplers.logits_processor import (
    LogitsProcessor,
    SortedLogitsProcessor,
    entropy,
    is_per_row,
    keep_where,
    require_state,
    setting,
)
from regard.generate.sampling_state import SamplingState

MAX_KERNEL_VOCAB = 1 << 16  # logits of a row that the top-k kernel can hold


def check_fraction(name: str, value: float, min_keep: int = 1) -> None:
    """Raise unless the value lies in [0, 1] and `min_keep` is at least 1."""
    if not 0 <= value <= 1:
        raise ConfigError(f"{name}={value} must lie in [0, 1]")
    check_min_keep(name, min_keep)


def check_min_keep(name: str, min_keep: int) -> None:
    """Raise unless `min_keep` is at least 1."""
    if min_keep < 1:
        raise ConfigError(f"{name}: min_keep={min_keep} must be at least 1")


@dataclass(frozen=True, slots=True)
class TopK(LogitsProcessor):
    r"""Top-k: keep the k largest logits (Fan et al. 2018).

        keep v  iff  l_v >= the k-th largest logit

    so all tokens tied with the k-th are kept; with `exact`, only those with the lowest ids, k
    in total. k = 0 switches it off.
    """

    k: int = setting(40, off=0)
    exact: bool = setting(False, per_row=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.k < 0:
            raise ConfigError(f"top_k={self.k} must be 1 or more tokens, or 0 for all")

    def process(self, logits: Tensor, sampling: SamplingState | None) -> Tensor:
        """Remove tokens with logits below the k-th largest."""
        if self.k >= logits.shape[-1]:
            return logits
        has_kernel = logits.dtype == torch.float32 and not self.exact
        if can_run_kernels(logits) and has_kernel and logits.shape[-1] <= MAX_KERNEL_VOCAB:
            from regard.accel.kernels.sampling import top_k

            return top_k(logits, self.k)
        kth_largest = logits.topk(self.k).values[..., -1:]
        keep = logits >= kth_largest
        if self.exact:
            above, tied = logits > kth_largest, logits == kth_largest
            ties_kept = self.k - above.sum(-1, keepdim=True)
            keep = keep & (above | (tied.cumsum(-1) <= ties_kept))
        return keep_where(logits, keep)

    def process_sorted(self, logits: Tensor, sampling: SamplingState | None) -> Tensor:
        """Remove tokens with logits below the k-th largest."""
        rank = torch.arange(logits.shape[-1], device=logits.device)
        if self.exact:
            return keep_where(logits, rank < self.k)
        smallest = logits.masked_fill(rank >= self.k, torch.inf).amin(-1, keepdim=True)
        return keep_where(logits, logits >= smallest)


@dataclass(frozen=True, slots=True)
class TopP(SortedLogitsProcessor):
    r"""Nucleus (top-p): keep the fewest tokens whose mass reaches p (Holtzman et al. 2020).

        keep v  iff  sum of P(u) over all u ranked above v  <  p

    Tokens of equal probability are ranked by id. p = 0 keeps one token, p = 1 switches it off.
    """

    p: float = setting(0.9, off=1.0)
    min_keep: int = setting(1, per_row=False, kw_only=True)

    def __post_init__(self) -> None:
        check_fraction("top_p", self.p, self.min_keep)

    def process_sorted(self, logits: Tensor, sampling: SamplingState | None) -> Tensor:
        """Remove the tail."""
        mass = logits.softmax(-1)
        keep = mass.cumsum(-1) - mass < self.p
        keep[..., :1] = True  # p = 0 keeps one
        return keep_where(logits, keep, self.min_keep)


@dataclass(frozen=True, slots=True)
class MinP(LogitsProcessor):
    r"""Min-p: keep tokens at least p times as probable as the most probable (Nguyen et al. 2024).

        keep v  iff  P(v) >= p max P

    p = 0 switches it off, p = 1 keeps the most probable token and its ties.
    """

    p: float = setting(0.05, off=0.0)
    min_keep: int = setting(1, per_row=False, kw_only=True)

    def __post_init__(self) -> None:
        check_fraction("min_p", self.p, self.min_keep)

    def process(self, logits: Tensor, sampling: SamplingState | None) -> Tensor:
        """Remove tokens below the threshold."""
        probs = logits.softmax(-1)
        keep = probs >= self.p * probs.amax(-1, keepdim=True)
        return keep_where(logits, keep, self.min_keep)


@dataclass(frozen=True, slots=True)
class TopA(LogitsProcessor):
    r"""Top-a: a threshold that grows with the square of the largest probability.

        keep v  iff  P(v) >= a (max P)^2

    a = 0 switches it off.
    """

    a: float = setting(0.2, off=0.0)
    min_keep: int = setting(1, per_row=False, kw_only=True)

    def __post_init__(self) -> None:
        check_fraction("top_a", self.a, self.min_keep)

    def process(self, logits: Tensor, sampling: SamplingState | None) -> Tensor:
        """Remove tokens below the threshold."""
        p = logits.softmax(-1)
        return keep_where(logits, p >= self.a * p.amax(-1, keepdim=True) ** 2, self.min_keep)


@dataclass(frozen=True, slots=True)
class TopNSigma(LogitsProcessor):
    r"""Top-n-sigma: keep logits within n standard deviations of the largest (Tang et al. 2024).

        keep v  iff  l_v >= max l - n sigma,      sigma over the remaining tokens

    A temperature before it does not change which tokens it keeps, but another truncation does, so
    it should be the first truncation. n = 0 switches it off.
    """

    n: float = setting(1.0, off=0.0)
    min_keep: int = setting(1, per_row=False, kw_only=True)

    def __post_init__(self) -> None:
        if not 0 <= self.n < math.inf:
            raise ConfigError(f"top_n_sigma={self.n} must be 0 (off) or larger")
        check_min_keep("top_n_sigma", self.min_keep)

    def process(self, logits: Tensor, sampling: SamplingState | None) -> Tensor:
        """Remove tokens far below the largest logit."""
        threshold = logits.amax(-1, keepdim=True) - self.n * self.deviation(logits)
        return keep_where(logits, logits >= threshold, self.min_keep)

    def deviation(self, logits: Tensor) -> Tensor:
        """sigma = sqrt(mean of (l - mean l)^2) over the remaining tokens."""
        remaining = logits > -torch.inf
        count = remaining.sum(-1, keepdim=True)
        mean = logits.masked_fill(~remaining, 0.0).sum(-1, keepdim=True) / count
        centred = (logits - mean).masked_fill(~remaining, 0.0)
        return (centred.square().sum(-1, keepdim=True) / count).sqrt()


@dataclass(frozen=True, slots=True)
class TopH(SortedLogitsProcessor):
    r"""Top-H: keep the most probable tokens up to a fraction h of the entropy.

        keep v  iff  sum of -P(u) ln P(u) over u = v and all u ranked above  <=  h H

    P and H are computed over the 100 most probable tokens; the most probable is always kept. h = 0
    switches it off. Potraghloo et al. 2025.
    """

    h: float = setting(0.4, off=0.0)

    def __post_init__(self) -> None:
        check_fraction("top_h", self.h)

    def process_sorted(self, logits: Tensor, sampling: SamplingState | None) -> Tensor:
        """Remove the tail."""
        terms = torch.special.entr(logits[..., :100].softmax(-1))
        keep = torch.zeros_like(logits, dtype=torch.bool)
        keep[..., :100] = terms.cumsum(-1) <= self.h * terms.sum(-1, keepdim=True)
        keep[..., :1] = True
        return keep_where(logits, keep)


@dataclass(frozen=True, slots=True)
class TailFree(SortedLogitsProcessor):
    r"""Tail-free (TFS): cut the flat tail of the sorted probabilities (Phénix and Egan 2019).

        c_j = cumulative sum of |second difference of P at rank j|, normalized;
        keep rank 0, remove rank j iff c_{j-1} > z, remove the last rank

    z = 1 switches it off. Rows with fewer than three tokens, or with equal probabilities, are
    not changed either.
    """

    z: float = setting(0.95, off=1.0)
    min_keep: int = setting(1, per_row=False, kw_only=True)

    def __post_init__(self) -> None:
        check_fraction("tail_free", self.z, self.min_keep)

    def process_sorted(self, logits: Tensor, sampling: SamplingState | None) -> Tensor:
        """Remove the tail."""
        if logits.shape[-1] < 3:
            return logits
        p = logits.softmax(-1)
        last = (logits > -torch.inf).sum(-1, keepdim=True) - 1  # rank of the least likely token
        rank = torch.arange(logits.shape[-1], device=logits.device)
        curvature = p.diff(dim=-1).diff(dim=-1).abs().masked_fill(rank[2:] > last, 0.0)
        total = curvature.sum(-1, keepdim=True)
        cumulative = curvature.cumsum(-1) / total
        keep = torch.ones_like(logits, dtype=torch.bool)
        keep[..., 1:-1] = cumulative <= self.z
        keep = keep & (rank < last) | (rank == 0) | (total == 0)
        return keep_where(logits, keep, self.min_keep)


@dataclass(frozen=True, slots=True)
class Epsilon(LogitsProcessor):
    r"""Epsilon sampling: keep tokens with at least this probability (Hewitt et al. 2022).

        keep v  iff  P(v) >= epsilon

    If no token qualifies, the most probable is kept. epsilon = 0 switches it off.
    """

    epsilon: float = setting(3e-4, off=0.0)
    min_keep: int = setting(1, per_row=False, kw_only=True)

    def __post_init__(self) -> None:
        check_fraction("epsilon", self.epsilon, self.min_keep)

    def process(self, logits: Tensor, sampling: SamplingState | None) -> Tensor:
        """Remove tokens below the threshold."""
        p = logits.softmax(-1)
        threshold = p.amax(-1, keepdim=True).clamp_max(self.epsilon)
        return keep_where(logits, p >= threshold, self.min_keep)


@dataclass(frozen=True, slots=True)
class Eta(LogitsProcessor):
    r"""Eta sampling: an epsilon that decreases with the entropy (Hewitt et al. 2022).

        keep v  iff  P(v) >= min(epsilon, sqrt(epsilon) exp(-H))

    If no token qualifies, the most probable is kept. epsilon = 0 switches it off.
    """

    epsilon: float = setting(3e-4, off=0.0)
    min_keep: int = setting(1, per_row=False, kw_only=True)

    def __post_init__(self) -> None:
        check_fraction("eta", self.epsilon, self.min_keep)

    def process(self, logits: Tensor, sampling: SamplingState | None) -> Tensor:
        """Remove tokens below the threshold."""
        p = logits.softmax(-1)
        threshold = (self.epsilon**0.5 * (-entropy(logits)).exp()).clamp_max(self.epsilon)
        threshold = torch.minimum(threshold, p.amax(-1, keepdim=True))
        return keep_where(logits, p >= threshold, self.min_keep)


@dataclass(frozen=True, slots=True)
class Typical(SortedLogitsProcessor):
    r"""Locally typical sampling: keep tokens with surprisal near the entropy (Meister et al. 2023).

        d_v = |-ln P(v) - H|,      keep v  iff  sum of P(u) over all u with d_u < d_v  <  mass

    It keeps the fewest tokens with surprisal nearest to the entropy H that reach the mass; the
    most probable token may be removed. mass = 1 switches it off.
    """

    mass: float = setting(0.95, off=1.0)
    min_keep: int = setting(1, per_row=False, kw_only=True)

    may_leave_gaps = True

    def __post_init__(self) -> None:
        check_fraction("typical", self.mass, self.min_keep)

    def process_sorted(self, logits: Tensor, sampling: SamplingState | None) -> Tensor:
        """Remove tokens that are too likely or too unlikely.

        Surprisal s increases with the rank, so the tokens nearer to H than v are the ranks
        between s_v and its mirror image 2 H - s_v: two binary searches in s instead of a sort
        by d.
        """
        surprisal, expected = -logits.log_softmax(-1), entropy(logits)
        mirror = 2 * expected - surprisal
        first = torch.searchsorted(surprisal, torch.minimum(surprisal, mirror), right=True)
        end = torch.searchsorted(surprisal, torch.maximum(surprisal, mirror))
        cumulative = torch.nn.functional.pad(logits.softmax(-1).cumsum(-1), (1, 0))
        nearer = cumulative.gather(-1, end) - cumulative.gather(-1, first)
        distance = (surprisal - expected).abs()
        nearest = distance.topk(min(self.min_keep, logits.shape[-1]), largest=False).values
        return keep_where(logits, (nearer < self.mass) | (distance <= nearest[..., -1:]))


@dataclass(frozen=True, slots=True)
class XTC(LogitsProcessor):
    r"""XTC: exclude top choices at random.

        with `probability`: of the tokens with P(v) >= threshold, if there are two or more,
        remove all but the least likely

    It uses one random number per sampled token, whether or not any token qualifies. A row in which
    a token of `protect` would be removed is not changed. probability = 0 switches it off, and so
    does a threshold above 1/2.
    """

    probability: float = setting(0.5, off=0.0)
    threshold: float = 0.1
    protect: tuple[int, ...] = setting((), per_row=False, kw_only=True)

    may_leave_gaps = True

    def __post_init__(self) -> None:
        check_fraction("xtc", self.probability)
        check_fraction("xtc: threshold", self.threshold)

    @property
    def is_off(self) -> bool:
        """Whether it is off: two tokens cannot both have a probability above 1/2."""
        return self.probability == 0 or self.threshold > 0.5

    @property
    def needs_ids(self) -> bool:  # type: ignore[override]
        """Whether it needs token ids, to find the protected ones."""
        return bool(self.protect)

    def process(self, logits: Tensor, sampling: SamplingState | None) -> Tensor:
        """Remove the top choices with the given probability."""
        generators = require_state(sampling, "xtc").generators
        active_rows = None
        if is_per_row(self.probability):
            active_rows = ((self.probability > 0) & (self.threshold <= 0.5)).squeeze(1)
        applies = generators.uniform(active_rows).unsqueeze(1) < self.probability
        p = logits.softmax(-1)
        top = p >= self.threshold
        least_likely = p.masked_fill(~top, torch.inf).argmin(-1, keepdim=True)
        removed = top.scatter(-1, least_likely, False)
        if self.protect:
            protected = token_mask("xtc: protect", self.protect, logits, sampling)
            applies = applies & ~(removed & protected).any(-1, keepdim=True)
        return logits.masked_fill(removed & applies, -torch.inf)
