"""What is read off the hidden states: the next token, a masked one, a class, a tag, a span."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import ConfigError, unknown
from regard.nn.ffn import ACTIVATIONS
from regard.nn.loss import IGNORED, cross_entropy, linear_cross_entropy, soft_cap
from regard.nn.options import require_positive

Hidden = Float[Tensor, "batch time dim"]


class Head(nn.Module):
    r"""The output layer: logits = W x + b, bent by `cap` where there is one.

    `tied` names an embedding matrix to use as W; it is then stored once, with the embedding.
    Where that is narrower than the model, x is projected first (OPT 350M); `scaled` divides x
    by sqrt(dim), as T5 does where it ties.
    """

    def __init__(
        self,
        dim: int,
        vocab_size: int,
        *,
        embed_dim: int | None = None,
        tied: nn.Embedding | None = None,
        bias: bool = False,
        scaled: bool = False,
        cap: float | None = None,
    ) -> None:
        super().__init__()
        require_positive("head 'linear'", cap=cap)
        width = dim if embed_dim is None else embed_dim
        self.scale, self.cap = dim**-0.5 if scaled else 1.0, cap
        self.project = None if width == dim else nn.Linear(dim, width, bias=False)
        self._tied = (tied,)  # in a tuple, so that it is not registered twice
        if tied is None:
            self.weight = nn.Parameter(torch.empty(vocab_size, width))
            nn.init.normal_(self.weight, std=0.02)
        self.bias = nn.Parameter(torch.zeros(vocab_size)) if bias else None

    @property
    def matrix(self) -> Tensor:
        """W, wherever it is kept."""
        (tied,) = self._tied
        return self.weight if tied is None else tied.weight

    def forward(self, x: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows vocab"]:
        """The logits."""
        return soft_cap(F.linear(self.prepare(x), self.matrix, self.bias), self.cap)

    def loss(
        self,
        x: Float[Tensor, "*rows dim"],
        targets: Int[Tensor, "*rows"],
        *,
        smoothing: float = 0.0,
    ) -> Float[Tensor, ""]:
        """The summed cross-entropy against `targets`; -1 is not scored."""
        x = self.prepare(x)
        return linear_cross_entropy(
            x, self.matrix, self.bias, targets, smoothing=smoothing, cap=self.cap
        )

    def prepare(self, x: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows width"]:
        """What W multiplies."""
        x = x if self.scale == 1.0 else x * self.scale
        return x if self.project is None else self.project(x)

    if TYPE_CHECKING:
        __call__ = forward


class MaskedHead(Head):
    r"""BERT's read-out of a masked token: logits = W n(f(D x + d)) + b, n a norm (Devlin 2018).

    With `next_sentence` also logits for whether the second part follows the first, from the
    first vector: N tanh(P x_1 + p) + n.
    """

    def __init__(
        self,
        dim: int,
        vocab_size: int,
        *,
        norm: Callable[[int], nn.Module],
        embed_dim: int | None = None,
        tied: nn.Embedding | None = None,
        bias: bool = True,
        activation: str = "gelu",
        next_sentence: bool = False,
    ) -> None:
        width = dim if embed_dim is None else embed_dim
        super().__init__(width, vocab_size, tied=tied, bias=bias)
        if activation not in ACTIVATIONS:
            raise ConfigError(f"head 'masked': {unknown('activation', activation, ACTIVATIONS)}")
        self.dense = nn.Linear(dim, width)
        self.activation = ACTIVATIONS[activation]
        self.norm = norm(width)
        self.pool = nn.Linear(dim, dim) if next_sentence else None
        self.follows = nn.Linear(dim, 2) if next_sentence else None

    def prepare(self, x: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows width"]:
        """The hidden states, bent and normed once more."""
        normed: Tensor = self.norm(self.activation(self.dense(x)))
        return normed

    def next_sentence(self, x: Hidden) -> Float[Tensor, "batch 2"]:
        """Logits of "follows" and "does not", in BERT's order."""
        if self.pool is None or self.follows is None:
            raise ConfigError("this head was made without next_sentence=true")
        logits: Tensor = self.follows(torch.tanh(self.pool(x[:, 0])))
        return logits


class GivenHead(nn.Module):
    """The head of a model whose hidden states are already log-probabilities (counts)."""

    def forward(self, x: Float[Tensor, "*rows vocab"]) -> Float[Tensor, "*rows vocab"]:
        """The same."""
        return x

    def loss(
        self,
        x: Float[Tensor, "*rows vocab"],
        targets: Int[Tensor, "*rows"],
        *,
        smoothing: float = 0.0,
    ) -> Float[Tensor, ""]:
        """The summed negative log-probability of `targets`; -1 is not scored."""
        return cross_entropy(x.flatten(0, -2), targets.flatten(), smoothing)


class NoHead(nn.Module):
    """The hidden states themselves: an encoder that was published without a read-out."""

    def forward(self, x: Hidden) -> Hidden:
        """The same."""
        return x


class PooledHead(nn.Module):
    r"""One vector for a text: tanh(P x_1 + p), x_1 the first hidden state (BERT's pooler)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.pool = nn.Linear(dim, dim)

    def forward(self, x: Hidden) -> Float[Tensor, "batch dim"]:
        """The pooled vector."""
        return torch.tanh(self.pool(x[:, 0]))


class ClassHead(nn.Module):
    r"""Which of some classes a whole sequence belongs to: logits = W h(pool(x)) + b.

    `pool` takes the first vector (BERT, ViT), the last real one (GPT, recurrent networks), the
    mean or the maximum of all. Of vectors of two halves, one read ahead and one read back, "ends"
    takes the last of the one and the first of the other: each has then seen everything.
    `hidden` is an extra layer h(y) = f(H y + c) with f = tanh (BERT, RoBERTa) or ReLU
    (DistilBERT); with `bend` it is h(y) = relu(y), without a matrix of its own.
    """

    def __init__(
        self,
        dim: int,
        *,
        classes: int,
        pool: Literal["first", "last", "mean", "max", "ends"] = "first",
        hidden: Literal["tanh", "relu"] | None = None,
        bend: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if classes < 2:
            raise ConfigError(f"head 'classify': classes={classes} must be at least 2")
        if bend and hidden is not None:
            raise ConfigError("head 'classify': bend=true is a hidden layer less; give either")
        self.pool, self.bend = pool, bend
        self.hidden = None if hidden is None else nn.Linear(dim, dim)
        self.activation = torch.relu if hidden == "relu" else torch.tanh
        self.out = nn.Linear(dim, classes, bias=bias)

    def forward(
        self, x: Hidden, lengths: Int[Tensor, " batch"] | None = None
    ) -> Float[Tensor, "batch classes"]:
        """The logits; `lengths` says how many vectors of each row are real."""
        pooled = self._pooled(x, lengths)
        if self.bend:
            pooled = pooled.relu()
        if self.hidden is not None:
            pooled = self.activation(self.hidden(pooled))
        logits: Tensor = self.out(pooled)
        return logits

    def loss(
        self,
        x: Hidden,
        targets: Int[Tensor, " batch"],
        *,
        lengths: Int[Tensor, " batch"] | None = None,
        smoothing: float = 0.0,
    ) -> Float[Tensor, ""]:
        """The summed cross-entropy; -1 is not scored."""
        return cross_entropy(self(x, lengths), targets, smoothing)

    def _pooled(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        if self.pool == "first":
            return x[:, 0]
        rows, positions = (
            torch.arange(len(x), device=x.device),
            torch.arange(x.shape[1], device=x.device),
        )
        if lengths is None:
            lengths = torch.full_like(rows, x.shape[1])
        if self.pool in ("last", "ends"):
            last = x[rows, lengths - 1]
            if self.pool == "last":
                return last
            half = x.shape[-1] // 2
            return torch.cat([last[:, :half], x[:, 0, half:]], -1)
        real = (positions < lengths.unsqueeze(1)).unsqueeze(-1)
        if self.pool == "max":
            return x.masked_fill(~real, -torch.inf).amax(1)
        return (x * real).sum(1) / lengths.unsqueeze(1)


class TagHead(nn.Module):
    """A class for every token: logits_t = W x_t + b."""

    def __init__(self, dim: int, *, classes: int) -> None:
        super().__init__()
        if classes < 2:
            raise ConfigError(f"head 'tag': classes={classes} must be at least 2")
        self.out = nn.Linear(dim, classes)

    def forward(self, x: Hidden) -> Float[Tensor, "batch time classes"]:
        """The logits."""
        logits: Tensor = self.out(x)
        return logits

    def loss(
        self, x: Hidden, targets: Int[Tensor, "batch time"], *, smoothing: float = 0.0
    ) -> Float[Tensor, ""]:
        """The summed cross-entropy; -1 is not scored."""
        return cross_entropy(self(x).flatten(0, -2), targets.flatten(), smoothing)


class SpanHead(TagHead):
    """Where an answer starts and where it ends: two logits for every token (Devlin 2018)."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, classes=2)

    def loss(
        self, x: Hidden, targets: Int[Tensor, "batch 2"], *, smoothing: float = 0.0
    ) -> Float[Tensor, ""]:
        """Cross-entropy of the first and of the last token, summed; -1 is not scored."""
        logits = self(x).transpose(1, 2).flatten(0, 1)  # (batch * 2, time)
        return cross_entropy(logits, targets.flatten(), smoothing)


HEADS: dict[str, Callable[..., nn.Module]] = {
    "linear": Head,
    "masked": MaskedHead,
    "classify": ClassHead,
    "tag": TagHead,
    "span": SpanHead,
    "pooled": PooledHead,
    "none": NoHead,
}

__all__ = [
    "HEADS",
    "IGNORED",
    "ClassHead",
    "GivenHead",
    "Head",
    "MaskedHead",
    "NoHead",
    "PooledHead",
    "SpanHead",
    "TagHead",
]
