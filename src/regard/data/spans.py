"""Extractive question answering: answers are spans of a context; SQuAD's JSON, and tables."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from regard.data.columns import Roles
from regard.data.tables import Table
from regard.data.text_files import open_bytes, preview, scan, stem, suffix
from regard.data.validation_split import split_by_hash
from regard.errors import DataError
from regard.units import count_are

HEAD_BYTES = 1 << 16  # at the start of a file, searched for SQuAD's key "paragraphs"
FORMATS = (
    "spans are SQuAD's JSON (data, paragraphs, qas), or a table (.csv, .tsv, .json, .jsonl, "
    ".parquet)\nwith the columns question, context, and answers or answer"
)
_PARAGRAPHS = re.compile(rb'"paragraphs"\s*:')

Answer = tuple[str, int]  # its text, and the index of its first character in the context


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a context, and its answers; none if the context does not answer it."""

    id: str
    text: str
    context: str
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Questions:
    """Questions with the spans that answer them."""

    kind: ClassVar[str] = "spans"
    name: str
    description: str
    rows: Sequence[Question] = field(repr=False)

    def __len__(self) -> int:
        return len(self.rows)

    def first_rows(self, count: int) -> list[str]:
        """The first questions with their answers, for a preview."""
        return [
            f"{preview(row.text)} → {preview(row.answers[0][0]) if row.answers else 'no answer'}"
            for row in self.rows[:count]
        ]

    @property
    def has_unanswerable(self) -> bool:
        """Whether some questions are unanswerable: the context has no answer (SQuAD 2.0)."""
        return not all(row.answers for row in self.rows)

    def texts(self) -> list[str]:
        """All questions, and every context once."""
        return [*(row.text for row in self.rows), *dict.fromkeys(row.context for row in self.rows)]

    def split(self, fraction: float, seed: int) -> tuple["Questions", "Questions"]:
        """Training questions, and about a `fraction` of the contexts for validation.

        All questions about a context are in the same split.
        """
        contexts = [row.context for row in self.rows]
        message = (
            f"{self.name}: all {len(self)} questions have the same context, so they cannot be "
            "split;\ngive more contexts, or a separate validation file"
        )
        unit = "questions, about contexts that are not in the training data"
        return split_by_hash(self, unit, contexts, fraction, seed, message)

    def lowercase(self) -> "Questions":
        """The same questions and contexts in lower case."""
        rows = [
            replace(
                row,
                text=row.text.lower(),
                context=_lower(row.context),
                answers=tuple((_lower(text), start) for text, start in row.answers),
            )
            for row in self.rows
        ]
        return replace(self, rows=rows, description=f"{self.description}, in lower case")

    def note_overlap(self, train: "Questions") -> "Questions":
        """These validation questions; the description says how many have a training context."""
        train_contexts = {row.context for row in train.rows}
        count = sum(row.context in train_contexts for row in self.rows)
        if not count:
            return self
        note = (
            f"overlap: {count:,} of the {len(self):,} questions have a context of the training data"
        )
        return replace(self, description=f"{self.description}; {note}")

    def fingerprint(self) -> str:
        """A sha256 of the content."""
        digest = hashlib.sha256(b"spans")
        for row in self.rows:
            content = [row.id, row.text, row.context, row.answers]
            digest.update(json.dumps(content).encode())
        return digest.hexdigest()


def _lower(text: str) -> str:
    """Lower case, character by character, so that all offsets stay valid."""
    return "".join(low if len(low := char.lower()) == 1 else char for char in text)


def is_squad(path: Path) -> bool:
    """Whether a file is JSON in SQuAD's format: data, paragraphs, qas."""
    if path.is_dir() or suffix(path) != ".json":
        return False
    try:
        with open_bytes(path) as stream:
            return _PARAGRAPHS.search(stream.read(HEAD_BYTES)) is not None
    except (OSError, EOFError):
        return False  # reported where it is read


def from_squad(path: Path) -> Questions:
    """The questions of a file in SQuAD's format, version 1.1 or 2.0."""
    scanned = scan(path)
    with open_bytes(path) as stream:
        stream.seek(scanned.start)
        try:
            text = stream.read().decode("utf-8")
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path} is not JSON: {error};\n{FORMATS}") from None
    version = content.get("version") if isinstance(content, dict) else None
    format = "SQuAD JSON" + (f", version {preview(str(version))}" if version else "")
    return _from_rows(stem(path), str(path), format, _squad_rows(str(path), content, text))


Row = tuple[str, str, Any, Any, Any]  # location, id, question, context, answers


def _squad_rows(path: str, content: Any, text: str) -> Iterator[Row]:
    """Yield the questions; the line of a location is that of the id, or else of the question."""
    line, offset = 1, 0
    for a, article in enumerate(_list(path, content, "data"), 1):
        article_location = f"{path}, article {a}"
        for p, paragraph in enumerate(_list(article_location, article, "paragraphs"), 1):
            location = f"{article_location}, paragraph {p}"
            for q, item in enumerate(_list(location, paragraph, "qas"), 1):
                question = f"{location}, question {q}"
                if not isinstance(item, dict):
                    raise DataError(f"{question} is not an object: {preview(str(item))}")
                id = str(item.get("id", f"{a}-{p}-{q}"))
                answers = [] if item.get("is_impossible") else item.get("answers", [])
                position = _find_string(text, item.get("id", item.get("question")), offset)
                at_line = ""
                if position > offset:
                    line, offset = line + text.count("\n", offset, position), position
                    at_line = f"line {line}, "
                yield (
                    f"{question} ({at_line}id {id})",
                    id,
                    item.get("question"),
                    paragraph.get("context"),
                    answers,
                )


def _find_string(text: str, value: Any, offset: int) -> int:
    """The position of a string in JSON, after an offset; -1 if it is not there."""
    if not isinstance(value, str):
        return -1
    as_ascii = text.find(json.dumps(value), offset)
    return as_ascii if as_ascii >= 0 else text.find(json.dumps(value, ensure_ascii=False), offset)


def _list(location: str, parent: Any, key: str) -> list[Any]:
    value = parent.get(key) if isinstance(parent, dict) else None
    if not isinstance(value, list):
        raise DataError(f"{location} has no list {key!r};\n{FORMATS}")
    return value


def from_table(table: Table, roles: Roles) -> Questions:
    """The questions of a table, with the columns that `data.columns.find_roles` returns."""
    column = {role: table.column(name) for role, name in roles.columns.items()}

    def rows() -> Iterator[Row]:
        for number, cells in table.rows():
            answers = cells[column["answers"]]
            if isinstance(answers, str):
                answers = [answers] if answers.strip() else []
            if not isinstance(answers, list | None):
                answers = [answers]  # refused below, since it is not a text
            starts = cells[column["starts"]] if "starts" in column else None
            if starts not in (None, ""):
                starts = starts if isinstance(starts, list) else [starts]
                if len(starts) != len(answers or []):
                    raise DataError(
                        f"{table.location(number)} has {len(answers or [])} answers and "
                        f"{len(starts)} starts; each answer needs one start"
                    )
                pairs = zip(answers or [], starts, strict=True)
                answers = [{"text": text, "answer_start": start} for text, start in pairs]
            id = str(cells[column["id"]]) if "id" in column else str(number)
            question, context = cells[column["question"]], cells[column["context"]]
            yield table.location(number), id, question, context, answers or []

    return _from_rows(table.name, table.path, table.format + roles.note, rows())


def _from_rows(name: str, path: str, format: str, rows: Iterable[Row]) -> Questions:
    """Check all rows; an answer that is not in its context is refused, a wrong start corrected."""
    questions: list[Question] = []
    locations: dict[str, str] = {}  # of the ids
    moved, first_moved = 0, ""
    for location, id, question, context, answers in rows:
        if id in locations:
            raise DataError(
                f"{location} has the id {preview(id)} of "
                f"{locations[id].removeprefix(f'{path}, ')}; ids must be unique"
            )
        locations[id] = location
        for key, value in (("question", question), ("context", context)):
            if not isinstance(value, str) or not value.strip():
                raise DataError(f"{location} has no {key}")
        if not isinstance(answers, list):
            raise DataError(f"{location}: answers are a list, not {preview(str(answers))}")
        answer_spans = []
        for answer in answers:
            text, start = _answer(location, answer)
            position = _locate(context, text, start)
            if position is None:
                raise DataError(
                    f"{location}: the answer {preview(text)} is not in its context\n"
                    f"{preview(context)}"
                )
            if start is not None and position != start:
                moved += 1
                first_moved = first_moved or location
            answer_spans.append((text, position))
        questions.append(Question(id, question, context, tuple(answer_spans)))
    if not questions:
        raise DataError(f"{path} has no question")
    unanswerable = sum(not row.answers for row in questions)
    note = f", {unanswerable:,} without an answer" if unanswerable else ""
    contexts = len({row.context for row in questions})
    description = f"spans, {len(questions):,} questions{note}, {contexts:,} contexts, {format}"
    if moved:
        description += (
            f"; {count_are(moved, 'answer')} not where answer_start says, and moved to the nearest "
            f"match (the first is {first_moved.removeprefix(f'{path}, ')})"
        )
    return Questions(name, description, questions)


def _answer(location: str, answer: Any) -> tuple[str, int | None]:
    """The text of an answer, and its `answer_start`, or None if it has none."""
    text, start = answer, None
    if isinstance(answer, dict):
        text, start = answer.get("text"), answer.get("answer_start")
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"{location}: an answer must be a text, not {preview(str(answer))}")
    if isinstance(start, str) and start.strip().isdecimal():
        with suppress(ValueError):  # more digits than Python reads
            start = int(start)
    if start is not None and (not isinstance(start, int) or isinstance(start, bool)):
        raise DataError(f"{location}: answer_start must be an integer, not {preview(str(start))}")
    return text, start


def _locate(context: str, text: str, start: int | None) -> int | None:
    """The index at which an answer begins: `start`, the match nearest to it, or the first match."""
    if start is not None and start >= 0 and context.startswith(text, start):
        return start
    matches = [match.start() for match in re.finditer(f"(?={re.escape(text)})", context)]
    return min(matches, key=lambda match: abs(match - (start or 0)), default=None)
