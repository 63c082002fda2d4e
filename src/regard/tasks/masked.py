"""Masked language modelling: predict masked tokens from the context on both sides."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, cast

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn

from regard.config import Choice, kind_of
from regard.data.batch import MaskedBatch
from regard.errors import ConfigError, DataError
from regard.models.presets import ModelConfig
from regard.nn.attention import Mask
from regard.nn.loss import CHUNK_ELEMENTS, IGNORE_INDEX, cross_entropy
from regard.tasks.base import Task, check_label_smoothing
from regard.tasks.metrics import evaluation_mode, perplexity
from regard.tasks.vocab_info import MASK, VocabInfo, encode_with_masks
from regard.text import Tokenizer

MASK_PROBABILITY, RANDOM_PROBABILITY = 0.8, 0.1  # that a chosen token becomes <mask>, or random
SAMPLE_TOKENS = 48  # tokens of a text that `sample` shows


@dataclass(frozen=True, kw_only=True)
class Masked(Task):
    r"""Mask some tokens and predict them from all the others (Devlin et al. 2018).

        of n tokens of a row, round(mask_fraction n) are chosen at random; of these
        80 % become <mask>, 10 % a random token, 10 % stay unchanged;
        loss = - sum over the chosen t of log P(x_t | the row after masking)

    Special tokens are never chosen. With `whole_words` (whole-word masking) all pieces of a word
    are chosen together: words in random order, as long as they fit into round(mask_fraction n). If
    no word fits, the first pieces of the row are chosen.

    A row is a block of the text, <cls> … <sep>. Where a document ends inside it, the next one
    follows: <cls> … <sep> <cls> … <sep>. Documents do not attend to each other, and each counts
    its positions from 0. Each file of a folder is a document; a single file is one document.

    With `next_sentence` a row is <cls> A <sep> B <sep>. In half of the rows B follows A, in the
    others B is from another row, and the model predicts which. In training this loss weighs
    about as much as that of the tokens; it is not part of the validation loss. Unlike in the
    paper, a row may cross the boundary between two documents.
    """

    data_kind: ClassVar[str] = "text"
    evaluates_beginning: ClassVar[bool] = True
    target_name: ClassVar[str] = "tokens"
    architectures: ClassVar[tuple[str, ...]] = ("encoder",)
    methods: ClassVar[tuple[str, ...]] = ("predict", "fill")
    supports_top: ClassVar[bool] = True
    metric_names: ClassVar[tuple[str, ...]] = ("loss", "perplexity", "accuracy")
    mask_fraction: float = 0.15  # fraction of the tokens to predict
    whole_words: bool = False  # whole-word masking: mask all pieces of a word together
    next_sentence: bool = False  # also predict whether a sentence follows another
    label_smoothing: float = 0.0  # probability that is spread over all tokens
    tokenizer: Tokenizer | None = None
    packs_documents: bool = True  # whether rows may have several documents

    def __post_init__(self) -> None:
        check_label_smoothing(self.label_smoothing)
        if not 0 < self.mask_fraction < 1:
            raise ConfigError(
                f"task.mask_fraction={self.mask_fraction} must lie between 0 and 1, such as 0.15"
            )

    def check_model(self, model: ModelConfig) -> None:
        """Also raise `ConfigError` for another head, too few segments or too short a context."""
        super().check_model(model)
        head = cast(Any, model).head
        kind, options = kind_of(head)
        required: Choice = "masked"
        if self.next_sentence:
            required = {"kind": "masked", "next_sentence": True}
        if kind != "masked" or (self.next_sentence and not options.get("next_sentence")):
            raise ConfigError(f"needs model.head={required!r}, not {head!r}; set it")
        if self.next_sentence and (segments := cast(Any, model).segments) < 2:
            raise ConfigError(
                f"task.next_sentence needs model.segments=2, not {segments}: "
                "the two sentences are two segments"
            )
        if model.context <= self.special_token_count:
            raise ConfigError(
                f"model.context={model.context} has no position for text between special tokens; "
                f"set {self.special_token_count + 1} or more"
            )

    @cached_property
    def vocab(self) -> VocabInfo:
        """The vocabulary as arrays over its ids."""
        assert self.tokenizer is not None
        return VocabInfo.from_tokenizer(self.tokenizer)

    @property
    def special_token_count(self) -> int:
        """How many positions of a row special tokens take."""
        return 3 if self.next_sentence else 2

    @property
    def separator(self) -> list[int]:
        """The ids between two documents of a text."""
        vocab = self.vocab
        return [vocab.sep_id] if self.next_sentence else [vocab.sep_id, vocab.cls_id]

    def collate(
        self, examples: tuple[np.ndarray, np.ndarray], generator: torch.Generator
    ) -> MaskedBatch:
        """Blocks of text between special tokens, some tokens masked.

        `examples` are ids and, for each, the next id, which is -1 at padding.
        """
        text, next_ids = examples
        lengths = (next_ids != IGNORE_INDEX).sum(1)
        rows, time = len(text), text.shape[1] + self.special_token_count
        # Row by row, so that the random numbers of a row do not depend on the batch size.
        random = torch.rand(rows, time, 3, generator=generator, dtype=torch.float64).numpy()
        parts = [[row[:length]] for row, length in zip(text, lengths, strict=True)]
        next_sentence_targets = None
        if self.next_sentence:
            parts, next_sentence_targets = self._sentence_pairs(text, lengths, generator)
        ids, segments = self._add_special_tokens(parts, time)
        documents, positions = self._documents(ids, lengths + self.special_token_count)
        positions_to_mask = self._choose_positions(ids, documents > 0, random[..., 0])
        targets = self._mask(ids, positions_to_mask, random[..., 1:])
        needs_mask = self.packs_documents or (documents == 0).any()
        return MaskedBatch(
            ids=torch.from_numpy(ids),
            documents=torch.from_numpy(documents) if needs_mask else None,
            positions=torch.from_numpy(positions),
            masked_positions=torch.from_numpy(positions_to_mask.clip(0)),
            targets=torch.from_numpy(targets),
            segments=None if next_sentence_targets is None else torch.from_numpy(segments),
            next_sentence_targets=(
                None if next_sentence_targets is None else torch.from_numpy(next_sentence_targets)
            ),
        )

    def loss(self, model: nn.Module, batch: MaskedBatch) -> Float[Tensor, ""]:
        """Summed cross-entropy; logits are computed at the masked positions only."""
        head: Any = model.head
        x = _hidden(model, batch)
        label_smoothing = self.label_smoothing if model.training else 0.0
        loss: Tensor = head.loss(
            _select_masked(x, batch), batch.targets, label_smoothing=label_smoothing
        )
        if batch.next_sentence_targets is not None:
            # One prediction per row, weighted as much as all masked tokens of the row.
            next_sentence_loss = cross_entropy(head.next_sentence(x), batch.next_sentence_targets)
            loss = loss + batch.targets.shape[1] * next_sentence_loss
        return loss

    def count(self, batch: MaskedBatch) -> Int[Tensor, ""]:
        """How many tokens are predicted."""
        return (batch.targets != IGNORE_INDEX).sum()

    def evaluation_count(self, batch: MaskedBatch) -> int:
        """All tokens of the text, masked or not."""
        return batch.valid_count() - len(batch.ids) * self.special_token_count

    def metrics(self, model: nn.Module, batches: Iterable[MaskedBatch]) -> dict[str, float]:
        """Nats per masked token, perplexity and accuracy, and `unigram_metrics`.

        The unigram metrics are the best that a fixed distribution could reach on these tokens:
        their entropy, and the frequency of the most frequent one.
        """
        next_sentence_correct = []

        def hidden_and_targets() -> Iterator[tuple[Tensor, Tensor]]:
            for batch in batches:
                x = _hidden(model, batch)
                scored = batch.targets != IGNORE_INDEX
                if batch.next_sentence_targets is not None:
                    head: Any = model.head
                    correct = head.next_sentence(x).argmax(-1) == batch.next_sentence_targets
                    next_sentence_correct.append(correct)
                yield _select_masked(x, batch)[scored], batch.targets[scored]

        result = prediction_metrics(model, hidden_and_targets())
        if next_sentence_correct:
            correct = torch.cat(next_sentence_correct)
            result["next_sentence_accuracy"] = float(correct.float().mean())
        return result

    def sample(self, model: nn.Module, batches: Iterable[Any]) -> str:
        """The beginning of a text: masked, as the model fills it in, and the original."""
        assert self.tokenizer is not None
        head: Any = model.head
        batch: MaskedBatch = next(iter(batches)).to(next(model.parameters()).device)
        with torch.no_grad():
            predictions = head(_select_masked(_hidden(model, batch), batch)[0]).argmax(-1)
        masked = batch.ids[0].tolist()
        filled, original = list(masked), list(masked)
        for position, prediction, target in zip(
            batch.masked_positions[0], predictions, batch.targets[0], strict=True
        ):
            if target != IGNORE_INDEX:
                filled[position], original[position] = int(prediction), int(target)
        return "\n".join(
            prefix + " ".join(self.vocab.text(self.tokenizer, ids[:SAMPLE_TOKENS]).split())
            for prefix, ids in (("", masked), ("→ ", filled), ("= ", original))
        )

    def predict(self, model: nn.Module, text: str, *, top: int) -> list[list[tuple[str, float]]]:
        """The most probable tokens for each <mask> of a text, with probabilities, best first."""
        tokenizer = self.tokenizer
        assert tokenizer is not None
        ids, positions = encode_with_masks(tokenizer, text)
        if not positions:
            raise ConfigError(
                f"the text has no {MASK} to fill in; write {MASK} where a word is missing"
            )
        device = next(model.parameters()).device
        with torch.no_grad():
            x = model(torch.tensor([ids], device=device))[0, positions]
            probabilities = cast(Any, model.head)(x).float().softmax(-1)
        best = probabilities.topk(min(top, tokenizer.vocab_size))
        return [
            [(tokenizer.piece(id), p) for id, p in zip(row, values, strict=True)]
            for row, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]

    def tokens_read(self, batch: MaskedBatch, context: int) -> int:
        """All tokens, masked or not; padding is not counted."""
        return batch.valid_count()

    def _add_special_tokens(
        self, parts: list[list[NDArray[Any]]], time: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows <cls> A <sep> or <cls> A <sep> B <sep>, and the segment of every token."""
        ids, segments = (np.zeros((len(parts), time), np.int64) for _ in range(2))
        for row, segment, texts in zip(ids, segments, parts, strict=True):
            row[0], end = self.vocab.cls_id, 1
            for index, text in enumerate(texts):
                begin, end = end, end + len(text) + 1
                row[begin:end] = [*text, self.vocab.sep_id]
                segment[begin:end] = index
        return ids, segments

    def _documents(
        self, ids: Int[np.ndarray, "batch time"], lengths: Int[np.ndarray, " batch"]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The index of each token's document, from 1 (0: padding), and its position in it."""
        index = np.arange(ids.shape[1])
        valid = index < lengths[:, None]
        is_start = (ids == self.vocab.cls_id) & valid
        start = np.maximum.accumulate(np.where(is_start, index, 0), axis=1)
        return np.where(valid, is_start.cumsum(1), 0), index - start

    def _sentence_pairs(
        self,
        text: Int[np.ndarray, "batch time"],
        lengths: Int[np.ndarray, " batch"],
        generator: torch.Generator,
    ) -> tuple[list[list[NDArray[Any]]], NDArray[np.int64]]:
        """A and B of every row, and 1 where B does not follow A.

        A row is split after the last end of a sentence near its middle, or near its middle if there
        is none. A part B from another row likewise begins after the end of a sentence if there is
        one, and has the length of the B that it replaces.
        """
        rows, width = text.shape
        random = torch.rand(rows, 3, generator=generator, dtype=torch.float64).tolist()
        parts, targets = [], np.zeros(rows, np.int64)
        for row, (cut_draw, row_draw, swap_draw) in enumerate(random):  # uniform in [0, 1)
            length = int(lengths[row])
            max_cut = int(length * (0.5 + 0.25 * cut_draw))
            cut = self.vocab.sentence_end(text[row], length // 4, max_cut)
            other, begin = row, cut
            if rows > 1 and swap_draw < 0.5:
                other = (row + 1 + int(row_draw * (rows - 1))) % rows
                if min(length, int(lengths[other])) < width:  # the end of the text has padding
                    other = row
            if other != row:
                targets[row], begin = 1, self.vocab.sentence_end(text[other], 0, cut)
            parts.append([text[row, :cut], text[other, begin : begin + length - cut]])
        return parts, targets

    def _choose_positions(
        self,
        ids: Int[np.ndarray, "batch time"],
        valid: Bool[np.ndarray, "batch time"],
        random: Float[np.ndarray, "batch time"],
    ) -> NDArray[np.int64]:
        """The positions to predict, padded with -1 to a shape that does not depend on the text."""
        ordinary = self.vocab.ordinary[ids] & valid
        begins = self.vocab.begins_word(ids) if self.whole_words else np.ones_like(ordinary)
        max_masked = max(1, round(self.mask_fraction * ids.shape[1]))
        positions = np.full((len(ids), max_masked), -1)
        for row in range(len(ids)):
            starts = np.flatnonzero(begins[row])
            ends = np.append(starts[1:], ids.shape[1])
            budget = max(1, round(self.mask_fraction * int(ordinary[row].sum())))
            chosen: list[int] = []
            for word in np.argsort(random[row, starts], kind="stable"):
                start, end = int(starts[word]), int(ends[word])
                if ordinary[row, start] and end - start <= budget:
                    chosen += range(start, end)
                    budget -= end - start
                if not budget:
                    break
            if not chosen:  # no word is short enough: choose pieces of words
                chosen = np.flatnonzero(ordinary[row])[:budget].tolist()
            positions[row, : len(chosen)] = sorted(chosen)
        return positions

    def _mask(
        self,
        ids: Int[np.ndarray, "batch time"],
        positions: Int[np.ndarray, "batch masked"],
        random: Float[np.ndarray, "batch time 2"],
    ) -> NDArray[np.int64]:
        """Mask the chosen positions of `ids` in place, and return the original ids as targets."""
        row, column = np.nonzero(positions >= 0)
        chosen = positions[row, column]
        original = ids[row, chosen]
        action_draw, id_draw = random[row, chosen].T
        ordinary_ids = self.vocab.ordinary_ids
        random_id = ordinary_ids[(id_draw * len(ordinary_ids)).astype(np.int64)]
        replaced = np.where(
            action_draw < MASK_PROBABILITY + RANDOM_PROBABILITY, random_id, original
        )
        ids[row, chosen] = np.where(action_draw < MASK_PROBABILITY, self.vocab.mask_id, replaced)
        targets = np.full_like(positions, IGNORE_INDEX)
        targets[row, column] = original
        return targets


def prediction_metrics(
    model: nn.Module,
    hidden: Iterable[tuple[Float[Tensor, "scored dim"], Int[Tensor, " scored"]]],
) -> dict[str, float]:
    """Loss, perplexity and accuracy of predictions from hidden states, and `unigram_metrics`."""
    losses, chunks, correct = [], [], []
    with evaluation_mode(model):
        for x, targets in hidden:
            for loss, chunk, is_correct in _score_in_chunks(model, x, targets):
                losses.append(loss)
                chunks.append(chunk)
                correct.append(is_correct)
    if not chunks or not len(all_targets := torch.cat(chunks).cpu()):
        raise DataError("nothing to evaluate: the validation text has no token to predict")
    mean = float(torch.stack(losses).cpu().double().sum() / len(all_targets))
    return {
        "loss": mean,
        "perplexity": perplexity(mean),
        "accuracy": float(torch.cat(correct).float().mean()),
        **unigram_metrics(all_targets),
    }


def unigram_metrics(targets: Int[Tensor, " scored"]) -> dict[str, float]:
    """The best unigram model: entropy H = - sum_v p(v) log p(v) in nats, and max_v p(v)."""
    p = torch.bincount(targets).double() / len(targets)
    entropy = -(p * p.clamp_min(1e-300).log()).sum()
    return {"unigram_loss": float(entropy), "unigram_accuracy": float(p.max())}


def _hidden(model: nn.Module, batch: MaskedBatch) -> Float[Tensor, "batch time dim"]:
    segments = {} if batch.segments is None else {"segments": batch.segments}
    mask = Mask.none() if batch.documents is None else Mask.documents(batch.documents)
    x: Tensor = model(batch.ids, mask=mask, positions=batch.positions, **segments)
    return x


def _select_masked(
    x: Float[Tensor, "batch time dim"], batch: MaskedBatch
) -> Float[Tensor, "batch masked dim"]:
    return x.take_along_dim(batch.masked_positions.unsqueeze(-1), 1)


def _score_in_chunks(
    model: nn.Module, x: Float[Tensor, "scored dim"], targets: Int[Tensor, " scored"]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Summed loss, targets and correct predictions, by chunks of positions to save memory."""
    head: Any = model.head
    size = max(1, CHUNK_ELEMENTS // len(head.matrix))
    for part, chunk in zip(x.split(size), targets.split(size), strict=True):
        logits = head(part)
        yield cross_entropy(logits, chunk), chunk, logits.argmax(-1) == chunk
