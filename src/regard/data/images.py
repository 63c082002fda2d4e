"""Images with their classes, from arrays or from files, which are read on demand."""

import hashlib
import io
import os
import re
import struct
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from regard.data.digest import json_digest
from regard.data.labels import class_ids
from regard.data.npz_files import array_names, read_arrays
from regard.data.strokes import LAYOUT as STROKES_LAYOUT
from regard.data.tables import IMAGE_SUFFIXES
from regard.data.text_files import open_bytes, stem
from regard.data.validation_split import split_rows
from regard.errors import DataError

Pixels = NDArray[np.uint8]  # (images, channels, height, width), from 0 to 255
Size = int | tuple[int, int]  # of a square, or height and width
IDX_IMAGES = re.compile(r"(?P<split>.*)-images[-.]idx3-ubyte(\.gz)?")
NPZ_TRAIN = (
    *(("x", "y"), ("x_train", "y_train")),
    *(("images", "labels"), ("train_images", "train_labels")),
)
NPZ_TEST = (("x_test", "y_test"), ("test_images", "test_labels"))
NPZ_KEYS = {key for pair in (*NPZ_TRAIN, *NPZ_TEST) for key in pair}
IMAGE_FORMATS = ["PNG", "JPEG", "WEBP", "GIF"]  # as Pillow names them
STATISTICS_IMAGES = 2000  # for the mean and standard deviation of the channels


@dataclass(frozen=True, slots=True)
class Images:
    """Images and their classes; `read(rows, size)` returns the pixels of some images."""

    kind: ClassVar[str] = "images"
    name: str
    description: str
    labels: NDArray[np.int64] = field(repr=False)
    class_names: tuple[str, ...] = field(repr=False)
    channels: int
    side: int  # the smaller side of the most frequent size
    is_square: bool  # whether all images are side × side
    read: Callable[[NDArray[np.int64], Size], Pixels] = field(repr=False)
    digest: str = field(repr=False)
    # the dataset's validation split, or else its test split
    validation: "Images | None" = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.labels)

    def split(self, fraction: float, seed: int) -> tuple["Images", "Images"]:
        """Images for training and for validation.

        Validation images are the validation or test split of the dataset, else a random `fraction`.
        """
        if self.validation is not None:
            return replace(self, validation=None), self.validation
        return split_rows(self, "images", fraction, seed)

    def subset(self, rows: NDArray[np.int64], description: str) -> "Images":
        """The images of these rows."""
        return replace(
            self,
            description=description,
            labels=self.labels[rows],
            read=lambda indices, size: self.read(rows[indices], size),
            digest=json_digest(self.digest, rows.tolist()),
            validation=None,
        )

    def note_overlap(self, train: "Images") -> "Images":
        """These validation images; the description says if they are the training images."""
        if self.digest != train.digest:
            return self
        note = f"overlap: all {len(self):,} images are in the training data"
        return replace(self, description=f"{self.description}; {note}")

    def with_class_names(self, names: Sequence[str]) -> "Images":
        """The same images; a class is its index in `names`."""
        new_ids = np.array(class_ids(self.class_names, names, self.name))
        return replace(self, labels=new_ids[self.labels], class_names=tuple(names))

    def fingerprint(self) -> str:
        """A sha256 of the content."""
        return json_digest(
            self.digest, self.class_names, hashlib.sha256(self.labels.tobytes()).hexdigest()
        )

    def statistics(self, size: Size) -> tuple[list[float], list[float]]:
        """Mean and standard deviation of each channel, of values from 0 to 1."""
        return channel_statistics(self.read, len(self), self.channels, size)


def channel_statistics(
    read: Callable[[NDArray[np.int64], Size], Pixels], images: int, channels: int, size: Size
) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel, of values from 0 to 1, over a sample."""
    stride = max(1, images // STATISTICS_IMAGES)
    rows = np.arange(0, images, stride)
    total, squares, count = np.zeros(channels), np.zeros(channels), 0
    for start in range(0, len(rows), 256):
        values = read(rows[start : start + 256], size).astype(np.float64) / 255
        total += values.sum((0, 2, 3))
        squares += np.square(values).sum((0, 2, 3))
        count += values.size // channels
    mean = total / count
    std = np.sqrt(np.maximum(squares / count - mean**2, 0))
    std = np.maximum(std, 1 / 255)  # images of one colour: no division by 0
    return mean.round(6).tolist(), std.round(6).tolist()


def resize(pixels: Pixels, size: Size) -> Pixels:
    """Resize images, by antialiased bilinear interpolation."""
    shape = _height_and_width(size)
    if pixels.shape[2:] == shape:
        return pixels
    images = torch.from_numpy(pixels).float()
    scaled = F.interpolate(images, shape, mode="bilinear", antialias=True)
    return scaled.round().clamp(0, 255).byte().numpy()


def from_arrays(name: str, pixels: NDArray[Any], labels: NDArray[Any], location: str) -> Images:
    """Images in memory: (images, height, width), or with channels second or last."""
    pixels = as_pixels(pixels, location)
    labels = np.asarray(labels)
    labels = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if labels.ndim != 1 or labels.dtype.kind not in "iuU":
        raise DataError(
            f"{location}: labels must be integers or strings, one for each image, not "
            f"{labels.dtype} of shape {labels.shape}"
        )
    if len(labels) != len(pixels):
        raise DataError(f"{location}: {len(pixels):,} images, but {len(labels):,} labels")
    if not len(labels):
        raise DataError(f"{location} has no images")
    values, ids = np.unique(labels, return_inverse=True)
    _, channels, height, width = pixels.shape
    return Images(
        name=name,
        description=_description(len(labels), f"{width} × {height} pixels", channels, len(values)),
        labels=ids.astype(np.int64),
        class_names=tuple(map(str, values.tolist())),
        channels=channels,
        side=min(height, width),
        is_square=height == width,
        read=lambda rows, size: resize(pixels[rows], size),
        digest=hashlib.sha256(np.ascontiguousarray(pixels).data).hexdigest(),
    )


def as_pixels(array: NDArray[Any], location: str) -> Pixels:
    """An array of images as uint8, (images, channels, height, width)."""
    array = np.asarray(array)
    if array.ndim == 3:
        array = array[:, None]
    elif array.ndim == 4 and array.shape[-1] in (1, 3) and array.shape[1] not in (1, 3):
        array = array.transpose(0, 3, 1, 2)
    if array.ndim != 4 or array.shape[1] not in (1, 3) or 0 in array.shape[2:]:
        raise DataError(
            f"{location}: images must have shape (count, height, width), with 1 or 3 channels "
            f"second or last; this array has shape {array.shape}"
        )
    if array.dtype == np.uint8:
        return array
    if array.dtype.kind not in "iufb" or not np.isfinite(array).all():
        raise DataError(f"{location}: images must be finite numbers, not {array.dtype}")
    low, high = (float(array.min()), float(array.max())) if array.size else (0.0, 0.0)
    if low < 0 or high > 255:
        raise DataError(
            f"{location}: values from {low:g} to {high:g}; the range must be 0 to 255, or 0 to 1"
        )
    is_fraction = high <= 1 and array.dtype.kind in "fb"
    return (array * 255 if is_fraction else array).round().astype(np.uint8)


def from_npz(path: Path) -> Images:
    """A NumPy archive of arrays x and y, or images and labels, with a test split or without."""
    stored = read_arrays(path, lambda key: key.lower() in NPZ_KEYS, "arrays of numbers instead")
    arrays = {key.lower(): array for key, array in stored.items()}
    train, test = (_first_pair(arrays, names) for names in (NPZ_TRAIN, NPZ_TEST))
    if train is None:
        names = array_names(path)
        hint = ""
        if {"train", "valid", "test"} <= {*names}:  # drawings as an array of arrays each
            hint = (
                "\nsketch-rnn's arrays are converted by train_xyp=np.concatenate(train), "
                "train_off=np.cumsum([0, *map(len, train)])"
            )
        raise DataError(
            f"{path} needs arrays {' or '.join(f'{x!r} and {y!r}' for x, y in NPZ_TRAIN)} of "
            f"images;\nor of strokes: {STROKES_LAYOUT}\n"
            f"it has: {', '.join(names) or 'nothing'}{hint}"
        )
    images = from_arrays(stem(path), *train, str(path))
    if test is None:
        return _with_validation(images)
    return _with_validation(images, from_arrays(stem(path), *test, f"{path} (test)"))


def _first_pair(
    arrays: Mapping[str, NDArray[Any]], names: Sequence[tuple[str, str]]
) -> tuple[NDArray[Any], NDArray[Any]] | None:
    pairs = ((arrays[x], arrays[y]) for x, y in names if x in arrays and y in arrays)
    return next(pairs, None)


def from_idx(folder: Path) -> Images:
    """MNIST's IDX files: images in one file, labels in another, gzip or not."""
    splits: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        match = IDX_IMAGES.fullmatch(path.name)
        if match:
            splits.setdefault(match["split"], path)  # uncompressed before compressed
    train = [split for split in splits if not split.endswith(("t10k", "test"))] or list(splits)
    if len(train) != 1:
        raise DataError(f"{folder} has {len(train)} sets of training images; keep one of them")
    images = _read_idx_split(folder, train[0], splits)
    test = [split for split in splits if split != train[0]]
    return _with_validation(images, _read_idx_split(folder, test[0], splits) if test else None)


def _read_idx_split(folder: Path, split: str, splits: Mapping[str, Path]) -> Images:
    path = splits[split]
    name = path.name.replace("images", "labels").replace("idx3", "idx1")
    candidates = [folder / name, folder / f"{name}.gz", folder / name.removesuffix(".gz")]
    labels = next((file for file in candidates if file.exists()), None)
    if labels is None:
        raise DataError(f"{path} has no labels next to it; expected {name}")
    pixels = read_idx(path, 3)
    return from_arrays(folder.resolve().name, pixels, read_idx(labels, 1), str(path))


def read_idx(path: Path, axes: int) -> NDArray[np.uint8]:
    """An IDX file of bytes: 0 0 8 axes, then the size of each axis as four bytes, then data."""
    try:
        with open_bytes(path) as stream:
            content = stream.read()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is corrupted: {error}") from None
    header = 4 + 4 * axes
    if content[:4] != bytes([0, 0, 8, axes]) or len(content) < header:
        raise DataError(
            f"{path} begins with {content[:4].hex(' ')}; an IDX file of bytes with {axes} axes "
            f"begins with 00 00 08 {axes:02x}"
        )
    shape = struct.unpack(f">{axes}I", content[4:header])
    size = int(np.prod([int(length) for length in shape], dtype=object))
    if len(content) - header != size:
        raise DataError(
            f"{path} has {len(content) - header:,} bytes of data, and its header says "
            f"{' × '.join(map(str, shape))}; it is truncated or not an IDX file"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def from_folder(folder: Path) -> Images:
    """A folder of images for each class, optionally within train/ and val/ (or else test/)."""
    if class_folders(folder / "train"):
        validation_folders = [folder / name for name in ("validation", "val", "test")]
        validation = next((path for path in validation_folders if class_folders(path)), None)
        name = folder.resolve().name
        images = replace(_read_class_folders(folder / "train"), name=name)
        if validation is None:
            return _with_validation(images)
        split = "test" if validation.name == "test" else "validation"
        return _with_validation(images, replace(_read_class_folders(validation), name=name), split)
    return _with_validation(_read_class_folders(folder))


def class_folders(folder: Path) -> dict[str, list[Path]]:
    """The image files in each sub-folder; empty if most files are not images.

    A single sub-folder called images is not a class.
    """
    if not folder.is_dir():
        return {}
    classes: dict[str, list[Path]] = {}
    other_files = 0
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        # Without permission, os.path.isfile returns False, and Path.is_file raises.
        files = [f for f in files if not f.name.startswith(".") and os.path.isfile(f)]
        images = [f for f in files if f.suffix.lower() in IMAGE_SUFFIXES and f.parent == path]
        if images:
            classes[path.name] = images
        other_files += len(files) - len(images)
    if [name.lower() for name in classes] == ["images"]:
        return {}
    return classes if sum(map(len, classes.values())) > other_files else {}


def _read_class_folders(folder: Path) -> Images:
    classes = class_folders(folder)
    paths = [path for files in classes.values() for path in files]
    labels = [id for id, files in enumerate(classes.values()) for _ in files]
    files = inspect_files(paths, [str(path.relative_to(folder)) for path in paths])

    def read(rows: NDArray[np.int64], size: Size) -> Pixels:
        return np.stack([file_pixels(paths[row], size, files.channels) for row in rows])

    return Images(
        name=folder.resolve().name,
        description=_description(len(paths), files.sizes, files.channels, len(classes)),
        labels=np.array(labels, np.int64),
        class_names=tuple(classes),
        channels=files.channels,
        side=files.side,
        is_square=files.is_square,
        read=read,
        digest=files.digest,
    )


@dataclass(frozen=True, slots=True)
class ImageFiles:
    """Properties of a set of image files."""

    sizes: str  # for a description
    channels: int
    side: int  # the smaller side of the most frequent size
    is_square: bool  # whether all images are side × side
    digest: str


def inspect_files(
    paths: Sequence[Path], names: Sequence[str], locations: Sequence[str] | None = None
) -> ImageFiles:
    """Read every image file once, without decoding pixels, and return their common properties.

    An error names the location of the file in `locations`, if given.
    """
    digest, sizes, colour_counts = hashlib.sha256(), Counter[tuple[int, int]](), Counter[bool]()
    for index, (path, name) in enumerate(zip(paths, names, strict=True)):
        try:
            content = _read_bytes(path)
            image = open_image(path, content)
        except DataError as error:
            raise DataError(f"{locations[index]}: {error}" if locations else str(error)) from None
        digest.update(f"{name} {len(content)}\n".encode("utf-8", "surrogatepass") + content)
        sizes[image.size] += 1
        colour_counts[image.mode not in ("1", "L", "LA", "I", "I;16")] += 1
    (width, height), _ = sizes.most_common(1)[0]
    description = f"{width} × {height} pixels"
    if len(sizes) > 1:
        description = f"{len(sizes)} sizes, most often {description}"
    return ImageFiles(
        sizes=description,
        channels=3 if colour_counts[True] else 1,
        side=min(width, height),
        is_square=set(sizes) == {(width, width)},
        digest=digest.hexdigest(),
    )


def _height_and_width(size: Size) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def file_pixels(path: Path, size: Size, channels: int) -> Pixels:
    """The pixels of an image file, resized to `size`, (channels, height, width)."""
    image = open_image(path, _read_bytes(path))
    try:
        if image.mode.startswith("I"):  # 16-bit grayscale, which `convert` would clip to 8 bits
            image = image.point(lambda value: value / 256, "F").convert("L")
        image = image.convert("L" if channels == 1 else "RGB")
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{path} is a corrupted image: {error}") from None
    height, width = _height_and_width(size)
    if image.size != (width, height):
        image = image.resize((width, height), resample=2)  # bilinear
    array = np.array(image, np.uint8)
    return array[None] if channels == 1 else array.transpose(2, 0, 1)


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


def open_image(path: Path, content: bytes) -> Any:
    """A Pillow image; its pixels are not decoded yet. Of an animation, the first frame is read."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise DataError(
            f"reading {path} needs Pillow; install it with: pip install 'regard[images]'"
        ) from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            return Image.open(io.BytesIO(content), formats=IMAGE_FORMATS)
    except UnidentifiedImageError:  # its message names the buffer
        raise DataError(f"{path} is not a PNG, JPEG, WebP or GIF image") from None
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise DataError(f"{path} has too many pixels: {error}\nmake it smaller") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a PNG, JPEG, WebP or GIF image: {error}") from None


def _with_validation(
    images: Images, validation: Images | None = None, split: str = "test"
) -> Images:
    """Add the validation data, which is a `split` of the dataset.

    Raises `DataError` unless there are several classes, and equal channels in both splits.
    """
    if len(images.class_names) < 2:
        raise DataError(
            f"{images.name} has one class only, {images.class_names[0]!r}; "
            "classification needs two or more"
        )
    if validation is None:
        return images
    if validation.channels != images.channels:
        raise DataError(
            f"{images.name}: training images have {images.channels} channels, "
            f"{split} images {validation.channels}"
        )
    validation = replace(
        validation.with_class_names(images.class_names),
        description=f"the {split} split of the data, {len(validation):,} images",
    )
    return replace(images, validation=validation)


def _description(count: int, sizes: str, channels: int, classes: int) -> str:
    mode = "RGB" if channels == 3 else "grayscale"
    return f"{count:,} images, {sizes}, {mode}, {classes:,} classes"
