"""Classification: say which of some classes an image belongs to."""

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
from regard.nn.loss import IGNORED, cross_entropy
from regard.tasks.base import Learns, check_label_smoothing, class_names


@dataclass(frozen=True, kw_only=True)
class Classify:
    r"""P(class | image): cross-entropy of the class, with label smoothing.

    A colour c from 0 to 255 becomes (c / 255 - mean) / std of its channel. While learning, an
    image may be shifted by up to `crop` pixels each way, what comes in being black, and turned
    into its mirror image half of the time (`flip`).
    """

    learns: ClassVar[Learns] = "images"
    verb: ClassVar[str] = "predict"
    measures: ClassVar[tuple[str, ...]] = ("loss", "accuracy")
    label_smoothing: float = 0.0
    crop: int = 0
    flip: bool = False
    mean: list[float] = field(default_factory=list)  # of each channel; empty: of what is learned
    std: list[float] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # of the classes; empty: the data's own

    def __post_init__(self) -> None:
        check_label_smoothing(self.label_smoothing)
        if self.crop < 0:
            raise ConfigError(f"task.crop={self.crop} must be 0 or more pixels")
        if len(self.mean) != len(self.std) or any(each <= 0 for each in self.std):
            raise ConfigError(
                f"task.mean={self.mean} and task.std={self.std} have one number for each channel, "
                "those of std above 0"
            )

    def collate(
        self,
        examples: tuple[NDArray[np.uint8], NDArray[np.int64], bool],
        generator: torch.Generator,
    ) -> ImageBatch:
        """Images as the model reads them and their classes; changed at random while learning."""
        pixels, labels, learning = examples
        images = torch.from_numpy(pixels)
        if learning and self.crop:
            images = shifted(images, self.crop, generator)
        if learning and self.flip:
            mirror = torch.rand(len(images), generator=generator) < 0.5
            images = torch.where(mirror.view(-1, 1, 1, 1), images.flip(-1), images)
        return ImageBatch(self.normal(images), torch.from_numpy(labels))

    def normal(
        self, images: UInt8[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch channels height width"]:
        """Colours centred and scaled."""
        mean, std = (torch.tensor(each).view(-1, 1, 1) for each in (self.mean, self.std))
        return (images.float() / 255 - mean) / std

    def loss(self, model: nn.Module, batch: ImageBatch) -> Float[Tensor, ""]:
        """Summed cross-entropy; smoothed while training."""
        smoothing = self.label_smoothing if model.training else 0.0
        return model.head.loss(model(batch.images), batch.targets, smoothing=smoothing)  # type: ignore[operator, union-attr]

    def count(self, batch: ImageBatch) -> Int[Tensor, ""]:
        """How many images there are."""
        return (batch.targets != IGNORED).sum()

    def metrics(self, model: nn.Module, batches: Iterable[ImageBatch]) -> dict[str, float]:
        """Loss in nats per image, and the share of images whose likeliest class is right."""
        training = model.training
        model.eval()
        sums = torch.zeros(3, dtype=torch.float64)  # of losses, of right answers, of images
        with torch.no_grad():
            for batch in batches:
                logits = model.head(model(batch.images))  # type: ignore[operator]
                loss = cross_entropy(logits, batch.targets)
                right = (logits.argmax(-1) == batch.targets).sum()
                sums += torch.stack((loss, right, self.count(batch))).cpu()
        model.train(training)
        loss, right, count = sums.tolist()
        if not count:
            raise DataError("nothing to evaluate: the held-out set has no image")
        return {"loss": loss / count, "accuracy": right / count}

    def named(self, names: Sequence[str]) -> list[str]:
        """The names of the classes: the data's own, or those given for numbers from 0 on."""
        return class_names(self.names, names)


def shifted(
    images: UInt8[Tensor, "batch channels height width"], by: int, generator: torch.Generator
) -> UInt8[Tensor, "batch channels height width"]:
    """Each image moved by a random number of pixels, at most `by`, down or up and to a side."""
    count, _, height, width = images.shape
    framed = F.pad(images, (by, by, by, by))
    down, right = torch.randint(0, 2 * by + 1, (2, count, 1), generator=generator)
    rows = (down + torch.arange(height)).view(count, 1, height, 1)
    columns = (right + torch.arange(width)).view(count, 1, 1, width)
    which = torch.arange(count).view(-1, 1, 1, 1)
    channels = torch.arange(images.shape[1]).view(1, -1, 1, 1)
    return framed[which, channels, rows, columns]
