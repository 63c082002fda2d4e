"""Dialogues for instruction tuning: JSONL of messages, or of prompts and responses."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from regard.data.text_files import preview, read_lines, scan, stem
from regard.data.validation_split import hash_threshold, row_hash
from regard.errors import DataError
from regard.files.untrusted import parse_json, quote

Message = tuple[str, str]  # role and content
ROLES = {"system": "system", "developer": "system", "user": "user", "human": "user"}
ROLES |= {"assistant": "assistant", "gpt": "assistant", "model": "assistant", "bot": "assistant"}
MESSAGE_KEYS = ("messages", "conversations", "conversation", "dialogue")
PROMPT_KEYS = ("prompt", "instruction", "question")
RESPONSE_KEYS = ("answer", "response", "completion", "output")
FORM = '{"messages": [{"role": "user", "content": …}, …]} or {"prompt": …, "response": …}'


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
        hashes = [row_hash(seed, json.dumps(row[:-1])) for row in self.rows]
        threshold = hash_threshold(
            hashes,
            fraction,
            f"{self.name}: all {len(self)} dialogues have the same prompt, so they cannot be "
            "split;\ngive more, or a separate validation file",
        )
        pairs = list(zip(self.rows, hashes, strict=True))
        train = [row for row, value in pairs if value >= threshold]
        validation = [row for row, value in pairs if value < threshold]
        described = f"{self.description}; {len(train):,} for training"
        counts = f"{len(validation):,} of the {len(self):,} dialogues"
        return (
            replace(self, rows=train, description=described),
            replace(self, rows=validation, description=counts),
        )

    def first_rows(self, count: int) -> list[str]:
        """The first dialogues, for a preview."""
        return [
            " ".join(f"{role}: {preview(content)}" for role, content in row)
            for row in islice(self.rows, count)
        ]

    def note_overlap(self, train: "Dialogues") -> "Dialogues":
        """These validation dialogues; the description says how many are in the training data."""
        known = set(train.rows)
        count = sum(row in known for row in self.rows)
        if not count:
            return self
        note = f"overlap: {count:,} of the {len(self):,} dialogues are in the training data"
        return replace(self, description=f"{self.description}; {note}")

    def fingerprint(self) -> str:
        """A sha256 of the content."""
        return hashlib.sha256(json.dumps(list(self.rows)).encode()).hexdigest()


def is_dialogues(path: Path) -> bool:
    """Whether the first line of a file is an object with a list of messages."""
    try:
        first = parse_json(next(iter(_lines(path)), (0, ""))[1])
    except (DataError, ValueError, OSError):
        return False
    return isinstance(first, dict) and any(isinstance(first.get(key), list) for key in MESSAGE_KEYS)


def from_jsonl(path: Path) -> Dialogues:
    """Read a dialogue from each line; an error names the line."""
    rows: list[tuple[Message, ...]] = []
    for number, line in _lines(path):
        location = f"{path}:{number}"
        try:
            value = parse_json(line)
        except ValueError as error:
            raise DataError(f"{location} is not JSON: {error}") from None
        rows.append(_messages(location, value))
    if not rows:
        raise DataError(f"{path} has no dialogues; each line is {FORM}")
    responses = sum(role == "assistant" for row in rows for role, _ in row)
    described = f"dialogues, {len(rows):,} lines of JSONL, {responses:,} responses"
    return Dialogues(stem(path), described, rows)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(read_lines(path, scan(path)), 1):
        if line.strip():
            yield number, line


def _messages(location: str, value: Any) -> tuple[Message, ...]:
    if not isinstance(value, Mapping):
        raise DataError(f"{location}: a dialogue is an object, {FORM}, not {quote(value)}")
    listed = next((value[key] for key in MESSAGE_KEYS if key in value), None)
    messages = _pair(location, value) if listed is None else _list(location, listed)
    if not any(role == "assistant" for role, _ in messages):
        raise DataError(
            f"{location}: the dialogue has no response, a message of the role assistant"
        )
    return messages


def _list(location: str, listed: Any) -> tuple[Message, ...]:
    if not isinstance(listed, list) or not listed:
        raise DataError(f"{location}: messages is a list of objects with role and content")
    messages = []
    for item in listed:
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


def _pair(location: str, value: Mapping[str, Any]) -> tuple[Message, ...]:
    prompt = next((value[key] for key in PROMPT_KEYS if key in value), None)
    response = next((value[key] for key in RESPONSE_KEYS if key in value), None)
    for name, text in (("prompt", prompt), ("response", response)):
        if not isinstance(text, str) or not text.strip():
            raise DataError(
                f"{location}: no {name}; a line is {FORM}, and this one has {', '.join(value)}"
            )
    more = value.get("input")
    assert isinstance(prompt, str)
    assert isinstance(response, str)
    prompt = f"{prompt}\n{more}" if isinstance(more, str) and more.strip() else prompt
    system = value.get("system")
    first = (("system", system),) if isinstance(system, str) and system.strip() else ()
    return (*first, ("user", prompt), ("assistant", response))
