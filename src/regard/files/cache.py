"""The cache folder: results that take long to compute, each in a folder named by its key."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from regard.errors import CheckpointError
from regard.files.atomic import remove_leftovers, sync_to_disk, temporary_path

FORMAT = 1  # part of every key; increment it when the format of stored files changes


def cache_folder() -> Path:
    """`$REGARD_HOME`, `$XDG_CACHE_HOME/regard` or `~/.cache/regard`."""
    if home := os.environ.get("REGARD_HOME"):
        return Path(home).expanduser()
    if cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(cache) / "regard"
    return Path.home() / ".cache" / "regard"


def cache_key(*inputs: Any) -> str:
    """A hash of everything that a cached result depends on, as JSON values."""
    return hashlib.sha256(json.dumps([FORMAT, *inputs], sort_keys=True).encode()).hexdigest()


def cached_folder(
    kind: str, key: str, write: Callable[[Path], Mapping[str, Any] | None]
) -> tuple[Path, dict[str, Any]]:
    """The folder `kind/key` of the cache and its index; `write` fills it if it is missing.

    `write` gets an empty folder and returns further entries of the index. The index lists the
    size of every file; a folder that does not agree with its index is written again. Several
    processes may do this at the same time: the first to finish wins.
    """
    entries = cache_folder() / kind
    folder = entries / key
    if (index := _read_index(folder)) is not None:
        return folder, index
    temporary = temporary_path(folder)
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        remove_leftovers(entries)
        entries_to_add = write(temporary) or {}
        files = sorted(temporary.iterdir())
        index = {
            "format": FORMAT,
            "files": {f.name: f.stat().st_size for f in files},
            **entries_to_add,
        }
        (temporary / "index.json").write_text(json.dumps(index))
        for file in (*files, temporary / "index.json"):
            sync_to_disk(file)
        if _read_index(folder) is None:
            shutil.rmtree(folder, ignore_errors=True)
            try:
                temporary.rename(folder)
            except OSError:  # unless another process was faster
                if _read_index(folder) is None:
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


def _read_index(folder: Path) -> dict[str, Any] | None:
    """The index of a cached folder; None if it is missing or the files do not agree with it."""
    try:
        index: dict[str, Any] = json.loads((folder / "index.json").read_bytes())
        sizes = {name: (folder / name).stat().st_size for name in index["files"]}
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return index if sizes == index["files"] else None
