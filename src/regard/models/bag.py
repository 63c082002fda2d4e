"""The bag of words: how often each word occurs, and a linear classifier of that."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.config import Choice, kind_of, make
from regard.errors import ConfigError
from regard.nn.head import HEADS


@dataclass(frozen=True, kw_only=True, slots=True)
class BagConfig:
    """A weight for each word and class."""

    vocab_size: int
    head: Choice = "classify"  # over counts; with pool="mean" over shares of the text
    context: int = 512  # words of a text that are counted, from its beginning

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        kind, options = kind_of(self.head)
        if kind != "classify" or options.get("pool", "first") not in ("first", "mean"):
            raise ConfigError(
                f"head={self.head!r} reads a sequence, and a bag has no order; "
                "set head='classify', with pool='first' or 'mean'"
            )

    @property
    def shape(self) -> str:
        """What tasks ask for."""
        return "bag"


class Bag(nn.Module):
    r"""A text as the counts of its words, whose order is lost.

        c_w = how often w occurs,    logits = W c + b

    The baseline that models which read in order must beat.
    """

    def __init__(self, config: BagConfig) -> None:
        super().__init__()
        self.config = config
        self.head: Any = make(config.head, HEADS, "head", dim=config.vocab_size)
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)  # a word that was never seen says nothing

    def forward(
        self, ids: Int[Tensor, "batch time"], *, lengths: Int[Tensor, " batch"] | None = None
    ) -> Float[Tensor, "batch 1 vocab"]:
        """The counts, as one vector for the whole text; `lengths` says how many ids are real."""
        real = torch.ones_like(ids, dtype=self.head.out.weight.dtype)
        if lengths is not None:
            real *= torch.arange(ids.shape[1], device=ids.device) < lengths.unsqueeze(1)
        counts = real.new_zeros(len(ids), self.config.vocab_size)
        return counts.scatter_add(1, ids, real).unsqueeze(1)

    if TYPE_CHECKING:
        __call__ = forward
