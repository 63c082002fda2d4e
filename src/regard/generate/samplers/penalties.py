"""Penalty samplers: repetition, presence, frequency, n-gram and DRY penalties on earlier tokens.

The text of a row is its prompt and the tokens generated so far.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from regard.accel.kernels import can_run_kernels
from regard.errors import ConfigError
from regard.generate.samplers.constraints import token_mask
from regard.generate.samplers.logits_processor import (
    LogitsProcessor,
    is_per_row,
    require_state,
    setting,
)
from regard.generate.sampling_state import SamplingState

Scope = Literal["text", "completion"]  # count prompt and completion, or the completion only
Window = int | None  # ids to look back; 0: all; None: the default of the `SamplerOrder`, or all
MAX_PENALTY = torch.finfo(torch.float32).max / 4  # a logit minus this does not overflow
MAX_KERNEL_WINDOW = 8192  # ids that the frequency kernel can count


def window_size(sampling: SamplingState, window: Window) -> int:
    """The most ids that a window can hold."""
    capacity = sampling.history.shape[1]
    return min(window, capacity) if window else capacity


def recent_ids(
    sampling: SamplingState, window: Window, scope: Scope = "text"
) -> tuple[Int[Tensor, "rows time"], Bool[Tensor, "rows time"]]:
    """The last `window` ids of each row, newest last, and which of them are valid."""
    offsets = torch.arange(-window_size(sampling, window), 0, device=sampling.history.device)
    positions = sampling.lengths.unsqueeze(1) + offsets  # (rows, window)
    valid = positions >= (sampling.prompt_lengths.unsqueeze(1) if scope == "completion" else 0)
    return sampling.history.gather(1, positions.clamp_min(0)), valid


def token_counts(
    sampling: SamplingState, vocab_size: int, window: Window, scope: Scope, dtype: torch.dtype
) -> Float[Tensor, "rows vocab"]:
    """How often each token occurs in the window."""
    ids, valid = recent_ids(sampling, window, scope)
    zeros = torch.zeros(len(ids), vocab_size, dtype=dtype, device=ids.device)
    return zeros.scatter_add_(1, ids, valid.to(dtype))


def kernel_supports(logits: Tensor, *settings: float) -> bool:
    """Whether the kernels can run: on a GPU, in float32, with the same settings for all rows."""
    return (
        can_run_kernels(logits)
        and logits.dtype == torch.float32
        and not any(map(is_per_row, settings))
    )


def check_window(name: str, window: Window) -> None:
    """Raise if the window is negative."""
    if window is not None and window < 0:
        raise ConfigError(f"{name}: window={window} must be 0 (the whole text) or more ids")


@dataclass(frozen=True, slots=True)
class Repetition(LogitsProcessor):
    r"""Repetition penalty: make tokens of the text less likely (Keskar et al. 2019).

        l_v <- l_v / penalty  if l_v > 0  else  l_v penalty

    It depends on the sign of the logits, and so belongs before samplers that shift them.
    penalty = 1 switches it off.
    """

    penalty: float = setting(1.0, off=1.0)
    window: Window = setting(None, per_row=False, kw_only=True)
    scope: Scope = setting("text", per_row=False, kw_only=True)

    needs_ids = True

    def __post_init__(self) -> None:
        if not 0 < self.penalty < math.inf:
            raise ConfigError(f"repetition={self.penalty} must be above 0; 1 switches it off")
        check_window("repetition", self.window)

    def process(self, logits: Tensor, sampling: SamplingState | None) -> Tensor:
        """Penalize tokens of the text."""
        sampling = require_state(sampling, "repetition")
        if kernel_supports(logits, self.penalty):
            from regard.accel.kernels.penalties import repetition

            prompt_lengths = sampling.prompt_lengths if self.scope == "completion" else None
            width = window_size(sampling, self.window)
            return repetition(
                logits, sampling.history, sampling.lengths, prompt_lengths, width, self.penalty
            )
        seen = token_counts(sampling, logits.shape[1], self.window, self.scope, logits.dtype) > 0
        penalized = torch.where(logits > 0, logits / self.penalty, logits * self.penalty)
        return torch.where(seen, penalized, logits)


@dataclass(frozen=True, slots=True)
class Frequency(LogitsProcessor):
    r"""Frequency penalty: proportional to how often a token occurs in the text.

        l_v <- l_v - penalty count(v)

    A negative penalty favours tokens of the text; 0 switches it off.
    """

    penalty: float = setting(0.0, off=0.0)
    window: Window = setting(None, per_row=False, kw_only=True)
    scope: Scope = setting("text", per_row=False, kw_only=True)

    needs_ids = True
    binary: ClassVar[bool] = False  # counts above 1 count as 1

    def __post_init__(self) -> None:
        name = type(self).__name__.lower()
        if not math.isfinite(self.penalty):
            raise ConfigError(f"{name}={self.penalty} must be a finite number; 0 switches it off")
        check_window(name, self.window)

    def process(self, logits: Tensor, sampling: SamplingState | None) -> Tensor:
        """Penalize tokens of the text."""
        sampling = require_state(sampling, type(self).__name__.lower())
        width = window_size(sampling, self.window)
        if kernel_supports(logits, self.penalty) and width <= MAX_KERNEL_WINDOW:
            from regard.accel.kernels.penalties import frequency

            history, lengths = sampling.history, sampling.lengths
            prompt_lengths = sampling.prompt_lengths if self.scope == "completion" else None
            return frequency(
                logits, history, lengths, prompt_lengths, width, self.penalty, presence=self.binary
            )
        counts = token_counts(sampling, logits.shape[1], self.window, self.scope, logits.dtype)
        return logits - self.penalty * (counts.clamp_max(1) if self.binary else counts)


@dataclass(frozen=True, slots=True)
class Presence(Frequency):
    r"""Presence penalty: a fixed amount for every token that occurs in the text.

        l_v <- l_v - penalty [count(v) > 0]

    A negative penalty favours tokens of the text; 0 switches it off.
    """

    binary = True


@dataclass(frozen=True, slots=True)
class NoRepeatNGram(LogitsProcessor):
    r"""Never complete an n-gram that occurs in the text (Paulus et al. 2018).

        remove v  iff  t_{i-n+1} .. t_{i-1} v  occurs in the text

    n is `size`; 0 switches it off.
    """

    size: int = setting(0, off=0, per_row=False)

    needs_ids = True

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ConfigError(f"no_repeat_ngram={self.size} must be 0 (off) or larger")

    def process(self, logits: Tensor, sampling: SamplingState | None) -> Tensor:
        """Remove tokens that would repeat an n-gram."""
        sampling = require_state(sampling, "no_repeat_ngram")
        history, lengths, prefix = sampling.history, sampling.lengths.unsqueeze(1), self.size - 1
        num_starts = history.shape[1] - prefix  # positions at which an n-gram may start
        if num_starts < 1:
            return logits
        start = torch.arange(num_starts, device=history.device)
        same = start + prefix < lengths  # the last of the n ids must be valid
        for i in range(prefix):
            newest = history.gather(1, (lengths - prefix + i).clamp_min(0))
            same = same & (history[:, i : i + num_starts] == newest)
        ends = history[:, prefix : prefix + num_starts]
        banned = torch.zeros_like(logits).scatter_add_(1, ends, same.to(logits.dtype)) > 0
        return logits.masked_fill(banned, -torch.inf)


@dataclass(frozen=True, slots=True)
class DRY(LogitsProcessor):
    r"""DRY (don't repeat yourself): a penalty that grows with the length of the repeated passage.

        m_v = length of the longest suffix of the text, since the last sequence breaker, that also
              precedes an earlier v
        l_v <- l_v - multiplier base^(m_v - allowed_length)      where m_v >= allowed_length

    with the largest m_v over all earlier v. Breakers are never penalized. multiplier = 0
    switches it off.
    """

    multiplier: float = setting(0.0, off=0.0)
    base: float = 1.75
    allowed_length: int = 2  # ids that may be repeated without a penalty
    # ids to look back; None: the default of the `SamplerOrder`, or 1,024; the cost is quadratic in
    # the window
    window: Window = setting(None, per_row=False, kw_only=True)
    # sequence breakers: ids at which a repeated passage ends
    breakers: tuple[int, ...] = setting((), per_row=False, kw_only=True)

    needs_ids = True

    def __post_init__(self) -> None:
        if not 0 <= self.multiplier < math.inf:
            raise ConfigError(f"dry={self.multiplier} must be 0 (off) or larger")
        if not 1 <= self.base < math.inf:
            raise ConfigError(f"dry: base={self.base} must be at least 1")
        if self.allowed_length < 1:
            raise ConfigError(f"dry: allowed_length={self.allowed_length} must be at least 1 id")
        if self.window is not None and self.window < 1:
            raise ConfigError(f"dry: window={self.window} must be at least 1 id")

    def process(self, logits: Tensor, sampling: SamplingState | None) -> Tensor:
        """Penalize tokens that would continue a repetition."""
        sampling, window = require_state(sampling, "dry"), self.window or 1024
        breakers = None
        if self.breakers:
            breakers = token_mask("dry: breakers", self.breakers, logits, sampling)
        if kernel_supports(logits, self.multiplier, self.base, self.allowed_length):
            from regard.accel.kernels.penalties import dry

            history, lengths, width = (
                sampling.history,
                sampling.lengths,
                window_size(sampling, window),
            )
            settings = self.multiplier, self.base, self.allowed_length, MAX_PENALTY
            return dry(logits, history, lengths, breakers, width, *settings)
        ids, valid = recent_ids(sampling, window)
        newest_first = ids.masked_fill(~valid, -1).flip(-1)  # (rows, window)
        span = ids.shape[1]
        earlier = pad(newest_first, (0, span), value=-1).unfold(1, span, 1)[:, 1:span]
        same = earlier == newest_first.unsqueeze(1)  # (rows, lag, window)
        length = (~same).to(torch.uint8).argmax(-1)  # ids that match before the first mismatch
        breaks = torch.zeros_like(valid)
        if breakers is not None:
            breaks = breakers[newest_first.clamp_min(0)] & (newest_first >= 0)
        since_breaker = torch.where(breaks.any(-1), breaks.to(torch.uint8).argmax(-1), span)
        length = length.minimum(since_breaker.unsqueeze(1))
        following = newest_first[:, : span - 1]  # the token that came after the earlier passage
        growth = self.base ** (length - self.allowed_length).to(logits.dtype)
        penalty = (self.multiplier * growth).clamp_max(MAX_PENALTY)
        penalized = (length >= self.allowed_length) & ~breaks[:, : span - 1]
        penalty = penalty.masked_fill(~penalized, 0.0)
        ids = following.clamp_min(0)
        return logits - torch.zeros_like(logits).scatter_reduce_(1, ids, penalty, "amax")
