"""Drawings as pen strokes: points (dx, dy, lift), in an .npz archive."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from regard.data.npz_files import array_names, read_arrays
from regard.data.text_files import stem
from regard.data.validation_split import split_rows
from regard.errors import DataError

# arrays of an archive, after the prefix of the split
POINTS, OFFSETS, LABELS, TEXTS = "xyp", "off", "label", "text"
PREFIXES = {"train": ("train_", ""), "validation": ("valid_", "validation_"), "test": ("test_",)}

LAYOUT = (  # for messages
    "'train_xyp' of shape (points, 3), the rows (dx, dy, lift) of all drawings one after the other,"
    "\nand 'train_off' of shape (drawings + 1,), where each drawing begins and the last one ends; "
    "likewise valid_ and test_"
)


@dataclass(frozen=True, slots=True)
class Strokes:
    """Drawings, each a sequence of points (dx, dy, lift).

    A point says how far the pen moves, and whether it is then lifted (the end of a stroke).
    """

    kind: ClassVar[Literal["strokes"]] = "strokes"
    name: str
    description: str
    points: NDArray[np.float32] = field(repr=False)  # (points, 3): dx, dy, lift
    # (drawings + 1): the first point of each drawing, and the number of points
    offsets: NDArray[np.int64] = field(repr=False)
    labels: NDArray[np.int64] | None = field(default=None, repr=False)  # class of each drawing
    class_names: tuple[str, ...] = ()
    texts: tuple[str, ...] | None = field(default=None, repr=False)  # text of each drawing
    validation: "Strokes | None" = field(default=None, repr=False)
    test: "Strokes | None" = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, drawing: int) -> NDArray[np.float32]:
        return self.points[self.offsets[drawing] : self.offsets[drawing + 1]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of points of each drawing."""
        return np.diff(self.offsets)

    def subset(self, rows: NDArray[np.int64], description: str) -> "Strokes":
        """The drawings of these rows."""
        lengths = self.lengths[rows]
        points = np.concatenate([self[int(row)] for row in rows])
        return replace(
            self,
            description=description,
            points=points,
            offsets=np.concatenate([[0], np.cumsum(lengths)]),
            labels=None if self.labels is None else self.labels[rows],
            texts=None if self.texts is None else tuple(self.texts[row] for row in rows),
        )

    def split(self, fraction: float, seed: int) -> tuple["Strokes", "Strokes"]:
        """Training and validation drawings: the splits of the archive, else a random `fraction`."""
        train = replace(self, validation=None, test=None)
        if self.validation is not None:
            return train, replace(self.validation, test=self.test)
        if self.test is not None:
            return train, self.test
        return split_rows(train, "drawings", fraction, seed)

    def note_overlap(self, train: "Strokes") -> "Strokes":
        """These drawings; overlap is not checked."""
        return self

    def fingerprint(self) -> str:
        """A sha256 of the content."""
        digest = hashlib.sha256("\n".join(self.class_names).encode("utf-8", "surrogatepass"))
        for array in (self.points, self.offsets, self.labels):
            digest.update(b"-" if array is None else np.ascontiguousarray(array).tobytes())
        for text in self.texts or ():
            digest.update(text.encode("utf-8", "surrogatepass") + b"\0")
        return digest.hexdigest()


def is_strokes(path: Path) -> bool:
    """Whether an .npz archive holds points of strokes."""
    names = set(array_names(path))
    return any(f"{prefix}{POINTS}" in names for group in PREFIXES.values() for prefix in group)


def from_npz(path: Path) -> Strokes:
    """The drawings of an archive, with validation and test splits where it has them.

    The training split has the arrays `train_xyp`, the points (dx, dy, lift) of all drawings one
    after the other, and `train_off`, the index of the first point of each drawing and the number of
    points. `train_label`, the class of each drawing, and `train_text`, the text that each drawing
    shows, are optional. The names in the other splits begin with `valid_` and `test_`. An archive
    of one split may omit the prefix: `xyp`, `off`, ….
    """
    hint = "the points of all drawings as one array 'xyp' and where they start as 'off'"
    arrays = read_arrays(path, lambda name: name.endswith((POINTS, OFFSETS, LABELS, TEXTS)), hint)
    splits = {}
    for split, prefixes in PREFIXES.items():
        for prefix in prefixes:
            if f"{prefix}{POINTS}" in arrays and split not in splits:
                splits[split] = _read_split(path, arrays, prefix)
    if "train" not in splits:
        raise DataError(f"{path} has no training drawings; name their points 'train_xyp' or 'xyp'")
    names = tuple(sorted({str(label) for split in splits.values() for label in split[2]}))
    if len({texts is None for *_, texts in splits.values()}) > 1:
        raise DataError(f"{path}: some splits have texts and others none; give all or none of them")
    drawings = {split: _strokes(stem(path), *arrays, names) for split, arrays in splits.items()}
    return replace(
        drawings["train"], validation=drawings.get("validation"), test=drawings.get("test")
    )


def _read_split(
    path: Path, arrays: Mapping[str, NDArray[Any]], prefix: str
) -> tuple[NDArray[np.float32], NDArray[np.int64], list[str], tuple[str, ...] | None]:
    """The checked points, offsets, labels and texts of a split of an archive."""
    name, offset_name = f"{path}: {prefix}{POINTS}", f"{prefix}{OFFSETS}"
    points = arrays[f"{prefix}{POINTS}"]
    if points.ndim != 2 or points.shape[1] != 3 or points.dtype.kind not in "iuf":
        raise DataError(
            f"{name} is {points.dtype} of shape {points.shape}; it must be numbers of shape "
            "(points, 3), a row (dx, dy, lift) for each point"
        )
    if offset_name not in arrays:
        raise DataError(f"{name}: there is no {offset_name!r} that says where each drawing starts")
    offsets = arrays[offset_name]
    if offsets.dtype.kind not in "iu" or offsets.ndim != 1:
        raise DataError(
            f"{path}: {offset_name} is {offsets.dtype} of shape {offsets.shape}; it must be "
            "integers of shape (drawings + 1,)"
        )
    offsets = offsets.astype(np.int64)
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != len(points):
        raise DataError(
            f"{path}: {offset_name} must start with 0 and end with the {len(points):,} points of "
            f"{prefix}{POINTS}, and has {len(offsets)} entries: {offsets[:3]} … {offsets[-1:]}"
        )
    if (empty := np.flatnonzero(np.diff(offsets) < 1)).size:
        row = int(empty[0])
        raise DataError(
            f"{path}: drawing {row} of {offset_name} goes from point {offsets[row]:,} to "
            f"{offsets[row + 1]:,}; every drawing has at least one point"
        )
    with np.errstate(over="ignore"):  # an overflow gives infinity, which is refused below
        points = points.astype(np.float32)
    wrong = ~np.isfinite(points).all(1) | ~np.isin(points[:, 2], (0, 1))
    if wrong.any():
        row = int(wrong.argmax())
        drawing = int(np.searchsorted(offsets, row, "right")) - 1
        raise DataError(
            f"{name}, row {row:,} (drawing {drawing:,}) is {points[row].tolist()}; dx and dy must "
            "be finite, and lift 0 or 1"
        )
    labels = arrays.get(f"{prefix}{LABELS}")
    if labels is not None and labels.shape != (len(offsets) - 1,):
        raise DataError(
            f"{path}: {prefix}{LABELS} has shape {labels.shape}, and there are "
            f"{len(offsets) - 1:,} drawings; it must have one label for each"
        )
    names = [] if labels is None else [str(label) for label in labels]
    return points, offsets, names, _texts(path, arrays.get(f"{prefix}{TEXTS}"), prefix, offsets)


def _texts(
    path: Path, texts: NDArray[Any] | None, prefix: str, offsets: NDArray[np.int64]
) -> tuple[str, ...] | None:
    """The text of each drawing, if an archive has them."""
    if texts is None:
        return None
    if texts.dtype.kind != "U" or texts.shape != (len(offsets) - 1,):
        raise DataError(
            f"{path}: {prefix}{TEXTS} is {texts.dtype} of shape {texts.shape}, and there are "
            f"{len(offsets) - 1:,} drawings; it must be one string for each"
        )
    if (empty := np.flatnonzero(texts == "")).size:
        raise DataError(
            f"{path}: {prefix}{TEXTS}, row {empty[0]:,} is empty; give the text of the drawing"
        )
    return tuple(map(str, texts))


def from_drawings(
    name: str, drawings: Sequence[NDArray[np.float32]], texts: Sequence[str]
) -> Strokes:
    """Drawings in memory, with their texts."""
    offsets = np.cumsum([0, *map(len, drawings)])
    return _strokes(name, np.concatenate(drawings), offsets, [], tuple(texts), ())


def _strokes(
    name: str,
    points: NDArray[np.float32],
    offsets: NDArray[np.int64],
    labels: list[str],
    texts: tuple[str, ...] | None,
    class_names: tuple[str, ...],
) -> Strokes:
    count, longest = len(offsets) - 1, int(np.diff(offsets).max())
    classes = f", {len(class_names)} classes" if class_names else ""
    text_note = "" if texts is None else f", with texts of up to {max(map(len, texts))} characters"
    return Strokes(
        name=name,
        description=f"strokes, {count:,} drawings of up to {longest:,} points{classes}{text_note}",
        points=points,
        offsets=offsets,
        labels=np.array([class_names.index(label) for label in labels]) if labels else None,
        class_names=class_names,
        texts=texts,
    )
