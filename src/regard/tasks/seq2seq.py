"""Sequence to sequence: read a source sentence, generate a target sentence."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.config import Choice
from regard.data.batch import PairBatch
from regard.models.presets import ModelConfig
from regard.nn.loss import IGNORE_INDEX
from regard.nn.recurrent_attention import reinforce
from regard.nn.state import Source
from regard.tasks.base import Task, check_label_smoothing
from regard.tasks.metrics import mean_loss, perplexity
from regard.tasks.scheduled_sampling import (
    check_scheduled_sampling,
    mix_predictions,
    sampling_schedule,
)


@dataclass(frozen=True, kw_only=True)
class Seq2Seq(Task):
    r"""P(y | x) = prod_n P(y_n | y_1 .. y_{n-1}, x), with label smoothing.

    The source ends with EOS. The decoder reads BOS and the target (teacher forcing), and
    predicts the target and EOS.
    """

    data_kind: ClassVar[str] = "pairs"
    target_name: ClassVar[str] = "target tokens"
    architectures: ClassVar[tuple[str, ...]] = ("encoder-decoder",)
    methods: ClassVar[tuple[str, ...]] = ("translate", "predict", "evaluate_by_length", "gradients")
    metric_names: ClassVar[tuple[str, ...]] = ("loss", "perplexity")
    label_smoothing: float = 0.1  # probability that is spread over all tokens
    # probability that an input token is a prediction (tasks.scheduled_sampling.SAMPLING_SCHEDULES)
    scheduled_sampling: float | Choice = 0.0
    bos_id: int = 1
    eos_id: int = 2
    source_eos_id: int = 2
    prefix_ids: tuple[int, ...] = ()  # ids after BOS that begin every target (BART: <s>)
    source_prefix_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_label_smoothing(self.label_smoothing)
        sampling_schedule(self.scheduled_sampling, 1)

    def check_model(self, model: ModelConfig) -> None:
        """Raise `ConfigError` also for scheduled sampling with a model without training steps."""
        super().check_model(model)
        check_scheduled_sampling(self.scheduled_sampling, model)

    @property
    def prompt(self) -> list[int]:
        """The ids that the decoder reads before it generates."""
        return [self.bos_id, *self.prefix_ids]

    @property
    def prefix_length(self) -> int:
        """How many positions of a pair the prefixes take."""
        return max(len(self.prefix_ids), len(self.source_prefix_ids))

    def source(self, sentences: Sequence[np.ndarray], width: int | None = None) -> Source:
        """Sentences as the encoder reads them, padded to `width`."""
        prefix = len(self.source_prefix_ids)
        lengths = [prefix + len(sentence) + 1 for sentence in sentences]
        ids = np.zeros((len(sentences), max(lengths) if width is None else width), dtype=np.int64)
        for row, sentence in zip(ids, sentences, strict=True):
            row[:prefix] = self.source_prefix_ids
            row[prefix : prefix + len(sentence)] = sentence
            row[prefix + len(sentence)] = self.source_eos_id
        return Source(torch.from_numpy(ids), torch.tensor(lengths))

    def collate(
        self,
        examples: tuple[Sequence[np.ndarray], Sequence[np.ndarray], int],
        generator: torch.Generator,
    ) -> PairBatch:
        """Sources, the input ids of the decoder (targets shifted right, after BOS), and targets."""
        sources, sentences, width = examples
        width = width + self.prefix_length
        ids, targets = self.shift(sentences, width)
        return PairBatch(self.source(sources, width), ids, targets)

    def shift(
        self, sentences: Sequence[np.ndarray], width: int
    ) -> tuple[Int[Tensor, "batch time"], Int[Tensor, "batch time"]]:
        """The input ids of the decoder, and the target of each position, padded to `width`."""
        prefix = len(self.prefix_ids)
        ids = np.zeros((len(sentences), width), dtype=np.int64)
        targets = np.full((len(sentences), width), IGNORE_INDEX, dtype=np.int64)
        for row, target, sentence in zip(ids, targets, sentences, strict=True):
            row[0] = self.bos_id
            end = prefix + len(sentence)
            target[:prefix] = self.prefix_ids
            target[prefix:end] = sentence
            target[end] = self.eos_id
            row[1 : end + 1] = target[:end]
        return torch.from_numpy(ids), torch.from_numpy(targets)

    def loss(self, model: nn.Module, batch: PairBatch) -> Float[Tensor, ""]:
        """Summed cross-entropy of the target, with label smoothing in training.

        If the model samples its attention (hard attention), the loss of `reinforce` is added, since
        no gradient flows through the samples.
        """
        label_smoothing = self.label_smoothing if model.training else 0.0
        ids = batch.ids
        if batch.use_prediction is not None:
            ids = mix_predictions(model, ids, batch.use_prediction, batch.source)
        head: Any = model.head
        if not (model.training and getattr(model, "samples_attention", False)):
            hidden = model(ids, source=batch.source)
            return head.loss(hidden, batch.targets, label_smoothing=label_smoothing)
        hidden, log_prob = cast(Any, model).forward_with_log_probs(ids, source=batch.source)
        loss = head.loss(hidden, batch.targets, label_smoothing=label_smoothing)
        with torch.no_grad():
            logits, scored = head(hidden).float(), batch.targets != IGNORE_INDEX
            valid_targets = batch.targets.clamp_min(0)
            token_losses = F.cross_entropy(
                logits.transpose(1, 2),
                valid_targets,
                reduction="none",
                label_smoothing=label_smoothing,
            )
        return loss + reinforce(log_prob, token_losses, scored)

    def count(self, batch: PairBatch) -> Int[Tensor, ""]:
        """How many target tokens are predicted, EOS included."""
        return (batch.targets != IGNORE_INDEX).sum()

    def metrics(self, model: nn.Module, batches: Iterable[PairBatch]) -> dict[str, float]:
        """Loss in nats per target token and perplexity; BLEU is computed in pipelines.pairs."""
        loss = mean_loss(self, model, batches)
        return {"loss": loss, "perplexity": perplexity(loss)}
