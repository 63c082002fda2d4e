"""Images with their classes, from arrays or from files, read as they are needed."""

import hashlib
import io
import json
import os
import re
import struct
import zipfile
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

from regard.data.labels import class_ids
from regard.data.loader import permute
from regard.data.text import stem
from regard.data.text_files import open_bytes
from regard.errors import ConfigError, DataError

Pixels = NDArray[np.uint8]  # (images, channels, height, width), from 0 to 255
ENDINGS = (".png", ".jpg", ".jpeg")
IDX = re.compile(r"(?P<part>.*)-images[-.]idx3-ubyte(?P<zipped>\.gz)?")
NPZ_TRAIN = (
    *(("x", "y"), ("x_train", "y_train")),
    *(("images", "labels"), ("train_images", "train_labels")),
)
NPZ_TEST = (("x_test", "y_test"), ("test_images", "test_labels"))
NPZ = {key for pair in (*NPZ_TRAIN, *NPZ_TEST) for key in pair}
DAMAGED = (  # what reading an archive of any content may raise
    *(OSError, ValueError, EOFError, AttributeError, MemoryError, RuntimeError),
    *(NotImplementedError, zipfile.BadZipFile, zlib.error),
)
SAMPLED = 2000  # images by which the mean and the spread of a colour are found


@dataclass(frozen=True, slots=True)
class Images:
    """Images, each with the number of its class; `read` gives those of some rows at one size."""

    kind: ClassVar[str] = "images"
    name: str
    description: str
    labels: NDArray[np.int64] = field(repr=False)
    class_names: tuple[str, ...] = field(repr=False)  # of the classes
    channels: int
    side: int  # the usual height or width, whichever is less
    square: bool  # whether each image is side × side
    read: Callable[[NDArray[np.int64], int], Pixels] = field(repr=False)
    digest: str = field(repr=False)
    test: "Images | None" = field(default=None, repr=False)  # what its makers keep for judging

    def __len__(self) -> int:
        return len(self.labels)

    def split(self, fraction: float, seed: int) -> tuple["Images", "Images"]:
        """The images to learn from and those to judge by.

        The test part, where the data has one; else a share of `fraction`, drawn by the seed.
        """
        if self.test is not None:
            return replace(self, test=None), self.test
        if not 0 < fraction < 1:
            raise ConfigError(
                f"validation_fraction={fraction} must lie between 0 and 1, as 0.1 does"
            )
        count = round(len(self) * fraction)
        if not 0 < count < len(self):
            raise DataError(
                f"{self.name}: {len(self)} images are too few to hold out a share of {fraction};"
                "\ngive more images, or a validation folder of its own"
            )
        order = permute(np.arange(len(self)), len(self), seed)
        held, kept = np.sort(order[:count]), np.sort(order[count:])
        told = f"{self.description}; {len(kept):,} to learn from"
        return self.subset(kept, told), self.subset(held, f"{count:,} of the {len(self):,} images")

    def subset(self, rows: NDArray[np.int64], description: str) -> "Images":
        """Only these rows."""
        return replace(
            self,
            description=description,
            labels=self.labels[rows],
            read=lambda chosen, size: self.read(rows[chosen], size),
            digest=_digest(self.digest, rows.tolist()),
            test=None,
        )

    def note_overlap(self, learned: "Images") -> "Images":
        """These images to judge by; where they are the very ones learned from, that is told."""
        if self.digest != learned.digest:
            return self
        told = f"overlap: all {len(self):,} images are among those learned from"
        return replace(self, description=f"{self.description}; {told}")

    def with_class_names(self, names: Sequence[str]) -> "Images":
        """The same with the numbers that classes have in `names`; without names, their own."""
        numbers = np.array(class_ids(self.class_names, names, self.name))
        return replace(self, labels=numbers[self.labels], class_names=tuple(names))

    def fingerprint(self) -> str:
        """A sha256 that is equal for equal content."""
        return _digest(
            self.digest, self.class_names, hashlib.sha256(self.labels.tobytes()).hexdigest()
        )

    def statistics(self, size: int) -> tuple[list[float], list[float]]:
        """Mean and standard deviation of each channel, of values from 0 to 1."""
        every = max(1, len(self) // SAMPLED)
        rows = np.arange(0, len(self), every)
        total, squares, count = np.zeros(self.channels), np.zeros(self.channels), 0
        for start in range(0, len(rows), 256):
            values = self.read(rows[start : start + 256], size).astype(np.float64) / 255
            total += values.sum((0, 2, 3))
            squares += np.square(values).sum((0, 2, 3))
            count += values.size // self.channels
        mean = total / count
        spread = np.sqrt(np.maximum(squares / count - mean**2, 0))
        spread = np.maximum(spread, 1 / 255)  # images of one colour stay finite
        return mean.round(6).tolist(), spread.round(6).tolist()


def resized(pixels: Pixels, size: int) -> Pixels:
    """Images stretched or squeezed to a square, bilinear."""
    if pixels.shape[2:] == (size, size):
        return pixels
    given = torch.from_numpy(pixels).float()
    scaled = F.interpolate(given, (size, size), mode="bilinear", antialias=True)
    return scaled.round().clamp(0, 255).byte().numpy()


def from_arrays(name: str, pixels: NDArray[Any], labels: NDArray[Any], where: str) -> Images:
    """Images that are already in memory: (images, height, width) or with channels at one end."""
    pixels = as_pixels(pixels, where)
    labels = np.asarray(labels)
    labels = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if labels.ndim != 1 or labels.dtype.kind not in "iuU":
        raise DataError(
            f"{where}: labels are whole numbers or words, one for each image, not "
            f"{labels.dtype} of shape {labels.shape}"
        )
    if len(labels) != len(pixels):
        raise DataError(f"{where}: {len(pixels):,} images, but {len(labels):,} labels")
    if not len(labels):
        raise DataError(f"{where} holds no images")
    values, numbers = np.unique(labels, return_inverse=True)
    _, channels, height, width = pixels.shape
    return Images(
        name=name,
        description=_told(len(labels), f"{width} × {height} pixels", channels, len(values)),
        labels=numbers.astype(np.int64),
        class_names=tuple(map(str, values.tolist())),
        channels=channels,
        side=min(height, width),
        square=height == width,
        read=lambda rows, size: resized(pixels[rows], size),
        digest=hashlib.sha256(np.ascontiguousarray(pixels).data).hexdigest(),
    )


def as_pixels(array: NDArray[Any], where: str) -> Pixels:
    """An array of images with its axes in our order and its values in bytes."""
    array = np.asarray(array)
    if array.ndim == 3:
        array = array[:, None]
    elif array.ndim == 4 and array.shape[-1] in (1, 3) and array.shape[1] not in (1, 3):
        array = array.transpose(0, 3, 1, 2)
    if array.ndim != 4 or array.shape[1] not in (1, 3) or 0 in array.shape[2:]:
        raise DataError(
            f"{where}: images are (count, height, width), with 1 or 3 channels at one end; "
            f"this array is {array.shape}"
        )
    if array.dtype == np.uint8:
        return array
    if array.dtype.kind not in "iufb" or not np.isfinite(array).all():
        raise DataError(f"{where}: images are finite numbers, not {array.dtype}")
    low, high = (float(array.min()), float(array.max())) if array.size else (0.0, 0.0)
    if low < 0 or high > 255:
        raise DataError(
            f"{where}: values from {low:g} to {high:g}; images are 0 to 255, or fractions 0 to 1"
        )
    fractions = high <= 1 and array.dtype.kind in "fb"
    return (array * 255 if fractions else array).round().astype(np.uint8)


def from_npz(path: Path) -> Images:
    """A NumPy archive of arrays x and y, or images and labels, with a test part or without."""
    try:
        with path.open("rb") as stream:
            archive = np.load(stream, allow_pickle=False)
            arrays = {key.lower(): archive[key] for key in archive.files if key.lower() in NPZ}
    except DAMAGED as error:
        if "pickle" in str(error).lower():
            raise DataError(
                f"{path} holds objects, which only pickle could read; save plain arrays instead"
            ) from None
        raise DataError(f"{path} is not a whole .npz archive: {error}") from None
    train, test = (_among(arrays, pairs) for pairs in (NPZ_TRAIN, NPZ_TEST))
    if train is None:
        raise DataError(
            f"{path} needs arrays {' or '.join(f'{x!r} and {y!r}' for x, y in NPZ_TRAIN)}; "
            f"it holds: {', '.join(archive.files) or 'nothing'}"
        )
    images = from_arrays(stem(path), *train, str(path))
    if test is None:
        return _whole(images)
    return _whole(images, from_arrays(stem(path), *test, f"{path} (test)"))


def _among(
    arrays: Mapping[str, NDArray[Any]], pairs: Sequence[tuple[str, str]]
) -> tuple[NDArray[Any], NDArray[Any]] | None:
    found = [(arrays[x], arrays[y]) for x, y in pairs if x in arrays and y in arrays]
    return found[0] if found else None


def from_idx(folder: Path) -> Images:
    """MNIST's files: images in one, labels in another of the same name; gzip or not."""
    parts: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        found = IDX.fullmatch(path.name)
        if found:
            parts.setdefault(found["part"], path)  # of two, the one that is not zipped
    train = [part for part in parts if not part.endswith(("t10k", "test"))] or list(parts)
    if len(train) != 1:
        raise DataError(
            f"{folder} holds {len(train)} sets of images to learn from; keep one of them"
        )
    images = _idx(folder, train[0], parts)
    test = [part for part in parts if part != train[0]]
    return _whole(images, _idx(folder, test[0], parts) if test else None)


def _idx(folder: Path, part: str, parts: Mapping[str, Path]) -> Images:
    path = parts[part]
    twin = path.name.replace("images", "labels").replace("idx3", "idx1")
    near = [folder / twin, folder / f"{twin}.gz", folder / twin.removesuffix(".gz")]
    labels = next((each for each in near if each.exists()), None)
    if labels is None:
        raise DataError(f"{path} has no labels beside it; expected {twin}")
    pixels = read_idx(path, 3)
    return from_arrays(folder.resolve().name, pixels, read_idx(labels, 1), str(path))


def read_idx(path: Path, axes: int) -> NDArray[np.uint8]:
    """An IDX file of bytes: 0 0 8 axes, then the length of each axis as four bytes, then data."""
    try:
        with open_bytes(path) as stream:
            content = stream.read()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is damaged: {error}") from None
    head = 4 + 4 * axes
    if content[:4] != bytes([0, 0, 8, axes]) or len(content) < head:
        raise DataError(
            f"{path} begins with {content[:4].hex(' ')}; an IDX file of bytes with {axes} axes "
            f"begins with 00 00 08 {axes:02x}"
        )
    shape = struct.unpack(f">{axes}I", content[4:head])
    wanted = int(np.prod([int(each) for each in shape], dtype=object))
    if len(content) - head != wanted:
        raise DataError(
            f"{path} holds {len(content) - head:,} bytes after its head, which promises "
            f"{' × '.join(map(str, shape))}; it is cut short or not an IDX file"
        )
    return np.frombuffer(content, np.uint8, offset=head).reshape(shape)


def from_folder(folder: Path) -> Images:
    """A folder for each class with its images; train/ and test/ (or val/) above them, or not."""
    if classes_in(folder / "train"):
        tests = [folder / name for name in ("test", "val", "validation")]
        test = next((each for each in tests if classes_in(each)), None)
        name = folder.resolve().name
        images = replace(_folder(folder / "train"), name=name)
        return _whole(images, None if test is None else replace(_folder(test), name=name))
    return _whole(_folder(folder))


def classes_in(folder: Path) -> dict[str, list[Path]]:
    """The image files of each class, where these are most of what the sub-folders hold."""
    if not folder.is_dir():
        return {}
    found: dict[str, list[Path]] = {}
    others = 0
    for each in sorted(folder.iterdir()):
        if each.name.startswith("."):
            continue
        files = sorted(each.rglob("*")) if each.is_dir() else [each]
        # os.path.isfile says no where a look is not permitted, Path.is_file raises
        files = [f for f in files if not f.name.startswith(".") and os.path.isfile(f)]
        pictures = [
            file for file in files if file.suffix.lower() in ENDINGS and file.parent == each
        ]
        if pictures:
            found[each.name] = pictures
        others += len(files) - len(pictures)
    return found if sum(map(len, found.values())) > others else {}


def _folder(folder: Path) -> Images:
    classes = classes_in(folder)
    paths = [path for files in classes.values() for path in files]
    labels = [number for number, files in enumerate(classes.values()) for _ in files]
    digest, sizes, colours = hashlib.sha256(), Counter[tuple[int, int]](), Counter[bool]()
    for path in paths:
        content = _content(path)
        digest.update(f"{path.relative_to(folder)} {len(content)}\n".encode() + content)
        image = open_image(path, content)
        sizes[image.size] += 1
        colours[image.mode not in ("1", "L", "LA", "I", "I;16")] += 1
    (width, height), _ = sizes.most_common(1)[0]
    channels = 3 if colours[True] else 1
    told = f"{width} × {height} pixels"
    if len(sizes) > 1:
        told = f"{len(sizes)} sizes, most often {told}"

    def read(rows: NDArray[np.int64], size: int) -> Pixels:
        return np.stack([_file_pixels(paths[row], size, channels) for row in rows])

    return Images(
        name=folder.resolve().name,
        description=_told(len(paths), told, channels, len(classes)),
        labels=np.array(labels, np.int64),
        class_names=tuple(classes),
        channels=channels,
        side=min(width, height),
        square=set(sizes) == {(width, width)},
        read=read,
        digest=digest.hexdigest(),
    )


def image_pixels(path: Path, size: int, channels: int) -> Pixels:
    """One image file, as the model was shown others: (1, channels, size, size)."""
    return _file_pixels(path, size, channels)[None]


def _file_pixels(path: Path, size: int, channels: int) -> Pixels:
    image = open_image(path, _content(path))
    try:
        if image.mode.startswith("I"):  # 16 bits of grey, which `convert` would clip to 8
            image = image.point(lambda value: value / 256, "F").convert("L")
        image = image.convert("L" if channels == 1 else "RGB")
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{path} is a damaged image: {error}") from None
    if image.size != (size, size):
        image = image.resize((size, size), resample=2)  # bilinear
    array = np.array(image, np.uint8)
    return array[None] if channels == 1 else array.transpose(2, 0, 1)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


def open_image(path: Path, content: bytes) -> Any:
    """An image of Pillow's of which only the head has been read."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise DataError(
            f"{path} needs Pillow to be read; install it with: pip install 'regard[images]'"
        ) from None
    try:
        return Image.open(io.BytesIO(content), formats=["PNG", "JPEG"])
    except UnidentifiedImageError:  # whose message names a buffer, not a file
        raise DataError(f"{path} is not a PNG or JPEG image") from None
    except (Image.DecompressionBombError, OSError, ValueError) as error:
        raise DataError(f"{path} is not a PNG or JPEG image: {error}") from None


def _whole(images: Images, test: Images | None = None) -> Images:
    """Check what a source as a whole must be: of several classes, its two parts alike."""
    if len(images.class_names) < 2:
        raise DataError(
            f"{images.name} has one class only, {images.class_names[0]!r}; there is nothing to tell apart"
        )
    if test is None:
        return images
    if test.channels != images.channels:
        raise DataError(
            f"{images.name}: images to learn from have {images.channels} channels, "
            f"those of the test part {test.channels}"
        )
    test = replace(
        test.with_class_names(images.class_names),
        description=f"its test part, {len(test):,} images",
    )
    return replace(images, test=test)


def _told(count: int, sizes: str, channels: int, classes: int) -> str:
    colour = "in colour" if channels == 3 else "grey"
    return f"{count:,} images, {sizes}, {colour}, {classes:,} classes"


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
