"""Samplers that name tokens: what may, must or must not be written."""

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from regard.errors import ConfigError
from regard.generate.sampler_context import SamplerContext
from regard.generate.samplers.logits_processor import STATIC, LogitsProcessor, needed


def members(
    name: str, tokens: tuple[int, ...], logits: Tensor, context: SamplerContext | None
) -> Tensor:
    """Which tokens of the vocabulary these are, as a mask that is made once."""
    vocab, device = logits.shape[-1], logits.device

    def make() -> Tensor:
        for token in tokens:
            if not 0 <= token < vocab:
                raise ConfigError(f"{name}: token {token} is not in the vocabulary of {vocab}")
        mask = torch.zeros(vocab, dtype=torch.bool)
        mask[list(tokens)] = True
        return mask.to(device)

    return make() if context is None else context.constant((name, tokens, vocab), make)


@dataclass(frozen=True, slots=True)
class Bias(LogitsProcessor):
    """Add a number to the logits of some tokens. 0, or no tokens, changes nothing."""

    tokens: tuple[int, ...] = field(default=(), metadata=STATIC)
    value: float = field(default=0.0, metadata=STATIC)

    by_id = True

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ConfigError(f"bias: value={self.value} must be finite; ban removes a token")

    @property
    def neutral(self) -> bool:
        """Whether it changes nothing."""
        return not self.tokens or self.value == 0

    def apply(self, logits: Tensor, context: SamplerContext | None) -> Tensor:
        """Add."""
        chosen = members("bias", self.tokens, logits, context)
        return torch.where(chosen, logits + self.value, logits)


@dataclass(frozen=True, slots=True)
class Ban(LogitsProcessor):
    """Never write these tokens. None changes nothing."""

    tokens: tuple[int, ...] = field(default=(), metadata=STATIC)

    off: ClassVar = {"tokens": ()}
    by_id = True

    def apply(self, logits: Tensor, context: SamplerContext | None) -> Tensor:
        """Remove them."""
        return logits.masked_fill(members("ban", self.tokens, logits, context), -torch.inf)


@dataclass(frozen=True, slots=True)
class Allow(LogitsProcessor):
    """Write these tokens only. None changes nothing: all are allowed."""

    tokens: tuple[int, ...] = field(default=(), metadata=STATIC)

    off: ClassVar = {"tokens": ()}
    by_id = True

    def apply(self, logits: Tensor, context: SamplerContext | None) -> Tensor:
        """Remove all others."""
        allowed = members("allow", self.tokens, logits, context)
        return logits.masked_fill(~allowed, -torch.inf)


@dataclass(frozen=True, slots=True)
class Force(LogitsProcessor):
    """Begin the answer with these tokens, whatever the model thinks of them."""

    tokens: tuple[int, ...] = field(default=(), metadata=STATIC)

    off: ClassVar = {"tokens": ()}
    by_id = True

    def apply(self, logits: Tensor, context: SamplerContext | None) -> Tensor:
        """Leave nothing but the one whose turn it is."""
        context = needed(context, "force")
        members("force", self.tokens, logits, context)  # are they in the vocabulary?
        wanted = context.constant(
            self.tokens, lambda: torch.tensor(self.tokens, device=logits.device)
        )
        turn = context.lengths - context.prompts
        token = wanted[turn.clamp_max(len(self.tokens) - 1)].unsqueeze(1)
        only = torch.full_like(logits, -torch.inf).scatter_(1, token, 0.0)
        return torch.where((turn < len(self.tokens)).unsqueeze(1), only, logits)


@dataclass(frozen=True, slots=True)
class MinLength(LogitsProcessor):
    """Do not stop before the answer has so many tokens. 0 changes nothing."""

    tokens: int = 0
    stop: tuple[int, ...] = field(
        default=(), kw_only=True, metadata=STATIC
    )  # ids that end a text; none: those of the context

    off: ClassVar = {"tokens": 0}
    by_id = True

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise ConfigError(f"min_length={self.tokens} must be 0 or more tokens")

    def apply(self, logits: Tensor, context: SamplerContext | None) -> Tensor:
        """Remove the stop while the answer is short."""
        context = needed(context, "min_length")
        ends = self.stop or context.stop
        if not ends:
            raise ConfigError("min_length does not know what ends a text; give it stop=[ids]")
        stops = members("min_length", ends, logits, context)
        short = (context.lengths - context.prompts).unsqueeze(1) < self.tokens
        return logits.masked_fill(stops & short, -torch.inf)
