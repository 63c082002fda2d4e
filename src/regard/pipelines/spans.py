"""Extractive question answering: questions that are answered by a span of a context."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from regard.config import Choice, RunConfig, make
from regard.data.batch import Batch, SpanBatch
from regard.data.columns import Roles
from regard.data.loader import PairIndices
from regard.data.spans import Question, Questions, from_squad, from_table, is_squad
from regard.data.table_files import is_table
from regard.data.tables import Table
from regard.data.token_store import PairStore
from regard.errors import ConfigError
from regard.models.build import config_table, resolve
from regard.models.presets import ModelConfig
from regard.pipelines.base import (
    EvalData,
    Inputs,
    Pipeline,
    Progress,
    TrainedModel,
    TrainingData,
    require_texts,
    with_task_options,
)
from regard.pipelines.batching import (
    batches_of_similar_length,
    concatenate,
    describe_data,
    encoded_text_loader,
    seeded_batches,
    sequential_batches,
)
from regard.pipelines.text_pairs import pair_template
from regard.pipelines.tokenizer_cache import train_cached_tokenizer
from regard.seeds import shuffle_key
from regard.tasks import TASKS
from regard.tasks.span import NO_ANSWER, Span, WindowOffsets
from regard.text import Tokenizer

EVALUATION_ROWS = 32  # windows in a batch of predictions
SAMPLE_QUESTIONS = 4

# a list with one element: the most probable answers with their probabilities
Answers = list[list[tuple[str, float]]]


class SpansPipeline(Pipeline):
    """Questions and contexts, in windows of similar length."""

    name: ClassVar[str] = "spans"
    data_description: ClassVar[str] = (
        "questions, contexts and answers: SQuAD's JSON, or columns of a table with these names"
    )
    tokenizer_type: ClassVar[type | None] = Tokenizer
    exclusive: ClassVar[bool] = True

    def recognizes(self, path: Path) -> bool:
        """A file in SQuAD's format."""
        return is_squad(path)

    def reads_as_table(self, path: Path, columns: Mapping[str, Any], kind: str | None) -> bool:
        """A table, but not a file in SQuAD's format."""
        return is_table(path) and not self.recognizes(path)

    def open(self, path: Path) -> Questions:
        """The questions of a file in SQuAD's format."""
        return from_squad(path)

    def from_table(self, table: Table, roles: Roles) -> Questions:
        """The questions of a table."""
        return from_table(table, roles)

    def lowercase(self, data: Questions) -> Questions:
        """The questions and contexts in lower case."""
        return data.lowercase()

    def input_names(self, config: RunConfig) -> tuple[str, ...]:
        """A question and a context."""
        return ("question", "context")

    def read_inputs(self, config: RunConfig, path: Path) -> Inputs | None:
        """The questions of a file in SQuAD's format."""
        if not is_squad(path):
            return None
        data = from_squad(path)
        rows = (({"id": q.id, "question": q.text}, (q.text, q.context)) for q in data.rows)
        return Inputs(data.description, rows)

    def defaults(self, data: Questions, task: Choice, *, gpu: bool) -> dict[str, Any]:
        """A small Transformer encoder with segments, over WordPiece."""
        return {
            "task": "span",
            "data": {"tokenizer": {"kind": "wordpiece", "vocab_size": 8000}},
            "model": {
                "preset": "tiny-encoder",
                "dim": 256 if gpu else 128,
                "segments": 2,
                "context": 384 if gpu else 256,
                "dropout": 0.1,
            },
            "train": {
                "steps": 4000 if gpu else 1500,
                "batch": 32,
                "lr": 5e-4,
                "schedule": {"kind": "linear", "warmup": 100},
            },
        }

    def smallest_model(self, config: RunConfig) -> ModelConfig:
        """With a head for start and end."""
        return add_span_head(config, vocab_size=1)

    def train_tokenizers(
        self,
        config: RunConfig,
        train: Questions,
        validation: Questions,
        progress: Progress | None,
    ) -> Tokenizer:
        """A tokenizer trained on the questions and the contexts."""
        return train_cached_tokenizer(config.data.tokenizer, train, train.texts)

    def training_data(
        self,
        config: RunConfig,
        train: Questions,
        validation: Questions,
        tokenizers: Tokenizer,
        progress: Progress | None,
    ) -> TrainingData:
        """Batches of windows of similar length, in random order."""
        task = span_task(config.task)
        if task.no_answer is None:
            derived = {"no_answer": train.has_unanswerable}
            choice = with_task_options(config.task, derived)
            config = replace(config, task=choice)
        model = add_span_head(config, vocab_size=tokenizers.vocab_size)
        config = replace(config, model=config_table(model))
        data = self.evaluation_data(config, validation, tokenizers)
        windows = SpanWindows.encode(span_task(config.task), train.rows, tokenizers, model)
        loader = encoded_text_loader(config, model, windows.store)
        description = [
            *describe_data(train, validation, tokenizers),
            f"windows    {len(windows.store):,} of {model.context} tokens, stride "
            f"{windows.stride}; {windows.without_answer:,} without the answer",
        ]
        if windows.truncated:
            description.append(f"truncated  {windows.truncated:,} long training questions")

        seed = config.train.seed
        return TrainingData(
            **vars(data),
            batch=seeded_batches(seed, loader, windows.collate),
            example_ids=loader.example_ids,
            all_batches=lambda: sequential_batches(seed, loader, windows.collate),
            description=description,
        )

    def evaluation_data(
        self,
        config: RunConfig,
        data: Questions,
        tokenizers: Tokenizer,
        progress: Progress | None = None,
    ) -> EvalData:
        """All windows of the validation questions, or those of a fixed sample of questions."""
        model = add_span_head(config, vocab_size=tokenizers.vocab_size)
        windows = SpanWindows.encode(span_task(config.task), data.rows, tokenizers, model)
        seed = config.train.seed

        def validation_batches(limit: int | None) -> Iterator[Batch]:
            return windows.batches(windows.sample(limit, seed))

        return EvalData(
            task=windows.task,
            task_choice=config.task,
            tokenizers=tokenizers,
            model=model,
            validation_batches=validation_batches,
            validation_data=data,
            validation_size=len(data),
            validation_targets=len(windows.store),
            too_long=windows.truncated,
        )

    def sample(self, data: EvalData, model: nn.Module, seed: int) -> str:
        """The predicted and the true answers of a few validation questions."""
        rows = data.validation_data.rows[:SAMPLE_QUESTIONS]
        tokenizer = cast(Tokenizer, data.tokenizers)
        predictions = answer_questions(model, cast(Span, data.task), tokenizer, rows)
        lines = []
        for row, (((text, _),),) in zip(rows, predictions, strict=True):
            true = row.answers[0][0] if row.answers else "no answer"
            lines.append(f"{row.text}\n→ {text or 'no answer'}\n= {true}")
        return "\n".join(lines)

    def predict(self, run: TrainedModel, input: Any, *, top: int) -> Answers:
        """The most probable answers to a question about a context, with their probabilities."""
        return self.predict_batch(run, [input], top=top)[0]

    def predict_batch(self, run: TrainedModel, inputs: Sequence[Any], *, top: int) -> list[Answers]:
        """The answers to several questions, each with its context."""
        rows = []
        for index, item in enumerate(inputs):
            if not (isinstance(item, tuple | list) and len(item) == 2):
                raise ConfigError(
                    "an input must be a question and a text, as in ('Who?', 'Ada did.'), "
                    f"not {item!r}"
                )
            question, context = map(str, item)
            require_texts([question, context])
            rows.append(Question(str(index), question, context, ()))
        task, tokenizer = span_task(run.config.task), cast(Tokenizer, run.tokenizers)
        return answer_questions(run.model, task, tokenizer, rows, top)


def span_task(choice: Choice) -> Span:
    """The task of a run on spans."""
    return cast(Span, make(choice, TASKS, "task"))


def add_span_head(config: RunConfig, *, vocab_size: int) -> ModelConfig:
    """The model of a run, with a head for start and end."""
    model = resolve(config.model, vocab_size=vocab_size)
    if not hasattr(model, "head"):
        raise ConfigError(
            "task=span needs a model with a head for start and end; choose another model.preset"
        )
    return resolve(config.model, vocab_size=vocab_size, head="span")


@torch.no_grad()
def answer_questions(
    model: nn.Module,
    task: Span,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    top: int = 1,
) -> list[Answers]:
    """For each question, its most probable answers."""
    config = cast(ModelConfig, model.config)
    windows = SpanWindows.encode(task, questions, tokenizer, config)
    device = next(model.parameters()).device
    model.eval()

    def batches_with_logits() -> Iterator[tuple[SpanBatch, Tensor]]:
        for batch in windows.batches(np.arange(len(windows.store))):
            device_batch = batch.to(device)
            yield device_batch, windows.task.logits(model, device_batch)

    best = windows.task.best_answers(batches_with_logits(), top)
    return [[best.get(index) or [(NO_ANSWER, 1.0)]] for index in range(len(questions))]


@dataclass(frozen=True, slots=True)
class SpanWindows:
    """Encoded windows: ids, and for each the bounds of its context and of the answer."""

    task: Span  # with `windows` set, from which it reads the text of an answer
    store: PairStore  # ids; begin and end of the context, first and last token of the answer
    windows: WindowOffsets
    segmented: bool  # question and context are two segments
    stride: int  # between the windows of a question; the smallest of all questions
    without_answer: int  # number of windows
    truncated: int  # number of questions

    @classmethod
    def encode(
        cls,
        task: Span,
        questions: Sequence[Question],
        tokenizer: Tokenizer,
        model: ModelConfig,
    ) -> "SpanWindows":
        """The windows of questions, for a model."""
        template = pair_template(model, tokenizer)
        max_tokens = model.context - template.special_token_count
        longest_question = max_tokens // 2
        if longest_question < 1:
            raise ConfigError(
                f"model.context={model.context} has no room for a question and a text besides "
                "special tokens; set a larger model.context"
            )
        texts = list(dict.fromkeys(row.context for row in questions))
        contexts = dict(zip(texts, tokenizer.encode_with_offsets(texts), strict=True))
        question_ids = tokenizer.encode_batch([row.text for row in questions])
        ids: list[NDArray[np.int64]] = []
        bounds: list[NDArray[np.int64]] = []
        offsets: list[NDArray[np.int64]] = []
        question_indices: list[int] = []
        strides = set()
        for index, (row, question) in enumerate(zip(questions, question_ids, strict=True)):
            question = question[:longest_question]
            context, spans = contexts[row.context]
            characters = np.array(spans, np.int64).reshape(-1, 2)
            answer = _answer_tokens(characters, row)
            width = max_tokens - len(question)
            stride = min(width, task.stride or max(1, width // 2))
            strides.add(stride)
            starts = [0]
            while starts[-1] + width < len(context):
                starts.append(starts[-1] + stride)
            for start in starts:
                stop = min(start + width, len(context))
                window, begin = template.join(question, context[start:stop])
                first = last = 0
                if answer is not None and start <= answer[0] and answer[1] < stop:
                    first, last = (begin + token - start for token in answer)
                ids.append(window)
                bounds.append(np.array([begin, begin + stop - start, first, last]))
                offsets.append(characters[start:stop])
                question_indices.append(index)
        begins = np.array([bound[0] for bound in bounds])
        windows = WindowOffsets(questions, np.array(question_indices), begins, offsets)
        return cls(
            replace(task, windows=windows),
            PairStore(*concatenate(ids), *concatenate(bounds), ""),
            windows,
            template.segmented,
            min(strides),
            sum(int(bound[3]) == 0 for bound in bounds),
            sum(len(question) > longest_question for question in question_ids),
        )

    def batch(self, rows: Sequence[int], width: int, generator: torch.Generator) -> SpanBatch:
        """A batch of some of the windows."""
        ids, bounds = map(self.store.source, rows), map(self.store.target, rows)
        return self.task.collate((list(ids), list(bounds), rows, width, self.segmented), generator)

    def collate(self, rows: PairIndices, generator: torch.Generator) -> SpanBatch:
        """A batch of the windows with the indices of a loader."""
        return self.batch(rows.indices.tolist(), rows.length - 1, generator)

    def batches(self, rows: NDArray[np.int64]) -> Iterator[SpanBatch]:
        """Batches of these windows, those of similar length together."""
        for indices, width in batches_of_similar_length(self.store, EVALUATION_ROWS, rows):
            yield self.batch(indices, width, torch.Generator())

    def sample(self, limit: int | None, seed: int) -> NDArray[np.int64]:
        """All windows, or all windows of a fixed sample of questions: about `limit` of them."""
        windows = np.arange(len(self.store))
        if limit is None or limit >= len(windows):
            return windows
        order = np.random.default_rng(shuffle_key(seed)).permutation(len(self.windows.questions))
        counts = np.bincount(self.windows.question_index, minlength=len(order))
        needed = 1 + int(np.searchsorted([*accumulate(counts[order].tolist())], limit))
        return windows[np.isin(self.windows.question_index, order[:needed])]


def _answer_tokens(characters: NDArray[np.int64], question: Question) -> tuple[int, int] | None:
    """The indices of the first and the last token of the first answer; None without an answer."""
    if not question.answers:
        return None
    text, start = question.answers[0]
    overlapping = np.flatnonzero(
        (characters[:, 1] > start) & (characters[:, 0] < start + len(text))
    )
    return (int(overlapping[0]), int(overlapping[-1])) if len(overlapping) else None
