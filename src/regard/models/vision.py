"""The Vision Transformer: patch embeddings and a Transformer encoder."""

import math
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from regard.config import Choice, kind_of, make
from regard.errors import ConfigError, ShapeError, unknown
from regard.models.compatibility import reads_first_position
from regard.models.transformer import StackConfig, build_stack, vector_norm_layer
from regard.nn.attention import Mask
from regard.nn.block import deepnorm_constants
from regard.nn.head import HEADS
from regard.nn.init import INITS, init_deepnorm
from regard.nn.patch import PatchEmbedding, interpolate_positions
from regard.nn.position import Learned

MAX_SIDE = 1_000_000  # pixels
IMAGE_HEADS = ("classification", "pooled", "none")


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class VisionConfig(StackConfig):
    """Any Vision Transformer.

    Patches are a sequence, row by row; its indices are the positions.
    """

    architecture: ClassVar[str] = "encoder"
    input_kind: ClassVar[str] = "images"  # instead of text
    image_size: int | list[int] = 224  # side of a square, or height and width, in pixels
    patch_size: int | list[int] = 16  # side of a square patch, or its height and width
    channels: int = 3  # channels of an image: 3 for RGB, 1 for grayscale
    cls: bool = True  # a class token before the patches; without it, set head.pool="mean"
    head: Choice = "classification"  # the output layer (nn.head.HEADS)

    def __post_init__(self) -> None:
        StackConfig.__post_init__(self)
        for name in ("image_size", "patch_size"):
            sides = getattr(self, name)
            if isinstance(sides, list) and (len(sides) != 2 or not all(map(_is_valid_side, sides))):
                raise ConfigError(f"{name}={sides} must be a height and a width, in pixels")
        if any(map(operator.mod, self.image_sides, self.patch_sides)):
            raise ShapeError(
                f"patch_size={self.patch_size} must divide image_size={self.image_size}"
            )
        kind, options = kind_of(self.head)
        if kind not in IMAGE_HEADS:
            raise ConfigError(f"{unknown('head', kind, IMAGE_HEADS)}; other heads predict tokens")
        if reads_first_position(self.head) and not self.cls:
            raise ConfigError(
                f"head={kind!r} reads the class token, which cls=false removes;\n"
                "set cls=true, or head.pool='mean'"
            )
        if self.cls and options.get("pool") == "mean":
            raise ConfigError("head.pool='mean' averages the patches; also set cls=false")

    @property
    def image_sides(self) -> tuple[int, int]:
        """Height and width of an image."""
        return _height_and_width(self.image_size)

    @property
    def patch_sides(self) -> tuple[int, int]:
        """Height and width of a patch."""
        return _height_and_width(self.patch_size)

    @property
    def grid(self) -> tuple[int, int]:
        """Patches per column and per row."""
        (height, width), (patch_height, patch_width) = self.image_sides, self.patch_sides
        return height // patch_height, width // patch_width

    @property
    def context(self) -> int:
        """The sequence length: patches, and the class token."""
        return math.prod(self.grid) + self.cls


def _is_valid_side(side: int) -> bool:
    return 0 < side <= MAX_SIDE


def _height_and_width(size: int | list[int]) -> tuple[int, int]:
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


class VisionTransformer(nn.Module):
    """ViT (Dosovitskiy et al. 2020): `forward` returns hidden states, `head` maps them to logits.

    For an image of another size than `image_size`, learned position embeddings are interpolated
    to the new grid; other positions need no change.
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.context = config.context
        self.embed = PatchEmbedding(config.channels, config.dim, config.patch_sides, cls=config.cls)
        self.encoder = build_stack(config, "encoder", context=config.context)
        self.head: Any = make(
            config.head, HEADS, "head", dim=config.dim, norm=vector_norm_layer(config)
        )
        make(config.init, INITS, "init", model=self, layers=config.layers)
        if config.norm_placement == "deepnorm":
            init_deepnorm(self.encoder, deepnorm_constants("encoder", config.layers, 0)[1])

    def forward(
        self, images: Float[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch time dim"]:
        """The hidden states of the class token and of the patches, row by row."""
        x = self.embed(images)
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        height, width = map(operator.floordiv, images.shape[2:], self.config.patch_sides)
        if (height, width) == self.config.grid:
            return self.encoder(x, positions=positions, mask=Mask.none())
        resized: dict[str, Tensor] = {}
        if isinstance(position := self.encoder.position, Learned):
            resized["position.table.weight"] = interpolate_positions(
                position.table.weight,
                self.config.grid,
                (height, width),
                num_prefix_tokens=position.offset + self.config.cls,
            )
        result: Tensor = functional_call(
            self.encoder, resized, (x,), {"positions": positions, "mask": Mask.none()}
        )
        return result

    if TYPE_CHECKING:
        __call__ = forward
