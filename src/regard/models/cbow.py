"""Word vectors: CBOW with negative sampling (word2vec)."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from regard.config import Settings
from regard.errors import ConfigError
from regard.models.ngram_counts import TokenBatch
from regard.nn.head import LMHead
from regard.nn.loss import IGNORE_INDEX, linear_cross_entropy

NOISE_POWER = 0.75  # exponent of the unigram counts in the noise distribution
MIN_NOISE_SAMPLES = 8  # per row
WORDS_PER_SAMPLE = 8  # longer rows have one noise sample per this many words


class _SparseMatmul(torch.autograd.Function):
    """A x for a sparse matrix A: row i of A has `entries[i]` in the columns `columns[i]`.

    The sparsity pattern is symmetric: Aᵀ has `transposed` in the same columns, so the gradient
    Aᵀ dy is computed in the same way.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, columns: Tensor, entries: Tensor, transposed: Tensor
    ) -> Tensor:
        ctx.save_for_backward(columns, transposed)
        return F.embedding_bag(columns, x, mode="sum", per_sample_weights=entries)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        (dy,) = grad_outputs
        columns, transposed = ctx.saved_tensors
        dx = F.embedding_bag(columns, dy, mode="sum", per_sample_weights=transposed)
        return dx, None, None, None


class _NegativeSamplingScores(torch.autograd.Function):
    """The scores x · u at each position: of its word, and of every noise word of its row.

    `u` has the vectors of the words first, then those of the noise. Both gradients of u are written
    into one tensor, and those of x are summed by `baddbmm_`; autograd would make copies.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, u)
        words, noise = _words_and_noise(u, x)
        return (x * words).sum(-1), (noise @ x.mT).to(x.dtype)  # autocast may lower the precision

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        dpositive, dnegative = grad_outputs[0].unsqueeze(-1), grad_outputs[1]
        x, u = ctx.saved_tensors
        du = torch.empty_like(u)
        (words, noise), (dwords, dnoise) = _words_and_noise(u, x), _words_and_noise(du, x)
        torch.mul(x, dpositive, out=dwords)
        torch.bmm(dnegative, x, out=dnoise)
        return (words * dpositive).baddbmm_(dnegative.mT, noise), du


def _words_and_noise(u: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Views of `u`: the word at each position of x, and the noise words of each row."""
    batch, time, dim = x.shape
    return u[: batch * time].view_as(x), u[batch * time :].view(batch, -1, dim)


class NegativeSamplingHead(LMHead):
    r"""Negative sampling: classify the true word against k words of a noise distribution Q.

        loss = - log σ(u_w · h) - k mean_n log σ(- u_n · h),     n ~ Q(n) ∝ (1 + count(n))^0.75

    All words of a row share their noise samples: 8, or one per 8 words if those are more. This has
    the same expectation as k samples for each word, in a fraction of the time (Ji et al. 2016). The
    optimal u gives u_w · h = log P(w | C) - log k Q(w) (Levy & Goldberg 2014), so evaluation uses
    P(w | C) = softmax_w(u_w · h + log Q(w)), which is comparable with a full softmax. Mikolov et
    al. 2013, where counts are not incremented by 1.
    """

    log_noise: Tensor

    def __init__(self, dim: int, vocab_size: int, negatives: int) -> None:
        super().__init__(dim, vocab_size)
        self.negatives = negatives
        self.register_buffer("log_noise", torch.full((vocab_size,), -math.log(vocab_size)))

    def forward(self, x: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows vocab"]:
        """Logits of P(w | C)."""
        return F.linear(x, self.weight, self.log_noise)

    def loss(
        self,
        x: Float[Tensor, "*rows dim"],
        targets: Int[Tensor, "*rows"],
        *,
        label_smoothing: float = 0.0,
    ) -> Float[Tensor, ""]:
        """The loss summed over `targets`; those of -1 are ignored.

        In evaluation mode it is the cross-entropy of P(w | C).
        """
        if not self.training:
            return linear_cross_entropy(x, self.weight, self.log_noise, targets)
        if label_smoothing:
            raise ConfigError(
                f"task.label_smoothing={label_smoothing} needs a full softmax; "
                "set model.negatives=0"
            )
        per_row = max(MIN_NOISE_SAMPLES, targets.shape[1] // WORDS_PER_SAMPLE)
        noise = torch.multinomial(self.log_noise.exp(), len(x) * per_row, replacement=True)
        u = F.embedding(torch.cat([targets.clamp_min(0).flatten(), noise]), self.weight)
        # (batch, time), (batch, noise, time)
        positive, negative = _NegativeSamplingScores.apply(x, u)  # type: ignore[no-untyped-call]
        log_likelihood = F.logsigmoid(positive) + self.negatives * F.logsigmoid(-negative).mean(1)
        return -(log_likelihood * (targets != IGNORE_INDEX)).sum()


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class CBOWConfig(Settings):
    """A continuous bag-of-words model."""

    vocab_size: int  # number of tokens
    dim: int = 100  # width of the word vectors
    window: int = 5  # context words on either side
    negatives: int = 5  # negative samples per word; 0: full softmax
    context: int = 64  # words per training row; windows do not extend beyond a row

    @property
    def architecture(self) -> str:
        """The architecture that the CBOW task needs."""
        return "cbow"

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "window", "negatives", "context"):
            minimum = {"negatives": 0, "context": 2}.get(name, 1)
            if getattr(self, name) < minimum:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least {minimum}")


class CBOW(nn.Module):
    r"""Continuous bag of words: predict the centre word from the mean of its neighbours' vectors.

        h_t = mean of v_c over c in C,    C = {id_{t-w} .. id_{t+w}} without id_t
        P(id_t = w | C) = softmax_w(u_w · h_t)

    v is `embed`, u the matrix of `head`. This is attention with equal weights: it ignores the order
    of the words, and a word has the same vector in every context. Mikolov et al. 2013.
    """

    def __init__(self, config: CBOWConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        nn.init.normal_(self.embed.weight, std=config.dim**-0.5)
        self.head = LMHead(config.dim, config.vocab_size)
        if config.negatives:
            self.head = NegativeSamplingHead(config.dim, config.vocab_size, config.negatives)

    def forward(
        self, ids: Int[Tensor, "batch time"], *, lengths: Int[Tensor, " batch"] | None = None
    ) -> Float[Tensor, "batch time dim"]:
        """The mean vector of the neighbours of each id; the first `lengths` ids are valid."""
        batch, time = ids.shape
        index = torch.arange(batch * time, device=ids.device).view(batch, time)
        x = self.embed(ids)
        valid = torch.ones_like(ids, dtype=x.dtype)
        if lengths is not None:
            valid = (index[0] < lengths.unsqueeze(1)).to(x.dtype)
        weights = self._neighbours(valid).sum(-1).clamp_min(1).reciprocal()
        mean: Tensor = _SparseMatmul.apply(  # type: ignore[no-untyped-call]
            x.flatten(0, 1),
            self._neighbours(index).flatten(0, 1),
            (self._neighbours(valid) * weights.unsqueeze(-1)).flatten(0, 1),
            (self._neighbours(weights) * valid.unsqueeze(-1)).flatten(0, 1),
        )
        return mean.view_as(x)

    def _neighbours(self, values: Tensor) -> Tensor:
        """The values of the `window` positions before and after each one; 0 outside of the row."""
        window = min(self.config.window, max(1, values.shape[1] - 1))
        windows = F.pad(values, (window, window)).unfold(1, 2 * window + 1, 1)
        return torch.cat([windows[..., :window], windows[..., window + 1 :]], -1)

    def set_noise_distribution(self, batches: Iterable[TokenBatch]) -> None:
        """Set the noise distribution from the word counts of the training data, before training."""
        if not isinstance(self.head, NegativeSamplingHead):
            return
        counts = torch.ones(self.config.vocab_size, dtype=torch.float64)
        for batch in batches:
            scored = batch.ids[batch.targets != IGNORE_INDEX].cpu()
            counts += torch.bincount(scored, minlength=len(counts))
        noise = counts**NOISE_POWER
        self.head.log_noise.copy_((noise / noise.sum()).log())

    if TYPE_CHECKING:
        __call__ = forward
