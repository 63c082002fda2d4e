"""Word vectors: CBOW with negative sampling (word2vec)."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.config import Settings
from regard.errors import ConfigError
from regard.models.counts import TokenBatch
from regard.nn.head import IGNORED, Head
from regard.nn.loss import linear_cross_entropy

NOISE_POWER = 0.75  # exponent of the unigram counts in the noise distribution
NOISE_SAMPLES = 32  # per row


class NegativeSamplingHead(Head):
    r"""Negative sampling: classify the true word against k words of a noise distribution Q.

        loss = - log σ(u_w · h) - k mean_n log σ(- u_n · h),     n ~ Q(n) ∝ (1 + count(n))^0.75

    The words of a row share 32 samples of n: the same expectation as k samples for each word, in
    a fraction of the time. The optimal u gives u_w · h = log P(w | C) - log k Q(w) (Levy &
    Goldberg 2014), so evaluation uses P(w | C) = softmax_w(u_w · h + log Q(w)), which is
    comparable with a full softmax. Mikolov et al. 2013, where counts are not incremented by 1.
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
        """Summed over `targets` other than -1; in evaluation the cross-entropy of P(w | C)."""
        if not self.training:
            return linear_cross_entropy(x, self.weight, self.log_noise, targets)
        if label_smoothing:
            raise ConfigError(
                f"task.label_smoothing={label_smoothing} needs a full softmax; "
                "set model.negatives=0"
            )
        sampled = torch.multinomial(self.log_noise.exp(), len(x) * NOISE_SAMPLES, replacement=True)
        noise = F.embedding(sampled.view(len(x), NOISE_SAMPLES), self.weight)
        positive = (x * F.embedding(targets.clamp_min(0), self.weight)).sum(-1)
        negative = F.logsigmoid(-x @ noise.mT).mean(-1)
        log_likelihood = F.logsigmoid(positive) + self.negatives * negative
        return -(log_likelihood * (targets != IGNORED)).sum()


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

    v is `embed`, u the matrix of `head`. This is attention with equal weights: the order of words
    is lost, and a word has one vector in every context. Mikolov et al. 2013.
    """

    def __init__(self, config: CBOWConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        nn.init.normal_(self.embed.weight, std=config.dim**-0.5)
        self.head = Head(config.dim, config.vocab_size)
        if config.negatives:
            self.head = NegativeSamplingHead(config.dim, config.vocab_size, config.negatives)

    def forward(
        self, ids: Int[Tensor, "batch time"], *, lengths: Int[Tensor, " batch"] | None = None
    ) -> Float[Tensor, "batch time dim"]:
        """The mean vector of the neighbours of each id; the first `lengths` ids are valid."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        distance = (positions.unsqueeze(1) - positions).abs()
        x: Tensor = self.embed(ids)
        in_window = ((distance > 0) & (distance <= self.config.window)).to(x.dtype)
        count = in_window.sum(1, keepdim=True)
        if lengths is not None:
            valid = (positions < lengths.unsqueeze(1)).unsqueeze(-1).to(x.dtype)
            x, count = x * valid, in_window @ valid
        return in_window @ x / count.clamp_min(1)

    def count_words(self, batches: Iterable[TokenBatch]) -> None:
        """Set the noise distribution from the word counts of the training data, before training."""
        if not isinstance(self.head, NegativeSamplingHead):
            return
        counts = torch.ones(self.config.vocab_size, dtype=torch.float64)
        for batch in batches:
            scored = batch.ids[batch.targets != IGNORED].cpu()
            counts += torch.bincount(scored, minlength=len(counts))
        noise = counts**NOISE_POWER
        self.head.log_noise.copy_((noise / noise.sum()).log())

    if TYPE_CHECKING:
        __call__ = forward
