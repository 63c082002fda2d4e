"""Dialogues: packed into rows, with the loss on the responses only."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
from torch import nn

from regard.config import Choice, RunConfig, make
from regard.data.batch import Batch
from regard.data.dialogues import Dialogues, from_jsonl, is_dialogues
from regard.data.loader import RowLoader
from regard.data.text_files import suffix
from regard.errors import ConfigError, DataError
from regard.generate import generate, parse_chain
from regard.models.base import Language
from regard.models.build import resolve
from regard.models.presets import ModelConfig
from regard.pipelines.base import (
    EvalData,
    Pipeline,
    Progress,
    TrainingData,
    first_rows,
    rows_per_step,
)
from regard.pipelines.tokenizer_cache import cached_tokenizer
from regard.seeds import batch_generator
from regard.tasks import TASKS, Instruct
from regard.tasks.instruct import Dialogue
from regard.text import Tokenizer, train_tokenizer
from regard.text.chat_encoding import chat_prompt_ids, dialogue_ids, response_end, special_texts
from regard.text.chat_template import ASSISTANT, Message, render, split_responses
from regard.text.pair_tokenizers import JOINT

SUFFIXES = (".jsonl", ".ndjson", ".json")
SAMPLE_TOKENS = 60


class DialoguesPipeline(Pipeline):
    """JSONL of messages, or of prompts and responses."""

    name: ClassVar[str] = "dialogues"
    needs: ClassVar[str] = "JSONL of messages, or of prompts and responses"
    tokenizer_type: ClassVar[type | None] = Tokenizer

    def recognizes(self, path: Path) -> bool:
        """A .jsonl file whose first line has a list of messages."""
        return path.is_file() and suffix(path) in SUFFIXES and is_dialogues(path)

    def reads_on_request(self, path: Path) -> bool:
        """Any .jsonl file."""
        return path.is_file() and suffix(path) in SUFFIXES

    def open(self, path: Path) -> Dialogues:
        """A dialogue on each line."""
        return from_jsonl(path)

    def lowercase(self, data: Dialogues) -> Dialogues:
        """The dialogues in lower case."""
        rows = [tuple((role, text.lower()) for role, text in row) for row in data.rows]
        return replace(data, rows=rows, description=f"{data.description}, in lower case")

    def defaults(self, data: Dialogues, task: Choice, *, gpu: bool) -> dict[str, Any]:
        """A small decoder; usually training starts from a pretrained one (`train.start`)."""
        size = sum(len(text) for row in data.rows for _, text in row)
        vocab_size = min(32_000, max(500, size // 500 // 100 * 100))
        sizes = (
            {"dim": 384, "layers": 6, "heads": 6, "context": 512, "dropout": 0.1}
            if gpu
            else {"dim": 128, "layers": 4, "heads": 4, "context": 128}
        )
        return {
            "task": "instruct",
            "data": {"tokenizer": {"kind": "bpe", "vocab_size": vocab_size}},
            "model": {"preset": "tiny-decoder", **sizes},
            "train": {
                "steps": 2000,
                "batch": 32 if gpu else 8,
                "lr": 2e-3,
                "optimizer": "muon",
                "schedule": {"kind": "linear", "warmup": 30},
            },
        }

    def train_tokenizers(
        self, config: RunConfig, train: Dialogues, validation: Dialogues, progress: Progress | None
    ) -> Tokenizer:
        """Train on the training dialogues, with the text of the template."""
        choice, template = config.data.tokenizer, instruct_task(config.task).template
        texts = [render(template, row, tokens=special_texts(None)) for row in train.rows]

        def write(folder: Path) -> None:
            train_tokenizer(choice, texts).save(folder / JOINT)

        return Tokenizer.load(
            cached_tokenizer({"choice": choice, "template": template}, [train], write) / JOINT
        )

    def preview(self, config: RunConfig, data: Dialogues) -> dict[str, str]:
        """The first dialogue as the model reads it, with the scored parts in brackets."""
        return {"loss mask": show_mask(instruct_task(config.task), None, data.rows[0])}

    def training_data(
        self,
        config: RunConfig,
        train: Dialogues,
        validation: Dialogues,
        tokenizers: Tokenizer,
        progress: Progress | None,
    ) -> TrainingData:
        """Rows of packed dialogues in random order."""
        data, evaluated = self._evaluation(config, validation, tokenizers)
        task, model = cast(Instruct, data.task), data.model
        packed = pack(train, task, tokenizers, model)
        count = max(1, rows_per_step(config.train, model.context) // config.train.accumulate)
        loader = RowLoader(len(packed.rows), count, config.train.seed)

        def batch(index: int) -> Batch:
            chosen = [packed.rows[row] for row in loader.examples(index)]
            generator = batch_generator(config.train.seed, index)
            return task.collate((chosen, model.context), generator)

        scored = sum(int(scored.sum()) for row in packed.rows for _, scored in row)
        filled = packed.fill_ratio(model.context)
        description = [
            f"data       {train.description}",
            *first_rows(train),
            f"loss mask  {show_mask(task, tokenizers, train.rows[0])}",
            f"validation {validation.description}",
            f"tokenizer  {tokenizers.kind}, {tokenizers.vocab_size:,} tokens; "
            f"{packed.tokens:,} for training, {scored:,} of them in responses",
            f"packing    {len(packed.rows):,} rows of {model.context} tokens, {filled:.0%} filled",
        ]
        if packed.truncated or evaluated.truncated:
            description.append(
                f"truncated  {packed.truncated:,} training dialogues and {evaluated.truncated:,} "
                f"for validation, to {model.context} tokens"
            )
        if packed.dropped or evaluated.dropped:
            description.append(
                f"dropped    {packed.dropped:,} training dialogues and {evaluated.dropped:,} for "
                f"validation: their first {model.context} tokens hold no part of a response"
            )
        return TrainingData(
            **vars(data),
            batch=batch,
            example_ids=loader.example_ids,
            all_batches=lambda: _batches(task, packed, model, count, None),
            description=description,
        )

    def evaluation_data(
        self,
        config: RunConfig,
        data: Dialogues,
        tokenizers: Tokenizer,
        progress: Progress | None = None,
    ) -> EvalData:
        """All validation dialogues in order, packed."""
        return self._evaluation(config, data, tokenizers)[0]

    def _evaluation(
        self, config: RunConfig, data: Dialogues, tokenizers: Tokenizer
    ) -> tuple[EvalData, "PackedDialogues"]:
        task = instruct_task(config.task)
        model = resolve(config.model, vocab_size=tokenizers.vocab_size)
        packed = pack(data, task, tokenizers, model)
        targets = sum(int(scored[1:].sum()) for row in packed.rows for _, scored in row)
        count = max(1, rows_per_step(config.train, model.context) // config.train.accumulate)
        evaluated = EvalData(
            task=task,
            task_choice=config.task,
            tokenizers=tokenizers,
            model=model,
            validation_batches=lambda limit: _batches(task, packed, model, count, limit),
            validation_data=data,
            validation_size=len(data),
            validation_targets=targets,
            dropped=packed.truncated + packed.dropped,
        )
        return evaluated, packed

    def sample(self, data: EvalData, model: nn.Module, seed: int) -> str:
        """A response to the first validation prompt."""
        task, tokenizer = cast(Instruct, data.task), cast(Tokenizer, data.tokenizers)
        row = data.validation_data.rows[0]
        index = next(i for i, (role, _) in enumerate(row) if role == ASSISTANT)
        ids = chat_prompt_ids(tokenizer, task.template, row[:index])[-data.model.context // 2 :]
        room = min(SAMPLE_TOKENS, data.model.context - len(ids))
        stop, end = response_end(tokenizer, task.template)
        (new,) = generate(
            cast(Language, model), [ids], parse_chain(["greedy"]), tokens=room, stop=stop, seed=seed
        )
        question = " ".join(text for _, text in row[:index])
        response = tokenizer.decode(new)
        response = response.partition(end)[0] if end else response
        return f"{question}\n→ {response}\n= {row[index][1]}"


def instruct_task(choice: Choice) -> Instruct:
    """The task of a run on dialogues."""
    return cast(Instruct, make(choice, TASKS, "task"))


def encode(task: Instruct, tokenizer: Tokenizer, messages: Sequence[Message]) -> Dialogue:
    """The ids of a dialogue, and which of them belong to responses."""
    ids, scored = dialogue_ids(tokenizer, task.template, messages)
    return np.asarray(ids, dtype=np.int64), np.asarray(scored, dtype=np.bool_)


def fit_prompt(
    tokenizer: Tokenizer,
    template: str,
    messages: Sequence[Message],
    model: Language,
    tokens: int,
) -> tuple[list[int], int]:
    """The prompt of the last messages that fit the context, and how many tokens may follow.

    Older messages are left out so that a response gets at least a quarter of the context; the last
    message alone leaves it the rest. A system message is kept.
    """
    context = model.context
    first = [message for message in messages[:1] if message[0] == "system"]
    rest = list(messages[len(first) :])
    while True:
        ids = chat_prompt_ids(tokenizer, template, [*first, *rest])
        room = tokens if context is None else min(tokens, context - len(ids))
        if context is None or room >= min(tokens, context // 4):
            return ids, room
        if len(rest) <= 2 and room > 0:
            return ids, room
        if len(rest) <= 2:
            raise ConfigError(
                f"the message has {len(ids):,} tokens and the model a context of {context:,}, so "
                "there is no room for a response; shorten it"
            )
        rest = rest[2:]


def show_mask(task: Instruct, tokenizer: Tokenizer | None, row: Sequence[Message]) -> str:
    """A dialogue as the model reads it; the parts in ⟦ ⟧ are scored."""
    parts = split_responses(task.template, row, special_texts(tokenizer))
    shown = "".join(f"⟦{text}⟧" if scored else text for text, scored in parts).replace("\n", "⏎")
    return shown if len(shown) <= 300 else f"{shown[:299]}…"


@dataclass(frozen=True, slots=True)
class PackedDialogues:
    """Dialogues packed into rows."""

    rows: list[list[Dialogue]]
    tokens: int
    truncated: int  # dialogues that are cut
    dropped: int  # dialogues that are left out: no part of a response fits

    def fill_ratio(self, context: int) -> float:
        """The fraction of positions that hold tokens; the last of a dialogue is a target only."""
        return (self.tokens - sum(map(len, self.rows))) / (len(self.rows) * context)


def pack(
    data: Dialogues, task: Instruct, tokenizer: Tokenizer, model: ModelConfig
) -> PackedDialogues:
    """Pack dialogues into rows of `model.context` tokens: best-fit decreasing.

    The longest come first, and each goes into the row with the least room that
    fits it. With `model.prefix` a row is one dialogue.
    """
    context = model.context
    encoded = [encode(task, tokenizer, row) for row in data.rows]
    cut = [(ids[: context + 1], scored[: context + 1]) for ids, scored in encoded]
    is_kept = [bool(scored[1:].any()) for _, scored in cut]
    kept = list(compress(cut, is_kept))
    truncated = sum(len(ids) > context + 1 for ids, _ in compress(encoded, is_kept))
    if not kept:
        raise DataError(
            f"{data.name}: no prompt leaves room for a response in model.context={context};\n"
            "set a larger model.context"
        )
    if getattr(model, "prefix", False):
        rows = [[dialogue] for dialogue in kept]
    else:
        rows = _best_fit(kept, context)
    return PackedDialogues(rows, sum(len(ids) for ids, _ in kept), truncated, len(cut) - len(kept))


def _best_fit(dialogues: list[Dialogue], context: int) -> list[list[Dialogue]]:
    rows: list[list[Dialogue]] = []
    free: dict[int, list[int]] = {}  # rows by the tokens that are left in them
    order = sorted(range(len(dialogues)), key=lambda n: (-len(dialogues[n][0]), n))
    for index in order:
        needed = len(dialogues[index][0]) - 1
        room = min((left for left in free if left >= needed), default=None)
        if room is None:
            rows.append([])
            room, row = context, len(rows) - 1
        else:
            row = free[room].pop()
            if not free[room]:
                del free[room]
        rows[row].append(dialogues[index])
        if room - needed:
            free.setdefault(room - needed, []).append(row)
    return rows


def _batches(
    task: Instruct, packed: PackedDialogues, model: ModelConfig, count: int, limit: int | None
) -> Iterator[Batch]:
    done = 0
    for first in range(0, len(packed.rows), count):
        if limit is not None and done >= limit:
            return
        batch = task.collate(
            (packed.rows[first : first + count], model.context), batch_generator(1, 0)
        )
        done += int(task.count(batch))
        yield batch
