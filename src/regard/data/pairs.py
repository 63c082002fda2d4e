"""Pairs of sentences, a source and its target, read row by row."""

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import ClassVar

from regard.data.text import stem
from regard.data.text_files import Scan, open_bytes, scan
from regard.errors import ConfigError, DataError

Row = tuple[str, str]
Numbered = tuple[int, str, str]  # line number, source, target


@dataclass(frozen=True, slots=True)
class Pairs:
    """Sentences with what each is to become; `rows()` gives them anew each time it is called."""

    kind: ClassVar[str] = "pairs"
    name: str
    description: str
    count: int
    rows: Callable[[], Iterator[Row]] = field(repr=False)
    digest: str

    def split(self, fraction: float, seed: int) -> tuple["Pairs", "Pairs"]:
        """The pairs to learn from, and about a `fraction` share of them for validation.

        A row is held out if hash(seed, source) < fraction · 2^64, so that equal sources never
        stand on both sides; each side gets at least one row.
        """
        hashes = array("Q", (hashed(seed, source) for source, _ in self.rows()))
        limit = border(
            hashes,
            fraction,
            f"{self.name}: all {self.count} rows have the same source, so none can be held out;"
            "\ngive more pairs, or validation files of their own",
        )
        held = sum(each < limit for each in hashes)

        def part(count: int, wanted: bool, description: str) -> Pairs:
            return Pairs(
                name=self.name,
                description=description,
                count=count,
                rows=lambda: (
                    row for row in self.rows() if (hashed(seed, row[0]) < limit) is wanted
                ),
                digest=_digest(self.digest, seed, limit, wanted),
            )

        kept = self.count - held
        return (
            part(kept, False, f"{self.description}; {kept:,} to learn from"),
            part(held, True, f"{held:,} of the {self.count:,} pairs"),
        )

    def lowercase(self) -> "Pairs":
        """The same pairs with case folded."""
        return Pairs(
            name=self.name,
            description=f"{self.description}, in lower case",
            count=self.count,
            rows=lambda: ((source.lower(), target.lower()) for source, target in self.rows()),
            digest=_digest(self.digest, "lower"),
        )

    def note_overlap(self, learned: "Pairs") -> "Pairs":
        """These pairs to judge by; how many of them are learned from too is told."""
        ours = [hashed(0, json.dumps(row)) for row in self.rows()]
        wanted = set(ours)
        known = {each for row in learned.rows() if (each := hashed(0, json.dumps(row))) in wanted}
        count = sum(each in known for each in ours)
        if not count:
            return self
        told = f"overlap: {count:,} of the {self.count:,} pairs are among those learned from"
        return replace(self, description=f"{self.description}; {told}")

    def fingerprint(self) -> str:
        """A sha256 that is equal for equal content."""
        return self.digest


def border(hashes: Sequence[int], fraction: float, alike: str) -> int:
    """The hash below which a row is held out: about this share of them, and one on each side.

    `alike` is told where all rows are, so that none can be.
    """
    if not 0 < fraction < 1:
        raise ConfigError(f"validation_fraction={fraction} must lie between 0 and 1, as 0.1 does")
    lowest, highest = min(hashes), max(hashes)
    if lowest == highest:
        raise DataError(alike)
    return min(max(int(fraction * 2**64), lowest + 1), highest)


def hashed(seed: int, sentence: str) -> int:
    """A number below 2^64 by which a sentence is put on one side or the other."""
    content = f"{seed} {sentence}".encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def from_rows(name: str, description: str, rows: Iterable[Row]) -> Pairs:
    """Pairs that are already in memory."""
    kept = list(rows)
    about = f"pairs, {len(kept):,} rows, {description}"
    return Pairs(name, about, len(kept), lambda: iter(kept), _digest(kept))


def from_tsv(path: Path) -> Pairs:
    """One file with a source, a tab and a target on each line."""
    found = scan(path)
    digest = _digest(found.digest)
    return _checked(stem(path), "tab-separated", lambda: _tsv(path, found), digest)


def from_parallel(source: Path, target: Path) -> Pairs:
    """Two files, in which equal lines belong together."""
    founds = scan(source), scan(target)

    def numbered() -> Iterator[Numbered]:
        return _parallel(source, target, *founds)

    digest = _digest(founds[0].digest, founds[1].digest)
    return _checked(stem(source), f"{source.name} to {target.name}", numbered, digest)


def _checked(name: str, how: str, numbered: Callable[[], Iterator[Numbered]], digest: str) -> Pairs:
    """Go through all lines once: errors come now, and lines with an empty side are counted."""
    count = skipped = first = 0
    for number, source, target in numbered():
        if source.strip() and target.strip():
            count += 1
        else:
            skipped += 1
            first = first or number
    if not count:
        raise DataError(f"{name}: each of the {skipped} lines has an empty side; there is no pair")

    def rows() -> Iterator[Row]:
        return ((s, t) for _, s, t in numbered() if s.strip() and t.strip())

    description = f"pairs, {count:,} rows, {how}"
    if skipped:
        description += f"; skipped: {skipped:,} with an empty side (the first is line {first})"
    return Pairs(name, description, count, rows, digest)


def lines(path: Path, found: Scan) -> Iterator[str]:
    """The lines of a file that was scanned, without their ends."""
    # Cut at \n only: str.splitlines would also cut at the separators inside a sentence.
    with open_bytes(path) as stream:
        stream.seek(found.start)
        for line in stream:
            yield line.decode("utf-8").rstrip("\r\n")


def _tsv(path: Path, found: Scan) -> Iterator[Numbered]:
    for number, line in enumerate(lines(path, found), 1):
        if not line.strip():
            yield number, "", ""
            continue
        if (tabs := line.count("\t")) != 1:
            raise DataError(
                f"{path}, line {number} has {tabs} tabs: {shown(line)}"
                "\na row is a source, one tab and a target; plain text should not be called .tsv"
            )
        source, target = line.split("\t")
        yield number, source, target


def _parallel(source: Path, target: Path, *founds: Scan) -> Iterator[Numbered]:
    ours, theirs = lines(source, founds[0]), lines(target, founds[1])
    for number, (left, right) in enumerate(zip_longest(ours, theirs), 1):
        if left is None or right is None:
            extra = sum(1 for _ in (theirs if left is None else ours))
            counts = [number - 1, number + extra]
            longer, line = (target, right) if left is None else (source, left)
            shorter = source if left is None else target
            raise DataError(
                f"parallel files differ in length: {longer} has {counts[1]} lines,"
                f" {shorter} has {counts[0]}"
                f"\nthe first line without a partner is line {number} of {longer}:"
                f" {shown(str(line))}"
            )
        yield number, left, right


def shown(line: str) -> str:
    """The beginning of a line, for a message."""
    return repr(line if len(line) <= 60 else line[:59] + "…")
