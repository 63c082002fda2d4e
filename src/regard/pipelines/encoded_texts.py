"""Labelled, tagged and paired texts as ids: special tokens, truncation, characters, segments."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from regard.data.batch import Batch, LabelBatch, TagBatch
from regard.data.labels import LabelledText
from regard.data.loader import PairIndices
from regard.data.token_store import PairStore
from regard.errors import ConfigError
from regard.models.presets import ModelConfig
from regard.models.transformer import TransformerConfig
from regard.nn.characters import MAX_WORD_BYTES, utf8_bytes
from regard.nn.loss import IGNORE_INDEX
from regard.pipelines.batching import batches_of_similar_length, concatenate
from regard.pipelines.text_pairs import pair_template
from regard.tasks import Tag, TextClassification, TextRegression
from regard.text import Tokenizer

TextTask = TextClassification | TextRegression  # tasks that read whole texts
EVALUATION_ROWS = 128  # texts in a batch of predictions


def special_ids_around(model: ModelConfig, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The special ids before and after a text: <cls> … <sep> for a Transformer encoder."""
    if isinstance(model, TransformerConfig) and model.architecture == "encoder":
        return [tokenizer.cls_id], [tokenizer.sep_id]
    return tokenizer.prefix_ids, []


def room_for_text(model: ModelConfig, tokenizer: Tokenizer) -> int:
    """The number of tokens of a text that fit into the context, besides the special ids."""
    room = model.context - sum(map(len, special_ids_around(model, tokenizer)))
    if room < 1:
        raise ConfigError(
            f"model.context={model.context} has no room for text besides special tokens; "
            "set a larger model.context"
        )
    return room


def placeholder_id(tokenizer: Tokenizer) -> int:
    """The id for a text without tokens, such as an invisible character: EOS, or else <unk>.

    BERT's vocabulary has no EOS.
    """
    eos, unk = tokenizer.special_id("eos"), tokenizer.special_id("unk")
    return tokenizer.eos_id if unk is None or eos is not None else unk


def _tagged_token(task: TextTask) -> str:
    return task.token if isinstance(task, Tag) else "last"


def special_ids(data: LabelledText, model: ModelConfig, tokenizer: Tokenizer) -> set[int]:
    """The special ids before, between and after the texts."""
    if data.is_paired:
        template = pair_template(model, tokenizer)
        return {*template.before, *template.between, *template.after}
    before, after = special_ids_around(model, tokenizer)
    return {*before, *after}


class EncodedText(NamedTuple):
    """A text as a model reads it."""

    ids: NDArray[np.int64]
    classes: NDArray[np.int64]
    truncated: bool  # to the context of the model
    word_bytes: NDArray[np.uint8] | None = None  # of the word of each token, if a model reads them
    second_start: int = 0  # of two texts, the position at which the second begins


def encode(
    data: LabelledText, tokenizer: Tokenizer, model: ModelConfig, token: str = "last"
) -> Iterator[EncodedText]:
    """The ids of each text and its classes, or its number.

    A labelled text has one class. In a tagged text the first or the last `token` of a word has the
    class of the word, and the other tokens have -1.
    """
    if data.is_paired:
        yield from _encode_pairs(data, tokenizer, model)
        return
    before, after = special_ids_around(model, tokenizer)
    max_tokens = room_for_text(model, tokenizer)
    words = [
        f" {part}" if index else part for parts, _ in data.rows for index, part in enumerate(parts)
    ]
    encoded = iter(tokenizer.encode_batch(words))
    reads_characters = getattr(model, "char_dim", 0)
    no_bytes = [utf8_bytes("")]
    for parts, classes in data.rows:
        ids: list[int] = []
        targets: list[int] = []
        token_bytes: list[list[int]] = []  # the bytes of the word of each token
        for part, label in zip(parts, classes, strict=True):
            word_ids = next(encoded) or [placeholder_id(tokenizer)]
            ids += word_ids
            token_bytes += [utf8_bytes(part)] * len(word_ids) if reads_characters else []
            ignored = [IGNORE_INDEX] * (len(word_ids) - 1)
            targets += [label, *ignored] if token == "first" else [*ignored, label]
        text_ids = np.array([*before, *ids[:max_tokens], *after])
        if data.kind != "tags":
            yield EncodedText(text_ids, np.array(classes), len(ids) > max_tokens)
            continue
        tags = np.array(
            [*[IGNORE_INDEX] * len(before), *targets[:max_tokens], *[IGNORE_INDEX] * len(after)]
        )
        word_bytes = None
        if reads_characters:
            rows = [
                *no_bytes * len(before),
                *token_bytes[:max_tokens],
                *no_bytes * len(after),
            ]
            word_bytes = np.array(rows, dtype=np.uint8)
        yield EncodedText(text_ids, tags, len(ids) > max_tokens, word_bytes)


def _encode_pairs(
    data: LabelledText, tokenizer: Tokenizer, model: ModelConfig
) -> Iterator[EncodedText]:
    """Both texts of each row; the longer one is truncated first."""
    template = pair_template(model, tokenizer)
    max_tokens = model.context - template.special_token_count
    if max_tokens < 2:
        raise ConfigError(
            f"model.context={model.context} has no room for two texts besides special tokens; "
            "set a larger model.context"
        )
    sides = [tokenizer.encode_batch([parts[side] for parts, _ in data.rows]) for side in (0, 1)]
    for a, b, (_, classes) in zip(*sides, data.rows, strict=True):
        a, b = a or [placeholder_id(tokenizer)], b or [placeholder_id(tokenizer)]
        a_length = min(len(a), max(max_tokens - len(b), (max_tokens + 1) // 2))
        ids, start = template.join(a[:a_length], b[: max_tokens - a_length])
        yield EncodedText(ids, np.array(classes), len(a) + len(b) > max_tokens, second_start=start)


@dataclass(frozen=True, slots=True)
class EncodedTexts:
    """Encoded texts and their classes, stored as the sources and targets of pairs."""

    store: PairStore
    word_bytes: list[NDArray[np.uint8]] | None  # of the words of each text
    truncated: int  # number of texts
    second_starts: list[int] | None  # of pairs, where the second begins, if the model has segments

    @classmethod
    def encode(
        cls, task: TextTask, data: LabelledText, tokenizer: Tokenizer, model: ModelConfig
    ) -> "EncodedTexts":
        """The texts of a dataset, for a model."""
        rows = list(encode(data, tokenizer, model, _tagged_token(task)))
        sides = [[row.ids for row in rows], [row.classes for row in rows]]
        store = PairStore(*concatenate(sides[0]), *concatenate(sides[1]), data.fingerprint())
        word_bytes = [row.word_bytes for row in rows if row.word_bytes is not None]
        truncated = sum(row.truncated for row in rows)
        segmented = data.is_paired and pair_template(model, tokenizer).segmented
        second_starts = [row.second_start for row in rows] if segmented else None
        return cls(store, word_bytes or None, truncated, second_starts)

    def batch(
        self, task: TextTask, rows: Sequence[int], width: int, generator: torch.Generator
    ) -> Batch:
        """A batch of some of the texts."""
        texts = [self.store.source(row) for row in rows]
        classes = [self.store.target(row) for row in rows]
        batch = task.collate((texts, classes, width), generator)
        if self.second_starts is not None:
            starts = torch.tensor([self.second_starts[row] for row in rows]).unsqueeze(1)
            lengths = cast(LabelBatch, batch).lengths.unsqueeze(1)
            positions = torch.arange(width)
            segments = ((positions >= starts) & (positions < lengths)).long()
            return replace(cast(LabelBatch, batch), segments=segments)
        if self.word_bytes is None:
            return batch
        word_bytes = torch.zeros(len(rows), width, MAX_WORD_BYTES, dtype=torch.uint8)
        for row, index in zip(word_bytes, rows, strict=True):
            row[: len(self.word_bytes[index])] = torch.from_numpy(self.word_bytes[index])
        return replace(cast(TagBatch, batch), word_bytes=word_bytes)

    def collate(self, task: TextTask, rows: PairIndices, generator: torch.Generator) -> Batch:
        """A batch of the texts with the indices of a loader."""
        return self.batch(task, rows.indices.tolist(), rows.length - 1, generator)

    def batches_by_length(
        self, task: TextTask, device: torch.device
    ) -> Iterator[tuple[list[int], Any]]:
        """All texts in batches of similar length: their rows, and the batch."""
        for rows, width in batches_of_similar_length(self.store, EVALUATION_ROWS):
            yield rows, self.batch(task, rows, width, torch.Generator()).to(device)
