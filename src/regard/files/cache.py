"""The cache folder: results that take long to compute, each in a folder named by its key."""

import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from regard.errors import CheckpointError
from regard.files.atomic import remove_leftovers, sync_to_disk, temporary_path
from regard.files.untrusted import open_regular_file, parse_json, read_text

logger = logging.getLogger(__name__)
FORMAT = 1  # part of every key; increment it when the format of stored files changes
_BLOCK = 1 << 20  # bytes per checksum
_THREADS = 4  # threads that compute checksums


def cache_folder() -> Path:
    """`$REGARD_HOME`, `$XDG_CACHE_HOME/regard` or `~/.cache/regard`.

    If the latter two cannot be written, a folder of this user in the system's temporary folder,
    with a warning.
    """
    if home := os.environ.get("REGARD_HOME"):
        return Path(os.path.expanduser(home))
    try:
        cache = os.environ.get("XDG_CACHE_HOME")
        folder = (Path(cache) if cache else Path.home() / ".cache") / "regard"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
        reason = f"{folder} cannot be written"
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        reason = str(error)
    return _temporary_cache(reason)


@lru_cache
def _temporary_cache(reason: str) -> Path:
    """`regard-UID` in the system's temporary folder; a new folder if another user owns that one."""
    user = os.getuid() if hasattr(os, "getuid") else 0  # on Windows each user has a separate folder
    folder = Path(tempfile.gettempdir()) / f"regard-{user}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != user or status.st_mode & 0o022:
        folder = Path(tempfile.mkdtemp(prefix="regard-"))
    logger.warning(
        "the cache is in %s, because %s; set REGARD_HOME to use another folder", folder, reason
    )
    return folder


def cache_key(*inputs: Any) -> str:
    """A hash of everything that a cached result depends on, as JSON values."""
    return hashlib.sha256(json.dumps([FORMAT, *inputs], sort_keys=True).encode()).hexdigest()


def cached_folder(
    kind: str,
    key: str,
    write: Callable[[Path], Mapping[str, Any] | None],
    check: Callable[[Path], str | None] = lambda folder: None,
) -> tuple[Path, dict[str, Any]]:
    """The folder `kind/key` of the cache and its index; `write` fills it if it is missing.

    `write` gets an empty folder and returns further entries of the index. The index has the
    size and the checksums of every file, and a hash of itself. A folder that does not agree with
    its index, or in which `check` finds a problem, is written again with a warning. Several
    processes may do this at the same time: the first to finish wins.
    """
    kind_folder = cache_folder() / kind
    folder = kind_folder / key
    index, problem = _read_index(folder, check)
    if index is not None:
        return folder, index
    if problem is not None:
        logger.warning("corrupted cache: %s; the result is computed again", problem)
    temporary = temporary_path(folder)
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        remove_leftovers(kind_folder)
        extra_entries = write(temporary) or {}
        files = sorted(temporary.iterdir())
        index = {
            "format": FORMAT,
            "files": {f.name: _checksums(f) for f in files},
            **extra_entries,
        }
        index["sha256"] = _hash(index)
        (temporary / "index.json").write_text(json.dumps(index))
        for file in (*files, temporary / "index.json"):
            sync_to_disk(file)
        if _read_index(folder, check)[0] is None:
            shutil.rmtree(folder, ignore_errors=True)
            try:
                temporary.rename(folder)
            except OSError:  # another process may have written the folder first
                if _read_index(folder, check)[0] is None:
                    raise
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"cannot write {folder}: {error.strerror or error}"
            "\nset the environment variable REGARD_HOME to another cache folder"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder, index


def _read_index(
    folder: Path, check: Callable[[Path], str | None]
) -> tuple[dict[str, Any] | None, str | None]:
    """The index of a cached folder, or a problem with it; both None if there is no folder."""
    if not folder.exists():
        return None, None
    path = folder / "index.json"
    try:
        index: dict[str, Any] = parse_json(read_text(path))
        if index["sha256"] != _hash(index):
            return None, f"{path} has changed since it was written"
        for name, checksums in index["files"].items():
            path = folder / name
            if _checksums(path) != checksums:
                return None, f"{path} has changed since it was written"
        problem = check(folder)
    except CheckpointError as error:
        return None, str(error)
    except OSError as error:
        return None, f"{path} cannot be read: {error.strerror or error}"
    except (ValueError, TypeError, KeyError, AttributeError):
        return None, f"{path} is not an index of the cache of this version"
    return (index, None) if problem is None else (None, problem)


def _hash(index: Mapping[str, Any]) -> str:
    """The sha256 of an index without its own hash."""
    entries = {name: value for name, value in index.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def _checksums(path: Path) -> dict[str, Any]:
    """The size of a file and the CRC-32 of each of its blocks, on several cores.

    CRC-32 detects corruption, not tampering; it is about twice as fast as SHA-256.
    """
    with open_regular_file(path) as file, ThreadPoolExecutor(_THREADS) as pool:
        size = os.fstat(file.fileno()).st_size

        def checksum(start: int) -> int:
            return zlib.crc32(os.pread(file.fileno(), _BLOCK, start))

        return {"size": size, "crc32": list(pool.map(checksum, range(0, size, _BLOCK)))}
