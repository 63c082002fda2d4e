"""Open text files (gzip or not), check that they are UTF-8 text, and hash them.

Each file is read once for these checks; the cache folder keeps the result for large files.
"""

import codecs
import gzip
import hashlib
import io
import json
import re
import shlex
import stat
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from regard.errors import DataError
from regard.files.atomic import write_json
from regard.files.cache import cache_folder
from regard.files.untrusted import parse_json, read_text

_CHUNK = 1 << 20
_MIN_AGE_NS = 2_000_000_000  # a younger file may change again within the same mtime

_MAGIC = {  # the first bytes of files that are not text
    b"\x80\x02": "a pickle",
    b"\x80\x03": "a pickle",
    b"\x80\x04": "a pickle",
    b"\x80\x05": "a pickle",
    b"PK\x03\x04": "a zip archive (as .npz, .pt, .docx are)",
    **{b"BZh%d1AY" % level: "bzip2" for level in range(1, 10)},
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "Zstandard",
    b"\xd0\xcf\x11\xe0": "an old Office document (as .xls, .doc are)",
    b"%PDF": "a PDF",
    b"\x89PNG": "an image",
    b"\xff\xd8\xff": "an image",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
_SPREADSHEETS = {  # by suffix; the files are zip archives or old Office documents
    **dict.fromkeys((".xlsx", ".xlsm", ".xlsb", ".xls"), "an Excel spreadsheet"),
    ".ods": "an OpenDocument spreadsheet",
}


class NotTextError(DataError):
    """A file that cannot be read as text; `reason` says why in one or two words."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Scan:
    """The byte range of a file's text and the hash of the file."""

    digest: str  # sha256 of the (decompressed) bytes
    start: int  # 3 after a byte order mark, else 0
    stop: int
    crlf: int  # number of line endings \r\n


def open_bytes(origin: Path | bytes) -> BinaryIO:
    """Open a file, decompressing it if it is gzip, or bytes in memory."""
    if isinstance(origin, bytes):
        return io.BytesIO(origin)
    try:
        with origin.open("rb") as stream:
            is_gzip = stream.read(2) == b"\x1f\x8b"
        return cast(BinaryIO, gzip.open(origin, "rb")) if is_gzip else origin.open("rb")
    except OSError as error:
        raise NotTextError(f"{origin} cannot be read: {error.strerror}", "unreadable") from None


def scan(path: Path) -> Scan:
    """Read and check a file; `NotTextError` names the line and byte that is not text.

    Text is UTF-8 without NUL bytes and with at least one character that is not whitespace.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        raise NotTextError(f"no file {path}", "missing") from None
    except OSError as error:
        raise NotTextError(f"{path} cannot be read: {error.strerror}", "unreadable") from None
    if stat.S_ISDIR(status.st_mode):
        raise NotTextError(f"{path} is a folder, not a file", "a folder")
    if not stat.S_ISREG(status.st_mode):
        message = f"{path} is a pipe or a device, not a file; write its content to a file first"
        raise NotTextError(message, "not a file")
    key = str(path.absolute())
    # The ctime also reveals an edit that keeps the size and resets the mtime.
    version = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
    large = status.st_size >= _CHUNK  # reading a small file is faster than the cache
    if large and (cached := _read_entry(_cached_scans().get(key), version)) is not None:
        return cached
    try:
        with open_bytes(path) as stream:
            scanned = _scan_stream(path, stream)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise NotTextError(f"{path} is a corrupted gzip file: {error}", "corrupted gzip") from None
    except OSError as error:
        raise NotTextError(f"{path} cannot be read: {error.strerror}", "unreadable") from None
    if large and time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > _MIN_AGE_NS:
        fields = [*version, *astuple(scanned)]
        _cache_scan(key, [*fields, _checksum(fields)])
    return scanned


def read_lines(path: Path, scanned: Scan) -> Iterator[str]:
    """The lines of a scanned file, without line endings."""
    # Split at \n only: str.splitlines also splits at the Unicode separators inside a sentence.
    with open_bytes(path) as stream:
        stream.seek(scanned.start)
        for line in stream:
            yield line.decode("utf-8").rstrip("\r\n")


def stem(path: Path) -> str:
    """The name of a file without its suffixes: train.de.gz is train."""
    return path.name.split(".")[0] or path.name


def suffix(path: Path) -> str:
    """The last suffix of a path in lower case, without that of gzip."""
    suffixes = [part.lower() for part in path.suffixes if part.lower() != ".gz"]
    return suffixes[-1] if suffixes else ""


def looks_like_path(text: str) -> bool:
    """Whether a text is meant as a path: it has no spaces, and a slash or a suffix.

    >>> looks_like_path("notes.txt"), looks_like_path("The end."), looks_like_path("3.14")
    (True, False, False)
    """
    return re.fullmatch(r"\S*/\S*|\S+\.[a-z][a-z0-9]{1,4}", text) is not None


def preview(line: str) -> str:
    """The beginning of a line, quoted, for a message."""
    return repr(line if len(line) <= 60 else line[:59] + "…")


def _scan_stream(path: Path, stream: BinaryIO) -> Scan:
    digest = hashlib.sha256()
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset, line, start, is_blank, crlf, last_byte = 0, 1, 0, True, 0, b""
    while True:
        data = stream.read(_CHUNK)
        if offset == 0:
            start = 3 if data.startswith(codecs.BOM_UTF8) else 0
            _check_magic(path, data)
        if (nul := data.find(b"\0")) >= 0:
            number = line + data.count(b"\n", 0, nul)
            message = f"{path} is binary, not text: byte {offset + nul} (line {number}) is NUL"
            raise NotTextError(message, "binary")
        pending = len(decoder.getstate()[0])  # bytes of a character that began in the last chunk
        try:
            text = decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            byte = offset - pending + error.start
            number = line + error.object.count(b"\n", 0, error.start)
            value = error.object[error.start]
            raise NotTextError(
                f"{path} is not UTF-8: byte {byte} (line {number}) is 0x{value:02x}"
                f"\nconvert it first, as in: {_conversion(path)}",
                "not UTF-8",
            ) from None
        if not data:
            break
        is_blank = is_blank and not text.removeprefix("\ufeff").strip()
        digest.update(data)
        offset += len(data)
        line += data.count(b"\n")
        crlf += data.count(b"\r\n") + (last_byte == b"\r" and data[:1] == b"\n")
        last_byte = data[-1:]
    if is_blank:
        problem = "is empty" if offset == start else f"holds only whitespace ({offset} bytes)"
        raise NotTextError(f"{path} {problem}; give a file with text", "empty")
    return Scan(digest.hexdigest(), start, offset, crlf)


def _conversion(path: Path) -> str:
    """A command that converts a file to UTF-8, with the suffix that tells what it holds."""
    is_gzip = path.suffix.lower() == ".gz"
    name, new = shlex.quote(str(path)), shlex.quote(f"new{suffix(path) or '.txt'}")
    convert = "iconv -f latin1 -t utf-8"
    return f"gunzip -c {name} | {convert} > {new}" if is_gzip else f"{convert} {name} > {new}"


def _check_magic(path: Path, data: bytes) -> None:
    for magic, file_type in _MAGIC.items():
        if data.startswith(magic):
            advice = "give a text file, or a gzipped one"
            if file_type == "UTF-16":
                advice = "save it as UTF-8"
            elif suffix(path) in _SPREADSHEETS:  # not a file of text that is only called .xls
                file_type = _SPREADSHEETS[suffix(path)]
                advice = "save it as .csv, in UTF-8, and give that file"
            raise NotTextError(f"{path} is {file_type}, not UTF-8 text; {advice}", "binary")


def _cached_scans() -> dict[str, Any]:
    try:
        scans = parse_json(read_text(cache_folder() / "scans.json"))
    except (OSError, ValueError):
        return {}
    return scans if isinstance(scans, dict) else {}


def _read_entry(entry: Any, version: list[int]) -> Scan | None:
    """The scan of an entry of the cache; None if the file has changed or the entry is corrupted."""
    if not isinstance(entry, list) or entry[: len(version)] != version:
        return None
    *fields, checksum = entry
    if checksum != _checksum(fields):
        return None
    return Scan(*fields[len(version) :])


def _checksum(fields: list[Any]) -> int:
    return zlib.crc32(json.dumps([Scan.__slots__, *fields]).encode())


def _cache_scan(key: str, entry: list[Any]) -> None:
    # Without a writable cache, the file is read again next time.
    with suppress(OSError):
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "scans.json", _cached_scans() | {key: entry}, sync=False)
