"""Word vectors from characters, even for words that are not in the training data."""

import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn

MAX_WORD_BYTES = 24  # later bytes of a word are ignored


class CharacterConvolution(nn.Module):
    r"""A character CNN: a convolution over the characters of a word, and max pooling over time.

        c = max_i relu(W [b_{i-1}; b_i; b_{i+1}] + v)

    b_i is the embedding of byte i of the word in UTF-8, so that no character is unknown; outside
    the word it is 0. Dos Santos & Zadrozny 2014, here over bytes and with a ReLU.
    """

    def __init__(self, dim: int, *, embed_dim: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, embed_dim, padding_idx=0)
        self.convolution = nn.Conv1d(embed_dim, dim, 3, padding=1)

    def forward(
        self, word_bytes: UInt8[Tensor, "batch time bytes"]
    ) -> Float[Tensor, "batch time dim"]:
        """The vector of each word; bytes of 0 are padding."""
        flat = word_bytes.flatten(0, 1)  # (batch * time, bytes)
        x = self.convolution(self.embed(flat.long()).mT)  # (batch * time, dim, bytes)
        pooled: Tensor = (F.relu(x) * (flat > 0).unsqueeze(1)).amax(2)
        return pooled.unflatten(0, word_bytes.shape[:2])


class CharacterEmbedding(nn.Module):
    r"""P c_t, which is added to the embedding of token t; c_t as in `CharacterConvolution`.

    A model with lowercased tokens sees capital letters through it.
    """

    def __init__(self, width: int, dim: int) -> None:
        super().__init__()
        self.convolution = CharacterConvolution(width)
        self.project = nn.Linear(width, dim, bias=False)

    def forward(
        self, word_bytes: UInt8[Tensor, "batch time bytes"]
    ) -> Float[Tensor, "batch time dim"]:
        """The vector of each word; bytes of 0 are padding."""
        x: Tensor = self.project(self.convolution(word_bytes))
        return x


def utf8_bytes(word: str) -> list[int]:
    """The first bytes of a word, padded with zeros.

    >>> utf8_bytes("né")[:4]
    [110, 195, 169, 0]
    """
    data = list(word.encode("utf-8", "replace").replace(b"\0", b"")[:MAX_WORD_BYTES])
    return data + [0] * (MAX_WORD_BYTES - len(data))
