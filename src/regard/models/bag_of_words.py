"""The bag of words: a linear classifier of word counts."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.config import Choice, Settings, kind_of, make
from regard.errors import ConfigError
from regard.models.compatibility import check_sizes
from regard.nn.head import HEADS


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class BagOfWordsConfig(Settings):
    """A bag-of-words classifier."""

    vocab_size: int  # number of tokens
    # the output layer, which reads word counts, or with pool="mean" relative frequencies
    head: Choice = "classification"
    context: int = 512  # texts are truncated to this many words

    def __post_init__(self) -> None:
        check_sizes(self, "vocab_size", "context")
        kind, options = kind_of(self.head)
        if kind != "classification" or options.get("pool", "first") not in ("first", "mean"):
            raise ConfigError(
                f"head={self.head!r} reads a sequence, but a bag of words has no word order; "
                "set head='classification', with pool='first' or 'mean'"
            )

    @property
    def architecture(self) -> str:
        """The architecture that text classification accepts besides encoders and decoders."""
        return "bag"


class BagOfWords(nn.Module):
    r"""A linear classifier of word counts; it ignores the order of the words.

    c_w = the number of times that w occurs,    logits = W c + b
    """

    def __init__(self, config: BagOfWordsConfig) -> None:
        super().__init__()
        self.config = config
        self.head: Any = make(config.head, HEADS, "head", dim=config.vocab_size)
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)  # a word that does not occur in training keeps weight 0

    def forward(
        self, ids: Int[Tensor, "batch time"], *, lengths: Int[Tensor, " batch"] | None = None
    ) -> Float[Tensor, "batch 1 vocab"]:
        """The counts, one vector per text; the first `lengths` ids of each row are valid."""
        valid = torch.ones_like(ids, dtype=self.head.out.weight.dtype)
        if lengths is not None:
            valid *= torch.arange(ids.shape[1], device=ids.device) < lengths.unsqueeze(1)
        counts = valid.new_zeros(len(ids), self.config.vocab_size)
        return counts.scatter_add(1, ids, valid).unsqueeze(1)

    if TYPE_CHECKING:
        __call__ = forward
