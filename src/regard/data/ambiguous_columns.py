"""The error for a table whose columns are ambiguous: the reason, and the settings that decide."""

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice

from regard.data.column_profiles import Profile, read_profiles
from regard.data.columns import (
    COLUMN_HINTS,
    METADATA_COLUMNS,
    ROLES,
    columns_of_texts,
    find_by_name,
    find_roles,
    image_column,
    label_candidates,
    longest_prose,
)
from regard.data.tables import LABEL_COLUMNS, TEXT_COLUMNS, Table, is_number
from regard.data.text_files import preview
from regard.errors import DataError

_KINDS_WITH_REASON = ("labels", "scores", "pairs", "sentences")
Choice = tuple[str, str]  # a kind of data, and the settings that choose it


def ambiguous_table_error(
    table: Table, kind: str | None, named_columns: Mapping[str, str | int]
) -> DataError:
    """The error for a table whose columns are ambiguous; it lists them.

    `kind` is the kind of data that the task learns from, if it is known, and `named_columns` are
    the columns that the user has given, by role.
    """
    if kind == "spans":
        return DataError(
            f"{table.path}: cannot tell which of its columns hold spans\n{table.listing()}\n"
            "spans need the columns question, context, and answers or answer"
        )
    if (line := single_line(table)) is not None:
        return DataError(f"{table.path} {line}")
    named = {role: table.columns[table.column(str(name))] for role, name in named_columns.items()}
    reason, choices = _explain(table, named, kind)
    if kind is None:
        first, *others = [choice for _, choice in choices]
        alternatives = f"\nor: {'; '.join(others)}" if others else ""
        return DataError(
            f"{table.path}: cannot tell what its columns are: {reason}\n{table.listing()}\n"
            f"choose: {first}{alternatives}"
        )
    other = None
    with suppress(DataError):  # raised for two columns of texts and a class
        other = find_roles(table, {}, None)
    if other is not None and other.kind != kind:
        problem = f"it seems to hold {other.kind}{other.note}, and the task learns from {kind}"
    else:
        problem = f"cannot tell which of its columns hold {kind}"
        problem += f": {reason}" if kind in _KINDS_WITH_REASON else ""
    choosable = {"sentences": "pairs"}.get(kind, kind)
    hints = [f"for example: {choice}" for name, choice in choices if name == choosable]
    hints += [f"name them: {hint}" for hint in COLUMN_HINTS if _hint_applies(hint, kind)]
    hints += ["a series is a table with columns of numbers, a row for each time"]
    return DataError(f"{table.path}: {problem}\n{table.listing()}\n{hints[0]}")


def single_line(table: Table) -> str | None:
    """The problem of a table with a single line, which may be a header; None for other tables."""
    rows = [row for _, row in islice(table.rows(), 2)]
    if table.header or len(rows) != 1 or any(map(is_number, rows[0])):
        return None
    line = preview(", ".join(rows[0]))
    return f"has one line, {line}, perhaps a header, and no rows below it; add a row per example"


def _explain(table: Table, named: Mapping[str, str], kind: str | None) -> tuple[str, list[Choice]]:
    """Why the roles of the columns are ambiguous, and what decides, the most plausible first."""
    profiles = [p for p in read_profiles(table) if p.name not in named.values()]
    for side in ("source", "target"):
        if side in named:
            return _explain_pairs(profiles, named, side)
    if "tags" in named:
        words = f"{_settings(text='COLUMN', tags=named['tags'])} for words with a tag each"
        return "data.tags needs a column of words too, data.text", [("tags", words)]
    image = image_column(table, profiles)
    profiles = [p for p in profiles if p.name != image]
    label = named.get("label") or find_by_name(profiles, LABEL_COLUMNS)
    others = [p for p in profiles if p.name != label]
    text = named.get("text") or find_by_name(others, TEXT_COLUMNS) or longest_prose(others)
    texts = [] if text is None or "text" in named else columns_of_texts(others, text)
    numeric = [p.name for p in others if p.is_numeric and p.name.lower() not in METADATA_COLUMNS]
    labels = [label] if label else [n for n in label_candidates(others) if n not in (text, *texts)]
    if text is None:
        reason = "no column holds texts (mostly letters, and mostly different)"
        choices = _choices_without_text(others, labels, numeric)
    else:
        candidates = {"scores": numeric, "pairs": [], "sentences": []}.get(kind or "", labels)
        reason = _reason(table, texts or [text], candidates, kind)
        choices = _choices(text, texts[:2], named, labels, numeric)
        if image is not None:
            settings = f"{_settings(source=image, target=text)} for images and their captions"
            choices.insert(0, ("captions", settings))
            if len(texts) > 1:
                reason = f"{_could_be(texts)} the caption of {image}"
    return reason, choices


def _reason(table: Table, texts: Sequence[str], candidates: Sequence[str], kind: str | None) -> str:
    if not table.header:  # the names of the columns are numbers
        texts, candidates = ([f"column {name}" for name in names] for names in (texts, candidates))
    noun, content = ("number", "numbers") if kind == "scores" else ("label", "classes")
    if len(candidates) > 1:
        return f"{_could_be(candidates)} the {noun}"
    if candidates:
        return f"without a header, {candidates[0]} may hold {content} or other texts"
    if kind in ("pairs", "sentences"):
        return f"{_list(texts)} hold texts" if len(texts) > 1 else f"only {texts[0]} holds texts"
    verb = "hold" if len(texts) > 1 else "holds"
    return f"{_list(texts)} {verb} texts, and no other column holds {content}"


def _choices(
    text: str,
    texts: Sequence[str],
    named: Mapping[str, str],
    labels: Sequence[str],
    numeric: Sequence[str],
) -> list[Choice]:
    """The choices for a table with a column of texts; `texts` are two, if it has several."""
    choices: list[Choice] = []
    pair = dict(zip(("text", "text2"), texts, strict=True)) if len(texts) == 2 else {}
    roles = {"text": text} | {role: named[role] for role in ("text2",) if role in named}
    noun = "pairs of texts" if "text2" in roles else "texts"
    labels = sorted(labels, key=lambda name: name in numeric)  # numbers may be no classes
    if "text2" in roles and not labels:
        labels = ["COLUMN"]
    if labels:
        label, *others = labels
        alternatives = ", ".join(_settings(label=name) for name in others[:3])
        note = f" (or {alternatives})" if others else ""
        settings = _settings(**roles, label=label)
        choices.append(("labels", f"{settings}{note} for {noun} with a class each"))
        if pair:
            settings = _settings(**pair, label=label)
            choices.append(("labels", f"{settings} for pairs of texts with a class each"))
    if len(texts) == 2:
        settings = _settings(source=texts[0], target=texts[1])
        choices.append(("pairs", f"{settings} for pairs of source and target"))
    if numeric:
        settings = f"{_settings(**roles, label=numeric[0])} task=text_regression"
        choices.append(("scores", f"{settings} for {noun} with a number each"))
    if "label" not in named and "text2" not in named:
        choices.append(("text", f"{_settings(text=text)} task=causal for language modelling"))
    return choices


def _choices_without_text(
    profiles: Sequence[Profile], labels: Sequence[str], numeric: Sequence[str]
) -> list[Choice]:
    label = labels[0] if len(labels) == 1 else "COLUMN"
    settings = _settings(text="COLUMN", label=label)
    choices = [("labels", f"{settings} for texts with a class each")]
    if len(profiles) > len(numeric) + 1:
        pair = _settings(source="COLUMN", target="COLUMN")
        choices.append(("pairs", f"{pair} for pairs, or for image files and captions"))
    if numeric:
        choices.append(("series", f"task=forecast for {_list(numeric[:3])} as a series"))
    return [*choices, ("text", "task=causal for language modelling of the file as plain text")]


def _explain_pairs(
    profiles: Sequence[Profile], named: Mapping[str, str], side: str
) -> tuple[str, list[Choice]]:
    other = "target" if side == "source" else "source"
    candidates = [p.name for p in profiles if p.is_prose and p.name.lower() not in METADATA_COLUMNS]
    reason = f"{_could_be(candidates)} the {other}" if candidates else "no other column holds texts"
    roles = {side: named[side], other: candidates[0] if candidates else "COLUMN"}
    settings = _settings(source=roles["source"], target=roles["target"])
    return reason, [("pairs", f"{settings} for pairs of source and target")]


def _settings(**columns: str) -> str:
    """The settings that name columns, as in a command line."""
    return " ".join(shlex.quote(f"data.{role}={name}") for role, name in columns.items())


def _could_be(names: Sequence[str]) -> str:
    return f"{_list(names)} could {'both' if len(names) == 2 else 'each'} be"


def _list(names: Sequence[str]) -> str:
    """The names of columns as an enumeration: "a, b and c"."""
    if len(names) > 5:
        return f"{', '.join(names[:5])}, … ({len(names)} columns)"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _hint_applies(hint: str, kind: str) -> bool:
    roles = [role for role in ROLES.get(kind, ()) if role != "text2" or "text2" in hint]
    return (
        all(f"data.{role}=" in hint for role in roles)
        and hint.count("COLUMN") == len(roles)
        and ("text_regression" in hint) == (kind == "scores")
    )
