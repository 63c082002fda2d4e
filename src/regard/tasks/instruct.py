"""Instruction tuning (supervised fine-tuning, SFT): predict only the responses of dialogues."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn

from regard.data.batch import DialogueBatch
from regard.errors import ConfigError
from regard.models.presets import ModelConfig
from regard.models.transformer import TransformerConfig
from regard.nn.attention import Mask
from regard.nn.loss import IGNORE_INDEX
from regard.tasks.base import Task, check_label_smoothing
from regard.tasks.metrics import mean_loss, perplexity

Dialogue = tuple[NDArray[np.int64], NDArray[np.bool_]]  # ids, and which of them are scored


@dataclass(frozen=True, kw_only=True)
class Instruct(Task):
    r"""P(response | prompt): cross-entropy of the tokens of the responses.

    Several dialogues share a row; a token attends to those of its own dialogue only, and positions
    begin at 0 in each. In a prefix LM (`model.prefix`), attention within the first prompt is
    bidirectional, and each row holds one dialogue.
    """

    data_kind: ClassVar[str] = "dialogues"
    target_name: ClassVar[str] = "tokens"
    architectures: ClassVar[tuple[str, ...]] = ("decoder",)
    methods: ClassVar[tuple[str, ...]] = ("chat", "generate", "search")
    metric_names: ClassVar[tuple[str, ...]] = ("loss", "perplexity")
    # how a dialogue becomes text: "chatml", or a Jinja chat template; by default that of the
    # model that training starts from
    chat_template: str = "chatml"
    label_smoothing: float = 0.0  # probability that is spread over all tokens

    def __post_init__(self) -> None:
        check_label_smoothing(self.label_smoothing)

    def check_model(self, model: ModelConfig) -> None:
        """Raise `ConfigError` unless the model is a Transformer, whose masks separate dialogues."""
        super().check_model(model)
        if not isinstance(model, TransformerConfig):
            raise ConfigError(
                "packs several dialogues into a row and separates them by "
                "attention masks, so it needs a Transformer decoder;\nset model.preset=tiny-decoder"
            )

    def collate(
        self, examples: tuple[Sequence[Sequence[Dialogue]], int], generator: torch.Generator
    ) -> DialogueBatch:
        """Rows of packed dialogues, padded to a width; document 0 is padding."""
        rows, width = examples
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        targets = torch.full_like(ids, IGNORE_INDEX)
        documents, positions = torch.zeros_like(ids), torch.zeros_like(ids)
        prefix_lengths = torch.zeros(len(rows), dtype=torch.long)
        for row, dialogues in enumerate(rows):
            first = 0
            for document, (tokens, scored) in enumerate(dialogues, 1):
                length = len(tokens) - 1
                columns = slice(first, first + length)
                ids[row, columns] = torch.from_numpy(tokens[:-1])
                next_ids = np.where(scored[1:], tokens[1:], IGNORE_INDEX)
                targets[row, columns] = torch.from_numpy(next_ids)
                documents[row, columns] = document
                positions[row, columns] = torch.arange(length)
                first += length
            prefix_lengths[row] = int(
                np.argmax(dialogues[0][1])
            )  # tokens before the first response
        return DialogueBatch(ids, targets, documents, positions, prefix_lengths)

    def loss(self, model: nn.Module, batch: DialogueBatch) -> Float[Tensor, ""]:
        """Summed cross-entropy of the responses."""
        label_smoothing = self.label_smoothing if model.training else 0.0
        mask = Mask.documents(batch.documents)
        if getattr(model.config, "prefix", False):
            mask = Mask.prefix(batch.prefix_lengths) & mask
        hidden = model(batch.ids, mask=mask, positions=batch.positions)
        loss: Tensor = model.head.loss(hidden, batch.targets, label_smoothing=label_smoothing)  # type: ignore[operator, union-attr]
        return loss

    def count(self, batch: DialogueBatch) -> Int[Tensor, ""]:
        """How many tokens of responses are predicted."""
        return (batch.targets != IGNORE_INDEX).sum()

    def metrics(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        """Loss in nats per token of the responses, and perplexity."""
        loss = mean_loss(self, model, batches)
        return {"loss": loss, "perplexity": perplexity(loss)}
