"""Images with captions: files that a table names, or generated ones."""

import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from os.path import dirname, join, normpath
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
    class_folders,
    file_pixels,
    inspect_files,
    resize,
)
from regard.data.table_files import is_table, read_table
from regard.data.tables import IMAGE_SUFFIXES, OTHER_IMAGE_SUFFIXES, TABLE_SUFFIXES, Table
from regard.data.text_files import preview, suffix
from regard.data.validation_split import hash_threshold, row_hash
from regard.errors import DataError
from regard.units import count_are, count_noun

TEXT_TABLE_SUFFIXES = (*TABLE_SUFFIXES, ".txt")  # in a folder of images
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


def caption_tables(folder: Path) -> list[Table]:
    """The tables in a folder that name images: tables of captions, or else other ones.

    They are in the folder itself or, as `captions_….json`, in its folder `annotations` (COCO). In
    a folder of images without classes, a .txt file may be a table too (Flickr8k).
    """
    if not folder.is_dir() or is_table(folder):
        return []
    entries = [entry for entry in sorted(folder.iterdir()) if not entry.name.startswith(".")]
    mostly_images = count_images(folder).mostly_images
    has_classes = bool(class_folders(folder))
    suffixes = TEXT_TABLE_SUFFIXES if mostly_images and not has_classes else TABLE_SUFFIXES
    files = [file for file in entries if file.is_file() and suffix(file) in suffixes]
    files += sorted((folder / "annotations").glob("captions*.json"))
    if len(files) > 1 and not mostly_images:
        return []
    tables = [table for table in map(_image_table, files) if isinstance(table, Table)]
    captions = [table for table in tables if find_roles(table, {}, "captions") is not None]
    # Without a caption column, accept a table only if the folder cannot hold images by class.
    folders = {entry.name.lower() for entry in entries if entry.is_dir()}
    return captions or (tables if folders <= {"images"} else [])


def _image_table(path: Path) -> Table | str:
    """The table in a file if it names images, or else the reason why it is not read."""
    try:
        table = read_table(path)
        if image_column(table, read_profiles(table)) is not None:
            return table
    except DataError as error:
        return "; ".join(str(error).removeprefix(f"{path}").lstrip(" ,:").splitlines())
    return "it names no images"


def caption_table(folder: Path) -> Table:
    """The table in a folder that names images; raises `DataError` unless there is exactly one."""
    tables = caption_tables(folder)
    if not tables:
        raise image_folder_error(folder)
    if len(tables) > 1:
        paths = [table.path for table in tables]
        raise DataError(
            f"{folder} holds {len(tables)} tables that name images: "
            f"{', '.join(Path(path).name for path in paths)};\n"
            "give the path of one of them, and the other as validation data if it is: "
            f"{paths[0]} data.validation={paths[1]}"
        )
    return tables[0]


@dataclass(frozen=True, slots=True)
class ImageCount:
    """The files of a folder and its sub-folders, by kind."""

    images: int  # in a format that is read
    other_formats: Sequence[str]  # suffixes of images in other formats, one for each image
    others: Sequence[Path]  # files that are not images

    @property
    def mostly_images(self) -> bool:
        """Whether most files are images."""
        return self.images + len(self.other_formats) > len(self.others)


def count_images(folder: Path) -> ImageCount:
    """Count the image files of a folder and its sub-folders, without hidden ones."""
    images, other_formats, others = 0, list[str](), list[Path]()
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for file in sorted(Path(parent, name) for name in files if not name.startswith(".")):
            if suffix(file) in IMAGE_SUFFIXES:
                images += 1
            elif suffix(file) in OTHER_IMAGE_SUFFIXES:
                other_formats.append(suffix(file))
            else:
                others.append(file)
    return ImageCount(images, other_formats, others)


def image_folder_error(folder: Path) -> DataError:
    """The error for a folder of images that has no table of them and no folder for each class."""
    count = count_images(folder)
    lines = []
    if count.other_formats:
        formats = " ".join(sorted({*count.other_formats}))
        number = count_noun(len(count.other_formats), "image")
        lines.append(
            f"{folder} holds {number} in formats that are not read ({formats}); convert them to "
            f"{' '.join(IMAGE_SUFFIXES)}"
        )
    if count.images or not count.other_formats:
        lines.append(
            f"{folder} holds {count_noun(count.images, 'image')}, but no table with their file "
            "names and captions"
        )
    for file in [file for file in count.others if suffix(file) in TEXT_TABLE_SUFFIXES][:3]:
        reason = _image_table(file)
        lines += [f"{file.name} is not such a table: {reason}"] if isinstance(reason, str) else []
    return DataError(
        "\n".join(lines)
        + "\nfor captions, add a table captions.csv with the columns file_name and "
        "caption; for classes, put the images\nof each class into one folder; task=causal trains "
        "on the text files alone"
    )


def from_folder(folder: Path) -> Captions:
    """A folder of images with one table of their file names and captions."""
    table = caption_table(folder)
    roles = find_roles(table, {}, "captions")
    if roles is None:
        raise DataError(
            f"{table.path} names images, but it is not clear which of its columns holds their "
            f"captions\n{table.listing()}\nname it: data.target=COLUMN; to classify images "
            "instead, put those of each class into one folder"
        )
    data = from_table(table, roles)
    description = f"{data.description}; captions of {Path(table.path).name}"
    return replace(data, name=folder.resolve().name, description=description)


def from_table(table: Table, roles: Roles) -> Captions:
    """The images that a table names, relative to its folder, and their captions."""
    folder = Path(table.path).parent
    folders = [folder, folder / "images", folder / "Images"]
    if (split := Path(table.path).stem.removeprefix("captions_")) != Path(table.path).stem:
        folders.append(folder.parent / split)  # COCO: annotations/captions_train2014.json
    by_image: dict[Path, list[str]] = {}
    groups: dict[Path, str] = {}
    locations: dict[Path, str] = {}
    for location, file, captions, group in _rows(table, roles):
        path = _image_path(folders, location, file)
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
        description += f"; {count_are(outside_count, 'image')} outside the folder of the table"
    if unnamed := _count_unnamed(by_image):
        description += f"; left out: {count_noun(unnamed, 'image')} without a row in the table"
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


def _count_unnamed(paths: Collection[Path]) -> int:
    """The number of image files that are not among `paths`, in the folders of those."""
    named = {normpath(path) for path in paths}
    count = 0
    for folder in {dirname(path) for path in named}:
        with suppress(OSError):  # a folder that may be searched, but not listed
            files = [join(folder, name) for name in os.listdir(folder or ".")]
            count += sum(suffix(Path(file)) in IMAGE_SUFFIXES for file in {*files} - named)
    return count


def _image_path(folders: Sequence[Path], location: str, file: str) -> Path:
    candidates = [folder / file for folder in folders]
    try:
        path = next((path for path in candidates if path.is_file()), None)
    except OSError as error:  # a name that is too long
        raise DataError(f"{location}: {preview(file)}: {error.strerror}") from None
    if path is None:
        raise DataError(f"{location}: there is no image {candidates[0]}")
    if suffix(path) not in IMAGE_SUFFIXES:
        raise DataError(f"{location}: {path} is not an image ({' '.join(IMAGE_SUFFIXES)})")
    return path
