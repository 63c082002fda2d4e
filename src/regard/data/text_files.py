"""The user's files as bytes: opened (gzip or not), checked to be text, and remembered.

What a file is made of is found by reading it once; the cache folder keeps the answer, so that
a second start on a large file costs nothing.
"""

import codecs
import gzip
import hashlib
import io
import json
import stat
import time
import zlib
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from regard.errors import DataError
from regard.files.atomic import write_json
from regard.files.cache import cache_folder

_CHUNK = 1 << 20
_RACY = 2_000_000_000  # ns: a file this young may change again without its time changing

_BINARY = {  # how files that are certainly not text begin
    b"\x80\x02": "a pickle",
    b"\x80\x03": "a pickle",
    b"\x80\x04": "a pickle",
    b"\x80\x05": "a pickle",
    b"PK\x03\x04": "a zip archive (as .npz, .pt, .docx are)",
    b"%PDF": "a PDF",
    b"\x89PNG": "an image",
    b"\xff\xd8\xff": "an image",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}


class NotText(DataError):
    """A file that cannot be read as text; `reason` says why in two words."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Scan:
    """What one reading of a file found: where its text starts and stops, and a hash of it."""

    digest: str  # sha256 of the (unzipped) bytes
    start: int  # 3 after a byte order mark, else 0
    stop: int


def open_bytes(origin: Path | bytes) -> BinaryIO:
    """Open a file, unzipping it if its first bytes say gzip, or bytes that are already here."""
    if isinstance(origin, bytes):
        return io.BytesIO(origin)
    try:
        with origin.open("rb") as stream:
            zipped = stream.read(2) == b"\x1f\x8b"
        return cast(BinaryIO, gzip.open(origin, "rb")) if zipped else origin.open("rb")
    except OSError as error:
        raise NotText(f"{origin} cannot be read: {error.strerror}", "unreadable") from None


def scan(path: Path) -> Scan:
    """Read a file once and say what it holds, or raise `NotText` naming line and byte.

    Text is UTF-8 without NUL bytes and with at least one character that is not white space.
    """
    try:
        facts = path.stat()
    except FileNotFoundError:
        raise NotText(f"no file {path}", "missing") from None
    except OSError as error:
        raise NotText(f"{path} cannot be read: {error.strerror}", "unreadable") from None
    if stat.S_ISDIR(facts.st_mode):
        raise NotText(f"{path} is a folder; a file is needed here", "a folder")
    if not stat.S_ISREG(facts.st_mode):
        message = f"{path} is a pipe or a device, not a file; write its content to a file first"
        raise NotText(message, "not a file")
    key = str(path.absolute())
    now = [facts.st_size, facts.st_mtime_ns, facts.st_ino]
    large = facts.st_size >= _CHUNK  # a small file is read sooner than looked up
    if large and (known := _remembered().get(key)) and known[:3] == now:
        return Scan(*known[3:])
    try:
        with open_bytes(path) as stream:
            found = _read(path, stream)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise NotText(f"{path} is a damaged gzip file: {error}", "damaged gzip") from None
    except OSError as error:
        raise NotText(f"{path} cannot be read: {error.strerror}", "unreadable") from None
    if large and time.time_ns() - facts.st_mtime_ns > _RACY:
        _remember(key, [*now, *astuple(found)])
    return found


def _read(path: Path, stream: BinaryIO) -> Scan:
    digest = hashlib.sha256()
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset, line, start, blank = 0, 1, 0, True
    while True:
        data = stream.read(_CHUNK)
        if offset == 0:
            start = 3 if data.startswith(codecs.BOM_UTF8) else 0
            _refuse_known_binary(path, data)
        if (nul := data.find(b"\0")) >= 0:
            number = line + data.count(b"\n", 0, nul)
            message = f"{path} is binary, not text: byte {offset + nul} (line {number}) is NUL"
            raise NotText(message, "binary")
        waiting = len(decoder.getstate()[0])  # the first bytes of a character cut by the chunk
        try:
            text = decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            byte = offset - waiting + error.start
            number = line + error.object.count(b"\n", 0, error.start)
            wrong = error.object[error.start]
            raise NotText(
                f"{path} is not UTF-8: byte {byte} (line {number}) is 0x{wrong:02x}"
                f"\nconvert it first, as in: iconv -f latin1 -t utf-8 {path.name} > new.txt",
                "not UTF-8",
            ) from None
        if not data:
            break
        blank = blank and not text.removeprefix("\ufeff").strip()
        digest.update(data)
        offset += len(data)
        line += data.count(b"\n")
    if blank:
        what = "is empty" if offset == start else f"holds only white space ({offset} bytes)"
        raise NotText(f"{path} {what}; there is nothing to learn from", "empty")
    return Scan(digest.hexdigest(), start, offset)


def _refuse_known_binary(path: Path, data: bytes) -> None:
    for magic, what in _BINARY.items():
        if data.startswith(magic):
            way_out = "save it as UTF-8" if what == "UTF-16" else "give a text file, or gzip of one"
            raise NotText(f"{path} is {what}, not UTF-8 text; {way_out}", "binary")


def _remembered() -> dict[str, list[Any]]:
    try:
        known = json.loads((cache_folder() / "scans.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _remember(key: str, entry: list[Any]) -> None:
    # A cache that cannot be written is no reason to stop: the file is read again next time.
    with suppress(OSError):
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "scans.json", _remembered() | {key: entry}, sync=False)
