"""Dialogues for instruction tuning: JSONL of messages, or of prompts and responses."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from regard.data.columns import Roles
from regard.data.digest import json_digest
from regard.data.tables import LABEL_COLUMNS
from regard.data.text_files import preview, read_lines, scan, stem
from regard.data.validation_split import describe_overlap, split_by_hash
from regard.errors import DataError
from regard.files.untrusted import parse_json, quote
from regard.text.chat_template import Message

ROLES = {"system": "system", "developer": "system", "user": "user", "human": "user"}
ROLES |= {"assistant": "assistant", "gpt": "assistant", "model": "assistant", "bot": "assistant"}
MESSAGE_KEYS = ("messages", "conversations", "conversation", "dialogue")
PROMPT_NAMES = ("prompt", "instruction")  # keys that identify a file of dialogues
PROMPT_KEYS = (*PROMPT_NAMES, "question")
RESPONSE_KEYS = ("answer", "response", "completion", "output")
LABEL_NAMES = {*LABEL_COLUMNS} - {"category", "topic"}  # instruction data may have these two
KEYS = {*MESSAGE_KEYS, *PROMPT_KEYS, *RESPONSE_KEYS, "input", "system"}
FORMAT = '{"messages": [{"role": "user", "content": …}, …]} or {"prompt": …, "response": …}'


@dataclass(frozen=True, slots=True)
class Dialogues:
    """Dialogues, each a list of messages with at least one response."""

    kind: ClassVar[str] = "dialogues"
    name: str
    description: str
    rows: Sequence[tuple[Message, ...]] = field(repr=False)

    def __len__(self) -> int:
        return len(self.rows)

    def split(self, fraction: float, seed: int) -> tuple["Dialogues", "Dialogues"]:
        """Training dialogues, and about a `fraction` for validation, by a hash of their prompts."""
        prompts = [json.dumps(row[:-1]) for row in self.rows]
        message = (
            f"{self.name}: all {len(self)} dialogues have the same prompt, so they cannot be "
            "split;\ngive more dialogues, or a separate validation file"
        )
        return split_by_hash(self, "dialogues", prompts, fraction, seed, message)

    def first_rows(self, count: int) -> list[str]:
        """The first dialogues, for a preview."""
        return [
            " ".join(f"{role}: {preview(content)}" for role, content in row)
            for row in islice(self.rows, count)
        ]

    def note_overlap(self, train: "Dialogues") -> "Dialogues":
        """These validation dialogues; the description says how many are in the training data."""
        train_rows = set(train.rows)
        count = sum(row in train_rows for row in self.rows)
        return describe_overlap(self, count, len(self), "dialogues")

    def fingerprint(self) -> str:
        """A sha256 of the content."""
        return json_digest(*self.rows)


def is_dialogues(path: Path) -> bool:
    """Whether the first line of a file is an object with messages, or a prompt and a response.

    A prompt and a response with a label are for classification or preference learning instead.
    """
    first = _first_object(path)
    if not LABEL_NAMES.isdisjoint(first) and not has_messages(path):
        return False
    sides = [[first.get(key) for key in keys] for keys in (PROMPT_NAMES, RESPONSE_KEYS)]
    return has_messages(path) or all(any(isinstance(v, str) for v in values) for values in sides)


def has_messages(path: Path) -> bool:
    """Whether the first line of a file is an object with a list of messages."""
    first = _first_object(path)
    return any(isinstance(first.get(key), list) for key in MESSAGE_KEYS)


def _first_object(path: Path) -> Mapping[str, Any]:
    """The object on the first line of a file; empty if there is none."""
    try:
        first = parse_json(next(iter(_nonempty_lines(path)), (0, ""))[1])
    except (DataError, ValueError, OSError):
        return {}
    return first if isinstance(first, dict) else {}


def from_jsonl(path: Path) -> Dialogues:
    """Read a dialogue from each line; an error names the line.

    The description names the keys that are not part of a dialogue.
    """
    rows: list[tuple[Message, ...]] = []
    keys: dict[str, None] = {}
    for number, line in _nonempty_lines(path):
        location = f"{path}, line {number}"
        try:
            value = parse_json(line)
        except ValueError as error:
            raise DataError(f"{location} is not JSON: {error}") from None
        rows.append(_messages(location, value))
        keys |= dict.fromkeys(value)
    if not rows:
        raise DataError(f"{path} has no dialogues; each line is {FORMAT}")
    responses = sum(role == "assistant" for row in rows for role, _ in row)
    description = f"dialogues, {len(rows):,} lines of JSONL, {responses:,} responses"
    roles = Roles("dialogues", {}, unused=tuple(key for key in keys if key not in KEYS))
    return Dialogues(stem(path), description + roles.note, rows)


def _nonempty_lines(path: Path) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(read_lines(path, scan(path)), 1):
        if line.strip():
            yield number, line


def _messages(location: str, value: Any) -> tuple[Message, ...]:
    if not isinstance(value, Mapping):
        raise DataError(f"{location}: a dialogue is an object, {FORMAT}, not {quote(value)}")
    items = next((value[key] for key in MESSAGE_KEYS if key in value), None)
    if items is None:
        messages = _from_prompt_and_response(location, value)
    else:
        messages = _from_messages(location, items)
    if not any(role == "assistant" for role, _ in messages):
        raise DataError(
            f"{location}: the dialogue has no response, a message with the role assistant"
        )
    return messages


def _from_messages(location: str, items: Any) -> tuple[Message, ...]:
    if not isinstance(items, list) or not items:
        raise DataError(f"{location}: messages is a list of objects with role and content")
    messages = []
    for item in items:
        if not isinstance(item, Mapping):
            raise DataError(f"{location}: a message has a role and a content, not {quote(item)}")
        role, content = item.get("role", item.get("from")), item.get("content", item.get("value"))
        if not isinstance(role, str) or role not in ROLES:
            raise DataError(
                f"{location}: the role of a message is one of {', '.join(ROLES)}, not {quote(role)}"
            )
        if not isinstance(content, str) or not content.strip():
            raise DataError(f"{location}: the content of a message is a text, not {quote(content)}")
        messages.append((ROLES[role], content))
    return tuple(messages)


def _from_prompt_and_response(location: str, value: Mapping[str, Any]) -> tuple[Message, ...]:
    prompt = next((value[key] for key in PROMPT_KEYS if key in value), None)
    response = next((value[key] for key in RESPONSE_KEYS if key in value), None)
    for name, text in (("prompt", prompt), ("response", response)):
        if not isinstance(text, str) or not text.strip():
            raise DataError(
                f"{location}: no {name}; a line is {FORMAT}, and this one has {', '.join(value)}"
            )
    input_text = value.get("input")
    assert isinstance(prompt, str)
    assert isinstance(response, str)
    if isinstance(input_text, str) and input_text.strip():
        prompt = f"{prompt}\n{input_text}"
    system = value.get("system")
    if isinstance(system, str) and system.strip():
        return ("system", system), ("user", prompt), ("assistant", response)
    return ("user", prompt), ("assistant", response)
