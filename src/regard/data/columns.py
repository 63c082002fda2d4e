"""What the columns of a table mean: texts, labels, tags, the sides of pairs, or numbers.

Columns that the user names come first, then common column names, then the content of the cells.
The description of the data states the chosen columns; an ambiguous table is an error.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from regard.data.tables import (
    IMAGE_SUFFIXES,
    LABEL,
    MIN_NUMERIC_FRACTION,
    PAIRS,
    SCORE,
    TAGS,
    TEXT,
    TEXT_PAIRS,
    WORDS,
    Table,
    has_comma,
    is_number,
)
from regard.errors import ConfigError, DataError

ROLES = {  # the columns of each kind of data
    "labels": ("text", "text2", "label"),
    "scores": ("text", "text2", "label"),
    "tags": ("text", "tags"),
    "pairs": ("source", "target"),
    "text": ("text",),
    "series": (),
    "captions": ("source", "target"),
    "spans": (),  # found by their names, as Hugging Face's data sets have them
}
COLUMN_HINTS = (  # for messages: how to name the columns
    "data.text=COLUMN data.label=COLUMN for texts with a class each",
    "data.text=COLUMN data.text2=COLUMN data.label=COLUMN for pairs of texts with a class each",
    "data.text=COLUMN data.label=COLUMN task=text_regression for texts with a number each",
    "data.text=COLUMN data.text2=COLUMN data.label=COLUMN task=text_regression for pairs of texts "
    "with a number each",
    "data.source=COLUMN data.target=COLUMN for pairs, or for image files and captions",
    "data.text=COLUMN data.tags=COLUMN for words with a tag each",
    "data.text=COLUMN task=causal for text",
)
METADATA = {  # columns that describe an example; they are taken for labels only where named
    *("id", "idx", "index", "url", "source", "lang", "language", "split", "date", "time"),
    *("timestamp", "license", "subset", "domain", "dataset", "author", "user", "title"),
}
IMAGE_COLUMNS = ("file_name", "filename", "image", "image_path", "file", "img", "path")
CAPTION_COLUMNS = ("caption", "captions", "text", "description", "title")
PROFILE_ROWS = 50_000  # whose cells decide what a column is
MAX_CLASSES = 1000  # of a label column that is inferred …
MAX_NUMBERS = 20  # … and holds numbers


class InferredName(str):
    """A column name inferred from the cells; saved in the settings of a run as a plain string."""


@dataclass(frozen=True, slots=True)
class Roles:
    """The kind of data that a table holds, and the column of each role."""

    kind: str
    columns: Mapping[str, str]  # role → name of the column
    inferred: frozenset[str] = field(default_factory=frozenset)  # roles inferred from the cells
    unused: tuple[str, ...] = ()

    @property
    def to_save(self) -> Mapping[str, str]:
        """The columns for the settings of a run, if some are inferred."""
        if not self.inferred and "text2" not in self.columns:
            return {}
        return {
            role: InferredName(name) if role in self.inferred else name
            for role, name in self.columns.items()
        }

    @property
    def note(self) -> str:
        """The roles for a description: "; text=review, label=stars (inferred); left out: id"."""
        roles = ", ".join(
            f"{role}={name}{' (inferred)' if role in self.inferred else ''}"
            for role, name in self.columns.items()
        )
        names = ", ".join(self.unused[:8]) + (", …" if len(self.unused) > 8 else "")
        left_out = f"left out: {names}" if self.unused else ""
        return "".join(f"; {part}" for part in (roles, left_out) if part)


def find_roles(
    table: Table, named_columns: Mapping[str, str | int], kind: str | None
) -> Roles | None:
    """The roles of the columns of a table, for data of a `kind` if one is asked for.

    `named_columns` are those that the user has named or numbered, by role. None if the table is
    not understood.
    """
    named = {role: table.columns[table.column(str(name))] for role, name in named_columns.items()}
    if kind is not None:
        _check_named(table, named, kind)
    profiles = _profiles(table)
    kinds = [kind] if kind is not None else _possible_kinds(named)
    if kind is None and not named and _is_flawed_series(profiles):
        kinds = ["series"]  # reading it reports each cell that is not a number, with its line
    for candidate in kinds:
        result = _FINDERS[candidate](table, dict(named), profiles, kind is not None)
        if result is not None:
            columns, inferred = result
            inferred |= {
                role for role, name in named_columns.items() if isinstance(name, InferredName)
            }
            unused = () if candidate == "series" else table.columns
            unused = tuple(name for name in unused if name not in columns.values())
            return Roles(candidate, columns, frozenset(inferred), unused)
    return None


def find_input(
    table: Table, kind: str, column: str | None, usual: str | int | None = None
) -> tuple[str, str]:
    """The column to predict from, and a note if it is inferred.

    `column` if given, the one that the run was trained on (`usual`), a common name, the only
    column, or the only one of prose; otherwise an error lists the columns.
    """
    if column is not None:
        return table.columns[table.column(column)], ""
    if str(usual) in table.columns:
        return str(usual), ""
    profiles = _profiles(table)
    names = {"pairs": [source for source, _ in PAIRS], "tags": [*WORDS, *TEXT]}.get(kind, TEXT)
    if (found := _by_name(profiles, names)) is not None:
        return found, ""
    if len(profiles) == 1:
        return profiles[0].name, ""
    prose = [p.name for p in profiles if p.is_prose and p.words >= 2]
    if len(prose) != 1:
        raise DataError(
            f"{table.path}: cannot tell which of its columns to predict from\n{table.listing()}\n"
            "name it: --column COLUMN"
        )
    return prose[0], " (inferred)"


def ambiguous_table(table: Table, kind: str | None = None) -> DataError:
    """The error for a table whose columns are ambiguous; it lists them."""
    if kind == "spans":
        return DataError(
            f"{table.path}: cannot tell which of its columns hold spans\n{table.listing()}\n"
            "spans need the columns question, context, and answers or answer"
        )
    if kind is None:
        return DataError(
            f"{table.path}: cannot tell what its columns are\n{table.listing()}\n"
            f"name them: {'; '.join(COLUMN_HINTS)}; task=causal trains on the file as plain text"
        )
    other = None
    with suppress(DataError):  # two texts and a class
        other = find_roles(table, {}, None)
    problem = f"cannot tell which of its columns hold {kind}"
    if other is not None and other.kind != kind:
        problem = f"it seems to hold {other.kind}{other.note}, and the task learns from {kind}"
    hints = [f"name them: {hint}" for hint in COLUMN_HINTS if _hint_applies(hint, kind)]
    if not hints:
        hints = ["a series is a table with columns of numbers, a row for each time"]
    return DataError(f"{table.path}: {problem}\n{table.listing()}\n{hints[0]}")


def _hint_applies(hint: str, kind: str) -> bool:
    roles = [role for role in ROLES.get(kind, ()) if role != "text2" or "text2" in hint]
    return all(f"data.{role}=" in hint for role in roles) and hint.count("COLUMN") == len(roles)


def _possible_kinds(named: Mapping[str, str]) -> list[str]:
    """The kinds to try, in this order: those with all the roles that the user has named."""
    order = ("spans", "captions", "tags", "scores", "labels", "pairs", "series", "text")
    kinds = [kind for kind in order if set(named) <= set(ROLES[kind])]
    if not kinds:
        settings = " and ".join(f"data.{role}" for role in named)
        raise ConfigError(f"{settings} cannot be combined; {'; '.join(COLUMN_HINTS)}")
    return kinds


def _check_named(table: Table, named: Mapping[str, str], kind: str) -> None:
    wrong = [role for role in named if role not in ROLES.get(kind, ())]
    if kind in ROLES and wrong:
        roles = " and ".join(f"data.{role}" for role in ROLES[kind]) or "none"
        raise ConfigError(
            f"data.{wrong[0]}={named[wrong[0]]!r} names a column, but the task learns from {kind};"
            f"\ncolumns of {kind} are named by: {roles}"
        )


@dataclass(frozen=True, slots=True)
class Profile:
    """What the cells of a column look like."""

    name: str
    filled: int  # cells that are not empty
    distinct: int
    is_list: bool
    is_numeric: bool
    numbers: float  # share of the cells that are numbers
    is_whole: bool  # all numbers are whole
    length: float  # characters of a cell, on average
    words: float
    letters: float  # share of the characters other than spaces

    @property
    def is_prose(self) -> bool:
        """Strings, mostly of letters, mostly different."""
        return (
            not (self.is_list or self.is_numeric)
            and self.letters >= 0.5
            and 2 * self.distinct > self.filled
        )

    @property
    def is_label(self) -> bool:
        """Few distinct values, so that a value has four cells or more on average."""
        if self.is_list or not self.distinct >= 2 or self.length > 40:
            return False
        if self.is_numeric and not (self.is_whole and self.distinct <= MAX_NUMBERS):
            return False
        return self.distinct <= min(MAX_CLASSES, max(2, self.filled // 4)) < self.filled


def _profiles(table: Table) -> list[Profile]:
    rows = [row for _, row in islice(table.rows(), PROFILE_ROWS)]
    return [_profile(name, [row[i] for row in rows]) for i, name in enumerate(table.columns)]


def _profile(name: str, cells: Sequence[Any]) -> Profile:
    filled = [cell for cell in cells if cell is not None and str(cell).strip()]
    texts = [cell if isinstance(cell, str) else str(cell) for cell in filled]
    sample = texts[:: max(1, len(texts) // 1000)]
    characters = [char for text in sample for char in text[:200] if not char.isspace()]
    numeric = bool(filled) and all(map(is_number, filled))
    return Profile(
        name=name,
        filled=len(filled),
        distinct=len(set(texts)),
        is_list=bool(filled) and all(isinstance(cell, list) for cell in filled),
        is_numeric=numeric,
        numbers=sum(is_number(cell) or has_comma(cell) for cell in filled) / max(1, len(filled)),
        is_whole=all(float(cell).is_integer() for cell in filled if is_number(cell)),
        length=sum(map(len, sample)) / max(1, len(sample)),
        words=sum(len(text.split()) for text in sample) / max(1, len(sample)),
        letters=sum(map(str.isalpha, characters)) / max(1, len(characters)),
    )


Columns = tuple[dict[str, str], set[str]] | None  # role → column, and the roles that are inferred


def _is_flawed_series(profiles: Sequence[Profile]) -> bool:
    """Whether columns hold dates, or numbers except in a few cells, and some have such cells."""
    flawed = [p for p in profiles if MIN_NUMERIC_FRACTION <= p.numbers < 1]
    others = [p for p in profiles if p.numbers < MIN_NUMERIC_FRACTION]
    return bool(flawed) and all(p.letters < 0.2 for p in others)


def _by_name(profiles: Sequence[Profile], names: Sequence[str]) -> str | None:
    lower = {profile.name.lower(): profile.name for profile in reversed(profiles)}
    return next((lower[name] for name in names if name in lower), None)


def _label_candidates(profiles: Sequence[Profile]) -> list[str]:
    """Label candidates: few distinct values, not a nested key, not a name of metadata."""
    return [
        p.name
        for p in profiles
        if p.is_label and p.name.lower() not in METADATA and "." not in p.name
    ]


def _longest(profiles: Sequence[Profile]) -> str | None:
    """The column with the longest prose; columns of several words are preferred."""
    prose = [profile for profile in profiles if profile.is_prose]
    best = max(prose, key=lambda profile: (profile.words >= 2, profile.length), default=None)
    return best.name if best else None


def _find_labels(
    table: Table, named: dict[str, str], profiles: list[Profile], requested: bool
) -> Columns:
    if not table.header and len(profiles) == 2 and requested:
        return {"text": "1", "label": "2"} | named, set()
    inferred = set()
    if "label" not in named:
        label = _by_name([p for p in profiles if p.name not in named.values()], LABEL)
        if label is None:
            taken = {named.get("text") or _by_name(profiles, TEXT), named.get("text2")}
            taken |= set(_text_pair(profiles) or ())
            candidates = [name for name in _label_candidates(profiles) if name not in taken]
            if len(candidates) != 1:
                return None
            label = candidates[0]
            inferred.add("label")
        named["label"] = label
    rest = [p for p in profiles if p.name != named["label"]]
    if not {"text", "text2"} & set(named) and (pair := _text_pair(rest)):
        named |= dict(zip(("text", "text2"), pair, strict=True))
    if "text" not in named:
        text = _by_name(rest, TEXT)
        if text is None:
            text = _longest([p for p in rest if p.name != named.get("text2")])
            if text is not None and "text2" not in named:
                _refuse_other_text(table, text, named["label"], rest, requested)
            inferred.add("text")
        if text is None:
            return None
        named["text"] = text
    if inferred == {"label", "text"} and not requested and not table.header:
        # Two columns of words without names are pairs, unless one is surely a label.
        label_profile = next(p for p in profiles if p.name == named["label"])
        if label_profile.distinct * 10 > label_profile.filled:
            return None
    return {role: named[role] for role in ROLES["labels"] if role in named}, inferred


def _find_scores(
    table: Table, named: dict[str, str], profiles: list[Profile], requested: bool
) -> Columns:
    """One or two columns of texts, and one of numbers, which are not whole unless asked for."""
    inferred = set()
    numbers = [p for p in profiles if p.is_numeric and (requested or not p.is_whole)]
    flawed = [  # reading them reports the cells that are not numbers
        p
        for p in profiles
        if MIN_NUMERIC_FRACTION <= p.numbers < 1 and (p.name.lower() in SCORE or not p.is_whole)
    ]
    numbers += flawed
    if "label" not in named:
        label = None if requested else _by_name(profiles, LABEL)
        if label is not None and label not in [p.name for p in numbers]:
            return None  # classes, beside which the number is a weight or a confidence
        known = _by_name(numbers, (*SCORE, *LABEL))
        others = [p.name for p in numbers if p.name.lower() not in METADATA]
        if known is None and len(others) != 1:
            return None
        classes = _label_candidates([p for p in profiles if p not in numbers])
        if known is None and classes and not requested:
            return None
        named["label"] = known or others[0]
        inferred |= {"label"} if known is None else set()
    elif not requested and named["label"] not in [p.name for p in numbers]:
        return None
    rest = [p for p in profiles if p.name not in named.values()]
    if "text" not in named and "text2" not in named:
        pair, text = _text_pair(rest), _by_name(rest, TEXT)
        prose = [p.name for p in rest if p.is_prose and p.words >= 2]
        prose = [name for name in prose if name.lower() not in METADATA]
        if pair is None and text is None:
            if not 1 <= len(prose) <= 2:
                return None
            inferred |= {"text", "text2"} if len(prose) == 2 else {"text"}
        named |= dict(zip(("text", "text2"), pair or ([text] if text else prose), strict=False))
    if "text" not in named:
        return None
    return {role: named[role] for role in ROLES["scores"] if role in named}, inferred


def _refuse_other_text(
    table: Table, text: str, label: str, profiles: Sequence[Profile], requested: bool
) -> None:
    """Raise if another column holds texts as well: a class may belong to one of them, or to both.

    Texts have three words or more on average, or a third of the length of the longest.
    """
    length = next(p.length for p in profiles if p.name == text)
    texts = [
        p.name
        for p in profiles
        if p.is_prose
        and p.name.lower() not in METADATA
        and (p.name == text or p.words >= 3 or 3 * p.length >= length)
    ]
    if len(texts) < 2:
        return
    first, second = texts[:2]
    choices = [
        f"data.text={first} data.text2={second} data.label={label} for pairs of texts with a class",
        f"data.text={first} data.label={label} for one of them",
        *(
            []
            if requested
            else [f"data.source={first} data.target={second} for pairs without {label}"]
        ),
    ]
    raise DataError(
        f"{table.path}: {', '.join(texts[:-1])} and {texts[-1]} hold texts, and {label} a class\n"
        f"{table.listing()}\nchoose: {'; '.join(choices)}"
    )


def _text_pair(profiles: Sequence[Profile]) -> tuple[str, str] | None:
    return text_pair([p.name for p in profiles if not (p.is_numeric or p.is_list)])


def text_pair(columns: Sequence[str]) -> tuple[str, str] | None:
    """Two columns of texts that a class belongs to, by their names.

    Usual names, or names that are equal but for an ending of 1 and 2, or of a and b.

    >>> text_pair(["id", "phrase_a", "phrase_b"])
    ('phrase_a', 'phrase_b')
    """
    lower = {name.lower(): name for name in reversed(columns)}
    for first, second in TEXT_PAIRS:
        if first in lower and second in lower:
            return lower[first], lower[second]
    for name, column in lower.items():
        for ending, other in (("1", "2"), ("a", "b")):
            partner = lower.get(name[:-1] + other)
            if name.endswith(ending) and len(name) > 1 and partner:
                return column, partner
    return None


def _find_pairs(
    table: Table, named: dict[str, str], profiles: list[Profile], requested: bool
) -> Columns:
    if set(named) == {"source", "target"}:
        return named, set()
    if not named:
        for source, target in PAIRS:
            columns = _by_name(profiles, [source]), _by_name(profiles, [target])
            if columns[0] and columns[1]:
                return {"source": columns[0], "target": columns[1]}, set()
        if requested and _holds_classes(table, profiles):
            return None
        nested = [p.name for p in profiles if p.name.startswith("translation.")]
        if len(nested) == 2:
            return {"source": nested[0], "target": nested[1]}, set()
    numbers = all(p.is_numeric for p in profiles)
    if len(profiles) == 2 and not numbers and (requested or not table.header):
        both = [p.name for p in profiles]
    else:
        both = [p.name for p in profiles if p.is_prose and p.name.lower() not in METADATA]
    both = [name for name in both if name not in named.values()]
    if len(both) + len(named) != 2:
        return None
    inferred_columns = iter(both)
    roles = {role: named.get(role) or next(inferred_columns) for role in ("source", "target")}
    return roles, set(roles) - set(named) if table.header else set()


def _holds_classes(table: Table, profiles: Sequence[Profile]) -> bool:
    """Whether a column is a label: by its name, or few values that repeat ten times on average."""
    named = table.header and _by_name(profiles, LABEL) is not None
    labels = _label_candidates(profiles)
    return named or any(p.name in labels and 10 * p.distinct <= p.filled for p in profiles)


def _find_tags(
    table: Table, named: dict[str, str], profiles: list[Profile], requested: bool
) -> Columns:
    lists = [p for p in profiles if p.is_list]
    words = named.get("text") or _by_name(lists, WORDS)
    tags = named.get("tags") or _by_name([p for p in lists if p.name != words], TAGS)
    if words is None or tags is None:
        return None
    return {"text": words, "tags": tags}, set()


def _find_text(
    table: Table, named: dict[str, str], profiles: list[Profile], requested: bool
) -> Columns:
    if "text" in named:
        return named, set()
    if not table.header or (not requested and _label_candidates(profiles)):
        return None
    text = _by_name(profiles, TEXT)
    if text is not None:
        return {"text": text}, set()
    prose = [p.name for p in profiles if p.is_prose and p.words >= 2]
    return ({"text": prose[0]}, {"text"}) if len(prose) == 1 else None


def _find_series(
    table: Table, named: dict[str, str], profiles: list[Profile], requested: bool
) -> Columns:
    others = [p for p in profiles if p.numbers < MIN_NUMERIC_FRACTION]
    dates_or_groups = all(p.letters < 0.2 or p.is_label or p.distinct < 2 for p in others)
    is_series = len(others) < len(profiles) and (requested or dates_or_groups)
    return ({}, set()) if is_series else None


def _find_spans(
    table: Table, named: dict[str, str], profiles: list[Profile], requested: bool
) -> Columns:
    names = {
        "question": ["question"],
        "context": ["context"],
        "answers": ["answers.text", "answers", "answer", "answer_text"],
        "starts": ["answers.answer_start", "answer_start"],
        "id": ["id"],
    }
    found = {role: _by_name(profiles, known) for role, known in names.items()}
    columns = {role: name for role, name in found.items() if name is not None}
    if not {"question", "context", "answers"} <= set(columns):
        return None
    answers = next(p for p in profiles if p.name == columns["answers"])
    if answers.is_label and not requested:  # classes (yes, no, maybe) are in no context
        answer, context = (table.column(columns[role]) for role in ("answers", "context"))
        rows = [row for _, row in islice(table.rows(), 100) if row[answer]]
        if not any(str(row[answer]) in str(row[context]) for row in rows):
            return None
    return columns, set()


def _find_captions(
    table: Table, named: dict[str, str], profiles: list[Profile], requested: bool
) -> Columns:
    texts = [profile for profile in profiles if not profile.is_numeric]
    columns = {
        "source": named.get("source") or _by_name(texts, IMAGE_COLUMNS),
        "target": named.get("target") or _by_name(texts, CAPTION_COLUMNS),
        "group": _by_name(profiles, ["group"]),
    }
    if columns["source"] is None or columns["target"] is None:
        return None
    index = table.column(columns["source"])
    cells = [str(row[index]).lower() for _, row in islice(table.rows(), 20) if row[index]]
    if not cells or not all(cell.endswith(IMAGE_SUFFIXES) for cell in cells):
        return None
    return {role: name for role, name in columns.items() if name is not None}, set()


_FINDERS = {
    "captions": _find_captions,
    "spans": _find_spans,
    "labels": _find_labels,
    "scores": _find_scores,
    "pairs": _find_pairs,
    "tags": _find_tags,
    "text": _find_text,
    "series": _find_series,
}
