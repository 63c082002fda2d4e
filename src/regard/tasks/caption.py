"""Image captioning (one to many): generate the caption of an image."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float, UInt8
from numpy.typing import NDArray
from torch import Tensor

from regard.data.batch import CaptionBatch
from regard.nn.state import ImageSource
from regard.tasks.image_classification import (
    check_pixel_settings,
    normalize_pixels,
    random_crop,
)
from regard.tasks.seq2seq import Seq2Seq


@dataclass(frozen=True, kw_only=True)
class Caption(Seq2Seq):
    r"""P(caption | image) = prod_n P(y_n | y_1 .. y_{n-1}, image), with label smoothing.

    Pixels are normalized as in `ImageClassification`; the decoder is trained as in `Seq2Seq`.
    """

    data_kind: ClassVar[str] = "captions"
    target_name: ClassVar[str] = "caption tokens"
    input_kinds: ClassVar[tuple[str, ...]] = ("images",)
    methods: ClassVar[tuple[str, ...]] = ("predict",)
    label_smoothing: float = 0.0  # probability that is spread over all tokens
    # in training, padding of random crops, in pixels on each side; 0: no random crops
    crop_padding: int = 0
    # mean of the pixels, per channel; empty: that of the training images
    mean: list[float] = field(default_factory=list)
    # standard deviation of the pixels, per channel; empty: that of the training images
    std: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        Seq2Seq.__post_init__(self)
        check_pixel_settings(self.crop_padding, self.mean, self.std)

    def collate(  # type: ignore[override]
        self,
        examples: tuple[NDArray[np.uint8], Sequence[np.ndarray], int, int, bool],
        generator: torch.Generator,
    ) -> CaptionBatch:
        """Images and their captions; `training` also shifts the images at random."""
        pixels, sentences, width, regions, training = examples
        images = torch.from_numpy(pixels)
        if training and self.crop_padding:
            images = random_crop(images, self.crop_padding, generator)
        source = ImageSource.of(self.normalize(images), regions)
        return CaptionBatch(source, *self.shift(sentences, width))

    def normalize(
        self, images: UInt8[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch channels height width"]:
        """Pixel values centred and scaled per channel."""
        return normalize_pixels(images, self.mean, self.std)
