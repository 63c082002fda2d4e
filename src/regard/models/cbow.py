"""Word vectors: the middle word from the mean of the vectors around it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import ConfigError
from regard.models.counts import Blocks
from regard.nn.head import IGNORED, Head
from regard.nn.loss import linear_cross_entropy

POWER = 0.75  # of the counts from which noise is drawn
DRAWN = 32  # noise words of a row


class NoiseHead(Head):
    r"""Learn to tell the word that stood there from k others, drawn at random.

        loss = - log σ(u_w · h) - k mean_n log σ(- u_n · h),     n ~ Q(n) ∝ (1 + count(n))^0.75

    The words of a row share 32 draws of n: in expectation the same as k draws for each word, in
    a fraction of the time. The best u gives u_w · h = log P(w | C) - log k Q(w) (Levy & Goldberg
    2014), so what is judged is P(w | C) = softmax_w(u_w · h + log Q(w)), as comparable as that
    of a whole softmax. Mikolov et al. 2013, there without the 1.
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
        smoothing: float = 0.0,
    ) -> Float[Tensor, ""]:
        """Summed over `targets`, of which -1 is not scored; cross-entropy where nobody learns."""
        if not self.training:
            return linear_cross_entropy(x, self.weight, self.log_noise, targets)
        if smoothing:
            raise ConfigError(
                f"task.label_smoothing={smoothing} smooths a whole softmax; set model.negatives=0"
            )
        drawn = torch.multinomial(self.log_noise.exp(), len(x) * DRAWN, replacement=True)
        noise = F.embedding(drawn.view(len(x), DRAWN), self.weight)
        own = (x * F.embedding(targets.clamp_min(0), self.weight)).sum(-1)
        others = F.logsigmoid(-x @ noise.mT).mean(-1)
        each = F.logsigmoid(own) + self.negatives * others
        return -(each * (targets != IGNORED)).sum()


@dataclass(frozen=True, kw_only=True, slots=True)
class CBOWConfig:
    """A vector for each word, learned from what stands around it."""

    vocab_size: int
    dim: int = 100
    window: int = 5  # words that are looked at, to either side
    negatives: int = 5  # noise words that each word is told from; 0: the whole softmax
    context: int = 64  # words of a training row; windows end where it does

    @property
    def shape(self) -> str:
        """What the task of this name needs."""
        return "cbow"

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "window", "negatives", "context"):
            least = {"negatives": 0, "context": 2}.get(name, 1)
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least {least}")


class CBOW(nn.Module):
    r"""A continuous bag of words: which word stands in the middle of these?

        h_t = mean of v_c over c in C,    C = {id_{t-w} .. id_{t+w}} without id_t
        P(id_t = w | C) = softmax_w(u_w · h_t)

    v is `embed`, u the matrix of `head`. This is attention that looks at all neighbours alike:
    the order of words is lost, and a word has one vector wherever it stands. Mikolov et al. 2013.
    """

    def __init__(self, config: CBOWConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        nn.init.normal_(self.embed.weight, std=config.dim**-0.5)
        self.head = Head(config.dim, config.vocab_size)
        if config.negatives:
            self.head = NoiseHead(config.dim, config.vocab_size, config.negatives)

    def forward(
        self, ids: Int[Tensor, "batch time"], *, lengths: Int[Tensor, " batch"] | None = None
    ) -> Float[Tensor, "batch time dim"]:
        """The mean of the vectors around each id; `lengths` says how many of a row are real."""
        at = torch.arange(ids.shape[1], device=ids.device)
        apart = (at.unsqueeze(1) - at).abs()
        x: Tensor = self.embed(ids)
        near = ((apart > 0) & (apart <= self.config.window)).to(x.dtype)
        count = near.sum(1, keepdim=True)
        if lengths is not None:
            real = (at < lengths.unsqueeze(1)).unsqueeze(-1).to(x.dtype)
            x, count = x * real, near @ real
        return near @ x / count.clamp_min(1)

    def count_words(self, batches: Iterable[Blocks]) -> None:
        """Count the words to learn from, before the first step: noise is drawn by them."""
        if not isinstance(self.head, NoiseHead):
            return
        counts = torch.ones(self.config.vocab_size, dtype=torch.float64)
        for batch in batches:
            scored = batch.ids[batch.targets != IGNORED].cpu()
            counts += torch.bincount(scored, minlength=len(counts))
        noise = counts**POWER
        self.head.log_noise.copy_((noise / noise.sum()).log())

    if TYPE_CHECKING:
        __call__ = forward
