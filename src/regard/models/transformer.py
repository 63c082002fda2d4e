"""The Transformer in its three shapes, from one configuration."""

from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.config import Choice, kind_of, make
from regard.errors import ConfigError, ShapeError, unknown
from regard.models.base import State
from regard.nn.attention import Attention
from regard.nn.block import Block
from regard.nn.embed import Embedding
from regard.nn.ffn import FFNS, GATED
from regard.nn.head import Head
from regard.nn.init import INITS, deepnorm_gain
from regard.nn.mask import Mask
from regard.nn.norm import NORMS
from regard.nn.position import POSITIONS
from regard.nn.residual import Order, deepnorm
from regard.nn.score import SCORES
from regard.nn.stack import Stack
from regard.nn.state import KeyValues, Source, TransformerState


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerConfig:
    """Any Transformer. Sizes first, then choices; a choice is a key of the table beside it."""

    vocab_size: int
    source_vocab_size: int | None = None  # None: one vocabulary for both sides
    dim: int = 512
    layers: int = 6  # of the decoder, or of the only stack
    encoder_layers: int | None = None  # None: as many as `layers`
    heads: int = 8
    kv_heads: int | None = None  # None: one per head
    head_dim: int | None = None  # None: dim / heads
    ffn_dim: int | None = None  # None: 4 dim, or 8/3 dim rounded up to 8 where gated
    context: int = 1024
    shape: Literal["encoder", "decoder", "encoder-decoder"] = "decoder"
    score: Choice = "scaled_dot"  # nn.score.SCORES
    position: Choice = "learned"  # nn.position.POSITIONS
    window: int | None = None  # how far self-attention sees; None: everything
    norm: str = "layer"  # nn.norm.NORMS
    norm_eps: float = 1e-5
    order: Literal["pre", "post", "sandwich", "deepnorm", "none"] = "pre"
    ffn: str = "gelu"  # nn.ffn.FFNS
    init: Choice = "normal"  # nn.init.INITS
    tied: bool = True  # output matrix = embedding matrix
    bias: bool = True
    embed_scaled: bool = False  # multiply embeddings by sqrt(dim)
    embed_norm: bool = False  # norm the embeddings, positions included
    dropout: float = 0.0  # of embeddings and of every branch
    attention_dropout: float = 0.0  # of attention weights
    ffn_dropout: float = 0.0  # inside the feed-forward

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if type(value) is int and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1")
        if self.head_dim is None and self.dim % self.heads:
            raise ShapeError(f"heads={self.heads} must divide dim={self.dim}, or give head_dim")
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ShapeError(f"kv_heads={self.kv_heads} must divide heads={self.heads}")
        for name in ("dropout", "attention_dropout", "ffn_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must lie in [0, 1)")
        for name, table in (
            ("score", SCORES),
            ("position", POSITIONS),
            ("norm", NORMS),
            ("ffn", FFNS),
            ("init", INITS),
        ):
            kind, _ = kind_of(getattr(self, name))
            if kind not in table:
                raise ConfigError(unknown(name, kind, table))
        if self.shape != "encoder-decoder" and (
            self.source_vocab_size is not None or self.encoder_layers is not None
        ):
            raise ConfigError(
                "source_vocab_size and encoder_layers belong to an encoder-decoder, "
                f"not to shape={self.shape!r}"
            )

    @property
    def width(self) -> int:
        """The width of the feed-forward layer."""
        if self.ffn_dim is not None:
            return self.ffn_dim
        return -(-8 * self.dim // 24) * 8 if self.ffn in GATED else 4 * self.dim

    @property
    def depths(self) -> tuple[int, int]:
        """How many layers the encoder and the decoder have; 0 where there is none."""
        if self.shape == "encoder":
            return self.layers, 0
        if self.shape == "decoder":
            return 0, self.layers
        return self.layers if self.encoder_layers is None else self.encoder_layers, self.layers


class Transformer(nn.Module):
    """Vaswani et al. 2017 and its descendants: encoder, decoder, or both.

    `forward` gives hidden states; `head` turns them into logits. `start` and `step` make
    those with a decoder a `Language`.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.context = config.context
        encoder_layers, decoder_layers = config.depths
        self.embed = Embedding(config.vocab_size, config.dim, scaled=config.embed_scaled)
        self.source_embed = None
        if config.source_vocab_size is not None:
            self.source_embed = Embedding(
                config.source_vocab_size, config.dim, scaled=config.embed_scaled
            )
        self.encoder = _stack(config, "encoder") if encoder_layers else None
        self.decoder = _stack(config, "decoder") if decoder_layers else None
        tied = self.embed.token if config.tied else None
        self.head = Head(config.dim, config.vocab_size, tied=tied)
        make(config.init, INITS, "init", model=self, layers=max(config.depths))
        if config.order == "deepnorm":
            for side, stack in (("encoder", self.encoder), ("decoder", self.decoder)):
                if stack is not None:
                    deepnorm_gain(stack, _deepnorm(config, side)[1])

    def forward(
        self,
        ids: Int[Tensor, "batch time"],
        *,
        source: Source | None = None,
        mask: Mask = Mask(),  # noqa: B008 -- a frozen value
        at: Int[Tensor, "#batch time"] | None = None,
    ) -> Float[Tensor, "batch time dim"]:
        """The hidden states of `ids`. A decoder is causal unless `mask` opens a prefix."""
        at = self._positions(ids) if at is None else at
        x = self.embed(ids)
        if self.decoder is None:
            assert self.encoder is not None
            return self.encoder(x, at=at, mask=self._self_mask(mask, causal=False))
        mask = self._self_mask(mask, causal=True)
        if self.encoder is None:
            return self.decoder(x, at=at, mask=mask)
        memory, memory_mask = self._read(source)
        return self.decoder(x, at=at, mask=mask, memory=memory, memory_mask=memory_mask)

    def start(self, rows: int, capacity: int, source: Source | None = None) -> TransformerState:
        """Empty buffers for `rows` rows of up to `capacity` ids; the source is read here, once."""
        if self.decoder is None:
            raise ConfigError("an encoder does not generate; a decoder or an encoder-decoder does")
        if capacity > self.config.context and kind_of(self.config.position)[0] == "learned":
            raise ShapeError(f"capacity={capacity} is beyond the learned context={self.context}")
        blocks = cast(list[Block], list(self.decoder.blocks))
        like = self.embed.token.weight

        def empty(attention: Attention) -> KeyValues:
            shape = (rows, attention.kv_heads, capacity)
            value_dim = attention.value.out_features // attention.kv_heads
            return KeyValues(
                like.new_zeros(*shape, attention.head_dim), like.new_zeros(*shape, value_dim)
            )

        memory = None
        if self.encoder is not None:
            read, _ = self._read(source)
            memory = [cast(Attention, block.cross).keys_values(read) for block in blocks]
        return TransformerState(
            [empty(block.attention) for block in blocks],
            torch.zeros(rows, dtype=torch.long, device=like.device),
            capacity,
            memory=memory,
            memory_lengths=None if source is None else source.lengths,
        )

    def step(
        self,
        ids: Int[Tensor, "rows time"],
        state: State,
        *,
        counts: Int[Tensor, " rows"] | None = None,
        every: bool = False,
    ) -> tuple[Float[Tensor, "rows scored vocab"], TransformerState]:
        """The logits of what follows, and the state with `ids` taken in."""
        assert isinstance(state, TransformerState)
        assert self.decoder is not None
        time = ids.shape[1]
        at = state.lengths.unsqueeze(1) + torch.arange(time, device=ids.device)
        lengths = state.memory_lengths
        x = self.decoder(
            self.embed(ids),
            at=at,
            mask=self._self_mask(Mask(), causal=True),
            memory_mask=None if lengths is None else Mask.lengths(lengths),
            state=state,
        )
        if not every:
            x = x[:, -1:] if counts is None else x[torch.arange(len(x)), counts - 1].unsqueeze(1)
        return self.head(x), state.advanced(counts, time)

    def _read(self, source: Source | None) -> tuple[Tensor, Mask]:
        if source is None or self.encoder is None:
            raise ConfigError("an encoder-decoder needs a source to read")
        embed = self.embed if self.source_embed is None else self.source_embed
        mask = Mask.lengths(source.lengths)
        own = self._self_mask(mask, causal=False)
        return self.encoder(embed(source.ids), at=self._positions(source.ids), mask=own), mask

    def _self_mask(self, mask: Mask, *, causal: bool) -> Mask:
        if causal and not mask.is_causal:
            mask = Mask.causal() & mask
        return mask if self.config.window is None else mask & Mask.window(self.config.window)

    def _positions(self, ids: Tensor) -> Tensor:
        if ids.shape[1] > self.config.context:
            raise ShapeError(f"{ids.shape[1]} tokens do not fit context={self.config.context}")
        return torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)

    if TYPE_CHECKING:
        __call__ = forward


def _deepnorm(config: TransformerConfig, side: str) -> tuple[float, float]:
    return deepnorm(cast(Literal["encoder", "decoder"], side), *config.depths)


def _stack(config: TransformerConfig, side: Literal["encoder", "decoder"]) -> Stack:
    """Choose the parts of one side. Every choice of the config is made here."""
    order = Order(config.order, _deepnorm(config, side)[0] if config.order == "deepnorm" else 1.0)
    norm = partial(
        make, config.norm, NORMS, "norm", dim=config.dim, eps=config.norm_eps, bias=config.bias
    )
    head_dim = config.dim // config.heads if config.head_dim is None else config.head_dim
    position = make(
        config.position,
        POSITIONS,
        "position",
        dim=config.dim,
        heads=config.heads,
        head_dim=head_dim,
        context=config.context,
        causal=side == "decoder",
    )
    attention = partial(
        Attention,
        config.dim,
        config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        score=config.score,
        bias=config.bias,
        dropout=config.attention_dropout,
    )
    cross = config.shape == "encoder-decoder" and side == "decoder"
    blocks = [
        Block(
            attention(),
            make(
                config.ffn,
                FFNS,
                "ffn",
                dim=config.dim,
                ffn_dim=config.width,
                bias=config.bias,
                dropout=config.ffn_dropout,
            ),
            norm,
            order,
            cross=attention() if cross else None,
            dropout=config.dropout,
        )
        for _ in range(config.depths[0 if side == "encoder" else 1])
    ]
    return Stack(
        blocks,
        position,
        embed_norm=norm() if config.embed_norm else None,
        norm=norm() if order.final_norm else None,
        dropout=config.dropout,
    )
