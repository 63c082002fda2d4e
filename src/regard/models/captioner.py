"""Image captioning: an encoder of the regions of an image, and a decoder that attends to them."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from regard.config import Choice, Settings, kind_of
from regard.errors import ConfigError, ShapeError, unknown
from regard.models.compatibility import SEQ2SEQ_RULES, check_dropout, check_rules, check_sizes
from regard.models.seq2seq import MemoryKV, RecurrentEncoderDecoder
from regard.models.transformer import Transformer, TransformerConfig
from regard.nn.attention import Mask
from regard.nn.image_features import FEATURES, RegionConvolution, RegionPositions
from regard.nn.recurrent import CELLS
from regard.nn.recurrent_attention import HardAttention
from regard.nn.score import SCORES
from regard.nn.state import CellState, ImageSource

Features = Literal["convolution", "patches"]


class ImageGrid:
    """A mixin of configurations: an image is a square grid of regions, `patch_size` pixels wide."""

    __slots__ = ()
    image_size: int
    patch_size: int
    channels: int
    features: Features

    @property
    def grid(self) -> int:
        """Regions per row and per column."""
        return self.image_size // self.patch_size

    @property
    def regions(self) -> int:
        """The number of regions of an image."""
        return self.grid**2

    def check_grid(self) -> None:
        """Raise if an image cannot be divided into regions."""
        check_sizes(self, "image_size", "patch_size", "channels")
        if self.image_size % self.patch_size:
            raise ShapeError(
                f"patch_size={self.patch_size} must divide image_size={self.image_size}"
            )
        if self.features not in FEATURES:
            raise ConfigError(unknown("features", self.features, FEATURES))
        if self.features == "convolution" and self.patch_size.bit_count() != 1:
            raise ConfigError(
                f"patch_size={self.patch_size} must be a power of two with features='convolution', "
                "whose layers halve the image; set another patch_size, or features='patches'"
            )


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class CaptionerConfig(ImageGrid, TransformerConfig):
    """A captioning Transformer, whose encoder reads the regions of an image."""

    input_kind: ClassVar[str] = "images"  # the input of the encoder, instead of text
    architecture: Literal["encoder-decoder"] = "encoder-decoder"  # which stacks the model has
    image_size: int = 64  # side of an image, in pixels
    patch_size: int = 8  # side of a region, in pixels
    channels: int = 3  # channels of an image: 3 for RGB, 1 for grayscale
    features: Features = "convolution"  # how regions become vectors (nn.image_features.FEATURES)

    def __post_init__(self) -> None:
        TransformerConfig.__post_init__(self)
        self.check_grid()
        if self.source_vocab_size is not None:
            raise ConfigError("source_vocab_size is for a source of text; leave it out")
        if self.context < self.regions:
            raise ConfigError(
                f"context={self.context} must be at least the {self.regions} regions of an image; "
                "raise context or patch_size"
            )


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class RecurrentCaptionerConfig(ImageGrid, Settings):
    """A captioning recurrent network with attention over the regions of an image."""

    input_kind: ClassVar[str] = "images"  # the input of the encoder, instead of text
    architecture: ClassVar[str] = "encoder-decoder"
    # settings of a recurrent encoder, for the code that is shared with seq2seq models
    bidirectional: ClassVar[bool] = False
    bridge: ClassVar[bool] = True
    source_vocab_size: ClassVar[None] = None
    vocab_size: int  # number of tokens
    cell: Choice = "lstm"  # the recurrent cell (nn.recurrent.CELLS)
    dim: int = 128  # width of the embeddings, the regions and every layer
    layers: int = 1  # number of decoder layers
    encoder_layers: int = 1  # convolutions over the regions; 0: none
    image_size: int = 64  # side of an image, in pixels
    patch_size: int = 8  # side of a region, in pixels
    channels: int = 3  # channels of an image: 3 for RGB, 1 for grayscale
    features: Features = "convolution"  # how regions become vectors (nn.image_features.FEATURES)
    score: Choice = "additive"  # the attention score (nn.score.SCORES)
    # where attention is: before the decoder (bahdanau), after it (luong), or between its first
    # layer and the next (between)
    attention_placement: Literal["bahdanau", "luong", "between"] = "bahdanau"
    input_feeding: bool = False  # luong: the attentional vector is part of the next input
    # attention heads with projections; None: one head without projections
    heads: int | None = None
    # attention layers in sequence; each adds the context vector of the one before to its query
    hops: int = 1
    # hard attention, to one region only, trained with this estimator
    hard_attention: HardAttention | None = None
    dropout: float = 0.0  # dropout of embeddings, between layers, and of the head's input
    tied: bool = True  # output matrix = embedding matrix of the target
    context: int = 64  # maximum number of ids of a training caption; generation has no limit

    def __post_init__(self) -> None:
        check_sizes(self, "vocab_size", "dim", "layers", "heads", "hops", "context")
        if self.encoder_layers < 0:
            raise ConfigError(f"encoder_layers={self.encoder_layers} must be at least 0")
        check_dropout(self)
        self.check_grid()
        if self.regions > self.context and kind_of(self.score)[0] == "location":
            raise ConfigError(
                f"score='location' has a row for each of context={self.context} positions, but an "
                f"image has {self.regions} regions; raise context or patch_size"
            )
        for name, choice, kinds in (("cell", self.cell, CELLS), ("score", self.score, SCORES)):
            if (kind := kind_of(choice)[0]) not in kinds:
                raise ConfigError(unknown(name, kind, kinds))
        check_rules(self, SEQ2SEQ_RULES)

    @property
    def depths(self) -> tuple[int, int]:
        """The numbers of encoder and decoder layers: equal, as `bridge` requires."""
        return self.layers, self.layers


class Captioner(Transformer):
    r"""P(caption | image): a Transformer whose encoder reads the regions of an image.

        h = encoder(regions(image)),     the decoder attends to h in every layer

    With features "patches" the encoder is a ViT without a class token.
    """

    config: CaptionerConfig

    def __init__(self, config: CaptionerConfig) -> None:
        super().__init__(config)
        features = FEATURES[config.features]
        self.image_embed = features(config.channels, config.dim, config.patch_size)

    def _encode(self, source: Any) -> tuple[Tensor, Mask]:
        images = check_images(source, self.config)
        assert self.encoder is not None
        x = self.image_embed(images.to(next(self.image_embed.parameters()).dtype))
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        memory = self.encoder(x, positions=positions, mask=Mask.none())
        return memory, Mask.lengths(source.lengths)


class RecurrentCaptioner(RecurrentEncoderDecoder):
    r"""P(caption | image): a recurrent decoder that attends to the regions of an image.

        h_i = encoder(regions(image))_i + p_i,           s_0 = tanh(B mean_i h_i)
        c_t = sum_i softmax_i(score(s, h_i)) h_i       soft attention
        c_t = h_i of one region i                        hard attention (`nn.recurrent_attention`)

    The decoder is that of `RecurrentEncoderDecoder`. Xu et al. 2015 ("Show, attend and tell"),
    without their gate and doubly stochastic regularization, and with features that are trained
    with the decoder.
    """

    uses_packed_sequence = False  # all images have the same number of regions

    def __init__(self, config: RecurrentCaptionerConfig) -> None:
        super().__init__(config)
        vectors = range(self._cells()[0].state_vectors)
        self.bridge = nn.ModuleList(
            nn.ModuleList(nn.Linear(config.dim, config.dim) for _ in vectors)
            for _ in range(config.layers)
        )

    def _build_encoder(self) -> None:
        config, dim = self.config, self.config.dim
        self.image_embed = FEATURES[config.features](config.channels, dim, config.patch_size)
        self.image_layers = nn.Sequential(
            *(RegionConvolution(dim, config.grid) for _ in range(config.encoder_layers))
        )
        self.region_positions = RegionPositions(config.regions, dim)

    def _encode(self, source: Any) -> tuple[list[CellState], MemoryKV]:
        images = check_images(source, self.config)
        regions = self.image_embed(images.to(next(self.image_embed.parameters()).dtype))
        h = self.region_positions(self.image_layers(regions))
        hops = [attention.keys_values(h) for attention in self._attentions()]
        allowed = torch.ones(len(h), 1, 1, h.shape[1], dtype=torch.bool, device=h.device)
        vectors = self._cells()[0].state_vectors
        states = self._initial_states([(h.mean(1),) * vectors] * self.config.layers)
        return states, MemoryKV(hops, allowed)


def check_images(source: Any, config: Any) -> Tensor:
    """Return the images of a source; raise an error unless their shape is that of the model."""
    if not isinstance(source, ImageSource):
        raise ConfigError("a captioner needs images; pass source=ImageSource(images, lengths)")
    expected = (config.channels, config.image_size, config.image_size)
    if tuple(source.images.shape[1:]) != expected:
        raise ShapeError(
            f"images of shape {tuple(source.images.shape[1:])} do not fit the model, which reads "
            f"{expected}: channels, height and width"
        )
    return source.images
