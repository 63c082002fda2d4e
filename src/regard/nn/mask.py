"""Attention masks: causal, prefix, sliding window, padding, packed documents."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard.errors import ShapeError


@dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """A conjunction of rules; query i may attend to key j if all of them allow it.

        causal       j <= i
        prefix       … or j < prefix: attention within the prefix is bidirectional
        window       |i - j| < window
        lengths      j < length of the row: the rest is padding
        documents    i and j lie in the same document of a packed row

    Masks combine with `&`. Positions are absolute, so decoding with a KV cache is no special case.
    """

    is_causal: bool = False
    prefixes: Int[Tensor, " batch"] | None = None
    width: int | None = None
    key_lengths: Int[Tensor, " batch"] | None = None
    document_ids: Int[Tensor, "batch seen"] | None = None

    @classmethod
    def none(cls) -> "Mask":
        """Full attention."""
        return cls()

    @classmethod
    def causal(cls) -> "Mask":
        """No attention to later positions."""
        return cls(is_causal=True)

    @classmethod
    def prefix(cls, lengths: Int[Tensor, " batch"]) -> "Mask":
        """Causal, but bidirectional within the first `lengths` tokens of each row."""
        return cls(is_causal=True, prefixes=lengths)

    @classmethod
    def window(cls, width: int) -> "Mask":
        """A sliding window: keys less than `width` positions away, on either side."""
        if width < 1:
            raise ShapeError(f"window={width} must be at least 1: a token attends to itself")
        return cls(width=width)

    @classmethod
    def lengths(cls, lengths: Int[Tensor, " batch"]) -> "Mask":
        """Only the first `lengths` keys of each row are real."""
        return cls(key_lengths=lengths)

    @classmethod
    def documents(cls, ids: Int[Tensor, "batch seen"]) -> "Mask":
        """Only keys of the same document, where several are packed into one row."""
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
            raise ShapeError(
                "two document masks cannot be combined; number all documents in one mask"
            )
        return Mask(
            is_causal=self.is_causal or other.is_causal,
            prefixes=prefixes,
            width=min(widths, default=None),
            key_lengths=torch.minimum(*lengths) if len(lengths) == 2 else next(iter(lengths), None),
            document_ids=other.document_ids if self.document_ids is None else self.document_ids,
        )

    @property
    def only_causal(self) -> bool:
        """Whether the `is_causal` flag of torch's fused kernel is enough."""
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
        """The mask as one boolean tensor, True = may attend; None where there is no rule."""
        i = query_positions.unsqueeze(-1)  # (batch, time, 1)
        j = key_positions.unsqueeze(-2)  # (batch, 1, seen)
        rules = []
        if self.is_causal:
            causal = j <= i
            if self.prefixes is not None:
                causal = causal | (j < self.prefixes.view(-1, 1, 1))
            rules.append(causal)
        if self.width is not None:
            rules.append((i - j).abs() < self.width)
        if self.key_lengths is not None:
            rules.append(j < self.key_lengths.view(-1, 1, 1))
        if self.document_ids is not None:
            # indexed by column: positions may restart at 0 in each document
            key_documents = self.document_ids[:, : key_positions.shape[1]]
            first_query = key_documents.shape[1] - query_positions.shape[1]
            query_documents = key_documents[:, first_query:]
            rules.append(query_documents.unsqueeze(-1) == key_documents.unsqueeze(-2))
        if not rules:
            return None
        allowed = rules[0]
        for rule in rules[1:]:
            allowed = allowed & rule
        return allowed.unsqueeze(1)
