"""Documents of text, read in chunks, so that a file may be larger than memory."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import ClassVar

from regard.data.columns import Roles
from regard.data.digest import json_digest
from regard.data.tables import TABLE_SUFFIXES, Table, text_cell
from regard.data.text_files import NotTextError, Scan, open_bytes, preview, scan, stem, suffix
from regard.data.validation_split import check_fraction, describe_overlap
from regard.errors import DataError
from regard.text.tokenizer import check_text
from regard.units import count_are, count_noun, format_bytes


@dataclass(frozen=True, slots=True)
class Document:
    """A byte range of a file (after decompression, if it is gzip) or of bytes in memory."""

    origin: Path | bytes = field(repr=False)
    digest: str  # sha256 of all bytes of the origin
    start: int
    stop: int
    includes_end: bool = True  # False if `split_at` divided the document here
    crlf: bool = False  # whether it has line endings \r\n, which `Text` reads as \n

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.stop - self.start

    def chunks(self, limit: int) -> Iterator[tuple[bytes, bool]]:
        """Chunks of at most `limit` bytes, whole lines if possible, each with `is_last`."""
        with open_bytes(self.origin) as stream:
            stream.seek(self.start)
            remaining, pending = self.size, b""
            while remaining:
                data = stream.read(min(remaining, limit - len(pending)))
                if not data:
                    raise DataError(f"{self.origin!s} became shorter while it was being read")
                remaining -= len(data)
                data = pending + data
                boundary = _last_boundary(data) if remaining else len(data)
                if boundary:
                    yield data[:boundary], not remaining
                pending = data[boundary:]

    def split_at(self, offset: int) -> tuple["Document", "Document"]:
        """The documents before and after byte `offset`, moved back to the start of a character."""
        offset += self.start
        with open_bytes(self.origin) as stream:
            first = max(self.start, offset - 3)  # a character has at most four bytes
            stream.seek(first)
            data = stream.read(offset - first + 1)
        while offset > first and _is_continuation(data[offset - first]):
            offset -= 1
        if data[: offset - first + 1].endswith(b"\r\n"):
            offset -= 1  # do not split the line ending
        return replace(self, stop=offset, includes_end=False), replace(self, start=offset)


def _is_continuation(byte: int) -> bool:
    return byte & 0b1100_0000 == 0b1000_0000


def _last_boundary(data: bytes) -> int:
    """The offset after the last newline; without one, before the last character.

    The last character may be incomplete.
    """
    if newline := data.rfind(b"\n") + 1:
        return newline
    offset = len(data) - 1
    while offset and _is_continuation(data[offset]):
        offset -= 1
    return offset


@dataclass(frozen=True, slots=True)
class Text:
    """One or several documents of text, with a description of what was read and skipped."""

    kind: ClassVar[str] = "text"
    name: str
    description: str
    documents: tuple[Document, ...] = field(repr=False)
    lower: bool = False
    columns: Mapping[str, str] = field(default_factory=dict)  # of a table: text
    is_split_off: bool = False  # validation text that `split` took from the training data

    @property
    def size(self) -> int:
        """Bytes of text, before conversion to lower case."""
        return sum(document.size for document in self.documents)

    def chunks(self, limit: int = 1 << 20) -> Iterator[tuple[str, bool]]:
        """The text in chunks of at most `limit` bytes (8 or more), each with `ends_document`.

        A chunk ends after a newline if it has one, else between two characters.
        """
        for document in self.documents:
            for data, last in document.chunks(limit):
                try:
                    text = data.decode("utf-8")
                except UnicodeDecodeError as error:
                    message = f"{document.origin!s} changed while it was being read: {error}"
                    raise DataError(message) from None
                if document.crlf:
                    text = text.replace("\r\n", "\n")
                yield text.lower() if self.lower else text, last and document.includes_end

    def split(self, fraction: float, seed: int = 0) -> tuple["Text", "Text"]:
        """Training text, and the last `fraction` of its bytes for validation; `seed` is not used.

            train = the first floor(size (1 - fraction)) bytes

        computed exactly for `fraction` as written (0.1 is one tenth, not the nearest float), and
        moved back to the start of a character.
        """
        check_fraction(fraction)
        remaining = int(self.size * (1 - Fraction(str(fraction))))
        train: list[Document] = []
        validation = list(self.documents)
        while validation and remaining >= validation[0].size:
            remaining -= validation[0].size
            train.append(validation.pop(0))
        if validation and remaining:
            before, after = validation[0].split_at(remaining)
            train += [before] if before.size else []
            validation[0] = after
        if not train or not validation:
            raise DataError(
                f"{self.name}: {count_are(self.size, 'byte')} too few for a validation fraction of "
                f"{fraction};\ngive more text, or a separate validation file"
            )
        train_size, validation_size = (
            sum(document.size for document in part) for part in (train, validation)
        )
        description = f"{self.description}; the first {count_noun(train_size, 'byte')} for training"
        return (
            replace(self, description=description, documents=tuple(train)),
            replace(
                self,
                description=f"the last {count_noun(validation_size, 'byte')}",
                documents=tuple(validation),
                is_split_off=True,
            ),
        )

    def first_rows(self, count: int) -> list[str]:
        """The beginnings of the first documents, for a preview."""
        first = (next(document.chunks(256))[0] for document in self.documents[:count])
        return [preview(data.decode("utf-8")) for data in first]

    def lowercase(self) -> "Text":
        """The same text in lower case."""
        return replace(self, lower=True, description=f"{self.description}, in lower case")

    def note_overlap(self, train: "Text") -> "Text":
        """This text; the description says how many of its documents are in the training data."""
        train_digests = {document.digest for document in train.documents}
        count = sum(document.digest in train_digests for document in self.documents)
        are_files = all(isinstance(document.origin, Path) for document in self.documents)
        unit = "files" if are_files else "documents"
        return describe_overlap(self, count, len(self.documents), unit)

    def fingerprint(self) -> str:
        """A sha256 of the content and its division into documents."""
        ranges = [
            (doc.digest, doc.start, doc.stop, doc.includes_end, *(["crlf"] if doc.crlf else []))
            for doc in self.documents
        ]
        return json_digest(self.lower, ranges)


def from_strings(name: str, description: str, documents: Iterable[str]) -> Text:
    """Text in memory."""
    contents = [check_text(document).encode() for document in documents if document]
    parts = (
        Document(content, hashlib.sha256(content).hexdigest(), 0, len(content))
        for content in contents
    )
    size = format_bytes(sum(map(len, contents)))
    return Text(name, f"{description}, {size}", tuple(parts))


def from_table(table: Table, roles: Roles) -> Text:
    """A column of a table: each cell is a document; empty ones are skipped and counted."""
    column = table.column(roles.columns["text"])
    documents: list[str] = []
    skipped = 0
    for number, row in table.rows():
        cell = text_cell(table.location(number), row[column])
        if cell.strip():
            documents.append(cell.replace("\r\n", "\n"))
        else:
            skipped += 1
    if not documents:
        raise DataError(f"{table.path}: the column {roles.columns['text']} is empty")
    text = from_strings(table.name, f"text, {len(documents):,} rows", documents)
    note = f"; skipped: {skipped:,} empty" if skipped else ""
    description = f"{text.description}, {table.format}{roles.note}{note}"
    return replace(
        text, description=description, columns={**roles.columns, **roles.columns_to_save}
    )


def from_file(path: Path) -> Text:
    """The text of a file, as one document."""
    scanned = scan(path)
    document = _document(path, scanned)
    bom = "; skipped: its byte order mark" if scanned.start else ""
    crlf = f"; {scanned.crlf:,} CRLF line endings, read as LF" if scanned.crlf else ""
    description = f"text, 1 file, {format_bytes(document.size)}{bom}{crlf}"
    return Text(stem(path), description, (document,))


def _document(path: Path, scanned: Scan) -> Document:
    return Document(path, scanned.digest, scanned.start, scanned.stop, crlf=scanned.crlf > 0)


def from_files(name: str, paths: Iterable[Path], skipped: dict[str, list[str]]) -> Text:
    """Several files, each a document; the description counts those that are not text.

    `skipped` are the names of files that the caller has skipped, by reason.
    """
    documents = []
    for path in paths:
        try:
            scanned = scan(path)
        except NotTextError as error:
            skipped.setdefault(error.reason, []).append(path.name)
        else:
            documents.append(_document(path, scanned))
    skipped_note = ", ".join(
        f"{len(names)} {reason} ({names[0]}{', …' if len(names) > 1 else ''})"
        for reason, names in sorted(skipped.items())
    )
    if not documents:
        raise DataError(
            f"{name} holds no text files; skipped: {skipped_note or 'nothing, it is empty'}\n"
            "(images need a folder for each class, or IDX or NPZ files)"
        )
    size = format_bytes(sum(document.size for document in documents))
    files = "1 file" if len(documents) == 1 else f"{len(documents):,} files"
    description = f"text, {files}, {size}" + (f"; skipped: {skipped_note}" if skipped_note else "")
    if crlf := sum(document.crlf for document in documents):
        description += f"; {crlf:,} with CRLF line endings, read as LF"
    origins = [document.origin for document in documents if isinstance(document.origin, Path)]
    if tables := [path.name for path in origins if suffix(path) in TABLE_SUFFIXES]:
        count = "a table" if len(tables) == 1 else f"{len(tables):,} tables"
        description += f"; {count} read as plain text ({tables[0]})"
    return Text(name, description, tuple(documents))
