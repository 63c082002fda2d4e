"""Dialogues: packed into rows, with the loss on the responses only."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from regard.config import Choice, RunConfig, make
from regard.data.batch import Batch
from regard.data.dialogues import Dialogues, from_json, has_messages, is_dialogues
from regard.data.loader import RowLoader
from regard.data.text_files import suffix
from regard.errors import ConfigError, DataError
from regard.generate import generate, parse_chain
from regard.models.base import Language
from regard.models.build import resolve
from regard.models.presets import ModelConfig
from regard.pipelines.base import EvalData, Pipeline, Progress, TrainingData, first_rows
from regard.pipelines.batching import blocks_per_micro_batch, count_unknown, describe_unknown
from regard.pipelines.tokenizer_cache import cached_tokenizer
from regard.seeds import batch_generator
from regard.tasks import TASKS, Instruct
from regard.tasks.instruct import Dialogue
from regard.text import Tokenizer, train_tokenizer
from regard.text.chat_encoding import (
    chat_prompt_ids,
    dialogue_ids,
    response_end,
    template_variables,
    unknown_template_parts,
)
from regard.text.chat_template import ASSISTANT, Message, render, split_responses
from regard.text.pair_tokenizers import JOINT

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
SAMPLE_TOKENS = 60


class DialoguesPipeline(Pipeline):
    """JSON objects with messages, or with a prompt and a response each."""

    name: ClassVar[str] = "dialogues"
    data_description: ClassVar[str] = (
        "JSONL or a JSON array of messages, or of prompts and responses"
    )
    tokenizer_type: ClassVar[type | None] = Tokenizer

    def recognizes(self, path: Path) -> bool:
        """A JSON file whose first object has a list of messages, or a prompt and a response."""
        return path.is_file() and suffix(path) in JSON_SUFFIXES and is_dialogues(path)

    def reads_on_request(self, path: Path) -> bool:
        """Any file with a suffix of `JSON_SUFFIXES`."""
        return path.is_file() and suffix(path) in JSON_SUFFIXES

    def reads_as_table(self, path: Path, columns: Mapping[str, Any], kind: str | None) -> bool:
        """Prompts and responses are a table for other tasks, or if columns are named."""
        other_task = bool(columns) or kind is not None
        return kind != self.name and other_task and not has_messages(path)

    def open(self, path: Path) -> Dialogues:
        """A dialogue on each line, or in each object of an array."""
        return from_json(path)

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
        choice, template = config.data.tokenizer, instruct_task(config.task).chat_template
        texts = [render(template, row, variables=template_variables(None)) for row in train.rows]

        def write(folder: Path) -> None:
            train_tokenizer(choice, texts).save(folder / JOINT)

        return Tokenizer.load(
            cached_tokenizer({"choice": choice, "template": template}, [train], write) / JOINT
        )

    def check_tokenizers(self, config: RunConfig, tokenizers: Tokenizer) -> None:
        """Raise `ConfigError` if parts of the chat template are not in the vocabulary."""
        parts = unknown_template_parts(tokenizers, instruct_task(config.task).chat_template)
        if not parts:
            return
        texts = ", ".join(map(repr, parts[:8])) + (", …" if len(parts) > 8 else "")
        solution = "start from a model whose vocabulary has them"
        ends = [id for id in map(tokenizers.special_id, ("sep", "eos")) if id is not None]
        if ends:
            end = tokenizers.piece(ends[0])
            solution += (
                ", or set a template of special tokens:\n"
                "'task.chat_template={% for m in messages %}"
                f"{{{{ m.content }}}}{end}{{% endfor %}}'"
            )
        raise ConfigError(
            f"the chat template has {texts}, which are not in the vocabulary of "
            f"{config.train.start or 'the tokenizer'}:\neach would be the same unknown token, "
            f"and the model could not tell where a message ends;\n{solution}"
        )

    def preview(
        self,
        config: RunConfig,
        train: Dialogues,
        validation: Dialogues,
        tokenizers: Tokenizer | None,
    ) -> dict[str, str]:
        """The first dialogue as the model reads it, with the scored parts in brackets."""
        task = instruct_task(config.task)
        return {"loss mask": format_loss_mask(task, tokenizers, train.rows[0])}

    def training_data(
        self,
        config: RunConfig,
        train: Dialogues,
        validation: Dialogues,
        tokenizers: Tokenizer,
        progress: Progress | None,
    ) -> TrainingData:
        """Rows of packed dialogues in random order."""
        data, packed_validation = self._evaluation(config, validation, tokenizers)
        task, model = cast(Instruct, data.task), data.model
        packed = pack(train, task, tokenizers, model)
        rows_per_batch = blocks_per_micro_batch(config.train, model.context)
        loader = RowLoader(len(packed.rows), rows_per_batch, config.train.seed)

        def batch(index: int) -> Batch:
            rows = [packed.rows[row] for row in loader.examples(index)]
            generator = batch_generator(config.train.seed, index)
            return task.collate((rows, model.context), generator)

        responses = sum(int(scored.sum()) for row in packed.rows for _, scored in row)
        fill_ratio = packed.fill_ratio(model.context)
        description = [
            f"data       {train.description}",
            *first_rows(train),
            f"loss mask  {format_loss_mask(task, tokenizers, train.rows[0])}",
            f"validation {validation.description}",
            f"tokenizer  {tokenizers.kind}, {tokenizers.vocab_size:,} tokens; "
            f"{packed.tokens:,} for training, {responses:,} of them in responses",
            f"packing    {len(packed.rows):,} rows of {model.context} tokens, "
            f"{fill_ratio:.0%} filled",
        ]
        if config.train.start is not None:  # whose tokenizer is used
            description += describe_unknown(
                *(count_unknown(part.ids, tokenizers) for part in (packed, packed_validation))
            )
        if packed.truncated or packed_validation.truncated:
            description.append(
                f"truncated  {packed.truncated:,} training dialogues and "
                f"{packed_validation.truncated:,} for validation, to {model.context} tokens"
            )
        if packed.dropped or packed_validation.dropped:
            description.append(
                f"dropped    {packed.dropped:,} training dialogues and "
                f"{packed_validation.dropped:,} for validation: their first {model.context} tokens "
                "hold no part of a response"
            )
        return TrainingData(
            **vars(data),
            batch=batch,
            example_ids=loader.example_ids,
            all_batches=lambda: _batches(task, packed, model, rows_per_batch, None),
            description=description,
        )

    def evaluation_data(
        self,
        config: RunConfig,
        data: Dialogues,
        tokenizers: Tokenizer,
        progress: Progress | None = None,
    ) -> EvalData:
        """All validation dialogues, packed."""
        return self._evaluation(config, data, tokenizers)[0]

    def _evaluation(
        self, config: RunConfig, data: Dialogues, tokenizers: Tokenizer
    ) -> tuple[EvalData, "PackedDialogues"]:
        task = instruct_task(config.task)
        model = resolve(config.model, vocab_size=tokenizers.vocab_size)
        packed = pack(data, task, tokenizers, model)
        targets = sum(int(scored[1:].sum()) for row in packed.rows for _, scored in row)
        rows_per_batch = blocks_per_micro_batch(config.train, model.context)
        eval_data = EvalData(
            task=task,
            task_choice=config.task,
            tokenizers=tokenizers,
            model=model,
            validation_batches=lambda limit: _batches(task, packed, model, rows_per_batch, limit),
            validation_data=data,
            validation_size=len(data),
            validation_targets=targets,
            too_long=packed.truncated + packed.dropped,
        )
        return eval_data, packed

    def sample(self, data: EvalData, model: nn.Module, seed: int) -> str:
        """A response to the first validation prompt."""
        task, tokenizer = cast(Instruct, data.task), cast(Tokenizer, data.tokenizers)
        row = data.validation_data.rows[0]
        index = next(i for i, (role, _) in enumerate(row) if role == ASSISTANT)
        ids = chat_prompt_ids(tokenizer, task.chat_template, row[:index])[
            -data.model.context // 2 :
        ]
        max_new_tokens = min(SAMPLE_TOKENS, data.model.context - len(ids))
        stop, end = response_end(tokenizer, task.chat_template)
        (new,) = generate(
            cast(Language, model),
            [ids],
            parse_chain(["greedy"]),
            max_new_tokens=max_new_tokens,
            stop=stop,
            seed=seed,
        )
        prompt = " ".join(text for _, text in row[:index])
        response = tokenizer.decode(new)
        response = response.partition(end)[0] if end else response
        return f"{prompt}\n→ {response}\n= {row[index][1]}"


def instruct_task(choice: Choice) -> Instruct:
    """The task of a run on dialogues."""
    return cast(Instruct, make(choice, TASKS, "task"))


def encode(task: Instruct, tokenizer: Tokenizer, messages: Sequence[Message]) -> Dialogue:
    """The ids of a dialogue, and which of them belong to responses."""
    ids, scored = dialogue_ids(tokenizer, task.chat_template, messages)
    return np.asarray(ids, dtype=np.int64), np.asarray(scored, dtype=np.bool_)


def fit_prompt(
    tokenizer: Tokenizer,
    template: str,
    messages: Sequence[Message],
    model: Language,
    max_new_tokens: int,
) -> tuple[list[int], int]:
    """The ids of the last messages that fit the context, and how many tokens may follow.

    The oldest messages are dropped so that at least a quarter of the context is free for the
    response. If the last message alone leaves less, the response gets the remaining positions. A
    system message is kept.
    """
    context = model.context
    system = [message for message in messages[:1] if message[0] == "system"]
    turns = list(messages[len(system) :])
    while True:
        ids = chat_prompt_ids(tokenizer, template, [*system, *turns])
        limit = max_new_tokens if context is None else min(max_new_tokens, context - len(ids))
        if context is None or limit >= min(max_new_tokens, context // 4):
            return ids, limit
        if len(turns) <= 2 and limit > 0:
            return ids, limit
        if len(turns) <= 2:
            raise ConfigError(
                f"the message has {len(ids):,} tokens and the model a context of {context:,}, so "
                "there is no room for a response; shorten it"
            )
        turns = turns[2:]


def format_loss_mask(task: Instruct, tokenizer: Tokenizer | None, row: Sequence[Message]) -> str:
    """A dialogue as the model reads it, from its ids; the parts in ⟦ ⟧ are scored.

    Without a tokenizer, which is trained later, the dialogue is shown as text.
    """
    if tokenizer is None:
        parts = split_responses(task.chat_template, row, template_variables(None))
    else:
        ids, scored = dialogue_ids(tokenizer, task.chat_template, row)
        groups = groupby(zip(ids, scored, strict=True), key=itemgetter(1))
        parts = [(_text_of([id for id, _ in group], tokenizer), key) for key, group in groups]
    line = "".join(f"⟦{text}⟧" if scored else text for text, scored in parts).replace("\n", "⏎")
    return line if len(line) <= 300 else f"{line[:299]}…"


def _text_of(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """The text of ids with that of special tokens, which `decode` skips."""
    special = {*tokenizer.special_ids}
    return "".join(
        "".join(map(tokenizer.piece, group)) if is_special else tokenizer.decode(group)
        for is_special, group in groupby(ids, key=special.__contains__)
    )


@dataclass(frozen=True, slots=True)
class PackedDialogues:
    """Dialogues packed into rows."""

    rows: list[list[Dialogue]]
    tokens: int
    truncated: int  # number of dialogues
    dropped: int  # number of dialogues in which no part of a response fits the context

    @property
    def ids(self) -> NDArray[np.int64]:
        """The ids of all dialogues."""
        return np.concatenate([ids for row in self.rows for ids, _ in row])

    def fill_ratio(self, context: int) -> float:
        """The fraction of positions with an input token: all tokens of a dialogue but its last."""
        return (self.tokens - sum(map(len, self.rows))) / (len(self.rows) * context)


def pack(
    data: Dialogues, task: Instruct, tokenizer: Tokenizer, model: ModelConfig
) -> PackedDialogues:
    """Pack dialogues into rows of `model.context` tokens: best-fit decreasing.

    The longest dialogues come first, and each goes into the fullest row in which it still fits.
    With `model.prefix` a row is one dialogue.
    """
    context = model.context
    encoded = [encode(task, tokenizer, row) for row in data.rows]
    truncated_rows = [(ids[: context + 1], scored[: context + 1]) for ids, scored in encoded]
    has_response = [bool(scored[1:].any()) for _, scored in truncated_rows]
    dialogues = list(compress(truncated_rows, has_response))
    truncated = sum(len(ids) > context + 1 for ids, _ in compress(encoded, has_response))
    if not dialogues:
        raise DataError(
            f"{data.name}: no prompt leaves room for a response in model.context={context};\n"
            "set a larger model.context"
        )
    if getattr(model, "prefix", False):
        rows = [[dialogue] for dialogue in dialogues]
    else:
        rows = _best_fit(dialogues, context)
    tokens = sum(len(ids) for ids, _ in dialogues)
    return PackedDialogues(rows, tokens, truncated, len(encoded) - len(dialogues))


def _best_fit(dialogues: list[Dialogue], context: int) -> list[list[Dialogue]]:
    rows: list[list[Dialogue]] = []
    free: dict[int, list[int]] = {}  # free positions → rows that have so many
    order = sorted(range(len(dialogues)), key=lambda n: (-len(dialogues[n][0]), n))
    for index in order:
        needed = len(dialogues[index][0]) - 1
        free_positions = min((space for space in free if space >= needed), default=None)
        if free_positions is None:
            rows.append([])
            free_positions, row = context, len(rows) - 1
        else:
            row = free[free_positions].pop()
            if not free[free_positions]:
                del free[free_positions]
        rows[row].append(dialogues[index])
        if free_positions - needed:
            free.setdefault(free_positions - needed, []).append(row)
    return rows


def _batches(
    task: Instruct,
    packed: PackedDialogues,
    model: ModelConfig,
    rows_per_batch: int,
    limit: int | None,
) -> Iterator[Batch]:
    done = 0
    for first in range(0, len(packed.rows), rows_per_batch):
        if limit is not None and done >= limit:
            return
        rows = packed.rows[first : first + rows_per_batch]
        # `collate` draws no random numbers
        batch = task.collate((rows, model.context), torch.Generator())
        done += int(task.count(batch))
        yield batch
