"""Language modelling: predict each token from those before it."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.config import Choice
from regard.data.batch import TextBatch
from regard.errors import ConfigError
from regard.models.ngram import NGram
from regard.models.presets import ModelConfig
from regard.nn.attention import Mask
from regard.nn.loss import IGNORE_INDEX
from regard.tasks.base import Task, check_label_smoothing
from regard.tasks.metrics import bits_per_byte, mean_loss, perplexity
from regard.tasks.scheduled_sampling import (
    check_scheduled_sampling,
    mix_predictions,
    sampling_schedule,
)


@dataclass(frozen=True, kw_only=True)
class Causal(Task):
    r"""P(t_1 .. t_N) = prod_n P(t_n | t_1 .. t_{n-1}): cross-entropy of every next token.

    Teacher forcing: the model reads the true tokens, unless `scheduled_sampling` replaces some.
    """

    data_kind: ClassVar[str] = "text"
    evaluates_beginning: ClassVar[bool] = True
    uses_evaluation_stride: ClassVar[bool] = True
    target_name: ClassVar[str] = "tokens"
    architectures: ClassVar[tuple[str, ...]] = ("decoder",)
    methods: ClassVar[tuple[str, ...]] = ("generate", "search", "gradients")
    metric_names: ClassVar[tuple[str, ...]] = ("loss", "perplexity", "bits_per_byte")
    label_smoothing: float = 0.0  # probability that is spread over all tokens
    # probability that an input token is a prediction (tasks.scheduled_sampling.SAMPLING_SCHEDULES)
    scheduled_sampling: float | Choice = 0.0
    bytes_per_token: float | None = None  # of the validation text, for bits per byte

    def __post_init__(self) -> None:
        check_label_smoothing(self.label_smoothing)
        sampling_schedule(self.scheduled_sampling, 1)

    def check_model(self, model: ModelConfig) -> None:
        """Raise `ConfigError` also for a bidirectional model, which would read the next token."""
        architecture = getattr(model, "architecture", "decoder")
        if architecture == "encoder" and getattr(model, "bidirectional", False):
            raise ConfigError(
                "model.bidirectional=true also reads a text from its end, and so sees the next "
                "token, which the task predicts;\n"
                "it is for task='text_classification' and task='tag'"
            )
        super().check_model(model)
        check_scheduled_sampling(self.scheduled_sampling, model)

    def collate(
        self, examples: tuple[np.ndarray, np.ndarray], generator: torch.Generator
    ) -> TextBatch:
        """Blocks of ids and, for each id, the one that follows."""
        ids, targets = examples
        return TextBatch(torch.from_numpy(ids), torch.from_numpy(targets))

    def loss(self, model: nn.Module, batch: TextBatch) -> Float[Tensor, ""]:
        """Summed cross-entropy."""
        label_smoothing = self.label_smoothing if model.training else 0.0
        ids = batch.ids
        if batch.use_prediction is not None:
            ids = mix_predictions(model, ids, batch.use_prediction)
        if isinstance(model, NGram):  # fitted without gradients, so this is an evaluation
            unscored = ids.shape[1] - batch.targets.shape[1]
            return -model.target_log_probs(
                ids, F.pad(batch.targets, (unscored, 0), value=IGNORE_INDEX)
            ).sum()
        hidden = model(ids, **self._mask_argument(model, batch))[:, -batch.targets.shape[1] :]
        return model.head.loss(hidden, batch.targets, label_smoothing=label_smoothing)  # type: ignore[operator, union-attr]

    def _mask_argument(self, model: nn.Module, batch: TextBatch) -> dict[str, Mask]:
        """The argument `mask` for a prefix LM; empty for other models.

        In an evaluation, the prefix is the part that is not scored.
        """
        if not getattr(getattr(model, "config", None), "prefix", False):
            return {}
        prefix_lengths = batch.prefix_lengths
        if prefix_lengths is None:
            rows, time = batch.ids.shape
            prefix_lengths = batch.ids.new_full((rows,), time - batch.targets.shape[1] + 1)
        return {"mask": Mask.prefix(prefix_lengths)}

    def collate_with_prefixes(
        self, examples: tuple[np.ndarray, np.ndarray], generator: torch.Generator
    ) -> TextBatch:
        """A batch for a prefix LM: each row has a prefix of random length, which is not scored.

        Lengths are uniform, as in Raffel et al. 2020. The last token of the prefix predicts the
        first one after it.
        """
        batch = self.collate(examples, generator)
        rows, time = batch.ids.shape
        prefix_lengths = torch.randint(1, time + 1, (rows,), generator=generator)
        in_prefix = torch.arange(time) < prefix_lengths.unsqueeze(1) - 1
        targets = batch.targets.masked_fill(in_prefix, IGNORE_INDEX)
        return replace(batch, targets=targets, prefix_lengths=prefix_lengths)

    def count(self, batch: TextBatch) -> Int[Tensor, ""]:
        """How many tokens are predicted."""
        return (batch.targets != IGNORE_INDEX).sum()

    def metrics(self, model: nn.Module, batches: Iterable[TextBatch]) -> dict[str, float]:
        """Loss in nats per token, perplexity, and bits per byte where the bytes are known."""
        return self.metrics_of_loss(mean_loss(self, model, batches))

    def metrics_of_loss(self, loss: float) -> dict[str, float]:
        """The metrics that follow from a loss in nats per token."""
        result = {"loss": loss, "perplexity": perplexity(loss)}
        if self.bytes_per_token is not None:
            result["bits_per_byte"] = bits_per_byte(loss, self.bytes_per_token)
        return result

    def tokens_per_target(self, model: ModelConfig) -> int | None:
        """Every token that is read is followed by a target."""
        return 1
