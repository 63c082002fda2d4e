"""Documents of text, read in pieces, so that a file may be larger than memory."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import ClassVar

from regard.data.text_files import NotText, open_bytes, scan
from regard.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class Document:
    """A span of bytes of a file (of the unzipped file, if it is gzip), or of bytes in memory."""

    origin: Path | bytes = field(repr=False)
    digest: str  # sha256 of all bytes of the origin
    start: int
    stop: int
    ends: bool = True  # False: `split` cut it, and it goes on elsewhere

    @property
    def size(self) -> int:
        """How many bytes."""
        return self.stop - self.start

    def chunks(self, limit: int) -> Iterator[tuple[bytes, bool]]:
        """At most `limit` bytes at a time, whole lines if possible, and whether it was the last."""
        with open_bytes(self.origin) as stream:
            stream.seek(self.start)
            left, rest = self.size, b""
            while left:
                data = stream.read(min(left, limit - len(rest)))
                if not data:
                    raise DataError(f"{self.origin!s} became shorter while it was being read")
                left -= len(data)
                data = rest + data
                cut = _last_cut(data) if left else len(data)
                if cut:
                    yield data[:cut], not left
                rest = data[cut:]

    def cut(self, at: int) -> tuple["Document", "Document"]:
        """The two parts before and after byte `at`, or the character that byte belongs to."""
        at += self.start
        with open_bytes(self.origin) as stream:
            first = max(self.start, at - 3)  # a character has at most four bytes
            stream.seek(first)
            near = stream.read(at - first + 1)
        while at > first and _inside_character(near[at - first]):
            at -= 1
        return replace(self, stop=at, ends=False), replace(self, start=at)


def _inside_character(byte: int) -> bool:
    return byte & 0b1100_0000 == 0b1000_0000


def _last_cut(data: bytes) -> int:
    """After the last newline; without one, before the last character, which may be incomplete."""
    if newline := data.rfind(b"\n") + 1:
        return newline
    at = len(data) - 1
    while at and _inside_character(data[at]):
        at -= 1
    return at


@dataclass(frozen=True, slots=True)
class Text:
    """Text to model: one or many documents, and what was detected about them."""

    kind: ClassVar[str] = "text"
    name: str
    description: str
    documents: tuple[Document, ...] = field(repr=False)
    lower: bool = False

    @property
    def size(self) -> int:
        """How many bytes of text there are, before any folding of case."""
        return sum(document.size for document in self.documents)

    def chunks(self, limit: int = 1 << 20) -> Iterator[tuple[str, bool]]:
        """The text in pieces of at most `limit` bytes (8 or more), each with `ends_document`.

        A piece ends after a newline where there is one, else between two characters.
        """
        for document in self.documents:
            for data, last in document.chunks(limit):
                try:
                    text = data.decode("utf-8")
                except UnicodeDecodeError as error:
                    message = f"{document.origin!s} changed while it was being read: {error}"
                    raise DataError(message) from None
                yield text.lower() if self.lower else text, last and document.ends

    def split(self, fraction: float) -> tuple["Text", "Text"]:
        """The text to learn from, and the last `fraction` share of its bytes for validation.

            train = the first floor(size (1 - fraction)) bytes

        computed exactly for `fraction` as written (0.1 is one tenth, not the nearest float), and
        moved back to the start of a character where it would cut one.
        """
        if not 0 < fraction < 1:
            raise ConfigError(
                f"validation_fraction={fraction} must lie between 0 and 1, as 0.1 does"
            )
        left = int(self.size * (1 - Fraction(str(fraction))))
        train: list[Document] = []
        rest = list(self.documents)
        while rest and left >= rest[0].size:
            left -= rest[0].size
            train.append(rest.pop(0))
        if rest and left:
            before, after = rest[0].cut(left)
            train += [before] if before.size else []
            rest[0] = after
        if not train or not rest:
            raise DataError(
                f"{self.name}: {self.size} bytes are too few to hold out a share of {fraction};"
                "\ngive more text, or a validation file of its own"
            )
        first, last = (sum(each.size for each in part) for part in (train, rest))
        kept, held = f"{self.description}; the first {first:,} bytes", f"the last {last:,} bytes"
        return (
            replace(self, description=kept, documents=tuple(train)),
            replace(self, description=held, documents=tuple(rest)),
        )

    def lowercase(self) -> "Text":
        """The same text with case folded."""
        return replace(self, lower=True, description=f"{self.description}, in lower case")

    def note_overlap(self, learned: "Text") -> "Text":
        """This text to judge by; how many of its documents are learned from too is told."""
        known = {each.digest for each in learned.documents}
        count = sum(each.digest in known for each in self.documents)
        if not count:
            return self
        told = (
            f"overlap: {count:,} of the {len(self.documents):,} files are among those learned from"
        )
        return replace(self, description=f"{self.description}; {told}")

    def fingerprint(self) -> str:
        """A sha256 that is equal for equal content cut into the same documents."""
        spans = [(each.digest, each.start, each.stop, each.ends) for each in self.documents]
        return hashlib.sha256(json.dumps([self.lower, spans]).encode()).hexdigest()


def from_strings(name: str, description: str, documents: Iterable[str]) -> Text:
    """Text that is already in memory."""
    contents = [document.encode() for document in documents if document]
    spans = (
        Document(content, hashlib.sha256(content).hexdigest(), 0, len(content))
        for content in contents
    )
    size = human(sum(map(len, contents)))
    return Text(name, f"{description}, {size}", tuple(spans))


def from_file(path: Path) -> Text:
    """One file is one document."""
    found = scan(path)
    document = Document(path, found.digest, found.start, found.stop)
    mark = "; skipped: its byte order mark" if found.start else ""
    return Text(stem(path), f"text, 1 file, {human(document.size)}{mark}", (document,))


def from_files(name: str, paths: Iterable[Path], skipped: dict[str, list[str]]) -> Text:
    """Many files, each a document; those that are not text are counted in the description.

    `skipped` holds what the caller has already left out, by reason.
    """
    documents = []
    for path in paths:
        try:
            found = scan(path)
        except NotText as error:
            skipped.setdefault(error.reason, []).append(path.name)
        else:
            documents.append(Document(path, found.digest, found.start, found.stop))
    left_out = ", ".join(
        f"{len(names)} {reason} ({names[0]}{', …' if len(names) > 1 else ''})"
        for reason, names in sorted(skipped.items())
    )
    if not documents:
        raise DataError(
            f"{name} holds no text files; skipped: {left_out or 'nothing, it is empty'}\n"
            "(images are learned from a folder for each class, or from IDX or NPZ files)"
        )
    size = human(sum(document.size for document in documents))
    files = "1 file" if len(documents) == 1 else f"{len(documents):,} files"
    description = f"text, {files}, {size}" + (f"; skipped: {left_out}" if left_out else "")
    return Text(name, description, tuple(documents))


def stem(path: Path) -> str:
    """The name of a file without its endings: train.de.gz is train."""
    return path.name.split(".")[0] or path.name


def human(size: int) -> str:
    """A number of bytes as people write it.

    >>> human(1_115_394)
    '1.1 MB'
    """
    amount, units = float(size), iter(["bytes", "kB", "MB", "GB"])
    unit = next(units)
    while amount >= 1000 and (larger := next(units, None)):
        amount, unit = amount / 1000, larger
    return f"{size} bytes" if unit == "bytes" else f"{amount:.1f} {unit}"
