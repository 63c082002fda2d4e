"""The Vision Transformer: patches of an image in front of the same encoder."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from regard.config import Choice, kind_of, make
from regard.errors import ConfigError, ShapeError, unknown
from regard.models.transformer import StackConfig, build_stack, norms
from regard.nn.head import HEADS
from regard.nn.init import INITS, deepnorm_gain
from regard.nn.mask import Mask
from regard.nn.patch import PatchEmbedding, stretched
from regard.nn.position import Learned
from regard.nn.residual import deepnorm

READERS = ("classify", "pooled", "none")  # heads that read a whole image


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionConfig(StackConfig):
    """Any Vision Transformer.

    Patches stand in a row, as words do: positions other than learned ones count along it.
    """

    image_size: int = 224  # height and width in pixels
    patch: int = 16  # height and width of a patch
    channels: int = 3
    cls: bool = True  # a learned vector in front of the patches; else head.pool is "mean"
    head: Choice = "classify"  # nn.head.HEADS

    def __post_init__(self) -> None:
        StackConfig.__post_init__(self)
        if self.image_size % self.patch:
            raise ShapeError(f"patch={self.patch} must divide image_size={self.image_size}")
        kind, options = kind_of(self.head)
        if kind not in READERS:
            raise ConfigError(f"{unknown('head', kind, READERS)}; other heads read tokens")
        first = kind == "pooled" or (kind == "classify" and options.get("pool", "first") == "first")
        if first and not self.cls:
            raise ConfigError(
                f"head={kind!r} reads the first vector, which cls=false takes away;\n"
                "set cls=true, or head.pool='mean'"
            )
        if self.cls and options.get("pool") == "mean":
            raise ConfigError("head.pool='mean' is a mean over patches; set cls=false beside it")

    @property
    def grid(self) -> int:
        """How many patches stand beside each other."""
        return self.image_size // self.patch

    @property
    def context(self) -> int:
        """How many vectors the encoder reads."""
        return self.grid**2 + self.cls


class Vision(nn.Module):
    """ViT (Dosovitskiy et al. 2020): `forward` gives hidden states, `head` reads them.

    An image of another size than `image_size` has more or fewer patches. Learned positions are
    then stretched to the new grid; all other positions are asked for as many as it needs.
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
        """The hidden states of the patches, row by row, behind that of the whole image."""
        x = self.embed(images)
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        height, width = (pixels // self.config.patch for pixels in images.shape[2:])
        if (height, width) == (self.config.grid, self.config.grid):
            return self.encoder(x, positions=positions, mask=Mask())
        other: dict[str, Tensor] = {}
        if isinstance(position := self.encoder.position, Learned):
            table, kept = position.table.weight, position.offset + self.config.cls
            other["position.table.weight"] = stretched(table, height, width, kept=kept)
        result: Tensor = functional_call(
            self.encoder, other, (x,), {"positions": positions, "mask": Mask()}
        )
        return result

    if TYPE_CHECKING:
        __call__ = forward
