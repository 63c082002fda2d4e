"""Dialogues for instruction tuning: JSON of messages, or of prompts and responses."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from regard.data.columns import Roles
from regard.data.digest import json_digest
from regard.data.json_files import read_document
from regard.data.tables import LABEL_COLUMNS
from regard.data.text_files import open_bytes, preview, read_lines, scan, stem, suffix
from regard.data.validation_split import describe_overlap, split_by_hash
from regard.errors import DataError
from regard.files.untrusted import parse_json, quote
from regard.text.chat_template import ASSISTANT, Message

MESSAGE_ROLES = {"system": "system", "developer": "system", "user": "user", "human": "user"}
MESSAGE_ROLES |= dict.fromkeys(("assistant", "gpt", "model", "bot"), ASSISTANT)
MESSAGE_KEYS = ("messages", "conversations", "conversation", "dialogue")
PROMPT_NAMES = ("prompt", "instruction")  # keys that identify a file of dialogues
PROMPT_KEYS = (*PROMPT_NAMES, "question")
RESPONSE_KEYS = ("answer", "response", "completion", "output")
LABEL_NAMES = {*LABEL_COLUMNS} - {"category", "topic"}  # instruction data may have these two
FIRST_OBJECT_BYTES = 1 << 20  # read from the beginning of an array, to detect what it holds
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
    """Whether the first object of a file has messages, or a prompt and a response.

    A prompt and a response with a label are for classification or preference learning instead.
    """
    first = _first_object(path)
    if _has_messages(first):
        return True
    sides = [[first.get(key) for key in keys] for keys in (PROMPT_NAMES, RESPONSE_KEYS)]
    return LABEL_NAMES.isdisjoint(first) and all(
        any(isinstance(value, str) for value in values) for values in sides
    )


def has_messages(path: Path) -> bool:
    """Whether the first object of a file has a list of messages."""
    return _has_messages(_first_object(path))


def _has_messages(value: Mapping[str, Any]) -> bool:
    return any(isinstance(value.get(key), list) for key in MESSAGE_KEYS)


def _first_object(path: Path) -> Mapping[str, Any]:
    """The object on the first line of a file, or the first of an array; empty if there is none."""
    try:
        _, line = next(_nonempty_lines(path))
        if _is_array(path):
            with open_bytes(path) as stream:
                line = stream.read(FIRST_OBJECT_BYTES).decode("utf-8", "ignore")
            line = line[line.index("[") + 1 :].lstrip()
            first, _ = json.JSONDecoder().raw_decode(line)
        else:
            first = parse_json(line)
    except (DataError, ValueError, OSError, RecursionError):
        return {}
    return first if isinstance(first, dict) else {}


def from_json(path: Path) -> Dialogues:
    """Read a dialogue from each line or from each object of an array; an error names its location.

    The description names the keys that are read, if their names differ from their roles, and those
    that are not part of a dialogue. Objects with an empty response are skipped and counted.
    """
    rows: list[tuple[Message, ...]] = []
    left_out: dict[str, None] = {}  # keys
    read_keys: dict[str, dict[str, None]] = {}  # role → keys
    has_input = False
    skipped: list[str] = []
    for location, value in _objects(path):
        messages = _messages(location, value)
        if messages is None:
            skipped.append(location)
            continue
        rows.append(messages)
        keys_by_role = _keys_by_role(value)
        for role, key in keys_by_role.items():
            read_keys.setdefault(role, {})[key] = None
        is_prompt = "prompt" in keys_by_role
        has_input |= is_prompt and _is_text(value.get("input"))
        known = {*keys_by_role.values(), "system", *(["input"] if is_prompt else [])}
        left_out |= {key: None for key in value if key not in known}
    if not rows:
        raise DataError(f"{path} has no dialogue with a response; an object is {FORMAT}")
    responses = sum(role == ASSISTANT for row in rows for role, _ in row)
    unit = "objects of a JSON array" if _is_array(path) else "lines of JSONL"
    columns = {role: " or ".join(names) for role, names in read_keys.items()}
    if has_input and "prompt" in columns:
        columns["prompt"] += " and input"
    columns = {role: names for role, names in columns.items() if names != role}
    roles = Roles("dialogues", columns, unused=tuple(left_out))
    description = f"dialogues, {len(rows):,} {unit}, {responses:,} responses{roles.note}"
    if skipped:
        first = skipped[0].removeprefix(f"{path}, ")
        description += f"; skipped: {len(skipped):,} with an empty response (the first is {first})"
    return Dialogues(stem(path), description, rows)


def _objects(path: Path) -> Iterator[tuple[str, Any]]:
    """The values on the lines of a file, or in its array, each with its location."""
    if _is_array(path):
        for number, value in enumerate(read_document(path), 1):
            yield f"{path}, row {number}", value
        return
    for number, line in _nonempty_lines(path):
        location = f"{path}, line {number}"
        try:
            yield location, parse_json(line)
        except ValueError as error:
            raise DataError(f"{location} is not JSON: {error}") from None


def _is_array(path: Path) -> bool:
    """Whether a file holds one JSON array, not an object on each line."""
    _, line = next(_nonempty_lines(path), (0, ""))
    return suffix(path) == ".json" and line.lstrip().startswith("[")


def _nonempty_lines(path: Path) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(read_lines(path, scan(path)), 1):
        if line.strip():
            yield number, line


def _keys_by_role(value: Mapping[str, Any]) -> dict[str, str]:
    """The keys of an object that hold its messages, or its prompt and response."""
    keys = {"prompt": PROMPT_KEYS, "response": RESPONSE_KEYS}
    messages = _find_key(value, MESSAGE_KEYS)
    keys_by_role = (
        {role: _find_key(value, names) for role, names in keys.items()}
        if messages is None
        else {"messages": messages}
    )
    return {role: key for role, key in keys_by_role.items() if key is not None}


def _find_key(value: Mapping[str, Any], keys: Sequence[str]) -> str | None:
    """The first of the keys that an object has, with a value that is not null."""
    return next((key for key in keys if value.get(key) is not None), None)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _messages(location: str, value: Any) -> tuple[Message, ...] | None:
    """The messages of a dialogue; None if its response is empty."""
    if not isinstance(value, Mapping):
        raise DataError(f"{location}: a dialogue is an object, {FORMAT}, not {quote(value)}")
    key = _find_key(value, MESSAGE_KEYS)
    if key is None:
        return _from_prompt_and_response(location, value)
    messages = _from_messages(location, value[key])
    system = _system_message(value)
    messages = messages if system == messages[:1] else (*system, *messages)
    if not any(role == ASSISTANT for role, _ in messages):
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
        if not isinstance(role, str) or role not in MESSAGE_ROLES:
            raise DataError(
                f"{location}: the role of a message is one of {', '.join(MESSAGE_ROLES)}, "
                f"not {quote(role)}"
            )
        if not isinstance(content, str) or not content.strip():
            raise DataError(f"{location}: the content of a message is a text, not {quote(content)}")
        messages.append((MESSAGE_ROLES[role], content))
    return tuple(messages)


def _from_prompt_and_response(
    location: str, value: Mapping[str, Any]
) -> tuple[Message, ...] | None:
    prompt, response = (
        None if key is None else value[key]
        for key in (_find_key(value, PROMPT_KEYS), _find_key(value, RESPONSE_KEYS))
    )
    is_empty = isinstance(response, str) and not response.strip()
    for name, text in (("prompt", prompt), *([] if is_empty else [("response", response)])):
        if not _is_text(text):
            raise DataError(
                f"{location}: no {name}; an object is {FORMAT}, and this one has {', '.join(value)}"
            )
    if is_empty:
        return None
    assert isinstance(prompt, str)
    assert isinstance(response, str)
    if _is_text(value.get("input")):
        prompt = f"{prompt}\n{value['input']}"
    dialogue = ("user", prompt), (ASSISTANT, response)
    return *_system_message(value), *dialogue


def _system_message(value: Mapping[str, Any]) -> tuple[Message, ...]:
    return (("system", value["system"]),) if _is_text(value.get("system")) else ()
