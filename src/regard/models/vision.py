"""The Vision Transformer: patch embeddings and a Transformer encoder."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from regard.config import Choice, kind_of, make
from regard.errors import ConfigError, ShapeError, unknown
from regard.models.transformer import StackConfig, build_stack, norms
from regard.nn.block import deepnorm
from regard.nn.head import HEADS
from regard.nn.init import INITS, deepnorm_gain
from regard.nn.mask import Mask
from regard.nn.patch import PatchEmbedding, interpolate_positions
from regard.nn.position import Learned

IMAGE_HEADS = ("classify", "pooled", "none")


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionConfig(StackConfig):
    """Any Vision Transformer.

    Patches are a sequence, row by row; its indices are the positions.
    """

    shape: ClassVar[str] = "images"  # it reads pixels, not ids
    image_size: int = 224  # height and width in pixels
    patch: int = 16  # height and width of a patch
    channels: int = 3
    cls: bool = True  # a class token before the patches; false: head.pool is "mean"
    head: Choice = "classify"  # nn.head.HEADS

    def __post_init__(self) -> None:
        StackConfig.__post_init__(self)
        if self.image_size % self.patch:
            raise ShapeError(f"patch={self.patch} must divide image_size={self.image_size}")
        kind, options = kind_of(self.head)
        if kind not in IMAGE_HEADS:
            raise ConfigError(f"{unknown('head', kind, IMAGE_HEADS)}; other heads predict tokens")
        first = kind == "pooled" or (kind == "classify" and options.get("pool", "first") == "first")
        if first and not self.cls:
            raise ConfigError(
                f"head={kind!r} reads the class token, which cls=false removes;\n"
                "set cls=true, or head.pool='mean'"
            )
        if self.cls and options.get("pool") == "mean":
            raise ConfigError("head.pool='mean' averages the patches; also set cls=false")

    @property
    def grid(self) -> int:
        """Patches per row and per column."""
        return self.image_size // self.patch

    @property
    def context(self) -> int:
        """The sequence length: patches, and the class token."""
        return self.grid**2 + self.cls


class Vision(nn.Module):
    """ViT (Dosovitskiy et al. 2020): `forward` returns hidden states, `head` maps them to logits.

    For an image of another size than `image_size`, learned position embeddings are interpolated
    to the new grid; other positions need no change.
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.context = config.context
        self.embed = PatchEmbedding(config.channels, config.dim, config.patch, cls=config.cls)
        self.encoder = build_stack(config, "encoder", context=config.context)
        self.head: Any = make(config.head, HEADS, "head", dim=config.dim, norm=norms(config))
        make(config.init, INITS, "init", model=self, layers=config.layers)
        if config.norm_order == "deepnorm":
            deepnorm_gain(self.encoder, deepnorm("encoder", config.layers, 0)[1])

    def forward(
        self, images: Float[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch time dim"]:
        """The hidden states of the class token and of the patches, row by row."""
        x = self.embed(images)
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        height, width = (pixels // self.config.patch for pixels in images.shape[2:])
        if (height, width) == (self.config.grid, self.config.grid):
            return self.encoder(x, positions=positions, mask=Mask())
        replaced: dict[str, Tensor] = {}
        if isinstance(position := self.encoder.position, Learned):
            replaced["position.table.weight"] = interpolate_positions(
                position.table.weight, height, width, prefix=position.offset + self.config.cls
            )
        result: Tensor = functional_call(
            self.encoder, replaced, (x,), {"positions": positions, "mask": Mask()}
        )
        return result

    if TYPE_CHECKING:
        __call__ = forward
