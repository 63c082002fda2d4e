"""Image classification."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from numpy.typing import NDArray
from torch import Tensor, nn

from regard.data.batch import ImageBatch
from regard.errors import ConfigError, DataError
from regard.models.presets import ModelConfig
from regard.nn.loss import IGNORE_INDEX, cross_entropy
from regard.tasks.base import Task, check_label_smoothing, resolve_class_names
from regard.tasks.metrics import evaluation_mode


@dataclass(frozen=True, kw_only=True)
class ImageClassification(Task):
    r"""P(class | image): cross-entropy of the class, with label smoothing.

    A pixel value c from 0 to 255 is normalized to (c / 255 - mean) / std of its channel. In
    training an image may be padded with `crop_padding` black pixels on each side and cropped at
    random to its size (random crop), and flipped horizontally with probability 1/2 (`flip`).
    """

    data_kind: ClassVar[str] = "images"
    target_name: ClassVar[str] = "images"
    best_metric: ClassVar[str] = "accuracy"
    architectures: ClassVar[tuple[str, ...]] = ("encoder",)
    input_kinds: ClassVar[tuple[str, ...]] = ("images",)
    methods: ClassVar[tuple[str, ...]] = ("predict", "classify")
    supports_top: ClassVar[bool] = True
    metric_names: ClassVar[tuple[str, ...]] = ("loss", "accuracy")
    heads: ClassVar[tuple[str, ...]] = ("classification",)  # kinds of `model.head`
    label_smoothing: float = 0.0  # probability that is spread over all classes
    # in training, padding of random crops, in pixels on each side; 0: no random crops
    crop_padding: int = 0
    flip: bool = False  # in training, flip half of the images horizontally
    # mean of the pixels, per channel; empty: that of the training images
    mean: list[float] = field(default_factory=list)
    # standard deviation of the pixels, per channel; empty: that of the training images
    std: list[float] = field(default_factory=list)
    # names of the classes; empty: those of the data
    class_names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_label_smoothing(self.label_smoothing)
        check_pixel_settings(self.crop_padding, self.mean, self.std)

    def collate(
        self,
        examples: tuple[NDArray[np.uint8], NDArray[np.int64], bool],
        generator: torch.Generator,
    ) -> ImageBatch:
        """Normalized images and their classes; `training` also applies random crop and flip."""
        pixels, labels, training = examples
        images = torch.from_numpy(pixels)
        if training and self.crop_padding:
            images = random_crop(images, self.crop_padding, generator)
        if training and self.flip:
            flipped = torch.rand(len(images), generator=generator) < 0.5
            images = torch.where(flipped.view(-1, 1, 1, 1), images.flip(-1), images)
        return ImageBatch(self.normalize(images), torch.from_numpy(labels))

    def normalize(
        self, images: UInt8[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch channels height width"]:
        """Pixel values centred and scaled per channel."""
        return normalize_pixels(images, self.mean, self.std)

    def loss(self, model: nn.Module, batch: ImageBatch) -> Float[Tensor, ""]:
        """Summed cross-entropy, with label smoothing in training."""
        label_smoothing = self.label_smoothing if model.training else 0.0
        return model.head.loss(model(batch.images), batch.targets, label_smoothing=label_smoothing)  # type: ignore[operator, union-attr]

    def count(self, batch: ImageBatch) -> Int[Tensor, ""]:
        """The number of images."""
        return (batch.targets != IGNORE_INDEX).sum()

    def metrics(self, model: nn.Module, batches: Iterable[ImageBatch]) -> dict[str, float]:
        """Loss in nats per image, and accuracy."""
        sums = torch.zeros(3, dtype=torch.float64)  # losses, correct predictions, images
        with evaluation_mode(model):
            for batch in batches:
                logits = model.head(model(batch.images))  # type: ignore[operator]
                loss = cross_entropy(logits, batch.targets)
                correct = (logits.argmax(-1) == batch.targets).sum()
                sums += torch.stack((loss, correct, self.count(batch))).cpu()
        loss, correct, count = sums.tolist()
        if not count:
            raise DataError("nothing to evaluate: the validation data has no image")
        return {"loss": loss / count, "accuracy": correct / count}

    def resolve_class_names(self, dataset_names: Sequence[str]) -> list[str]:
        """The names of the classes: those of the data, or names given for classes 0, 1, 2, …"""
        return resolve_class_names(self.class_names, dataset_names)

    def tokens_per_target(self, model: ModelConfig) -> int | None:
        """An image has one target; its patches are the tokens."""
        return int(model.context)

    def tokens_read(self, batch: ImageBatch, context: int) -> int:
        """All patches of all images."""
        return len(batch.targets) * context


def check_pixel_settings(crop_padding: int, mean: list[float], std: list[float]) -> None:
    """Raise `ConfigError` for settings with which images cannot be cropped or normalized."""
    if crop_padding < 0:
        raise ConfigError(f"task.crop_padding={crop_padding} must be 0 or more pixels")
    if len(mean) != len(std) or not all(value > 0 for value in std):
        raise ConfigError(
            f"task.mean={mean} and task.std={std} need one value per channel, "
            "and those of std must be above 0"
        )


def normalize_pixels(
    images: UInt8[Tensor, "batch channels height width"], mean: list[float], std: list[float]
) -> Float[Tensor, "batch channels height width"]:
    """(c / 255 - mean) / std of pixel values c, per channel."""
    centre, scale = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))
    return (images.float() / 255 - centre) / scale


def random_crop(
    images: UInt8[Tensor, "batch channels height width"], pixels: int, generator: torch.Generator
) -> UInt8[Tensor, "batch channels height width"]:
    """Pad each image with `pixels` black pixels on each side; crop it to its size at random.

    As `torchvision.transforms.RandomCrop` with `padding`.
    """
    count, _, height, width = images.shape
    padded = F.pad(images, (pixels,) * 4)
    top, left = torch.randint(0, 2 * pixels + 1, (2, count, 1), generator=generator)
    rows = (top + torch.arange(height)).view(count, 1, height, 1)
    columns = (left + torch.arange(width)).view(count, 1, 1, width)
    image = torch.arange(count).view(-1, 1, 1, 1)
    channels = torch.arange(images.shape[1]).view(1, -1, 1, 1)
    return padded[image, channels, rows, columns]
