"""Output heads: the next token, a masked token, a class, tags, an answer span."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.errors import ConfigError, unknown
from regard.nn.block import ACTIVATIONS
from regard.nn.crf import Transitions, log_partition, marginals, path_score, viterbi
from regard.nn.loss import IGNORE_INDEX, cross_entropy, linear_cross_entropy, soft_cap
from regard.nn.mixture_density import MixtureDensityHead
from regard.nn.options import require_positive

Hidden = Float[Tensor, "batch time dim"]


class LMHead(nn.Module):
    r"""The language model head (LM head, unembedding): logits = W x + b.

    Only heads over a vocabulary derive from it. With `cap` the logits are soft-capped.
    Weight tying: with `tied`, W is the weight of that embedding, and the head stores none. If
    `embed_dim` differs from `dim`, x is projected to that width first (OPT 350M). `scaled` divides
    x by sqrt(dim), as T5 does with tied weights.
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
        """W: the matrix of the tied embedding, or `weight`."""
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
        label_smoothing: float = 0.0,
    ) -> Float[Tensor, ""]:
        """The summed cross-entropy against `targets`; those of -1 are ignored."""
        x = self.prepare(x)
        return linear_cross_entropy(
            x, self.matrix, self.bias, targets, label_smoothing=label_smoothing, cap=self.cap
        )

    def prepare(self, x: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows width"]:
        """The input of the matmul with W: x scaled and projected."""
        x = x if self.scale == 1.0 else x * self.scale
        return x if self.project is None else self.project(x)

    if TYPE_CHECKING:
        __call__ = forward


class MaskedLMHead(LMHead):
    r"""BERT's head for masked tokens: logits = W n(f(D x + d)) + b, n a norm (Devlin 2018).

    With `next_sentence`, it also predicts from the first hidden state whether the second segment
    follows the first (next-sentence prediction): logits S tanh(P x_1 + p) + s.
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
        self.seq_relationship = nn.Linear(dim, 2) if next_sentence else None

    def prepare(self, x: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows width"]:
        """n(f(D x + d))"""
        normalized: Tensor = self.norm(self.activation(self.dense(x)))
        return normalized

    def next_sentence(self, x: Hidden) -> Float[Tensor, "batch 2"]:
        """Logits of "is next" and "is not next", in BERT's order."""
        if self.pool is None or self.seq_relationship is None:
            raise ConfigError(
                "this head has no next-sentence prediction; set model.head.next_sentence=true"
            )
        logits: Tensor = self.seq_relationship(torch.tanh(self.pool(x[:, 0])))
        return logits


class LogProbHead(nn.Module):
    """The head of a model whose hidden states are log-probabilities already (n-grams, HMM)."""

    def forward(self, x: Float[Tensor, "*rows vocab"]) -> Float[Tensor, "*rows vocab"]:
        """Return `x` itself."""
        return x

    def loss(
        self,
        x: Float[Tensor, "*rows vocab"],
        targets: Int[Tensor, "*rows"],
        *,
        label_smoothing: float = 0.0,
    ) -> Float[Tensor, ""]:
        """The summed negative log-probability of `targets`; those of -1 are ignored."""
        return cross_entropy(x.flatten(0, -2), targets.flatten(), label_smoothing)


class NoHead(nn.Module):
    """Returns the hidden states: for encoders that were published without a head."""

    def forward(self, x: Hidden) -> Hidden:
        """Return `x` itself."""
        return x


class PooledHead(nn.Module):
    r"""One vector per sequence: tanh(P x_1 + p), x_1 the first hidden state (BERT's pooler)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.pool = nn.Linear(dim, dim)

    def forward(self, x: Hidden) -> Float[Tensor, "batch dim"]:
        """The pooled vector."""
        return torch.tanh(self.pool(x[:, 0]))


class ClassificationHead(nn.Module):
    r"""The class of a sequence: logits = W h(pool(x)) + b; classes=1 is regression.

    `pool` takes the first vector (BERT, ViT), the last one that is not padding (GPT, recurrent
    networks), the mean or the maximum. For a bidirectional recurrent network "ends" takes the last
    state of the forward layer and the first of the backward layer: both have read all tokens.
    `hidden` is an extra layer h(y) = f(H y + c) with f = tanh (BERT, RoBERTa), ReLU (DistilBERT)
    or GELU (DeBERTa); with `relu`, h(y) = relu(y) without weights; by default h(y) = y.
    """

    def __init__(
        self,
        dim: int,
        *,
        classes: int,
        pool: Literal["first", "last", "mean", "max", "ends"] = "first",
        hidden: Literal["tanh", "relu", "gelu"] | None = None,
        relu: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if classes < 1:
            raise ConfigError(f"head 'classification': classes={classes} must be at least 1")
        if relu and hidden is not None:
            raise ConfigError(
                "head 'classification': relu=true and hidden cannot be combined; give one"
            )
        self.pool, self.relu = pool, relu
        self.hidden = None if hidden is None else nn.Linear(dim, dim)
        self.activation = {"relu": torch.relu, "gelu": F.gelu}.get(hidden or "", torch.tanh)
        self.out = nn.Linear(dim, classes, bias=bias)

    def forward(
        self, x: Hidden, lengths: Int[Tensor, " batch"] | None = None
    ) -> Float[Tensor, "batch classes"]:
        """The logits; positions of a row from its length on are padding."""
        pooled = self._pool(x, lengths)
        if self.relu:
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
        label_smoothing: float = 0.0,
    ) -> Float[Tensor, ""]:
        """The summed cross-entropy; targets of -1 are ignored."""
        return cross_entropy(self(x, lengths), targets, label_smoothing)

    def _pool(self, x: Tensor, lengths: Tensor | None) -> Tensor:
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
        valid = (positions < lengths.unsqueeze(1)).unsqueeze(-1)
        if self.pool == "max":
            return x.masked_fill(~valid, -torch.inf).amax(1)
        return (x * valid).sum(1) / lengths.unsqueeze(1)


class TagHead(nn.Module):
    """Token classification, a class for every token: logits_t = W x_t + b."""

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
        self, x: Hidden, targets: Int[Tensor, "batch time"], *, label_smoothing: float = 0.0
    ) -> Float[Tensor, ""]:
        """The summed cross-entropy; targets of -1 are ignored."""
        return cross_entropy(self(x).flatten(0, -2), targets.flatten(), label_smoothing)

    def decode(self, x: Hidden, tagged: Bool[Tensor, "batch time"]) -> Int[Tensor, "batch time"]:
        """The predicted class at each of the `tagged` tokens."""
        return self(x).argmax(-1)

    def log_probs(
        self, x: Hidden, tagged: Bool[Tensor, "batch time"]
    ) -> Float[Tensor, "batch time classes"]:
        """The log-probabilities of all classes at each of the `tagged` tokens."""
        return self(x).log_softmax(-1)


class CRFHead(TagHead):
    """A conditional random field over the tags of the words of a text (`nn.crf`).

    u_t = W x_t + b at the tagged token of word t; A, s and e are learned. Lample et al. 2016.
    """

    def __init__(self, dim: int, *, classes: int) -> None:
        super().__init__(dim, classes=classes)
        self.start_transitions = nn.Parameter(torch.zeros(classes))
        self.transitions = nn.Parameter(torch.zeros(classes, classes))
        self.end_transitions = nn.Parameter(torch.zeros(classes))

    @property
    def transition_scores(self) -> Transitions:
        """s, A and e."""
        return Transitions(self.start_transitions, self.transitions, self.end_transitions)

    def loss(
        self, x: Hidden, targets: Int[Tensor, "batch time"], *, label_smoothing: float = 0.0
    ) -> Float[Tensor, ""]:
        """The sum of -log P(tags | text); tokens of class -1 have no tag."""
        if label_smoothing:
            raise ConfigError(
                f"label_smoothing={label_smoothing} needs a head that predicts tags independently; "
                "set it to 0, or choose head 'tag'"
            )
        tagged = targets != IGNORE_INDEX
        u, lengths, indices = self._gather_tagged(x, tagged)
        tags = targets.gather(1, indices).clamp_min(0)
        scores = path_score(u, tags, lengths, self.transition_scores)
        return ((self._log_partition(u, lengths) - scores) * tagged.any(1)).sum()

    def decode(self, x: Hidden, tagged: Bool[Tensor, "batch time"]) -> Int[Tensor, "batch time"]:
        """The most probable sequence of tags, at the `tagged` tokens.

        It need not contain the most probable tag of each word.
        """
        u, lengths, indices = self._gather_tagged(x, tagged)
        tags = viterbi(u, lengths, self.transition_scores)
        return tags.scatter(1, indices, tags)

    def log_probs(
        self, x: Hidden, tagged: Bool[Tensor, "batch time"]
    ) -> Float[Tensor, "batch time classes"]:
        """log P(tag of a word | text) at each of the `tagged` tokens."""
        u, lengths, indices = self._gather_tagged(x, tagged)
        log_p = marginals(u, lengths, self.transition_scores).log()
        return log_p.scatter(1, indices.unsqueeze(2).expand_as(u), log_p)

    def _gather_tagged(self, x: Hidden, tagged: Bool[Tensor, "batch time"]) -> tuple[Tensor, ...]:
        """The emission scores of the tagged tokens, their number per row, and their indices.

        Tagged tokens are moved to the front of each row. A truncated text may have none: its length
        is set to 1, and it is not scored.
        """
        indices = tagged.long().argsort(dim=1, descending=True, stable=True)
        u = self(x).to(self.transitions.dtype)  # float32 under autocast
        u = u.gather(1, indices.unsqueeze(2).expand_as(u))
        return u, tagged.sum(1).clamp_min(1), indices

    def _log_partition(self, u: Tensor, lengths: Tensor) -> Tensor:
        """log Z; `accel.compile` replaces this method, so that its loop runs eagerly."""
        return log_partition(u, lengths, self.transition_scores)


class SpanHead(TagHead):
    """The start and the end of an answer: two logits for every token (Devlin 2018)."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, classes=2)

    def loss(
        self, x: Hidden, targets: Int[Tensor, "batch 2"], *, label_smoothing: float = 0.0
    ) -> Float[Tensor, ""]:
        """The summed cross-entropy of start and end; targets of -1 are ignored."""
        return self.span_loss(self(x), targets, label_smoothing)

    @staticmethod
    def span_loss(
        logits: Float[Tensor, "batch time 2"],
        targets: Int[Tensor, "batch 2"],
        label_smoothing: float = 0.0,
    ) -> Float[Tensor, ""]:
        """The summed cross-entropy of start and end, from their logits."""
        by_boundary = logits.transpose(1, 2).flatten(0, 1)  # (batch * 2, time)
        return cross_entropy(by_boundary, targets.flatten(), label_smoothing)


class ForecastHead(nn.Module):
    r"""The next values of a series: W pool(x) + b, of `horizon` steps with `outputs` values each.

    `pool` takes the last position, which a causal model needs, the mean of all positions, or all of
    them concatenated ("flatten", as PatchTST does), for inputs of exactly `positions` positions.
    """

    def __init__(
        self,
        dim: int,
        positions: int,
        *,
        horizon: int = 1,
        outputs: int = 1,
        pool: Literal["last", "mean", "flatten"] = "last",
    ) -> None:
        super().__init__()
        require_positive("head 'forecast'", horizon=horizon, outputs=outputs)
        self.horizon, self.outputs, self.pool = horizon, outputs, pool
        self.out = nn.Linear(dim * positions if pool == "flatten" else dim, horizon * outputs)

    def forward(self, x: Hidden) -> Float[Tensor, "batch horizon variables"]:
        """The values after the last position."""
        if self.pool == "flatten":
            pooled = x.flatten(1)
        else:
            pooled = x[:, -1] if self.pool == "last" else x.mean(1)
        return self.project(pooled)

    def project(self, x: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows horizon variables"]:
        """The forecast from each pooled vector."""
        values: Tensor = self.out(x)
        return values.unflatten(-1, (self.horizon, self.outputs))

    if TYPE_CHECKING:
        __call__ = forward


HEADS: dict[str, Callable[..., nn.Module]] = {
    "linear": LMHead,
    "masked": MaskedLMHead,
    "classification": ClassificationHead,
    "tag": TagHead,
    "crf": CRFHead,
    "span": SpanHead,
    "pooled": PooledHead,
    "forecast": ForecastHead,
    "mixture": MixtureDensityHead,
    "none": NoHead,
}

__all__ = [
    "HEADS",
    "IGNORE_INDEX",
    "CRFHead",
    "ClassificationHead",
    "ForecastHead",
    "LMHead",
    "LogProbHead",
    "MaskedLMHead",
    "MixtureDensityHead",
    "NoHead",
    "PooledHead",
    "SpanHead",
    "TagHead",
]
