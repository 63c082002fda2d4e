"""Masked language modelling: predict hidden tokens from what stands on both sides."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn

from regard.data.batch import MaskedBatch
from regard.errors import ConfigError, DataError
from regard.nn.head import IGNORED
from regard.nn.loss import CHUNK_ELEMENTS, cross_entropy
from regard.nn.mask import Mask
from regard.tasks.base import Learns, check_label_smoothing
from regard.tasks.metrics import perplexity
from regard.tasks.vocab_info import VocabInfo
from regard.text import Tokenizer

HIDDEN, REPLACED = 0.8, 0.1  # of the chosen tokens; the rest stays as it is
SHOWN = 48  # tokens of a sample


@dataclass(frozen=True, kw_only=True)
class Masked:
    r"""Hide a few tokens and predict them from all the others (Devlin et al. 2018).

        of n tokens of a row, round(share n) are chosen at random; of these
        80 % become <mask>, 10 % any token, 10 % stay;
        loss = - sum over the chosen t of log P(x_t | the row as it is now)

    Special tokens are never chosen. With `whole_words` all pieces of a word are chosen together,
    in random order as long as they fit into round(share n); where none does, a part of one is.

    A row is a stretch of the text, <cls> … <sep>. Where a document ends in it, the next one
    follows: <cls> … <sep> <cls> … <sep>; none sees another, and each counts its positions from
    0. Each file of a folder is a document; a file alone is one.

    With `next_sentence` a row is <cls> A <sep> B <sep>. In one half of them B follows A, in the
    other it is from another row, and this is predicted too; its loss counts about as much as
    that of the tokens in training, and is left out of the held-out loss. Unlike the paper's, a
    row may run on from one document into the next.
    """

    learns: ClassVar[Learns] = "text"
    verb: ClassVar[str] = "predict"
    measures: ClassVar[tuple[str, ...]] = ("loss", "perplexity", "accuracy")
    mask_fraction: float = 0.15
    whole_words: bool = False
    next_sentence: bool = False
    label_smoothing: float = 0.0
    tokenizer: Tokenizer | None = None

    def __post_init__(self) -> None:
        check_label_smoothing(self.label_smoothing)
        if not 0 < self.mask_fraction < 1:
            raise ConfigError(
                f"task.mask_fraction={self.mask_fraction} must lie between 0 and 1, as 0.15 does"
            )

    @cached_property
    def words(self) -> VocabInfo:
        """What the vocabulary says of its ids."""
        assert self.tokenizer is not None
        return VocabInfo.of(self.tokenizer)

    @property
    def frame(self) -> int:
        """How many places of a row are not for text."""
        return 3 if self.next_sentence else 2

    @property
    def between(self) -> list[int]:
        """What stands between two documents of a text."""
        words = self.words
        return [words.sep_id] if self.next_sentence else [words.sep_id, words.cls_id]

    def collate(
        self, examples: tuple[np.ndarray, np.ndarray], generator: torch.Generator
    ) -> MaskedBatch:
        """Blocks of a text, framed, with some tokens hidden; their targets tell what is padding."""
        text, following = examples
        lengths = (following != IGNORED).sum(1)
        rows, time = len(text), text.shape[1] + self.frame
        # One draw for all, row after row: how rows are put into batches changes nothing.
        chance = torch.rand(rows, time, 3, generator=generator, dtype=torch.float64).numpy()
        parts = [[row[:length]] for row, length in zip(text, lengths, strict=True)]
        follows = None
        if self.next_sentence:
            parts, follows = self._pairs(text, lengths, generator)
        ids, segments = self._framed(parts, time)
        documents, positions = self._documents(ids, lengths + self.frame)
        places = self._chosen(ids, documents > 0, chance[..., 0])
        targets = self._hide(ids, places, chance[..., 1:])
        return MaskedBatch(
            ids=torch.from_numpy(ids),
            documents=torch.from_numpy(documents),
            positions=torch.from_numpy(positions),
            masked_positions=torch.from_numpy(places.clip(0)),
            targets=torch.from_numpy(targets),
            segments=None if follows is None else torch.from_numpy(segments),
            next_sentence_targets=None if follows is None else torch.from_numpy(follows),
        )

    def loss(self, model: nn.Module, batch: MaskedBatch) -> Float[Tensor, ""]:
        """Summed cross-entropy; only the chosen positions reach the vocabulary."""
        head: Any = model.head
        x = _read(model, batch)
        smoothing = self.label_smoothing if model.training else 0.0
        loss: Tensor = head.loss(_chosen_of(x, batch), batch.targets, smoothing=smoothing)
        if batch.next_sentence_targets is not None:
            # One per row: weight it like all the targets of the row.
            pairs = cross_entropy(head.next_sentence(x), batch.next_sentence_targets)
            loss = loss + batch.targets.shape[1] * pairs
        return loss

    def count(self, batch: MaskedBatch) -> Int[Tensor, ""]:
        """How many tokens are predicted."""
        return (batch.targets != IGNORED).sum()

    def metrics(self, model: nn.Module, batches: Iterable[MaskedBatch]) -> dict[str, float]:
        """Nats per hidden token and the share guessed right, and the same without looking.

        The unigram figures are the best that any fixed distribution could do on these very
        tokens: their entropy, and the share of the most frequent one.
        """
        pairs = []

        def read() -> Iterator[tuple[Tensor, Tensor]]:
            for batch in batches:
                x = _read(model, batch)
                scored = batch.targets != IGNORED
                if batch.next_sentence_targets is not None:
                    head: Any = model.head
                    pairs.append(head.next_sentence(x).argmax(-1) == batch.next_sentence_targets)
                yield _chosen_of(x, batch)[scored], batch.targets[scored]

        result = guessed(model, read())
        if pairs:
            result["next_sentence_accuracy"] = float(torch.cat(pairs).float().mean())
        return result

    def sample(self, model: nn.Module, batches: Iterable[Any]) -> str:
        """The beginning of a text: as the model sees it, as it fills it in, and as it was."""
        assert self.tokenizer is not None
        head: Any = model.head
        batch: MaskedBatch = next(iter(batches)).to(next(model.parameters()).device)
        with torch.no_grad():
            guesses = head(_chosen_of(_read(model, batch), batch)[0]).argmax(-1)
        seen = batch.ids[0].tolist()
        filled, before = list(seen), list(seen)
        for place, guess, target in zip(
            batch.masked_positions[0], guesses, batch.targets[0], strict=True
        ):
            if target != IGNORED:
                filled[place], before[place] = int(guess), int(target)
        return "\n".join(
            mark + " ".join(self.words.text(self.tokenizer, ids[:SHOWN]).split())
            for mark, ids in (("", seen), ("→ ", filled), ("= ", before))
        )

    def _framed(
        self, parts: list[list[NDArray[Any]]], time: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows <cls> A <sep> or <cls> A <sep> B <sep>, and the segment of every token."""
        ids, segments = (np.zeros((len(parts), time), np.int64) for _ in range(2))
        for row, segment, texts in zip(ids, segments, parts, strict=True):
            row[0], end = self.words.cls_id, 1
            for number, text in enumerate(texts):
                begin, end = end, end + len(text) + 1
                row[begin:end] = [*text, self.words.sep_id]
                segment[begin:end] = number
        return ids, segments

    def _documents(
        self, ids: Int[np.ndarray, "batch time"], lengths: Int[np.ndarray, " batch"]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Which document each token is of, from 1, with 0 for padding, and its place in that."""
        index = np.arange(ids.shape[1])
        real = index < lengths[:, None]
        begins = (ids == self.words.cls_id) & real
        start = np.maximum.accumulate(np.where(begins, index, 0), axis=1)
        return np.where(real, begins.cumsum(1), 0), index - start

    def _pairs(
        self,
        text: Int[np.ndarray, "batch time"],
        lengths: Int[np.ndarray, " batch"],
        generator: torch.Generator,
    ) -> tuple[list[list[NDArray[Any]]], NDArray[np.int64]]:
        """A and B of every row, cut where a sentence ends, and 1 where B does not follow A.

        A B from elsewhere begins behind a sentence, too, and is as long as the one it replaces.
        """
        rows, width = text.shape
        draws = torch.rand(rows, 3, generator=generator, dtype=torch.float64).tolist()
        parts, follows = [], np.zeros(rows, np.int64)
        for row, (where, which, whether) in enumerate(draws):
            length = int(lengths[row])
            most = int(length * (0.5 + 0.25 * where))
            cut = self.words.sentence_end(text[row], length // 4, most)
            other, begin = row, cut
            if rows > 1 and whether < 0.5:
                other = (row + 1 + int(which * (rows - 1))) % rows
                if min(length, int(lengths[other])) < width:  # the end of the text has padding
                    other = row
            if other != row:
                follows[row], begin = 1, self.words.sentence_end(text[other], 0, cut)
            parts.append([text[row, :cut], text[other, begin : begin + length - cut]])
        return parts, follows

    def _chosen(
        self,
        ids: Int[np.ndarray, "batch time"],
        real: Bool[np.ndarray, "batch time"],
        chance: Float[np.ndarray, "batch time"],
    ) -> NDArray[np.int64]:
        """The places to predict, as many columns for every batch of this shape; -1 is none."""
        ordinary = self.words.ordinary[ids] & real
        begins = self.words.begins(ids) if self.whole_words else np.ones_like(ordinary)
        room = max(1, round(self.mask_fraction * ids.shape[1]))
        places = np.full((len(ids), room), -1)
        for row in range(len(ids)):
            starts = np.flatnonzero(begins[row])
            ends = np.append(starts[1:], ids.shape[1])
            left = max(1, round(self.mask_fraction * int(ordinary[row].sum())))
            chosen: list[int] = []
            for word in np.argsort(chance[row, starts], kind="stable"):
                start, end = int(starts[word]), int(ends[word])
                if ordinary[row, start] and end - start <= left:
                    chosen += range(start, end)
                    left -= end - start
                if not left:
                    break
            if not chosen:  # no word is short enough: a part of one is better than nothing
                chosen = np.flatnonzero(ordinary[row])[:left].tolist()
            places[row, : len(chosen)] = sorted(chosen)
        return places

    def _hide(
        self,
        ids: Int[np.ndarray, "batch time"],
        places: Int[np.ndarray, "batch masked"],
        chance: Float[np.ndarray, "batch time 2"],
    ) -> NDArray[np.int64]:
        """Put something else in the chosen places of `ids`, and give what stood there."""
        row, column = np.nonzero(places >= 0)
        at = places[row, column]
        before = ids[row, at]
        fate, which = chance[row, at].T
        any_id = self.words.ids[(which * len(self.words.ids)).astype(np.int64)]
        after = np.where(fate < HIDDEN + REPLACED, any_id, before)
        ids[row, at] = np.where(fate < HIDDEN, self.words.mask_id, after)
        targets = np.full_like(places, IGNORED)
        targets[row, column] = before
        return targets


def guessed(
    model: nn.Module,
    hidden: Iterable[tuple[Float[Tensor, "chosen dim"], Int[Tensor, " chosen"]]],
) -> dict[str, float]:
    """How well a model guesses the tokens that its hidden states are of, beside a blind guess."""
    training = model.training
    model.eval()
    losses, goals, right = [], [], []
    with torch.no_grad():
        for x, targets in hidden:
            for loss, goal, hit in _judged(model, x, targets):
                losses.append(loss)
                goals.append(goal)
                right.append(hit)
    model.train(training)
    if not goals or not len(wanted := torch.cat(goals).cpu()):
        raise DataError("nothing to evaluate: no token of the held-out text is hidden")
    mean = float(torch.stack(losses).cpu().double().sum() / len(wanted))
    return {
        "loss": mean,
        "perplexity": perplexity(mean),
        "accuracy": float(torch.cat(right).float().mean()),
        **unigram(wanted),
    }


def unigram(targets: Int[Tensor, " chosen"]) -> dict[str, float]:
    """What can be had without looking: H = - sum_v p(v) log p(v) nats, and max_v p(v)."""
    p = torch.bincount(targets).double() / len(targets)
    entropy = -(p * p.clamp_min(1e-300).log()).sum()
    return {"unigram_loss": float(entropy), "unigram_accuracy": float(p.max())}


def _read(model: nn.Module, batch: MaskedBatch) -> Float[Tensor, "batch time dim"]:
    segments = {} if batch.segments is None else {"segments": batch.segments}
    x: Tensor = model(
        batch.ids, mask=Mask.documents(batch.documents), positions=batch.positions, **segments
    )
    return x


def _chosen_of(
    x: Float[Tensor, "batch time dim"], batch: MaskedBatch
) -> Float[Tensor, "batch masked dim"]:
    return x.take_along_dim(batch.masked_positions.unsqueeze(-1), 1)


def _judged(
    model: nn.Module, x: Float[Tensor, "chosen dim"], targets: Int[Tensor, " chosen"]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Summed loss, targets and hits, for a few positions at a time: logits are large."""
    head: Any = model.head
    size = max(1, CHUNK_ELEMENTS // len(head.matrix))
    for part, goal in zip(x.split(size), targets.split(size), strict=True):
        logits = head(part)
        yield cross_entropy(logits, goal), goal, logits.argmax(-1) == goal
