"""Images with captions: files that a table names, or generated ones."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os.path import normpath
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from regard.data.column_profiles import read_profiles
from regard.data.columns import Roles, find_roles, image_column
from regard.data.digest import json_digest
from regard.data.images import (
    Pixels,
    Size,
    channel_statistics,
    file_pixels,
    inspect_files,
    resize,
)
from regard.data.table_files import read_table
from regard.data.tables import IMAGE_SUFFIXES, TABLE_SUFFIXES, Table
from regard.data.text_files import preview, suffix
from regard.data.validation_split import hash_threshold, row_hash
from regard.errors import DataError

Box = tuple[int, int, int, int]  # top, left, bottom, right in pixels; the last two are exclusive


@dataclass(frozen=True, slots=True)
class Captions:
    """Images, each with one or more captions; `read(rows, size)` returns pixels."""

    kind: ClassVar[str] = "captions"
    name: str
    description: str
    captions: Sequence[tuple[str, ...]] = field(repr=False)  # of each image
    groups: Sequence[str] = field(repr=False)  # images of one group stay in one split
    channels: int
    side: int  # the smaller side of the most frequent size
    read: Callable[[NDArray[np.int64], Size], Pixels] = field(repr=False)
    digest: str = field(repr=False)
    # for each image, index of a caption word → bounding box of the object that it names
    boxes: Sequence[Mapping[int, Box]] | None = field(default=None, repr=False)
    # the training data, if this is validation data
    train: "Captions | None" = field(default=None, repr=False)
    columns: Mapping[str, str] = field(default_factory=dict)  # of a table, by role

    def __len__(self) -> int:
        return len(self.captions)

    def first_rows(self, count: int) -> list[str]:
        """The first captions."""
        return [" | ".join(map(preview, captions)) for captions in self.captions[:count]]

    def texts(self) -> list[str]:
        """All captions."""
        return [caption for captions in self.captions for caption in captions]

    def split(self, fraction: float, seed: int) -> tuple["Captions", "Captions"]:
        """Training images, and about a `fraction` of the groups for validation."""
        hashes = np.array([row_hash(seed, group) for group in self.groups], np.uint64)
        threshold = hash_threshold(
            list(map(int, hashes)),
            fraction,
            f"{self.name}: all {len(self)} images belong to one group, so they cannot be split;"
            "\ngive more images, or a separate validation file",
        )
        is_validation = hashes < threshold
        count = int(is_validation.sum())
        train = self.subset(
            np.flatnonzero(~is_validation),
            f"{self.description}; {len(self) - count:,} for training",
        )
        note = f"{count:,} of the {len(self):,} images"
        if len({*self.groups}) < len(self):
            note += ", of groups that are not in the training data"
        return train, replace(self.subset(np.flatnonzero(is_validation), note), train=train)

    def subset(self, rows: NDArray[np.int64], description: str) -> "Captions":
        """The images of these rows."""
        return replace(
            self,
            description=description,
            captions=[self.captions[row] for row in rows],
            groups=[self.groups[row] for row in rows],
            boxes=None if self.boxes is None else [self.boxes[row] for row in rows],
            read=lambda indices, size: self.read(rows[indices], size),
            digest=json_digest(self.digest, rows.tolist()),
        )

    def lowercase(self) -> "Captions":
        """The same images, with captions in lower case."""
        captions = [tuple(map(str.lower, row)) for row in self.captions]
        return replace(self, captions=captions, description=f"{self.description}, in lower case")

    def note_overlap(self, train: "Captions") -> "Captions":
        """These validation images; the description says if they are the training images."""
        with_train = replace(self, train=train)
        if self.digest != train.digest:
            return with_train
        note = f"overlap: all {len(self):,} images are in the training data"
        return replace(with_train, description=f"{self.description}; {note}")

    def fingerprint(self) -> str:
        """A sha256 of the content."""
        return json_digest(self.digest, list(self.captions))

    def statistics(self, size: Size) -> tuple[list[float], list[float]]:
        """Mean and standard deviation of each channel, of values from 0 to 1."""
        return channel_statistics(self.read, len(self), self.channels, size)


def from_pixels(
    name: str,
    description: str,
    pixels: Pixels,
    captions: Sequence[tuple[str, ...]],
    boxes: Sequence[Mapping[int, Box]] | None = None,
) -> Captions:
    """Images in memory, with their captions."""
    return Captions(
        name=name,
        description=f"captions, {len(captions):,} images, {description}",
        captions=captions,
        groups=[str(index) for index in range(len(captions))],
        channels=pixels.shape[1],
        side=min(pixels.shape[2:]),
        read=lambda rows, size: resize(pixels[rows], size),
        digest=hashlib.sha256(np.ascontiguousarray(pixels).data).hexdigest(),
        boxes=boxes,
    )


def caption_table(folder: Path) -> Path | None:
    """The one table in a folder of images that names them, or None."""
    if not folder.is_dir():
        return None
    files = [file for file in sorted(folder.iterdir()) if not file.name.startswith(".")]
    tables = [file for file in files if file.is_file() and suffix(file) in TABLE_SUFFIXES]
    if len(tables) != 1 or len(files) < 2:
        return None
    try:
        table = read_table(tables[0])
        if find_roles(table, {}, "captions") is not None:
            return tables[0]
        # Without a caption column, accept the table only if the folder cannot hold images by class.
        folders = {file.name for file in files if file.is_dir()}
        names_images = image_column(table, read_profiles(table)) is not None
        return tables[0] if names_images and folders <= {"images"} else None
    except DataError:
        return None


def from_folder(folder: Path) -> Captions:
    """A folder of images with one table of their file names and captions."""
    path = caption_table(folder)
    assert path is not None
    table = read_table(path)
    roles = find_roles(table, {}, "captions")
    if roles is None:
        raise DataError(
            f"{path} names images, but it is not clear which of its columns holds their captions\n"
            f"{table.listing()}\nname it: data.target=COLUMN; to classify images instead, put "
            "those of each class into one folder"
        )
    return replace(from_table(table, roles), name=folder.resolve().name)


def from_table(table: Table, roles: Roles) -> Captions:
    """The images that a table names, relative to its folder, and their captions."""
    folder = Path(table.path).parent
    by_image: dict[Path, list[str]] = {}
    groups: dict[Path, str] = {}
    locations: dict[Path, str] = {}
    for location, file, captions, group in _rows(table, roles):
        path = _image_path(folder, location, file)
        by_image.setdefault(path, []).extend(captions)
        groups.setdefault(path, str(path) if group is None else group)
        locations.setdefault(path, location)
    if not by_image:
        raise DataError(f"{table.path} has no image with a caption")
    paths = list(by_image)
    files = inspect_files(paths, [path.name for path in paths], [*locations.values()])

    def read(rows: NDArray[np.int64], size: Size) -> Pixels:
        return np.stack([read_pixels(paths[row], size) for row in rows])

    def read_pixels(path: Path, size: Size) -> Pixels:
        try:
            return file_pixels(path, size, files.channels)
        except DataError as error:
            raise DataError(f"{locations[path]}: {error}") from None

    mode = "RGB" if files.channels == 3 else "grayscale"
    description = f"captions, {len(paths):,} images, {files.sizes}, {mode}, "
    description += f"{table.format}{roles.note}"
    count = sum(map(len, by_image.values()))
    if count > len(paths):
        description += f"; {count:,} captions"
    if "group" in roles.columns:
        description += f"; {len({*groups.values()}):,} groups"
    root = Path(normpath(folder))
    outside_count = sum(not Path(normpath(path)).is_relative_to(root) for path in paths)
    if outside_count:  # a table of unknown origin could name the user's own images
        description += f"; {outside_count:,} images are outside the folder of the table"
    return Captions(
        name=table.name,
        description=description,
        captions=[tuple(captions) for captions in by_image.values()],
        groups=[groups[path] for path in paths],
        channels=files.channels,
        side=files.side,
        read=read,
        digest=files.digest,
        columns={role: name for role, name in roles.columns_to_save.items() if role != "group"},
    )


def _rows(table: Table, roles: Roles) -> Iterator[tuple[str, str, list[str], str | None]]:
    """Location, file name, captions and group of each row.

    Raises `DataError` for a row without a file name or without a caption.
    """
    column = {role: table.column(name) for role, name in roles.columns.items()}
    for number, cells in table.rows():
        if not any(cells):
            continue  # an empty line
        location, file, captions = (
            table.location(number),
            cells[column["source"]],
            cells[column["target"]],
        )
        if not isinstance(file, str) or not file.strip():
            raise DataError(f"{location}: the caption {preview(str(captions))} has no image")
        texts = captions if isinstance(captions, list) else [captions]
        if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
            raise DataError(f"{location}: the image {file} has no caption")
        group = cells[column["group"]] if "group" in column else None
        yield (
            location,
            file,
            [text.strip() for text in texts],
            None if group is None else str(group),
        )


def _image_path(folder: Path, location: str, file: str) -> Path:
    candidates = [folder / file, folder / "images" / file]
    try:
        path = next((path for path in candidates if path.is_file()), None)
    except OSError as error:  # a name that is too long
        raise DataError(f"{location}: {preview(file)}: {error.strerror}") from None
    if path is None:
        raise DataError(f"{location}: there is no image {folder / file}")
    if suffix(path) not in IMAGE_SUFFIXES:
        raise DataError(f"{location}: {path} is not an image ({' '.join(IMAGE_SUFFIXES)})")
    return path
