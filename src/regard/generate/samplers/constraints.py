"""Constraint samplers: logit bias, banned, allowed and forced tokens, minimum length."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import ConfigError
from regard.generate.samplers.logits_processor import LogitsProcessor, require_state, setting
from regard.generate.sampling_state import SamplingState


def token_mask(
    name: str, tokens: tuple[int, ...], logits: Tensor, sampling: SamplingState | None
) -> Tensor:
    """A mask over the vocabulary that is True at these token ids; made once per `SamplingState`."""
    vocab_size, device = logits.shape[-1], logits.device

    def make() -> Tensor:
        for token in tokens:
            if not 0 <= token < vocab_size:
                raise ConfigError(f"{name}: token {token} is not in the vocabulary ({vocab_size=})")
        mask = torch.zeros(vocab_size, dtype=torch.bool)
        mask[list(tokens)] = True
        return mask.to(device)

    return make() if sampling is None else sampling.constant((name, tokens, vocab_size), make)


@dataclass(frozen=True, slots=True)
class Bias(LogitsProcessor):
    """Logit bias: add `value` to the logits of `tokens`. 0, or no tokens, switches it off."""

    tokens: tuple[int, ...] = setting((), per_row=False)
    value: float = setting(0.0, per_row=False)

    needs_ids = True

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ConfigError(f"bias: value={self.value} must be finite; ban removes a token")

    @property
    def is_off(self) -> bool:
        """Whether it is off."""
        return not self.tokens or self.value == 0

    def process(self, logits: Tensor, sampling: SamplingState | None) -> Tensor:
        """Add the bias."""
        chosen = token_mask("bias", self.tokens, logits, sampling)
        return torch.where(chosen, logits + self.value, logits)


@dataclass(frozen=True, slots=True)
class Ban(LogitsProcessor):
    """Never generate these tokens. An empty list switches it off."""

    tokens: tuple[int, ...] = setting((), off=(), per_row=False)

    needs_ids = True

    def process(self, logits: Tensor, sampling: SamplingState | None) -> Tensor:
        """Remove the banned tokens."""
        return logits.masked_fill(token_mask("ban", self.tokens, logits, sampling), -torch.inf)


@dataclass(frozen=True, slots=True)
class Allow(LogitsProcessor):
    """Generate these tokens only. An empty list switches it off."""

    tokens: tuple[int, ...] = setting((), off=(), per_row=False)

    needs_ids = True

    def process(self, logits: Tensor, sampling: SamplingState | None) -> Tensor:
        """Remove all other tokens."""
        allowed = token_mask("allow", self.tokens, logits, sampling)
        return logits.masked_fill(~allowed, -torch.inf)


@dataclass(frozen=True, slots=True)
class Force(LogitsProcessor):
    """Begin the completion with these tokens. An empty list switches it off."""

    tokens: tuple[int, ...] = setting((), off=(), per_row=False)

    needs_ids = True

    def process(self, logits: Tensor, sampling: SamplingState | None) -> Tensor:
        """Remove all tokens but the next forced one."""
        sampling = require_state(sampling, "force")
        token_mask("force", self.tokens, logits, sampling)  # raises on ids outside the vocabulary
        forced_ids = sampling.constant(
            self.tokens, lambda: torch.tensor(self.tokens, device=logits.device)
        )
        generated = sampling.lengths - sampling.prompt_lengths
        token = forced_ids[generated.clamp_max(len(self.tokens) - 1)].unsqueeze(1)
        forced = torch.full_like(logits, -torch.inf).scatter_(1, token, 0.0)
        return torch.where((generated < len(self.tokens)).unsqueeze(1), forced, logits)


@dataclass(frozen=True, slots=True)
class MinNewTokens(LogitsProcessor):
    """Do not stop before the completion has this many tokens, without the prompt. 0: off."""

    tokens: int = setting(0, off=0)
    # the ids that end a sequence; empty: those of the `SamplingState`
    stop: tuple[int, ...] = setting((), per_row=False, kw_only=True)

    needs_ids = True

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise ConfigError(f"min_new_tokens={self.tokens} must be 0 or more tokens")

    def process(self, logits: Tensor, sampling: SamplingState | None) -> Tensor:
        """Remove the stop ids while the completion is too short."""
        sampling = require_state(sampling, "min_new_tokens")
        stop_ids = self.stop or sampling.stop
        if not stop_ids:
            raise ConfigError(
                "min_new_tokens needs stop ids, and the SamplingState has none; write "
                "min_new_tokens={tokens=…, stop=[ids]}"
            )
        stops = token_mask("min_new_tokens", stop_ids, logits, sampling)
        short = (sampling.lengths - sampling.prompt_lengths).unsqueeze(1) < self.tokens
        return logits.masked_fill(stops & short, -torch.inf)
