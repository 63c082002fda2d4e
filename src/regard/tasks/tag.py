"""Sequence labelling (token classification): a class for every word of a text."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.config import kind_of
from regard.data.batch import TagBatch
from regard.errors import ConfigError
from regard.models.presets import ModelConfig
from regard.nn.head import TagHead
from regard.nn.loss import IGNORE_INDEX
from regard.tasks.text_classification import Ids, TextClassification, pad

TaggedSpan = tuple[int, int, str]  # first word, one past the last word, type
_PREFIXES, _CONTINUING, _ENDS = {*"BILUES"}, {*"ILE"}, {*"LUES"}


@dataclass(frozen=True, kw_only=True)
class Tag(TextClassification):
    r"""P(tag_1 … tag_N | text), at one token of each word.

    The loss is the cross-entropy of each tag with the head "tag", and of the whole sequence of tags
    with the head "crf".

    At the last token of a word, a causal model has read the whole word too. Taggers on the Hugging
    Face hub are trained on the first token, so imported taggers use the first token.
    """

    data_kind: ClassVar[str] = "tags"
    reads_characters: ClassVar[bool] = True
    target_name: ClassVar[str] = "words"
    best_metric: ClassVar[str] = "f1"
    architectures: ClassVar[tuple[str, ...]] = ("encoder", "decoder")
    heads: ClassVar[tuple[str, ...]] = ("tag", "crf")
    predicts_words: ClassVar[bool] = True
    token: Literal["first", "last"] = "last"  # which token of a word has its tag

    def collate(self, examples: tuple[Ids, Ids, int], generator: torch.Generator) -> TagBatch:
        """Texts and the tags of their tokens, padded to a width."""
        texts, tags, width = examples
        lengths = torch.tensor([len(text) for text in texts])
        return TagBatch(pad(texts, width, 0), lengths, pad(tags, width, IGNORE_INDEX))

    def check_model(self, model: ModelConfig) -> None:
        """Raise `ConfigError` also for label smoothing or class weights with a CRF."""
        super().check_model(model)
        if kind_of(getattr(model, "head", "tag"))[0] != "crf":
            return
        for name in ("label_smoothing", "class_weights"):
            if value := getattr(self, name):
                raise ConfigError(
                    f"task.{name}={value} is for tags that are predicted independently; "
                    "leave it out, or set model.head=tag"
                )

    def loss(self, model: nn.Module, batch: Any) -> Float[Tensor, ""]:
        """Summed -log P of the tags, with label smoothing in training."""
        if self.training_weights(model):
            return super().loss(model, batch)
        label_smoothing = self.label_smoothing if model.training else 0.0
        head, x = cast(TagHead, model.head), self.hidden(model, batch)
        return head.loss(x, batch.targets, label_smoothing=label_smoothing)

    def logits(self, model: nn.Module, batch: Any) -> Float[Tensor, "batch time classes"]:
        """The logits of the tags, at every token."""
        logits: Tensor = model.head(self.hidden(model, batch))  # type: ignore[operator]
        return logits

    def hidden(self, model: nn.Module, batch: Any) -> Float[Tensor, "batch time dim"]:
        """The hidden states of every token."""
        extra = {} if batch.word_bytes is None else {"word_bytes": batch.word_bytes}
        x: Tensor = model(batch.ids, lengths=batch.lengths, **extra)
        return x

    def loss_and_predictions(
        self, model: nn.Module, batch: Any
    ) -> tuple[Tensor, Int[Tensor, "batch time"]]:
        """The summed loss without label smoothing, and the predicted tags."""
        head, x = cast(TagHead, model.head), self.hidden(model, batch)
        return head.loss(x, batch.targets), head.decode(x, batch.targets != IGNORE_INDEX)

    def predictions_and_log_probs(
        self, model: nn.Module, batch: Any
    ) -> tuple[Tensor, Float[Tensor, "batch time classes"]]:
        """The predicted tags, and the log-probabilities of all tags."""
        head, x = cast(TagHead, model.head), self.hidden(model, batch)
        scored = batch.targets != IGNORE_INDEX
        return head.decode(x, scored), head.log_probs(x, scored)

    def metrics(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        """Loss in nats, accuracy of the tags, and F1 of the spans that they mark.

        F1 = 2 correct / (predicted + true); a span is correct if its start, end and type are.
        """
        loss, classes = self.predicted_classes(model, batches)
        correct_spans = predicted_spans = true_spans = correct_tags = words = 0
        for predicted, true in classes:
            predicted_set, true_set = (
                spans([self.class_names[i] for i in tags]) for tags in (predicted, true)
            )
            predicted_spans += len(predicted_set)
            true_spans += len(true_set)
            correct_spans += len(predicted_set & true_set)
            correct_tags, words = correct_tags + int((predicted == true).sum()), words + len(true)
        total = predicted_spans + true_spans
        f1 = 2 * correct_spans / total if total else 0.0
        return {"loss": loss, "accuracy": correct_tags / words, "f1": f1}


def spans(tags: Sequence[str]) -> set[TaggedSpan]:
    """The spans that tags mark: B-x begins one of type x, I-x continues it, O is outside.

    In BILOU and BIOES, L-x or E-x ends a span, and U-x or S-x is a span of one word. As in CoNLL's
    script, an I-x without a span to continue begins one; a tag of another form is a span of one
    word.

    >>> sorted(spans(["B-place", "I-place", "O", "I-person", "B-person"]))
    [(0, 2, 'place'), (3, 4, 'person'), (4, 5, 'person')]
    """
    result: set[TaggedSpan] = set()
    current: tuple[int, str] | None = None  # first word and type of the open span
    for word, tag in enumerate([*tags, "O"]):
        prefix, _, span_type = tag.partition("-")
        continues = prefix in _CONTINUING and current is not None and current[1] == span_type
        if current is not None and not continues:
            result.add((current[0], word, current[1]))
            current = None
        if current is None and tag != "O":
            current = (word, span_type if prefix in _PREFIXES and span_type else tag)
        if current is not None and prefix in _ENDS and span_type:
            result.add((current[0], word + 1, current[1]))
            current = None
    return result
