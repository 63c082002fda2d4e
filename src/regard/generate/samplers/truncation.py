"""Samplers that remove tokens by what the logits say.

Each takes softmax over what is left, keeps what ties with its threshold, and keeps at least
`min_keep` tokens, the likeliest ones.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from regard.accel.kernels import usable
from regard.errors import ConfigError
from regard.generate.sampler_context import SamplerContext
from regard.generate.samplers.constraints import members
from regard.generate.samplers.logits_processor import (
    STATIC,
    LogitsProcessor,
    Ranking,
    by_row,
    cut,
    entropy,
    needed,
)

WIDEST = 1 << 16  # logits of a row that the kernel can hold


def check_share(name: str, value: float, least: int) -> None:
    """Refuse what is no share of a whole."""
    if not 0 <= value <= 1:
        raise ConfigError(f"{name}={value} must lie in [0, 1]")
    check_least(name, least)


def check_least(name: str, least: int) -> None:
    """Refuse to keep nothing."""
    if least < 1:
        raise ConfigError(f"{name}: min_keep={least} must be at least 1")


@dataclass(frozen=True, slots=True)
class TopK(LogitsProcessor):
    r"""Keep the k largest logits (Fan et al. 2018).

        keep v  iff  l_v >= the k-th largest logit

    so tokens tied with the k-th all stay; with `exact`, only those with the lowest ids, k in
    all. k = 0 changes nothing.
    """

    k: int = 40
    exact: bool = field(default=False, kw_only=True, metadata=STATIC)

    off: ClassVar = {"k": 0}

    def __post_init__(self) -> None:
        if self.k < 0:
            raise ConfigError(f"top_k={self.k} must be 1 or more tokens, or 0 for all")

    def apply(self, logits: Tensor, context: SamplerContext | None) -> Tensor:
        """Remove what lies below the k-th."""
        if self.k >= logits.shape[-1]:
            return logits
        plain = logits.dtype == torch.float32 and not self.exact
        if usable(logits) and plain and logits.shape[-1] <= WIDEST:
            from regard.accel.kernels.sampling import top_k

            return top_k(logits, self.k)
        last = logits.topk(self.k).values[..., -1:]
        keep = logits >= last
        if self.exact:
            room = self.k - (logits > last).sum(-1, keepdim=True)
            keep = keep & ((logits > last) | ((logits == last).cumsum(-1) <= room))
        return cut(logits, keep)

    def ranked(self, logits: Tensor, context: SamplerContext | None) -> Tensor:
        """Remove what lies below the k-th."""
        at = torch.arange(logits.shape[-1], device=logits.device)
        if self.exact:
            return cut(logits, at < self.k)
        least = logits.masked_fill(at >= self.k, torch.inf).amin(-1, keepdim=True)
        return cut(logits, logits >= least)


@dataclass(frozen=True, slots=True)
class TopP(Ranking):
    r"""Nucleus sampling (Holtzman et al. 2020): keep the fewest tokens whose mass reaches p.

        keep v  iff  sum of P(u) over all u ranked above v  <  p

    Tokens of equal probability rank by their id. p = 0 keeps one token, p = 1 changes nothing.
    """

    p: float = 0.9
    min_keep: int = field(default=1, kw_only=True, metadata=STATIC)

    off: ClassVar = {"p": 1.0}

    def __post_init__(self) -> None:
        check_share("top_p", self.p, self.min_keep)

    def ranked(self, logits: Tensor, context: SamplerContext | None) -> Tensor:
        """Remove the tail."""
        mass = logits.softmax(-1)
        keep = mass.cumsum(-1) - mass < self.p
        keep[..., :1] = True  # p = 0 keeps one
        return cut(logits, keep, self.min_keep)


@dataclass(frozen=True, slots=True)
class MinP(LogitsProcessor):
    r"""Keep what is at least a share m as likely as the likeliest (Nguyen et al. 2024).

        keep v  iff  P(v) >= m max P

    m = 0 changes nothing, m = 1 keeps the likeliest and its ties.
    """

    m: float = 0.05
    min_keep: int = field(default=1, kw_only=True, metadata=STATIC)

    off: ClassVar = {"m": 0.0}

    def __post_init__(self) -> None:
        check_share("min_p", self.m, self.min_keep)

    def apply(self, logits: Tensor, context: SamplerContext | None) -> Tensor:
        """Remove the unlikely."""
        p = logits.softmax(-1)
        return cut(logits, p >= self.m * p.amax(-1, keepdim=True), self.min_keep)


@dataclass(frozen=True, slots=True)
class TopA(LogitsProcessor):
    r"""Keep what passes a bar that rises with the square of the largest probability.

        keep v  iff  P(v) >= a (max P)^2

    a = 0 changes nothing.
    """

    a: float = 0.2
    min_keep: int = field(default=1, kw_only=True, metadata=STATIC)

    off: ClassVar = {"a": 0.0}

    def __post_init__(self) -> None:
        check_share("top_a", self.a, self.min_keep)

    def apply(self, logits: Tensor, context: SamplerContext | None) -> Tensor:
        """Remove the unlikely."""
        p = logits.softmax(-1)
        return cut(logits, p >= self.a * p.amax(-1, keepdim=True) ** 2, self.min_keep)


@dataclass(frozen=True, slots=True)
class TopNSigma(LogitsProcessor):
    r"""Keep what lies within n standard deviations of the largest logit (Tang et al. 2024).

        keep v  iff  l_v >= max l - n sigma,      sigma over the tokens that are left

    A temperature before it changes nothing, another truncation does: put it first. n = 0 changes
    nothing.
    """

    n: float = 1.0
    min_keep: int = field(default=1, kw_only=True, metadata=STATIC)

    off: ClassVar = {"n": 0.0}

    def __post_init__(self) -> None:
        if not 0 <= self.n < math.inf:
            raise ConfigError(f"top_n_sigma={self.n} must be 0 (off) or larger")
        check_least("top_n_sigma", self.min_keep)

    def apply(self, logits: Tensor, context: SamplerContext | None) -> Tensor:
        """Remove what is far below."""
        low = logits.amax(-1, keepdim=True) - self.n * self.deviation(logits)
        return cut(logits, logits >= low, self.min_keep)

    def deviation(self, logits: Tensor) -> Tensor:
        """sigma = sqrt(mean of (l - mean l)^2) over the tokens that are left."""
        alive = logits > -torch.inf
        count = alive.sum(-1, keepdim=True)
        mean = logits.masked_fill(~alive, 0.0).sum(-1, keepdim=True) / count
        away = (logits - mean).masked_fill(~alive, 0.0)
        return (away.square().sum(-1, keepdim=True) / count).sqrt()


@dataclass(frozen=True, slots=True)
class TopH(Ranking):
    r"""Keep the likeliest tokens up to a share h of the entropy (Potraghloo et al. 2025).

        keep v  iff  sum of -P(u) ln P(u) over u = v and all u ranked above  <=  h H

    P and H are those of the 100 likeliest tokens alone; the likeliest is always kept. h = 0
    changes nothing.
    """

    h: float = 0.4

    off: ClassVar = {"h": 0.0}

    def __post_init__(self) -> None:
        check_share("top_h", self.h, 1)

    def ranked(self, logits: Tensor, context: SamplerContext | None) -> Tensor:
        """Remove the tail."""
        terms = torch.special.entr(logits[..., :100].softmax(-1))
        keep = torch.zeros_like(logits, dtype=torch.bool)
        keep[..., :100] = terms.cumsum(-1) <= self.h * terms.sum(-1, keepdim=True)
        keep[..., :1] = True
        return cut(logits, keep)


@dataclass(frozen=True, slots=True)
class TailFree(Ranking):
    r"""Cut where the sorted probabilities stop bending (Phénix and Egan 2019).

        c_j = |second difference of P at rank j|, normalised and summed up;
        rank 0 stays, rank j goes iff c_{j-1} > z, the last one goes

    z = 1 changes nothing; nor does it where fewer than three tokens are left or all are equal.
    """

    z: float = 0.95
    min_keep: int = field(default=1, kw_only=True, metadata=STATIC)

    off: ClassVar = {"z": 1.0}

    def __post_init__(self) -> None:
        check_share("tail_free", self.z, self.min_keep)

    def ranked(self, logits: Tensor, context: SamplerContext | None) -> Tensor:
        """Remove the flat tail."""
        if logits.shape[-1] < 3:
            return logits
        p = logits.softmax(-1)
        last = (logits > -torch.inf).sum(-1, keepdim=True) - 1  # rank of the unlikeliest left
        at = torch.arange(logits.shape[-1], device=logits.device)
        bend = p.diff(dim=-1).diff(dim=-1).abs().masked_fill(at[2:] > last, 0.0)
        total = bend.sum(-1, keepdim=True)
        curve = bend.cumsum(-1) / total
        keep = torch.ones_like(logits, dtype=torch.bool)
        keep[..., 1:-1] = curve <= self.z
        return cut(logits, keep & (at < last) | (at == 0) | (total == 0), self.min_keep)


@dataclass(frozen=True, slots=True)
class Epsilon(LogitsProcessor):
    r"""Keep what is at least so likely (Hewitt et al. 2022).

        keep v  iff  P(v) >= epsilon

    or the likeliest alone where nothing is. epsilon = 0 changes nothing.
    """

    epsilon: float = 3e-4
    min_keep: int = field(default=1, kw_only=True, metadata=STATIC)

    off: ClassVar = {"epsilon": 0.0}

    def __post_init__(self) -> None:
        check_share("epsilon", self.epsilon, self.min_keep)

    def apply(self, logits: Tensor, context: SamplerContext | None) -> Tensor:
        """Remove the unlikely."""
        p = logits.softmax(-1)
        bar = p.amax(-1, keepdim=True).clamp_max(self.epsilon)
        return cut(logits, p >= bar, self.min_keep)


@dataclass(frozen=True, slots=True)
class Eta(LogitsProcessor):
    r"""An epsilon that sinks where the model is unsure (Hewitt et al. 2022).

        keep v  iff  P(v) >= min(epsilon, sqrt(epsilon) exp(-H))

    or the likeliest alone where nothing is. epsilon = 0 changes nothing.
    """

    epsilon: float = 3e-4
    min_keep: int = field(default=1, kw_only=True, metadata=STATIC)

    off: ClassVar = {"epsilon": 0.0}

    def __post_init__(self) -> None:
        check_share("eta", self.epsilon, self.min_keep)

    def apply(self, logits: Tensor, context: SamplerContext | None) -> Tensor:
        """Remove the unlikely."""
        p = logits.softmax(-1)
        bar = (self.epsilon**0.5 * (-entropy(logits)).exp()).clamp_max(self.epsilon)
        return cut(logits, p >= torch.minimum(bar, p.amax(-1, keepdim=True)), self.min_keep)


@dataclass(frozen=True, slots=True)
class Typical(Ranking):
    r"""Keep what is about as surprising as the model expects (Meister et al. 2023).

        d_v = |-ln P(v) - H|,      keep v  iff  sum of P(u) over all u with d_u < d_v  <  mass

    so the fewest tokens nearest to the entropy H that reach the mass, which need not be the
    likeliest. mass = 1 changes nothing.
    """

    mass: float = 0.95
    min_keep: int = field(default=1, kw_only=True, metadata=STATIC)

    off: ClassVar = {"mass": 1.0}
    leaves_holes = True

    def __post_init__(self) -> None:
        check_share("typical", self.mass, self.min_keep)

    def ranked(self, logits: Tensor, context: SamplerContext | None) -> Tensor:
        """Remove what is too likely or too unlikely.

        Surprise s rises along the ranks, so those nearer to H than v are the ranks between
        s_v and its mirror image 2 H - s_v: two look-ups in s instead of a sort by d.
        """
        surprise, expected = -logits.log_softmax(-1), entropy(logits)
        mirror = 2 * expected - surprise
        first = torch.searchsorted(surprise, torch.minimum(surprise, mirror), right=True)
        behind = torch.searchsorted(surprise, torch.maximum(surprise, mirror))
        below = torch.nn.functional.pad(logits.softmax(-1).cumsum(-1), (1, 0))
        nearer = below.gather(-1, behind) - below.gather(-1, first)
        distance = (surprise - expected).abs()
        nearest = distance.topk(min(self.min_keep, logits.shape[-1]), largest=False).values
        return cut(logits, (nearer < self.mass) | (distance <= nearest[..., -1:]))


@dataclass(frozen=True, slots=True)
class XTC(LogitsProcessor):
    r"""Now and then exclude the top choices.

        with `probability`: of the tokens with P(v) >= threshold, if there are two or more,
        remove all but the least likely

    One random number per token, whether or not anything qualifies. Nothing is removed where a
    token of `protect` would be. probability = 0 changes nothing, nor does a threshold above 1/2.
    """

    probability: float = 0.5
    threshold: float = 0.1
    protect: tuple[int, ...] = field(default=(), kw_only=True, metadata=STATIC)

    off: ClassVar = {"probability": 0.0}
    leaves_holes = True

    def __post_init__(self) -> None:
        check_share("xtc", self.probability, 1)
        check_share("xtc: threshold", self.threshold, 1)

    @property
    def neutral(self) -> bool:
        """Whether it changes nothing; two tokens cannot both have more than half."""
        return self.probability == 0 or self.threshold > 0.5

    @property
    def by_id(self) -> bool:  # type: ignore[override]
        """Whether it must know which tokens to protect."""
        return bool(self.protect)

    def apply(self, logits: Tensor, context: SamplerContext | None) -> Tensor:
        """Toss the coin, and remove."""
        generators = needed(context, "xtc").generators
        wanted = None
        if by_row(self.probability):
            wanted = ((self.probability > 0) & (self.threshold <= 0.5)).squeeze(1)
        act = generators.uniform(wanted).unsqueeze(1) < self.probability
        p = logits.softmax(-1)
        top = p >= self.threshold
        least = p.masked_fill(~top, torch.inf).argmin(-1, keepdim=True)
        removed = top.scatter(-1, least, False)
        if self.protect:
            protected = members("xtc: protect", self.protect, logits, context)
            act = act & ~(removed & protected).any(-1, keepdim=True)
        return logits.masked_fill(removed & act, -torch.inf)
