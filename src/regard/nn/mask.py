"""Who may look at whom. A mask is a value; kernels ask it what they need."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard.errors import ShapeError


@dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """A set of rules, all of which must allow a look from query i to key j.

        causal       j <= i
        prefix       … or j < prefix, so the first tokens see each other both ways
        window       |i - j| < window
        lengths      j < length of the row: the rest is padding
        documents    i and j lie in the same document of a packed row

    Rules combine with `&`. Positions are absolute, so a decoding state needs no special case.
    """

    is_causal: bool = False
    prefixes: Int[Tensor, " batch"] | None = None
    width: int | None = None
    key_lengths: Int[Tensor, " batch"] | None = None
    document_ids: Int[Tensor, "batch seen"] | None = None

    @classmethod
    def none(cls) -> "Mask":
        """Everybody sees everybody."""
        return cls()

    @classmethod
    def causal(cls) -> "Mask":
        """Nobody sees the future."""
        return cls(is_causal=True)

    @classmethod
    def prefix(cls, lengths: Int[Tensor, " batch"]) -> "Mask":
        """Causal, but the first `lengths` tokens of each row see each other both ways."""
        return cls(is_causal=True, prefixes=lengths)

    @classmethod
    def window(cls, width: int) -> "Mask":
        """Only the `width` nearest positions, the own one included, on either side."""
        if width < 1:
            raise ShapeError(f"window={width} must be at least 1: a token sees itself")
        return cls(width=width)

    @classmethod
    def lengths(cls, lengths: Int[Tensor, " batch"]) -> "Mask":
        """Only the first `lengths` keys of each row are real."""
        return cls(key_lengths=lengths)

    @classmethod
    def documents(cls, ids: Int[Tensor, "batch seen"]) -> "Mask":
        """Only tokens of the same document, where several are packed into one row."""
        return cls(document_ids=ids)

    def __and__(self, other: "Mask") -> "Mask":
        if self.is_causal and other.is_causal:  # a plain causal mask is one with prefix 0
            both = (self.prefixes, other.prefixes)
            prefixes = None if any(p is None for p in both) else torch.minimum(*both)  # type: ignore[arg-type]
        else:
            prefixes = self.prefixes if self.is_causal else other.prefixes
        widths = [w for w in (self.width, other.width) if w is not None]
        lengths = [n for n in (self.key_lengths, other.key_lengths) if n is not None]
        if self.document_ids is not None and other.document_ids is not None:
            raise ShapeError("two masks of documents cannot be combined; number them once")
        return Mask(
            is_causal=self.is_causal or other.is_causal,
            prefixes=prefixes,
            width=min(widths, default=None),
            key_lengths=torch.minimum(*lengths) if len(lengths) == 2 else next(iter(lengths), None),
            document_ids=other.document_ids if self.document_ids is None else self.document_ids,
        )

    @property
    def only_causal(self) -> bool:
        """Whether the fused kernel's own causal mode says it all."""
        return self.is_causal and self.prefixes is None and self._no_other_rule

    @property
    def allows_all(self) -> bool:
        """Whether there is no rule."""
        return not self.is_causal and self._no_other_rule

    @property
    def _no_other_rule(self) -> bool:
        return self.width is None and self.key_lengths is None and self.document_ids is None

    def dense(
        self, query_positions: Int[Tensor, "#batch time"], key_positions: Int[Tensor, "#batch seen"]
    ) -> Bool[Tensor, "#batch 1 #time seen"] | None:
        """The rules as one boolean, True = may look; None where there is no rule."""
        i, j = (
            query_positions.unsqueeze(-1),
            key_positions.unsqueeze(-2),
        )  # (batch, time, 1), (batch, 1, seen)
        rules = []
        if self.is_causal:
            ahead = j <= i
            if self.prefixes is not None:
                ahead = ahead | (j < self.prefixes.view(-1, 1, 1))
            rules.append(ahead)
        if self.width is not None:
            rules.append((i - j).abs() < self.width)
        if self.key_lengths is not None:
            rules.append(j < self.key_lengths.view(-1, 1, 1))
        if self.document_ids is not None:
            seen = self.document_ids[
                :, : key_positions.shape[1]
            ]  # by place in the row, since positions
            own = seen[
                :, seen.shape[1] - query_positions.shape[1] :
            ]  # may begin anew in each document
            rules.append(own.unsqueeze(-1) == seen.unsqueeze(-2))
        if not rules:
            return None
        allowed = rules[0]
        for rule in rules[1:]:
            allowed = allowed & rule
        return allowed.unsqueeze(1)
