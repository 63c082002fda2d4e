"""Tables of JSON objects: one on each line, or a document."""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, TypeGuard

from regard.data.tables import SAMPLE_ROWS, Table
from regard.data.text_files import open_bytes, preview, read_lines, scan, stem
from regard.errors import DataError


def from_json_lines(path: Path) -> Table:
    """The table in a file with an object on each line."""
    scanned = scan(path)

    def objects() -> Iterator[tuple[int, dict[str, Any]]]:
        for number, line in enumerate(read_lines(path, scanned), 1):
            if not line.strip():
                continue
            value = _parse(f"{path}, line {number}", line)
            if not isinstance(value, dict):
                raise DataError(
                    f"{path}, line {number} is not an object: {preview(line)}"
                    '\neach line must be an object, as in {"text": "…", "label": "…"}'
                )
            yield number, flatten(value)

    return from_objects(path, "one object per line", scanned.digest, objects, "line")


def from_json(path: Path) -> Table:
    """The table in a JSON document: a list of objects, lists by column, or an object per line."""
    scanned = scan(path)
    lines = (line for line in read_lines(path, scanned) if line.strip())
    first, second = next(lines), next(lines, None)
    with suppress(ValueError, RecursionError):
        if second is not None and isinstance(json.loads(first), dict):
            return from_json_lines(path)
    records, note = _records(path, read_document(path))

    def objects() -> Iterator[tuple[int, dict[str, Any]]]:
        return ((number, flatten(record)) for number, record in enumerate(records, 1))

    return from_objects(path, f"JSON objects{note}", scanned.digest, objects, "row")


def read_document(path: Path) -> Any:
    """The value in a JSON document."""
    scanned = scan(path)
    with open_bytes(path) as stream:
        stream.seek(scanned.start)
        return _parse(str(path), stream.read().decode("utf-8"))


def _parse(location: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{location} is not JSON: {error}") from None


def _records(path: Path, content: Any) -> tuple[list[dict[str, Any]], str]:
    """The list of objects in a JSON document, and a note on its place in the document."""
    if _is_records(content):
        return content, ""
    if isinstance(content, dict):
        _refuse_squad(path, content)
        if captions := _coco_captions(content):
            return captions, " of COCO, a caption each"
        lists = {key: value for key, value in content.items() if isinstance(value, list)}
        is_columns = len(lists) == len(content) and not any(map(_is_records, lists.values()))
        if is_columns and len({len(value) for value in lists.values()}) == 1:
            rows = zip(*lists.values(), strict=True)
            return [dict(zip(lists, row, strict=True)) for row in rows], " (one list per column)"
        record_keys = [key for key, value in lists.items() if _is_records(value)]
        if len(record_keys) == 1:
            return content[record_keys[0]], f" under {record_keys[0]!r}"
    description = preview(json.dumps(content)[:100])
    if isinstance(content, dict):
        keys = ", ".join(map(str, content))
        description = f"an object with the keys {keys}" if content else "an empty object, {}"
    raise DataError(
        f"{path} is JSON, but not a list of objects: {description[:200]}\n"
        'a table is [{"text": "…", "label": "…"}, …]'
    )


def _coco_captions(content: dict[str, Any]) -> list[dict[str, Any]]:
    """The captions of a COCO document, each with the file name of its image; else empty."""
    images, annotations = content.get("images"), content.get("annotations")
    if not (_is_records(images) and _is_records(annotations)):
        return []
    if not any("caption" in row for row in annotations):
        return []
    files = {str(image.get("id")): image.get("file_name") for image in images}
    return [
        {"file_name": files.get(str(row.get("image_id"))), "caption": row.get("caption")}
        for row in annotations
    ]


def _is_records(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _refuse_squad(path: Path, content: dict[str, Any]) -> None:
    data = content.get("data")
    if _is_records(data) and all("paragraphs" in article for article in data):
        raise DataError(
            f"{path} is SQuAD JSON (data, paragraphs, qas): questions with answer spans,\n"
            "which are not a table; task=span learns from it"
        )


def flatten(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """An object without nested objects: their keys are joined by dots.

    >>> flatten({"id": 1, "translation": {"de": "ja", "en": "yes"}})
    {'id': 1, 'translation.de': 'ja', 'translation.en': 'yes'}
    """
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, dict) and item:
            flat |= flatten(item, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = item
    return flat


def from_objects(
    path: Path | str,
    format: str,
    digest: str,
    objects: Callable[[], Iterator[tuple[int, dict[str, Any]]]],
    row_unit: str,
) -> Table:
    """A table with a column for each key of the first objects."""
    keys: dict[str, None] = {}
    for _, item in islice(objects(), SAMPLE_ROWS):
        keys |= dict.fromkeys(item)
    columns = tuple(keys)
    if not columns:
        raise DataError(
            f"{path} holds only empty objects, {{}}; an object needs a key for each column, as in\n"
            '{"text": "…", "label": "…"}'
        )
    return Table(
        name=stem(Path(path)),
        path=str(path),
        format=format,
        columns=columns,
        rows=lambda: ((n, tuple(map(item.get, columns))) for n, item in objects()),
        digest=digest,
        row_unit=row_unit,
    )
