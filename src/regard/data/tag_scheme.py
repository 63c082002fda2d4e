"""Tags that mark spans: IOB1, IOB2, BILOU and BIOES, all read as IOB2."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from regard.errors import DataError

_TAG = re.compile(r"([BILUES])-(.+)")
_TO_IOB2 = {"B": "B", "I": "I", "L": "I", "E": "I", "U": "B", "S": "B"}


@dataclass(frozen=True, slots=True)
class TagScheme:
    """The scheme of some texts' tags, the tags as IOB2, and where they break the scheme."""

    name: str | None  # None: the tags mark no spans (parts of speech)
    tags: Sequence[Sequence[str]]
    invalid: Sequence[int]  # for each invalid transition, the index of its text

    def note(self, locations: Sequence[str]) -> str:
        """The scheme for a description; `locations` are those of the texts."""
        if self.name is None:
            return ""
        note = f"; {self.name}" + ("" if self.name == "IOB2" else " tags, read as IOB2")
        if not self.invalid:
            return note
        location = locations[self.invalid[0]].rsplit(", ", 1)[-1]
        count = f"{len(self.invalid):,} invalid transition{'s' if len(self.invalid) > 1 else ''}"
        return f"{note}; {count} (the first in the text at {location})"


def to_iob2(sequences: Sequence[Sequence[str]]) -> TagScheme:
    """Detect the tag scheme of tag sequences, find its violations, and convert the tags to IOB2.

        IOB2    B-x begins a span of kind x, I-x continues it
        IOB1    I-x begins it too; B-x only directly after a span of the same kind
        BILOU   L-x ends a span, U-x is a span of one word
        BIOES   the same with E-x and S-x

    >>> to_iob2([["I-place", "I-place", "B-place", "O"]])
    TagScheme(name='IOB1', tags=[['B-place', 'I-place', 'B-place', 'O']], invalid=[])
    """
    matches = {tag: _TAG.fullmatch(tag) for tags in sequences for tag in tags if tag != "O"}
    prefixes = {match[1] for match in matches.values() if match is not None}
    if not matches or None in matches.values():
        return TagScheme(None, sequences, [])
    if prefixes <= {*"BI"}:
        return _iob(sequences)
    for name, ends in (("BILOU", "LU"), ("BIOES", "ES")):
        if prefixes <= {*"BI", *ends}:
            invalid = [
                index
                for index, tags in enumerate(sequences)
                for before, tag in zip(["O", *tags], [*tags, "O"], strict=True)
                if not _follows(before, tag, ends)
            ]
            converted = [
                [tag if tag == "O" else _TO_IOB2[tag[0]] + tag[1:] for tag in tags]
                for tags in sequences
            ]
            return TagScheme(name, converted, invalid)
    return TagScheme(None, sequences, [])


def _follows(before: str, tag: str, ends: str) -> bool:
    """Whether a tag may follow another in BILOU (ends "LU") or BIOES ("ES")."""
    if before[0] in "BI":
        return tag[0] in ("I", ends[0]) and tag[1:] == before[1:]
    return tag[0] in ("O", "B", ends[1])


def _iob(sequences: Sequence[Sequence[str]]) -> TagScheme:
    starts = [  # I-x that does not continue a span: invalid in IOB2, the rule in IOB1
        index
        for index, tags in enumerate(sequences)
        for before, tag in _transitions(tags)
        if tag[0] == "I" and before[1:] != tag[1:]
    ]
    has_iob2_starts = any(  # B-x that IOB1 would write as I-x
        tag[0] == "B" and before[1:] != tag[1:]
        for tags in sequences
        for before, tag in _transitions(tags)
    )
    if has_iob2_starts or not starts:
        return TagScheme("IOB2", sequences, starts)
    converted = [
        [
            f"B{tag[1:]}" if tag != "O" and before[1:] != tag[1:] else tag
            for before, tag in _transitions(tags)
        ]
        for tags in sequences
    ]
    return TagScheme("IOB1", converted, [])


def _transitions(tags: Sequence[str]) -> Iterator[tuple[str, str]]:
    return zip(["O", *tags[:-1]], tags, strict=True)


def check_classes(path: str, sequences: Sequence[Sequence[str]], hint: str) -> None:
    """Raise if all tags are equal, or so many that the column probably holds words or numbers.

    n words may have max(n / 10, min(10, 3 n / 4), 4) classes.
    """
    words = sum(map(len, sequences))
    classes = {tag: None for tags in sequences for tag in tags}
    if len(classes) == 1:
        raise DataError(
            f"{path}: every word has the same class, {next(iter(classes))!r}; classification needs "
            f"two or more\n{hint}"
        )
    if len(classes) <= max(words / 10, min(10, 3 / 4 * words), 4):
        return
    sample = ", ".join(map(repr, list(classes)[:6]))
    raise DataError(
        f"{path}: the tags of {words:,} words have {len(classes):,} classes, more than a tenth: "
        f"{sample}, …\n{hint}"
    )
