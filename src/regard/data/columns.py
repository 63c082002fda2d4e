"""The roles of the columns of a table: texts, labels, tags, the sides of pairs, or numbers.

Columns that the user names come first, then common column names, then the content of the cells.
The description of the data states the chosen columns; an ambiguous table is an error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, islice

from regard.data.column_profiles import Profile, read_profiles
from regard.data.tables import (
    IMAGE_SUFFIXES,
    LABEL_COLUMNS,
    MIN_NUMERIC_FRACTION,
    PAIR_COLUMNS,
    SCORE_COLUMNS,
    TAG_COLUMNS,
    TEXT_COLUMNS,
    TEXT_PAIR_COLUMNS,
    WORD_COLUMNS,
    Table,
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
    "sentences": ("source", "target"),  # only if the task learns from them: they look like pairs
    "spans": (),  # found by the column names of SQuAD in Hugging Face's datasets
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
METADATA_COLUMNS = {  # they describe an example, and are labels only if the user names them
    *("id", "idx", "index", "url", "source", "lang", "language", "split", "date", "time"),
    *("timestamp", "license", "subset", "domain", "dataset", "author", "user", "title"),
}
IMAGE_COLUMNS = ("file_name", "filename", "image", "image_path", "file", "img", "path")
CAPTION_COLUMNS = ("caption", "captions", "text", "description", "title")


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
    def columns_to_save(self) -> Mapping[str, str]:
        """The columns to save in the settings of a run.

        Empty if none is inferred and texts are not paired: the same table then gets the same roles.
        """
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
    """The roles of the columns of a table; None if they cannot be determined.

    `named_columns` are the columns that the user has given, by role, as names or numbers. `kind` is
    the kind of data that the task learns from, if it is known.
    """
    named = {role: table.columns[table.column(str(name))] for role, name in named_columns.items()}
    _check_distinct(table, named_columns, named)
    if kind is not None:
        _check_named(named, kind)
    profiles = read_profiles(table)
    kinds = [kind] if kind is not None else _possible_kinds(named)
    if kind is None and not named and _is_series_with_errors(profiles):
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
    table: Table, kind: str, column: str | None, training_column: str | int | None = None
) -> tuple[str, str]:
    """The column to predict from, and a note if it is inferred.

    It is `column` if given, else the column that the run was trained on, a column with a common
    name, the only column, or the only column of prose; otherwise an error lists the columns.
    """
    if column is not None:
        return table.columns[table.column(column)], ""
    if training_column is not None and (name := table.find(str(training_column))) is not None:
        return name, ""
    profiles = read_profiles(table)
    names = {
        "pairs": [source for source, _ in PAIR_COLUMNS],
        "tags": [*WORD_COLUMNS, *TEXT_COLUMNS],
    }.get(kind, TEXT_COLUMNS)
    if (name := find_by_name(profiles, names)) is not None:
        return name, ""
    if len(profiles) == 1:
        return profiles[0].name, ""
    prose = [p.name for p in profiles if p.is_prose and p.mean_words >= 2]
    if len(prose) != 1:
        raise DataError(
            f"{table.path}: cannot tell which of its columns to predict from\n{table.listing()}\n"
            "name it: --column COLUMN"
        )
    return prose[0], " (inferred)"


def _possible_kinds(named: Mapping[str, str]) -> list[str]:
    """The kinds to try, in this order: those with all the roles that the user has named."""
    order = ("spans", "captions", "tags", "scores", "labels", "pairs", "series", "text")
    kinds = [kind for kind in order if set(named) <= set(ROLES[kind])]
    if not kinds:
        settings = " and ".join(f"data.{role}" for role in named)
        raise ConfigError(f"{settings} cannot be combined; {'; '.join(COLUMN_HINTS)}")
    return kinds


def _check_distinct(
    table: Table, named_columns: Mapping[str, str | int], named: Mapping[str, str]
) -> None:
    for first, second in combinations(named, 2):
        if named[first] == named[second]:
            settings = [f"data.{role}={named_columns[role]}" for role in (first, second)]
            raise ConfigError(
                f"{' and '.join(settings)} name the same column of {table.path}; "
                f"each needs its own column\n{table.listing()}"
            )


def _check_named(named: Mapping[str, str], kind: str) -> None:
    wrong = [role for role in named if role not in ROLES.get(kind, ())]
    if kind in ROLES and wrong:
        roles = " and ".join(f"data.{role}" for role in ROLES[kind]) or "none"
        raise ConfigError(
            f"data.{wrong[0]}={named[wrong[0]]!r} names a column, but the task learns from {kind};"
            f"\ncolumns of {kind} are named by: {roles}"
        )


Columns = tuple[dict[str, str], set[str]] | None  # role → column, and the roles that are inferred


def _is_series_with_errors(profiles: Sequence[Profile]) -> bool:
    """Whether the table is a series in which some cells are not numbers.

    A few cells may be anything. More of them are missing values (NA), in a table of dates and
    numbers; beside dates, it may have columns of few values.
    """
    non_numeric = [p for p in profiles if not _is_numeric(p)]
    if any(p.is_mostly_numeric for p in profiles) and all(
        p.letter_fraction < 0.2 for p in non_numeric
    ):
        return True
    others = [p for p in non_numeric if not p.is_date]
    has_dates = len(others) < len(non_numeric)
    return any(p.has_missing_numbers for p in profiles) and (
        not others or (has_dates and all(p.is_label or p.distinct < 2 for p in others))
    )


def _is_numeric(profile: Profile) -> bool:
    """Whether a column may be a column of a series: nearly all its cells are numbers or missing."""
    return profile.numeric_fraction >= MIN_NUMERIC_FRACTION or profile.has_missing_numbers


def find_by_name(profiles: Sequence[Profile], names: Sequence[str]) -> str | None:
    """The column with the first of these names that the table has, ignoring case."""
    lower = {profile.name.lower(): profile.name for profile in reversed(profiles)}
    return next((lower[name] for name in names if name in lower), None)


def label_candidates(profiles: Sequence[Profile]) -> list[str]:
    """Columns that may be labels: few distinct values, not a nested key, not a name of metadata."""
    return [
        p.name
        for p in profiles
        if p.is_label and p.name.lower() not in METADATA_COLUMNS and "." not in p.name
    ]


def longest_prose(profiles: Sequence[Profile]) -> str | None:
    """The column with the longest prose; columns of several words are preferred."""
    prose = [profile for profile in profiles if profile.is_prose]
    best = max(prose, key=lambda p: (p.mean_words >= 2, p.mean_length), default=None)
    return best.name if best else None


def _find_labels(
    table: Table, named: dict[str, str], profiles: list[Profile], requested: bool
) -> Columns:
    if not table.header and len(profiles) == 2 and requested:
        return {"text": "1", "label": "2"} | named, set()
    inferred = set()
    if "label" not in named:
        label = find_by_name([p for p in profiles if p.name not in named.values()], LABEL_COLUMNS)
        if label is None:
            texts = {named.get("text") or find_by_name(profiles, TEXT_COLUMNS), named.get("text2")}
            texts |= set(_text_pair(profiles) or ())
            candidates = [name for name in label_candidates(profiles) if name not in texts]
            if len(candidates) != 1:
                return None
            label = candidates[0]
            inferred.add("label")
        named["label"] = label
    text_profiles = [p for p in profiles if p.name != named["label"]]
    if not {"text", "text2"} & set(named) and (pair := _text_pair(text_profiles)):
        named |= dict(zip(("text", "text2"), pair, strict=True))
    if "text" not in named:
        text = find_by_name(text_profiles, TEXT_COLUMNS)
        if text is None:
            text = longest_prose([p for p in text_profiles if p.name != named.get("text2")])
            if text is not None and "text2" not in named:
                _refuse_other_text(table, text, named["label"], text_profiles, requested)
            inferred.add("text")
        if text is None:
            return None
        named["text"] = text
    if inferred == {"label", "text"} and not requested and not table.header:
        # Without a header, two columns of words are pairs, unless one clearly holds labels.
        label_profile = next(p for p in profiles if p.name == named["label"])
        if label_profile.distinct * 10 > label_profile.filled:
            return None
    return {role: named[role] for role in ROLES["labels"] if role in named}, inferred


def _find_scores(
    table: Table, named: dict[str, str], profiles: list[Profile], requested: bool
) -> Columns:
    """One or two columns of texts, and one of numbers.

    A column of integers is taken only if scores are `requested`: they may be classes.
    """
    inferred = set()
    texts = {named.get("text"), named.get("text2")}
    profiles = [p for p in profiles if p.name not in texts]
    numbers = [p for p in profiles if p.is_numeric and (requested or not p.is_integer)]
    mostly_numeric = [  # reading them reports the cells that are not numbers
        p
        for p in profiles
        if p.is_mostly_numeric and (p.name.lower() in SCORE_COLUMNS or not p.is_integer)
    ]
    numbers += mostly_numeric
    if "label" not in named:
        label = None if requested else find_by_name(profiles, LABEL_COLUMNS)
        if label is not None and label not in [p.name for p in numbers]:
            return None  # the labels are classes, and the number is a weight or a confidence
        by_name = find_by_name(numbers, (*SCORE_COLUMNS, *LABEL_COLUMNS))
        candidates = [p.name for p in numbers if p.name.lower() not in METADATA_COLUMNS]
        if by_name is None and len(candidates) != 1:
            return None
        classes = label_candidates([p for p in profiles if p not in numbers])
        if by_name is None and classes and not requested:
            return None
        named["label"] = by_name or candidates[0]
        inferred |= {"label"} if by_name is None else set()
    elif not requested and named["label"] not in [p.name for p in numbers]:
        return None
    text_profiles = [p for p in profiles if p.name not in named.values()]
    if "text" not in named and "text2" not in named:
        pair, text = _text_pair(text_profiles), find_by_name(text_profiles, TEXT_COLUMNS)
        prose = [p.name for p in text_profiles if p.is_prose and p.mean_words >= 2]
        prose = [name for name in prose if name.lower() not in METADATA_COLUMNS]
        if pair is None and text is None:
            if not 1 <= len(prose) <= 2:
                return None
            inferred |= {"text", "text2"} if len(prose) == 2 else {"text"}
        named |= dict(zip(("text", "text2"), pair or ([text] if text else prose), strict=False))
    if "text" not in named:
        return None
    return {role: named[role] for role in ROLES["scores"] if role in named}, inferred


def columns_of_texts(profiles: Sequence[Profile], longest: str) -> list[str]:
    """The columns of texts: three words or more on average, or a third of the longest's length."""
    length = next(p.mean_length for p in profiles if p.name == longest)
    return [
        p.name
        for p in profiles
        if p.is_prose
        and p.name.lower() not in METADATA_COLUMNS
        and (p.name == longest or p.mean_words >= 3 or 3 * p.mean_length >= length)
    ]


def _refuse_other_text(
    table: Table, text: str, label: str, profiles: Sequence[Profile], requested: bool
) -> None:
    """Raise if another column holds texts too: a class may belong to one of them, or to both."""
    texts = columns_of_texts(profiles, text)
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

    They have common names, or names that differ only in their last character: 1 and 2, or a and b.

    >>> text_pair(["id", "phrase_a", "phrase_b"])
    ('phrase_a', 'phrase_b')
    """
    lower = {name.lower(): name for name in reversed(columns)}
    for first, second in TEXT_PAIR_COLUMNS:
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
        for source, target in PAIR_COLUMNS:
            columns = find_by_name(profiles, [source]), find_by_name(profiles, [target])
            if columns[0] and columns[1]:
                return {"source": columns[0], "target": columns[1]}, set()
        if requested and _holds_classes(table, profiles):
            return None
        nested = [p.name for p in profiles if p.name.startswith("translation.")]
        if len(nested) == 2:
            return {"source": nested[0], "target": nested[1]}, set()
    numbers = all(p.is_numeric for p in profiles)
    if len(profiles) == 2 and not numbers and (requested or not table.header):
        candidates = [p.name for p in profiles]
    else:
        candidates = [
            p.name for p in profiles if p.is_prose and p.name.lower() not in METADATA_COLUMNS
        ]
    candidates = [name for name in candidates if name not in named.values()]
    if len(candidates) + len(named) != 2:
        return None
    inferred_columns = iter(candidates)
    roles = {role: named.get(role) or next(inferred_columns) for role in ("source", "target")}
    return roles, set(roles) - set(named) if table.header else set()


def _holds_classes(table: Table, profiles: Sequence[Profile]) -> bool:
    """Whether a column is a label: by its name, or few values that repeat ten times on average."""
    named = table.header and find_by_name(profiles, LABEL_COLUMNS) is not None
    labels = label_candidates(profiles)
    return named or any(p.name in labels and 10 * p.distinct <= p.filled for p in profiles)


def _find_tags(
    table: Table, named: dict[str, str], profiles: list[Profile], requested: bool
) -> Columns:
    lists = [p for p in profiles if p.is_list]
    words = named.get("text") or find_by_name(lists, WORD_COLUMNS)
    tags = named.get("tags") or find_by_name([p for p in lists if p.name != words], TAG_COLUMNS)
    if words is None or tags is None:
        return None
    return {"text": words, "tags": tags}, set()


def _find_text(
    table: Table, named: dict[str, str], profiles: list[Profile], requested: bool
) -> Columns:
    if "text" in named:
        return named, set()
    if not table.header or (not requested and label_candidates(profiles)):
        return None
    text = find_by_name(profiles, TEXT_COLUMNS)
    if text is not None:
        return {"text": text}, set()
    prose = [p.name for p in profiles if p.is_prose and p.mean_words >= 2]
    return ({"text": prose[0]}, {"text"}) if len(prose) == 1 else None


def _find_series(
    table: Table, named: dict[str, str], profiles: list[Profile], requested: bool
) -> Columns:
    non_numeric = [p for p in profiles if not _is_numeric(p)]
    dates_or_groups = all(
        p.letter_fraction < 0.2 or p.is_label or p.distinct < 2 for p in non_numeric
    )
    is_series = len(non_numeric) < len(profiles) and (requested or dates_or_groups)
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
    matches = {role: find_by_name(profiles, known) for role, known in names.items()}
    columns = {role: name for role, name in matches.items() if name is not None}
    if not {"question", "context", "answers"} <= set(columns):
        return None
    answers = next(p for p in profiles if p.name == columns["answers"])
    if answers.is_label and not requested:  # classes (yes, no, maybe) are in no context
        answer, context = (table.column(columns[role]) for role in ("answers", "context"))
        rows = [row for _, row in islice(table.rows(), 100) if row[answer]]
        if not any(str(row[answer]) in str(row[context]) for row in rows):
            return None
    return columns, set()


def image_column(table: Table, profiles: Sequence[Profile]) -> str | None:
    """The column of image files: one with a common name, or else the only one that holds them."""
    images = {p.name: _image_fraction(table, p.name) for p in profiles}
    name = find_by_name([p for p in profiles if images[p.name] > 0.5], IMAGE_COLUMNS)
    columns = [column for column, fraction in images.items() if fraction == 1]
    return columns[0] if name is None and len(columns) == 1 else name


def _image_fraction(table: Table, name: str) -> float:
    """The fraction of the first cells of a column that are names of image files."""
    index = table.column(name)
    cells = [str(row[index]).lower() for _, row in islice(table.rows(), 20) if row[index]]
    return sum(cell.endswith(IMAGE_SUFFIXES) for cell in cells) / max(1, len(cells))


def _find_captions(
    table: Table, named: dict[str, str], profiles: list[Profile], requested: bool
) -> Columns:
    """A column of image files, and one of captions: by name, or the only one of prose."""
    profiles = [p for p in profiles if p.name != named.get("target")]
    source = named.get("source") or image_column(table, profiles)
    if source is None or _image_fraction(table, source) <= 0.5:
        return None
    candidates = [p for p in profiles if p.name != source and not p.is_numeric]
    target = named.get("target") or find_by_name(candidates, CAPTION_COLUMNS)
    inferred = set()
    if "source" not in named and source.lower() not in IMAGE_COLUMNS:
        inferred.add("source")
    if target is None:
        prose = [
            p.name for p in candidates if p.is_prose and p.name.lower() not in METADATA_COLUMNS
        ]
        if len(prose) != 1:
            return None
        target = prose[0]
        inferred.add("target")
    columns = {"source": source, "target": target, "group": find_by_name(profiles, ["group"])}
    return {role: name for role, name in columns.items() if name is not None}, inferred


# By kind of data: find the columns, given the table, the columns that the user has named, the
# profiles of all columns, and whether the task learns from this kind.
_FINDERS = {
    "captions": _find_captions,
    "spans": _find_spans,
    "labels": _find_labels,
    "scores": _find_scores,
    "pairs": _find_pairs,
    "sentences": _find_pairs,
    "tags": _find_tags,
    "text": _find_text,
    "series": _find_series,
}
