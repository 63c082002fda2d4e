"""Tags that mark spans: IOB1, IOB2, BILOU and BIOES, all read as IOB2."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from regard.errors import DataError

_TAG = re.compile(r"([BILUES])-(.+)")
_TO_IOB2 = {"B": "B", "I": "I", "L": "I", "E": "I", "U": "B", "S": "B"}


@dataclass(frozen=True, slots=True)
class TagScheme:
    """The tag scheme of texts, their tags converted to IOB2, and the invalid transitions."""

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

        IOB2    B-x begins a span of type x, I-x continues it
        IOB1    I-x begins it too; B-x only directly after a span of the same type
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
    for name, end_prefixes in (("BILOU", "LU"), ("BIOES", "ES")):
        if prefixes <= {*"BI", *end_prefixes}:
            invalid = [
                index
                for index, tags in enumerate(sequences)
                for previous, tag in zip(["O", *tags], [*tags, "O"], strict=True)
                if not _may_follow(previous, tag, end_prefixes)
            ]
            converted = [
                [tag if tag == "O" else _TO_IOB2[tag[0]] + tag[1:] for tag in tags]
                for tags in sequences
            ]
            return TagScheme(name, converted, invalid)
    return TagScheme(None, sequences, [])


def _may_follow(previous: str, tag: str, end_prefixes: str) -> bool:
    """Whether a tag may follow another in BILOU (`end_prefixes` "LU") or BIOES ("ES")."""
    if previous[0] in "BI":
        return tag[0] in ("I", end_prefixes[0]) and tag[1:] == previous[1:]
    return tag[0] in ("O", "B", end_prefixes[1])


def _iob(sequences: Sequence[Sequence[str]]) -> TagScheme:
    starts = [  # I-x that does not continue a span: invalid in IOB2, the rule in IOB1
        index
        for index, tags in enumerate(sequences)
        for previous, tag in _transitions(tags)
        if tag[0] == "I" and previous[1:] != tag[1:]
    ]
    has_iob2_starts = any(  # B-x that IOB1 would write as I-x
        tag[0] == "B" and previous[1:] != tag[1:]
        for tags in sequences
        for previous, tag in _transitions(tags)
    )
    if has_iob2_starts or not starts:
        return TagScheme("IOB2", sequences, starts)
    converted = [
        [
            f"B{tag[1:]}" if tag != "O" and previous[1:] != tag[1:] else tag
            for previous, tag in _transitions(tags)
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
