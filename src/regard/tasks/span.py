"""Extractive question answering: the span of a text that answers a question."""

import re
import string
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn

from regard.data.batch import SpanBatch
from regard.data.spans import Question
from regard.errors import ConfigError, DataError
from regard.nn.head import SpanHead
from regard.tasks.base import Task
from regard.tasks.metrics import evaluation_mode
from regard.tasks.text_classification import Ids, pad

_ARTICLES = re.compile(r"\b(a|an|the)\b")
NO_ANSWER = ""  # the prediction for a question without an answer, as SQuAD 2.0 writes it


@dataclass(frozen=True, slots=True)
class WindowOffsets:
    """Character offsets of the tokens of each window: a question and a part of its context."""

    questions: Sequence[Question]
    question_index: NDArray[np.int64]  # of each window
    context_start: NDArray[np.int64]  # position of the first token of the context in each window
    # (tokens, 2) for each window: start and end of each context token in characters
    offsets: Sequence[NDArray[np.int64]]

    def text(self, window: int, first: int, last: int) -> str:
        """The text from one position of a window to another, both included."""
        begin, offsets = int(self.context_start[window]), self.offsets[window]
        context = self.questions[self.question_index[window]].context
        return context[offsets[first - begin, 0] : offsets[last - begin, 1]].strip()


@dataclass(frozen=True, slots=True)
class _Spans:
    """The best spans of each window of a batch."""

    scores: Float[Tensor, "batch candidates"]
    first: Int[Tensor, "batch candidates"]
    last: Int[Tensor, "batch candidates"]
    logsumexp: Float[Tensor, " batch"]  # over the scores of all spans
    null: Float[Tensor, " batch"]  # the score of "no answer"


@dataclass(frozen=True, kw_only=True)
class Span(Task):
    r"""Extractive question answering: the start and end of the answer in the context.

        P(start, end | question, context) = softmax_i(s_i) softmax_j(e_j)      (Devlin et al. 2018)

    s_i and e_i are the two logits of token i. A context that is too long is read in overlapping
    windows; where a window does not hold the answer, start and end are at <cls>. The predicted
    answer is the span of the context with the largest s_i + e_j of all windows, where
    i <= j < i + `max_answer_length`; its probability is exp(s_i + e_j) divided by the sum over all
    spans.
    """

    data_kind: ClassVar[str] = "spans"
    target_name: ClassVar[str] = "windows"
    best_metric: ClassVar[str] = "f1"
    architectures: ClassVar[tuple[str, ...]] = ("encoder",)
    methods: ClassVar[tuple[str, ...]] = ("predict",)
    supports_top: ClassVar[bool] = True
    metric_names: ClassVar[tuple[str, ...]] = ("loss", "f1", "exact_match")
    heads: ClassVar[tuple[str, ...]] = ("span",)  # kinds of `model.head`
    # stride of the windows of a long context, in tokens; None: half of the tokens that fit
    stride: int | None = None
    max_answer_length: int = 30  # maximum number of tokens of an answer
    # whether a question may have no answer; None: true if a training question has none
    no_answer: bool | None = None
    # predict no answer if its score exceeds that of the best answer by more than this
    no_answer_threshold: float = 0.0
    windows: WindowOffsets | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("stride", "max_answer_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"task.{name}={value} must be 1 or more tokens")

    def collate(
        self,
        examples: tuple[Ids, Ids, Sequence[int], int, bool],
        generator: torch.Generator,
    ) -> SpanBatch:
        """Windows, padded to a width, with start and end of the answers."""
        windows, window_bounds, window_indices, width, segmented = examples
        # (windows, 4): begin and end of the context, first and last token of the answer
        bounds = torch.from_numpy(np.stack(window_bounds).astype(np.int64))
        positions = torch.arange(width)
        lengths = torch.tensor([len(window) for window in windows])
        return SpanBatch(
            ids=pad(windows, width, 0),
            lengths=lengths,
            context=bounds[:, :2],
            targets=bounds[:, 2:],
            window_indices=torch.tensor([*window_indices]),
            segments=(
                ((positions >= bounds[:, :1]) & (positions < lengths.unsqueeze(1))).long()
                if segmented
                else None
            ),
        )

    def logits(self, model: nn.Module, batch: SpanBatch) -> Float[Tensor, "batch time 2"]:
        """The logits of start and end, at every token."""
        extra = {} if batch.segments is None else {"segments": batch.segments}
        logits: Tensor = model.head(model(batch.ids, lengths=batch.lengths, **extra))  # type: ignore[operator]
        padding = torch.arange(batch.ids.shape[1], device=logits.device) >= batch.lengths[:, None]
        return logits.masked_fill(padding.unsqueeze(2), torch.finfo(logits.dtype).min)

    def loss(self, model: nn.Module, batch: SpanBatch) -> Float[Tensor, ""]:
        """The summed -log P(start) - log P(end)."""
        return SpanHead.span_loss(self.logits(model, batch), batch.targets)

    def count(self, batch: SpanBatch) -> Int[Tensor, ""]:
        """The number of windows."""
        return torch.tensor(len(batch.ids), device=batch.ids.device)

    def tokens_read(self, batch: SpanBatch, context: int) -> int:
        """All tokens of all windows."""
        return int(batch.lengths.sum())

    def metrics(self, model: nn.Module, batches: Iterable[SpanBatch]) -> dict[str, float]:
        """Loss in nats per window, and F1 and exact match of the answers, as SQuAD scores them."""
        assert self.windows is not None
        losses: list[tuple[float, int]] = []

        def scored_batches() -> Iterable[tuple[SpanBatch, Tensor]]:
            for batch in batches:
                logits = self.logits(model, batch)
                losses.append((float(SpanHead.span_loss(logits, batch.targets)), len(batch.ids)))
                yield batch, logits

        with evaluation_mode(model):
            best = self.best_answers(scored_batches(), top=1)
        if not best:
            raise DataError("nothing to evaluate: the validation data has no question")
        questions = [self.windows.questions[index] for index in best]
        predictions = {
            q.id: answers[0][0] if answers else NO_ANSWER  # none if its context has no token
            for q, answers in zip(questions, best.values(), strict=True)
        }
        loss = sum(value for value, _ in losses) / sum(count for _, count in losses)
        return {"loss": loss, **score_answers(questions, predictions)}

    def best_answers(
        self, batches: Iterable[tuple[SpanBatch, Tensor]], top: int
    ) -> dict[int, list[tuple[str, float]]]:
        """The most probable answers of each question with their probabilities, best first."""
        assert self.windows is not None
        candidates: dict[int, dict[str, float]] = defaultdict(dict)
        totals: dict[int, list[float]] = defaultdict(list)
        nulls: dict[int, float] = {}
        for batch, logits in batches:
            spans = self._best_spans(batch, logits, top)
            columns = (spans.scores, spans.first, spans.last, spans.logsumexp, spans.null)
            indices = batch.window_indices.tolist()
            rows = zip(indices, *(column.tolist() for column in columns), strict=True)
            for window, scores, first, last, total, null in rows:
                question = int(self.windows.question_index[window])
                texts = candidates[question]
                for score, i, j in zip(scores, first, last, strict=True):
                    if score > -np.inf:
                        text = self.windows.text(window, i, j)
                        texts[text] = max(score, texts.get(text, -np.inf))
                totals[question].append(total)
                nulls[question] = min(null, nulls.get(question, np.inf))
        return {
            question: self._rank(texts, totals[question], nulls[question])[:top]
            for question, texts in candidates.items()
        }

    def _rank(
        self, texts: Mapping[str, float], totals: list[float], null: float
    ) -> list[tuple[str, float]]:
        """Answers with their probabilities, by score, and "no answer" at its rank.

        The probabilities of all spans of all windows and of "no answer" sum to 1; `texts` has only
        the best spans.
        """
        ranked = sorted(texts.items(), key=lambda item: -item[1])
        if self.no_answer:
            totals = [*totals, null]
            best = ranked[0][1] if ranked else -np.inf
            above = sum(score >= null for _, score in ranked)
            rank = 0 if null > best + self.no_answer_threshold else max(1, above)
            ranked.insert(rank, (NO_ANSWER, null))
        total = float(np.logaddexp.reduce(totals))
        return [(text, float(np.exp(score - total))) for text, score in ranked]

    def _best_spans(self, batch: SpanBatch, logits: Tensor, top: int) -> _Spans:
        """The largest s_i + e_j within the context of each window.

        There are 4 · `top` of them, since several spans may have the same text.
        """
        start, end = logits.float().unbind(2)  # (batch, time)
        positions = torch.arange(start.shape[1], device=start.device)
        begin, stop = batch.context.unsqueeze(2).unbind(1)  # (batch, 1)
        inside = (positions >= begin) & (positions < stop)
        distance = positions - positions.unsqueeze(1)  # j - i
        band = (distance >= 0) & (distance < self.max_answer_length)
        allowed = inside.unsqueeze(2) & inside.unsqueeze(1) & band
        scores = (start.unsqueeze(2) + end.unsqueeze(1)).masked_fill(~allowed, -torch.inf)
        flat = scores.flatten(1)
        best = flat.topk(min(4 * top, flat.shape[1]))
        first, last = best.indices // len(positions), best.indices % len(positions)
        return _Spans(best.values, first, last, flat.logsumexp(1), start[:, 0] + end[:, 0])


def normalize_answer(text: str) -> str:
    """An answer as SQuAD's scorer compares it: lower case, no punctuation, no articles.

    >>> normalize_answer("The  Duchy of Normandy's")
    'duchy of normandys'
    """
    characters = (char for char in text.lower() if char not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", "".join(characters)).split())


def answer_f1(prediction: str, answer: str) -> float:
    """F1 = 2 common / (predicted + true) of the words of two answers, after normalization.

    If an answer has no words left, F1 is 1 if the other has none either, else 0.

    >>> round(answer_f1("in the year 1066", "1066"), 3)
    0.5
    """
    predicted, true = (normalize_answer(text).split() for text in (prediction, answer))
    if not predicted or not true:
        return float(predicted == true)
    common = (Counter(predicted) & Counter(true)).total()
    return 2 * common / (len(predicted) + len(true))


def score_answers(
    questions: Sequence[Question], predictions: Mapping[str, str]
) -> dict[str, float]:
    """Mean F1 and exact match of predictions by question id, each with its best reference answer.

    If some questions are unanswerable, also both metrics for answerable and unanswerable questions
    alone. A question without a prediction scores 0.
    """
    scores: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for question in questions:
        answers = [text for text, _ in question.answers if normalize_answer(text)] or [NO_ANSWER]
        predicted = predictions.get(question.id)
        pair = (0.0, 0.0)
        if predicted is not None:
            normalized = normalize_answer(predicted)
            exact = max(float(normalized == normalize_answer(answer)) for answer in answers)
            pair = (max(answer_f1(predicted, answer) for answer in answers), exact)
        scores[bool(question.answers)].append(pair)
    all_scores = [*scores[True], *scores[False]]
    result: dict[str, float] = dict(zip(("f1", "exact_match"), _means(all_scores), strict=True))
    if scores[True] and scores[False]:
        for name, part in (("answerable", scores[True]), ("unanswerable", scores[False])):
            result |= dict(zip((f"f1_{name}", f"exact_match_{name}"), _means(part), strict=True))
    return result


def _means(pairs: Sequence[tuple[float, float]]) -> list[Any]:
    return [sum(column) / len(pairs) for column in zip(*pairs, strict=True)]
