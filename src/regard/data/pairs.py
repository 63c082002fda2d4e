"""Pairs of source and target sentences, read row by row."""

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import ClassVar

from regard.data.columns import Roles
from regard.data.digest import json_digest
from regard.data.tables import Table, text_cell
from regard.data.text_files import Scan, preview, read_lines, scan, stem
from regard.data.validation_split import describe_overlap, hash_threshold, row_hash
from regard.errors import DataError

Row = tuple[str, str]
NumberedPair = tuple[int, str, str]  # line number, source, target


@dataclass(frozen=True, slots=True)
class Pairs:
    """Source sentences and their targets; each call of `rows()` iterates from the start."""

    kind: ClassVar[str] = "pairs"
    name: str
    description: str
    count: int
    rows: Callable[[], Iterator[Row]] = field(repr=False)
    digest: str
    columns: Mapping[str, str] = field(default_factory=dict)  # of a table: source and target

    def split(self, fraction: float, seed: int) -> tuple["Pairs", "Pairs"]:
        """Training pairs, and about a `fraction` of the pairs for validation.

        A row is for validation if hash(seed, source) < fraction · 2^64, so equal sources are in the
        same split; each split gets at least one row.
        """
        hashes = array("Q", (row_hash(seed, source) for source, _ in self.rows()))
        threshold = hash_threshold(
            hashes,
            fraction,
            f"{self.name}: all {self.count} rows have the same source, so they cannot be split;"
            "\ngive more pairs, or separate validation files",
        )
        validation_count = sum(value < threshold for value in hashes)

        def subset(count: int, is_validation: bool, description: str) -> Pairs:
            return Pairs(
                name=self.name,
                description=description,
                count=count,
                rows=lambda: (
                    row
                    for row in self.rows()
                    if (row_hash(seed, row[0]) < threshold) == is_validation
                ),
                digest=json_digest(self.digest, seed, threshold, is_validation),
            )

        count = self.count - validation_count
        return (
            subset(count, False, f"{self.description}; {count:,} for training"),
            subset(validation_count, True, f"{validation_count:,} of the {self.count:,} pairs"),
        )

    def first_rows(self, count: int) -> list[str]:
        """The first pairs, for a preview."""
        rows = islice(self.rows(), count)
        return [f"{preview(source)} → {preview(target)}" for source, target in rows]

    def lowercase(self) -> "Pairs":
        """The same pairs in lower case."""
        return Pairs(
            name=self.name,
            description=f"{self.description}, in lower case",
            count=self.count,
            rows=lambda: ((source.lower(), target.lower()) for source, target in self.rows()),
            digest=json_digest(self.digest, "lower"),
            columns=self.columns,
        )

    def note_overlap(self, train: "Pairs") -> "Pairs":
        """These validation pairs; the description says how many are in the training data."""
        hashes = [row_hash(0, json.dumps(row)) for row in self.rows()]
        validation = set(hashes)
        train_hashes = (row_hash(0, json.dumps(row)) for row in train.rows())
        common = {value for value in train_hashes if value in validation}
        count = sum(value in common for value in hashes)
        return describe_overlap(self, count, self.count, "pairs")

    def fingerprint(self) -> str:
        """A sha256 of the content."""
        return self.digest


def from_rows(name: str, description: str, rows: Iterable[Row]) -> Pairs:
    """Pairs that are already in memory."""
    pairs = list(rows)
    description = f"pairs, {len(pairs):,} rows, {description}"
    return Pairs(name, description, len(pairs), lambda: iter(pairs), json_digest(pairs))


def from_table(table: Table, roles: Roles) -> Pairs:
    """The sources and targets of a table."""
    source, target = (table.column(roles.columns[role]) for role in ("source", "target"))

    def numbered_pairs() -> Iterator[NumberedPair]:
        for number, row in table.rows():
            location = table.location(number)
            yield number, text_cell(location, row[source]), text_cell(location, row[target])

    plain = not table.header and len(table.columns) == 2 and source < target
    digest = json_digest(table.digest) if plain else json_digest(table.digest, source, target)
    note = "" if plain else roles.note
    pairs = _from_numbered(
        table.name, f"{table.format}{note}", numbered_pairs, digest, table.short_location
    )
    return replace(pairs, columns=roles.columns_to_save)


def from_parallel(source: Path, target: Path) -> Pairs:
    """Two files; line i of one is the translation of line i of the other."""
    scans = scan(source), scan(target)

    def numbered_pairs() -> Iterator[NumberedPair]:
        return _parallel_rows(source, target, *scans)

    digest = json_digest(scans[0].digest, scans[1].digest)
    return _from_numbered(stem(source), f"{source.name} to {target.name}", numbered_pairs, digest)


def _from_numbered(
    name: str,
    source_format: str,
    numbered_pairs: Callable[[], Iterator[NumberedPair]],
    digest: str,
    short_location: Callable[[int], str] = "line {}".format,
) -> Pairs:
    """Read all lines once to check them; lines with an empty side are skipped and counted."""
    count = skipped = first_skipped = 0
    for number, source, target in numbered_pairs():
        if source.strip() and target.strip():
            count += 1
        else:
            skipped += 1
            first_skipped = first_skipped or number
    if not count:
        problem = f"each of the {skipped} rows has an empty side" if skipped else "it has no rows"
        raise DataError(f"{name}: {problem}; there is no pair")

    def rows() -> Iterator[Row]:
        return ((s, t) for _, s, t in numbered_pairs() if s.strip() and t.strip())

    description = f"pairs, {count:,} rows, {source_format}"
    if skipped:
        location = short_location(first_skipped)
        description += f"; skipped: {skipped:,} with an empty side (the first is {location})"
    return Pairs(name, description, count, rows, digest)


def _parallel_rows(source: Path, target: Path, *scans: Scan) -> Iterator[NumberedPair]:
    sources, targets = read_lines(source, scans[0]), read_lines(target, scans[1])
    for number, (source_line, target_line) in enumerate(zip_longest(sources, targets), 1):
        if source_line is None or target_line is None:
            extra = sum(1 for _ in (targets if source_line is None else sources))
            counts = [number - 1, number + extra]
            longer, line = (target, target_line) if source_line is None else (source, source_line)
            shorter = source if source_line is None else target
            raise DataError(
                f"parallel files differ in length: {longer} has {counts[1]} lines,"
                f" {shorter} has {counts[0]}"
                f"\nthe first line without a partner is line {number} of {longer}:"
                f" {preview(str(line))}"
            )
        yield number, source_line, target_line
