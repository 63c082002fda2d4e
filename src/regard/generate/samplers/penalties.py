"""Samplers that look back at the text: what was said already is made less likely, or banned."""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from regard.accel.kernels import usable
from regard.errors import ConfigError
from regard.generate.sampler_context import SamplerContext
from regard.generate.samplers.constraints import members
from regard.generate.samplers.logits_processor import STATIC, LogitsProcessor, by_row, needed

Scope = Literal["text", "answer"]  # count prompt and answer, or the answer only
Window = int | None  # how many ids to look back at; 0: all; None, not said: all, or as a dialect
LARGEST = torch.finfo(torch.float32).max / 4
LONGEST = 8192  # ids that a kernel can count


def reach(context: SamplerContext, window: Window) -> int:
    """How many ids there may be to look back at."""
    room = context.history.shape[1]
    return min(window, room) if window else room


def recent(
    context: SamplerContext, window: Window, scope: Scope = "text"
) -> tuple[Int[Tensor, "rows time"], Bool[Tensor, "rows time"]]:
    """The last `window` ids of each row, newest last, and which of them are text."""
    back = torch.arange(-reach(context, window), 0, device=context.history.device)
    at = context.lengths.unsqueeze(1) + back  # (rows, last)
    real = at >= (context.prompts.unsqueeze(1) if scope == "answer" else 0)
    return context.history.gather(1, at.clamp_min(0)), real


def counts(
    context: SamplerContext, vocab: int, window: Window, scope: Scope, dtype: torch.dtype
) -> Float[Tensor, "rows vocab"]:
    """How often each token was said."""
    ids, real = recent(context, window, scope)
    zeros = torch.zeros(len(ids), vocab, dtype=dtype, device=ids.device)
    return zeros.scatter_add_(1, ids, real.to(dtype))


def one_kernel(logits: Tensor, *settings: float) -> bool:
    """Whether a kernel can do it: on a GPU, in float32, by the same numbers for every row."""
    return usable(logits) and logits.dtype == torch.float32 and not any(map(by_row, settings))


def check_window(name: str, window: Window) -> None:
    """Refuse to look back by less than nothing."""
    if window is not None and window < 0:
        raise ConfigError(f"{name}: window={window} must be 1 or more ids to look back, or 0: all")


@dataclass(frozen=True, slots=True)
class Repetition(LogitsProcessor):
    r"""Make every token of the text less likely, once (Keskar et al. 2019).

        l_v <- l_v / penalty  if l_v > 0  else  l_v penalty

    It depends on where zero lies: it belongs before whatever shifts the logits. penalty = 1
    changes nothing.
    """

    penalty: float = 1.0
    window: Window = field(default=None, kw_only=True, metadata=STATIC)
    scope: Scope = field(default="text", kw_only=True, metadata=STATIC)

    off: ClassVar = {"penalty": 1.0}
    by_id = True

    def __post_init__(self) -> None:
        if not 0 < self.penalty < math.inf:
            raise ConfigError(f"repetition={self.penalty} must be above 0; 1 is none")
        check_window("repetition", self.window)

    def apply(self, logits: Tensor, context: SamplerContext | None) -> Tensor:
        """Penalise what was said."""
        context = needed(context, "repetition")
        if one_kernel(logits, self.penalty):
            from regard.accel.kernels.penalties import repetition

            prompts = context.prompts if self.scope == "answer" else None
            width = reach(context, self.window)
            return repetition(
                logits, context.history, context.lengths, prompts, width, self.penalty
            )
        seen = counts(context, logits.shape[1], self.window, self.scope, logits.dtype) > 0
        less = torch.where(logits > 0, logits / self.penalty, logits * self.penalty)
        return torch.where(seen, less, logits)


@dataclass(frozen=True, slots=True)
class Frequency(LogitsProcessor):
    r"""Take the more from a token the more often it was said.

        l_v <- l_v - penalty (times v was said)

    A negative penalty favours what was said; 0 changes nothing.
    """

    penalty: float = 0.0
    window: Window = field(default=None, kw_only=True, metadata=STATIC)
    scope: Scope = field(default="text", kw_only=True, metadata=STATIC)

    off: ClassVar = {"penalty": 0.0}
    by_id = True
    once: ClassVar[bool] = False  # only the first time counts

    def __post_init__(self) -> None:
        name = type(self).__name__.lower()
        if not math.isfinite(self.penalty):
            raise ConfigError(f"{name}={self.penalty} must be a finite number; 0 is none")
        check_window(name, self.window)

    def apply(self, logits: Tensor, context: SamplerContext | None) -> Tensor:
        """Penalise what was said."""
        context = needed(context, type(self).__name__.lower())
        width = reach(context, self.window)
        if one_kernel(logits, self.penalty) and width <= LONGEST:
            from regard.accel.kernels.penalties import frequency

            history, lengths = context.history, context.lengths
            prompts = context.prompts if self.scope == "answer" else None
            return frequency(logits, history, lengths, prompts, width, self.penalty, once=self.once)
        said = counts(context, logits.shape[1], self.window, self.scope, logits.dtype)
        return logits - self.penalty * (said.clamp_max(1) if self.once else said)


@dataclass(frozen=True, slots=True)
class Presence(Frequency):
    r"""Take a fixed amount from every token of the text, once.

        l_v <- l_v - penalty [v was said]

    A negative penalty favours what was said; 0 changes nothing.
    """

    once = True


@dataclass(frozen=True, slots=True)
class NoRepeatNGram(LogitsProcessor):
    r"""Never complete an n-gram that the text already has (Paulus et al. 2018).

        remove v  iff  t_{i-n+1} .. t_{i-1} v  stands in the text

    n = 0 changes nothing.
    """

    size: int = field(default=0, metadata=STATIC)

    off: ClassVar = {"size": 0}
    by_id = True

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ConfigError(f"no_repeat_ngram={self.size} must be 1 or more ids, or 0: off")

    def apply(self, logits: Tensor, context: SamplerContext | None) -> Tensor:
        """Remove what would repeat."""
        context = needed(context, "no_repeat_ngram")
        history, lengths, known = context.history, context.lengths.unsqueeze(1), self.size - 1
        starts = history.shape[1] - known  # where an n-gram may begin
        if starts < 1:
            return logits
        begin = torch.arange(starts, device=history.device)
        same = begin + known < lengths  # the last of the n ids must be text
        for i in range(known):
            newest = history.gather(1, (lengths - known + i).clamp_min(0))
            same = same & (history[:, i : i + starts] == newest)
        ends = history[:, known : known + starts]
        banned = torch.zeros_like(logits).scatter_add_(1, ends, same.to(logits.dtype)) > 0
        return logits.masked_fill(banned, -torch.inf)


@dataclass(frozen=True, slots=True)
class DRY(LogitsProcessor):
    r"""Don't repeat yourself: the longer the passage a token would repeat, the larger its penalty.

        m_v = ids before an earlier v that equal the newest ids, at most since the last breaker
        l_v <- l_v - multiplier base^(m_v - allowed)      where m_v >= allowed

    with the longest m_v of all earlier v. Breakers are never penalised. multiplier = 0 changes
    nothing.
    """

    multiplier: float = 0.0
    base: float = 1.75
    allowed: int = 2  # ids that may be repeated free of charge
    window: Window = field(
        default=None, kw_only=True, metadata=STATIC
    )  # how far back, 1,024 where nothing is said; the cost grows with its square
    breakers: tuple[int, ...] = field(
        default=(), kw_only=True, metadata=STATIC
    )  # ids that no passage reaches across

    off: ClassVar = {"multiplier": 0.0}
    by_id = True

    def __post_init__(self) -> None:
        if not 0 <= self.multiplier < math.inf:
            raise ConfigError(f"dry={self.multiplier} must be 0 (off) or larger")
        if not 1 <= self.base < math.inf:
            raise ConfigError(f"dry: base={self.base} must be at least 1")
        if self.allowed < 1:
            raise ConfigError(f"dry: allowed={self.allowed} must be at least 1 id")
        if self.window is not None and self.window < 1:
            raise ConfigError(f"dry: window={self.window} must be at least 1 id to look back")

    def apply(self, logits: Tensor, context: SamplerContext | None) -> Tensor:
        """Penalise what would go on with a repetition."""
        context, window = needed(context, "dry"), self.window or 1024
        breakers = None
        if self.breakers:
            breakers = members("dry: breakers", self.breakers, logits, context)
        if one_kernel(logits, self.multiplier, self.base, self.allowed):
            from regard.accel.kernels.penalties import dry

            history, lengths, width = context.history, context.lengths, reach(context, window)
            numbers = self.multiplier, self.base, self.allowed, LARGEST
            return dry(logits, history, lengths, breakers, width, *numbers)
        ids, real = recent(context, window)
        newest_first = ids.masked_fill(~real, -1).flip(-1)  # (rows, last)
        span = ids.shape[1]
        earlier = pad(newest_first, (0, span), value=-1).unfold(1, span, 1)[:, 1:span]
        same = earlier == newest_first.unsqueeze(1)  # (rows, lag, last)
        length = (~same).to(torch.uint8).argmax(-1)  # ids that match before the first that do not
        breaks = torch.zeros_like(real)
        if breakers is not None:
            breaks = breakers[newest_first.clamp_min(0)] & (newest_first >= 0)
        since = torch.where(breaks.any(-1), breaks.to(torch.uint8).argmax(-1), span)
        length = length.minimum(since.unsqueeze(1))
        following = newest_first[:, : span - 1]  # the token that came after the earlier passage
        growth = self.base ** (length - self.allowed).to(logits.dtype)
        penalty = (self.multiplier * growth).clamp_max(LARGEST)
        counted = (length >= self.allowed) & ~breaks[:, : span - 1]
        penalty = penalty.masked_fill(~counted, 0.0)
        worst = torch.zeros_like(logits).scatter_reduce_(1, following.clamp_min(0), penalty, "amax")
        return logits - worst
