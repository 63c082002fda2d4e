"""Language modelling: predict each token from those before it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.config import Choice
from regard.data.batch import TextBatch
from regard.nn.head import IGNORED
from regard.tasks.base import Learns, check_label_smoothing
from regard.tasks.metrics import bits_per_byte, mean_loss, perplexity
from regard.tasks.scheduled import mixed, sampling


@dataclass(frozen=True, kw_only=True)
class Causal:
    r"""P(t_1 .. t_N) = prod_n P(t_n | t_1 .. t_{n-1}): cross-entropy of every next token."""

    learns: ClassVar[Learns] = "text"
    verb: ClassVar[str] = "generate"
    measures: ClassVar[tuple[str, ...]] = ("loss", "perplexity", "bits_per_byte")
    label_smoothing: float = 0.0
    scheduled_sampling: float | Choice = (
        0.0  # how often it reads its own words: a share, or one of SAMPLINGS
    )
    bytes_per_token: float | None = None  # of the held-out text: makes bits per byte comparable

    def __post_init__(self) -> None:
        check_label_smoothing(self.label_smoothing)
        sampling(self.scheduled_sampling, 1)

    def collate(
        self, examples: tuple[np.ndarray, np.ndarray], generator: torch.Generator
    ) -> TextBatch:
        """Blocks of ids and, for each, the id that follows."""
        ids, targets = examples
        return TextBatch(torch.from_numpy(ids), torch.from_numpy(targets))

    def loss(self, model: nn.Module, batch: TextBatch) -> Float[Tensor, ""]:
        """Summed cross-entropy."""
        smoothing = self.label_smoothing if model.training else 0.0
        hidden = model(mixed(model, batch.ids, batch.use_prediction))
        return model.head.loss(hidden, batch.targets, smoothing=smoothing)  # type: ignore[operator, union-attr]

    def count(self, batch: TextBatch) -> Int[Tensor, ""]:
        """How many tokens are predicted."""
        return (batch.targets != IGNORED).sum()

    def metrics(self, model: nn.Module, batches: Iterable[TextBatch]) -> dict[str, float]:
        """Loss in nats per token, perplexity, and bits per byte where the bytes are known."""
        return self.measured(mean_loss(self, model, batches))

    def measured(self, loss: float) -> dict[str, float]:
        """What a loss in nats per token amounts to."""
        result = {"loss": loss, "perplexity": perplexity(loss)}
        if self.bytes_per_token is not None:
            result["bits_per_byte"] = bits_per_byte(loss, self.bytes_per_token)
        return result
