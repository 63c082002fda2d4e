"""Parquet and Arrow files, and datasets of the Hugging Face hub."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from regard.data.json_files import flatten, from_objects
from regard.data.tables import SAMPLE_ROWS, Table
from regard.data.text_files import suffix
from regard.errors import DataError

HUB_PREFIX = "hf://datasets/"  # a dataset of the Hugging Face hub: hf://datasets/owner/name
ARROW_MAGIC = b"ARROW1"  # the first bytes of a file in the Arrow file format (Feather version 2)
SPLITS = {  # names of splits in files and datasets, and the split that they mean
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
}


def from_arrow(path: Path) -> Table:
    """The table in a Parquet or Arrow file, with class names where the file records them."""
    format = suffix(path)[1:].capitalize()
    reason = f"{path} is {format}"
    pyarrow = _import_optional("pyarrow", "tables", reason)
    ipc, parquet = (
        _import_optional(f"pyarrow.{name}", "tables", reason) for name in ("ipc", "parquet")
    )

    try:
        if format == "Parquet":
            schema = parquet.read_schema(path)
        else:
            with pyarrow.memory_map(str(path)) as source:
                schema, _ = _open_ipc(ipc, source)
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{path} is not {format}: {reason}") from None
    try:
        metadata = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        class_names = _class_names(metadata.get("info", {}).get("features", {}))
    except (ValueError, AttributeError, TypeError, RecursionError):
        class_names = {}  # metadata of another program is ignored

    def batches() -> Iterator[Any]:
        if format == "Parquet":
            with parquet.ParquetFile(path) as file:
                yield from map(floats, file.iter_batches(SAMPLE_ROWS))
        else:
            with pyarrow.memory_map(str(path)) as source:
                yield from map(floats, _open_ipc(ipc, source)[1])

    def floats(batch: Any) -> Any:
        """The batch with floats in columns of decimals (`DECIMAL` in SQL)."""
        for index, column in enumerate(batch.schema):
            if pyarrow.types.is_decimal(column.type):
                values = batch.column(index).cast(pyarrow.float64())
                batch = batch.set_column(index, column.name, values)
        return batch

    def objects() -> Iterator[tuple[int, dict[str, Any]]]:
        rows = (row for batch in batches() for row in batch.to_pylist())
        try:
            for number, row in enumerate(rows, 1):
                yield number, flatten(_name_classes(row, class_names))
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise DataError(f"{path} is corrupted: {reason}") from None

    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return from_objects(path, format, digest, objects, "row")


def _open_ipc(ipc: Any, source: Any) -> tuple[Any, Iterator[Any]]:
    """The schema and the record batches of Arrow's file format, or of its stream format."""
    is_file_format = source.read(len(ARROW_MAGIC)) == ARROW_MAGIC
    source.seek(0)
    if not is_file_format:
        reader = ipc.open_stream(source)
        return reader.schema, iter(reader)
    reader = ipc.open_file(source)
    return reader.schema, map(reader.get_batch, range(reader.num_record_batches))


def from_hub(path: str, split: str) -> Table | None:
    """The table of a split that `datasets` loads from the hub; None if there is no such split.

    `split` is "train" (the first split if none has this name) or "validation" (or else test).
    """
    datasets = _import_optional("datasets", "datasets", f"{path} is a dataset of the hub")
    parts = path.removeprefix(HUB_PREFIX).strip("/").split("/")
    try:
        dataset = datasets.load_dataset("/".join(parts[:2]), *parts[2:3])
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{path} cannot be loaded: {reason}") from None
    splits = {SPLITS.get(name, name): rows for name, rows in dataset.items()}
    if split == "train":
        names = ["train", *splits]
    else:
        names = ["validation", "test"] if "train" in splits else []
    name = next((name for name in names if name in splits), None)
    if name is None:
        return None
    rows = splits[name]
    if not len(rows):
        raise DataError(f"the split {name!r} of {path} has no rows")
    class_names = _class_names(rows.features.to_dict())

    def objects() -> Iterator[tuple[int, dict[str, Any]]]:
        return ((n, flatten(_name_classes(row, class_names))) for n, row in enumerate(rows, 1))

    digest = hashlib.sha256(str(rows._fingerprint).encode()).hexdigest()
    return from_objects(path, "Hugging Face dataset", digest, objects, "row")


def _class_names(features: Mapping[str, Any]) -> dict[str, list[str]]:
    """The class names of `ClassLabel` columns, single or in lists."""
    names = {}
    for column, feature in features.items():
        if isinstance(feature, dict):
            inner = feature.get("feature", feature)
            if isinstance(inner, dict) and inner.get("_type") == "ClassLabel":
                names[column] = list(inner.get("names") or [])
    return names


def _name_classes(row: dict[str, Any], class_names: Mapping[str, list[str]]) -> dict[str, Any]:
    """The row with class names for class ids; -1, Hugging Face's id for no label, becomes None."""

    def name(column: str, value: Any) -> Any:
        if isinstance(value, list):
            return [name(column, item) for item in value]
        names = class_names[column]
        return names[value] if isinstance(value, int) and 0 <= value < len(names) else None

    return {
        column: name(column, value) if class_names.get(column) else value
        for column, value in row.items()
    }


def _import_optional(module: str, extra: str, reason: str) -> ModuleType:
    try:
        return import_module(module)
    except ImportError:
        raise DataError(
            f"{reason}, which is read with {module}; install it: pip install 'regard[{extra}]'"
        ) from None
