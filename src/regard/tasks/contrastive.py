"""Contrastive training of sentence embeddings: paired texts near each other, others far apart."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.data.batch import ContrastiveBatch
from regard.errors import ConfigError, DataError
from regard.nn.state import Source
from regard.tasks.base import Task
from regard.tasks.metrics import evaluation_mode
from regard.tasks.text_classification import Ids, pad


@dataclass(frozen=True, kw_only=True)
class Contrastive(Task):
    r"""InfoNCE with in-batch negatives: the other texts of the batch.

        loss = - sum_i log ( exp(cos(a_i, b_i) / t) / sum_j exp(cos(a_i, b_j) / t) )

    t is the temperature. With pairs of texts this is the multiple negatives ranking loss (Henderson
    et al. 2017; Reimers & Gurevych 2019 in sentence-transformers). With the same text twice,
    embedded with different dropout masks, it is SimCSE (Gao et al. 2021). With gradient
    accumulation the negatives are those of the micro-batch, and if several ranks share a
    micro-batch, those in the rows of the same rank.
    """

    data_kind: ClassVar[str] = "sentences"
    target_name: ClassVar[str] = "pairs"
    best_metric: ClassVar[str] = "accuracy"
    architectures: ClassVar[tuple[str, ...]] = ("encoder",)
    methods: ClassVar[tuple[str, ...]] = ("neighbours", "embed")
    metric_names: ClassVar[tuple[str, ...]] = ("loss", "accuracy")
    temperature: float = 0.05  # temperature of the softmax over the texts of a batch
    pool: Literal["mean", "first"] = "mean"  # the mean of all hidden states, or the first (<cls>)

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ConfigError(f"task.temperature={self.temperature} must be above 0")

    def collate(
        self, examples: tuple[Ids, Ids, int], generator: torch.Generator
    ) -> ContrastiveBatch:
        """Both texts of each pair, padded."""
        first, second, width = examples

        def pad_texts(texts: Ids) -> Source:
            return Source(pad(texts, width, 0), torch.tensor([len(text) for text in texts]))

        return ContrastiveBatch(pad_texts(first), pad_texts(second))

    def embed(self, model: nn.Module, texts: Source) -> Float[Tensor, "batch dim"]:
        """The L2-normalized embedding of each text."""
        x = model(texts.ids, lengths=texts.lengths).float()
        if self.pool == "first":
            return F.normalize(x[:, 0], dim=-1)
        valid = torch.arange(x.shape[1], device=x.device) < texts.lengths.unsqueeze(1)
        return F.normalize((x * valid.unsqueeze(-1)).sum(1), dim=-1)

    def loss(self, model: nn.Module, batch: ContrastiveBatch) -> Float[Tensor, ""]:
        """The summed loss over the pairs of the batch."""
        a, b = self.embed(model, batch.first), self.embed(model, batch.second)
        targets = torch.arange(len(a), device=a.device)
        return F.cross_entropy(a @ b.T / self.temperature, targets, reduction="sum")

    def count(self, batch: ContrastiveBatch) -> Int[Tensor, ""]:
        """The number of pairs."""
        return batch.first.lengths.new_tensor(len(batch.first.lengths))

    def metrics(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        """The loss per pair, and how often the nearest of all second texts is the correct one.

        If several second texts are equal, any of them is correct.
        """
        total, vectors = 0.0, []
        with evaluation_mode(model):
            for batch in batches:
                total += float(self.loss(model, batch))
                vectors.append((self.embed(model, batch.first), self.embed(model, batch.second)))
        if not vectors:
            raise DataError("nothing to evaluate: the validation data has no pairs")
        a, b = (torch.cat(side) for side in zip(*vectors, strict=True))
        cosines = a @ b.T
        correct = cosines.amax(1) <= cosines.diagonal() + 1e-6
        return {"loss": total / len(a), "accuracy": float(correct.float().mean())}
