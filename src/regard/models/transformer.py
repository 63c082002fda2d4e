"""The Transformer: encoder, decoder or encoder-decoder, from one configuration."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast, get_args, get_origin, get_type_hints

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from regard.config import Choice, Settings, kind_of, make
from regard.errors import ConfigError, ShapeError, unknown
from regard.models.base import LanguageModel, State
from regard.models.compatibility import (
    STACK_RULES,
    TRANSFORMER_RULES,
    check_dropout,
    check_input_dim,
    check_rules,
    option,
    require_generating_head,
)
from regard.nn.attention import Attention, Mask
from regard.nn.block import (
    FFNS,
    GATED_ACTIVATIONS,
    Block,
    Embedding,
    NormPlacement,
    NormPlacementKind,
    Stack,
    VectorEmbedding,
    deepnorm_constants,
)
from regard.nn.characters import CharacterEmbedding
from regard.nn.head import HEADS
from regard.nn.init import INITS, init_deepnorm
from regard.nn.norm import NORMS
from regard.nn.options import require_positive
from regard.nn.position import POSITIONS, Position
from regard.nn.score import RELATIVE_SCORES, SCORES, Disentangled
from regard.nn.state import Inputs, KVCache, Source, TransformerState


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class StackConfig(Settings):
    """A stack of blocks: sizes and choices; comments name the dict of each choice."""

    dim: int = 512  # width of the residual stream
    layers: int = 6  # number of layers of the decoder, or of the only stack
    heads: int = 8  # number of attention heads
    # number of key and value heads (GQA, MQA); None: as many as `heads`
    kv_heads: int | None = None
    head_dim: int | None = None  # width of a head; None: dim / heads
    # width of the FFN; None: 4 dim, or if gated 8/3 dim, rounded up to a multiple of 8
    ffn_dim: int | None = None
    # the attention score (nn.score.SCORES); relative scores in self-attention only
    score: Choice = "scaled_dot"
    position: Choice = "learned"  # the position encoding (nn.position.POSITIONS)
    window: int | None = None  # size of sliding-window attention; None: full attention
    global_every: int | None = None  # every n-th layer has full attention instead of `window`
    # indices, from 0, of the layers with full attention instead of `window`
    global_layers: list[int] | None = None
    norm: str = "layer"  # the norm (nn.norm.NORMS)
    norm_eps: float = 1e-5  # epsilon of the norm, added to the variance
    qk_norm: bool = False  # normalize each query and each key
    # where the norms are in a block, and whether attention and FFN are computed in parallel
    norm_placement: NormPlacementKind = "pre"
    # DeepNorm's alpha, the scale of the residual; None: computed from the number of layers
    residual_scale: float | None = None
    ffn: str | None = "gelu"  # the feed-forward network (nn.block.FFNS); None: attention only
    init: Choice = "normal"  # initialization of the weights (nn.init.INITS)
    # which linear layers have a bias: all (true), none (false), or some of them
    bias: bool | Literal["qkv", "attention", "not_qkv", "not_attention"] = True
    shared_layers: bool = False  # all layers share one block (ALBERT)
    embed_norm: bool = False  # normalize the embeddings, positions included
    dropout: float = 0.0  # dropout of the embeddings and of every residual branch
    attention_dropout: float = 0.0  # dropout of attention weights
    ffn_dropout: float = 0.0  # dropout of the hidden layer of the feed-forward network

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            minimum = 0 if name in ("segments", "input_dim", "char_dim") else 1
            if type(value) is int and value < minimum:
                raise ConfigError(f"{name}={value} must be at least {minimum}")
        for name, hint in get_type_hints(type(self)).items():
            value, allowed = getattr(self, name), _literal_values(hint)
            if allowed and isinstance(value, str) and value not in allowed:
                known = (*allowed, "true", "false") if bool in get_args(hint) else allowed
                raise ConfigError(unknown(f"value of {name}", value, known))
        if self.head_dim is None and self.dim % self.heads:
            raise ShapeError(f"heads={self.heads} must divide dim={self.dim}, or give head_dim")
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ShapeError(f"kv_heads={self.kv_heads} must divide heads={self.heads}")
        check_dropout(self, "dropout", "attention_dropout", "ffn_dropout")
        require_positive("model", norm_eps=self.norm_eps, residual_scale=self.residual_scale)
        for name, kinds in (
            ("score", SCORES),
            ("position", POSITIONS),
            ("norm", NORMS),
            ("ffn", FFNS),
            ("init", INITS),
        ):
            choice = getattr(self, name)
            if choice is not None and (kind := kind_of(choice)[0]) not in kinds:
                raise ConfigError(unknown(name, kind, kinds))
        check_rules(self, STACK_RULES)

    @property
    def resolved_ffn_dim(self) -> int:
        """The width of the feed-forward network; 0 without one."""
        if self.ffn is None:
            return 0
        if self.ffn_dim is not None:
            return self.ffn_dim
        return -(-8 * self.dim // 24) * 8 if self.ffn in GATED_ACTIVATIONS else 4 * self.dim

    def heads_and_ffn_dim(self, side: str) -> tuple[int, int]:
        """The heads and the width of the feed-forward network of an encoder or a decoder."""
        return self.heads, self.resolved_ffn_dim

    @property
    def biases(self) -> tuple[bool, bool, bool]:
        """Whether q, k and v have biases; the attention outputs; all other layers."""
        named = {
            "qkv": (True, False, False),  # Qwen 2
            "attention": (True, True, False),  # LLaMA with attention_bias
            "not_qkv": (False, True, True),  # ViT
            "not_attention": (False, False, True),  # GPT-NeoX
        }
        return (self.bias,) * 3 if isinstance(self.bias, bool) else named[self.bias]

    @property
    def depths(self) -> tuple[int, int]:
        """The number of layers of the encoder and of the decoder; 0 for none."""
        return self.layers, 0


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class TransformerConfig(StackConfig):
    """Any Transformer over token ids, or over vectors (`input_dim`)."""

    vocab_size: int  # number of tokens
    # number of tokens of the source; None: both sides share one vocabulary
    source_vocab_size: int | None = None
    context: int = 1024  # maximum number of tokens of a sequence
    input_dim: int = 0  # width of the input vectors (series, strokes); 0: the inputs are ids
    # which stacks the model has
    architecture: Literal["encoder", "decoder", "encoder-decoder"] = "decoder"
    encoder_heads: int | None = None  # attention heads of the encoder; None: as many as `heads`
    encoder_ffn_dim: int | None = None  # width of the encoder's FFN; None: as `ffn_dim`
    encoder_layers: int | None = None  # number of encoder layers; None: as many as `layers`
    embed_dim: int | None = None  # width of the embedding tables; None: dim
    factorize_positions: bool = True  # position embeddings have width embed_dim; false: dim
    embed_scaled: bool = False  # multiply embeddings by the square root of their width
    segments: int = 0  # number of segment embeddings of an encoder (BERT: 2)
    char_dim: int = 0  # for tagging: width of the character vector of each word; 0: none
    # prefix LM: attention within the prompt is bidirectional; only tokens after it are predicted
    prefix: bool = False
    tied: bool = True  # weight tying: a head over the vocabulary uses the embedding matrix
    head: Choice = "linear"  # the output layer (nn.head.HEADS)

    def __post_init__(self) -> None:
        StackConfig.__post_init__(self)
        kind, _ = kind_of(self.head)
        if kind not in HEADS:
            raise ConfigError(unknown("head", kind, HEADS))
        check_input_dim(self)
        check_rules(self, TRANSFORMER_RULES)

    def heads_and_ffn_dim(self, side: str) -> tuple[int, int]:
        """The heads and the width of the feed-forward network of an encoder or a decoder."""
        if side == "decoder" or self.architecture != "encoder-decoder":
            return self.heads, self.resolved_ffn_dim
        return self.encoder_heads or self.heads, self.encoder_ffn_dim or self.resolved_ffn_dim

    @property
    def depths(self) -> tuple[int, int]:
        """The number of layers of the encoder and of the decoder; 0 for none."""
        if self.architecture == "encoder":
            return self.layers, 0
        if self.architecture == "decoder":
            return 0, self.layers
        return self.layers if self.encoder_layers is None else self.encoder_layers, self.layers


class Transformer(LanguageModel):
    """Vaswani et al. 2017 and its descendants: encoder, decoder, or both.

    `forward` returns hidden states, which `head` projects to logits. With a decoder it is a
    `Language`, by `start` and `step`.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.context = config.context
        encoder_layers, decoder_layers = config.depths
        embed_dim = config.embed_dim if config.factorize_positions else None
        embedding = partial(
            Embedding,
            dim=embed_dim or config.dim,
            scaled=config.embed_scaled,
            segments=config.segments,
            embed_dim=config.embed_dim,
        )
        self.embed: Any  # an Embedding, or a VectorEmbedding of vectors
        if config.input_dim:
            self.embed = VectorEmbedding(config.input_dim, config.dim)
        else:
            self.embed = embedding(config.vocab_size)
        self.characters = None
        if config.char_dim:
            self.characters = CharacterEmbedding(config.char_dim, config.dim)
        self.source_embed = None
        if config.source_vocab_size is not None:
            self.source_embed = embedding(config.source_vocab_size)
        stack = partial(build_stack, config, embed_dim=embed_dim, context=config.context)
        self.encoder = stack(side="encoder") if encoder_layers else None
        self.decoder = stack(side="decoder") if decoder_layers else None
        self.head: Any = make(
            config.head,
            HEADS,
            "head",
            dim=config.dim,
            vocab_size=config.vocab_size,
            embed_dim=config.embed_dim,
            tied=self.embed.token if config.tied and not config.input_dim else None,
            norm=vector_norm_layer(config),
            positions=config.context,
        )
        make(config.init, INITS, "init", model=self, layers=max(config.depths))
        if config.norm_placement == "deepnorm":
            for side, module in (("encoder", self.encoder), ("decoder", self.decoder)):
                if module is not None:
                    init_deepnorm(module, _deepnorm_constants(config, side)[1])

    def forward(
        self,
        ids: Inputs,
        *,
        source: Source | None = None,
        mask: Mask = Mask.none(),  # noqa: B008 -- a frozen value
        lengths: Int[Tensor, " batch"] | None = None,
        positions: Int[Tensor, "#batch time"] | None = None,
        segments: Int[Tensor, "batch time"] | None = None,
        word_bytes: UInt8[Tensor, "batch time bytes"] | None = None,
    ) -> Float[Tensor, "batch time dim"]:
        """The hidden states of `ids`. A decoder is causal, except within a prefix of `mask`.

        Rows may be right-padded: `lengths` gives the number of valid ids of each, which an encoder
        masks. A decoder needs no such mask: no position attends to later ones. `word_bytes` are
        the bytes of the word of each id.
        """
        self._check_source(source)
        positions = self._positions(ids) if positions is None else positions
        x = self.embed(ids, segments)
        if self.characters is not None:
            if word_bytes is None:
                raise ConfigError("this model reads the characters of words; give `word_bytes`")
            x = x + self.characters(word_bytes)
        if self.decoder is None:
            assert self.encoder is not None
            mask = mask if lengths is None else mask & Mask.lengths(lengths)
            return self.encoder(x, positions=positions, mask=mask)
        mask = _make_causal(mask)
        if self.encoder is None:
            return self.decoder(x, positions=positions, mask=mask)
        memory, memory_mask = self._encode(source)
        return self.decoder(
            x, positions=positions, mask=mask, memory=memory, memory_mask=memory_mask
        )

    def start(self, rows: int, capacity: int, source: Source | None = None) -> TransformerState:
        """An empty KV cache for `rows` rows of up to `capacity` ids; the source is encoded here."""
        if self.decoder is None:
            raise ConfigError("an encoder does not generate; use a decoder or an encoder-decoder")
        self._check_source(source)
        require_generating_head(self.head, self.config.head)
        if capacity > self.config.context and kind_of(self.config.position)[0] == "learned":
            raise ShapeError(
                f"capacity={capacity} exceeds context={self.context}, the number of learned "
                "positions; use fewer tokens"
            )
        blocks = self.decoder.layers
        like = next(self.parameters())

        def empty_cache(attention: Attention) -> KVCache:
            shape = (rows, attention.kv_heads, capacity)
            value_dim = attention.value.out_features // attention.kv_heads
            return KVCache(
                like.new_zeros(*shape, attention.head_dim), like.new_zeros(*shape, value_dim)
            )

        memory_kv = None
        if self.encoder is not None:
            encoder_output, _ = self._encode(source)
            memory_kv = [cast(Attention, b.cross).keys_values(encoder_output) for b in blocks]
        return TransformerState(
            [empty_cache(block.attention) for block in blocks],
            torch.zeros(rows, dtype=torch.long, device=like.device),
            capacity,
            memory_kv=memory_kv,
            memory_lengths=None if source is None else source.lengths,
        )

    def step(
        self,
        ids: Inputs,
        state: State,
        *,
        counts: Int[Tensor, " rows"] | None = None,
        all_logits: bool = False,
    ) -> tuple[Float[Tensor, "rows scored vocab"], TransformerState]:
        """Read one or more ids per row; see `Language.step`."""
        x, next_state = self.hidden(ids, state, counts=counts)
        if not all_logits:
            rows = torch.arange(len(x), device=x.device)
            x = x[:, -1:] if counts is None else x[rows, counts - 1].unsqueeze(1)
        return self.head(x), next_state

    def hidden(
        self,
        ids: Inputs,
        state: State,
        *,
        counts: Int[Tensor, " rows"] | None = None,
    ) -> tuple[Float[Tensor, "rows time dim"], TransformerState]:
        """The hidden states, and the state after `ids`; see `SupportsHidden.hidden`."""
        assert isinstance(state, TransformerState)
        assert self.decoder is not None
        time = ids.shape[1]
        positions = state.lengths.unsqueeze(1) + torch.arange(time, device=ids.device)
        lengths = state.memory_lengths
        mask = Mask.causal()
        if state.prefix:
            mask = Mask.prefix(state.lengths + (time if counts is None else counts))
        x = self.decoder(
            self.embed(ids),
            positions=positions,
            mask=mask,
            memory_mask=None if lengths is None else Mask.lengths(lengths),
            state=state,
        )
        return x, state.advance(counts, time)

    def _encode(self, source: Source | None) -> tuple[Tensor, Mask]:
        if source is None or self.encoder is None:
            raise ConfigError("an encoder-decoder needs a source; pass source=Source(ids, lengths)")
        embed = self.embed if self.source_embed is None else self.source_embed
        mask = Mask.lengths(source.lengths)
        return self.encoder(
            embed(source.ids), positions=self._positions(source.ids), mask=mask
        ), mask

    def _check_source(self, source: Source | None) -> None:
        if source is not None and self.config.architecture != "encoder-decoder":
            raise ConfigError(
                f"a Transformer with architecture={self.config.architecture!r} takes no source; "
                "an encoder-decoder does"
            )

    def _positions(self, ids: Tensor) -> Tensor:
        if ids.shape[1] > self.config.context:
            raise ShapeError(
                f"{ids.shape[1]} tokens exceed context={self.config.context}; shorten the input"
            )
        return torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)

    if TYPE_CHECKING:
        __call__ = forward


def _literal_values(hint: Any) -> tuple[Any, ...]:
    """The values of the `Literal` in a type hint; empty if it has none."""
    literals = [part for part in (hint, *get_args(hint)) if get_origin(part) is Literal]
    return tuple(value for literal in literals for value in get_args(literal))


def _make_causal(mask: Mask) -> Mask:
    return mask if mask.is_causal else Mask.causal() & mask


def _deepnorm_constants(config: StackConfig, side: str) -> tuple[float, float]:
    scale, gain = deepnorm_constants(cast(Literal["encoder", "decoder"], side), *config.depths)
    return scale if config.residual_scale is None else config.residual_scale, gain


def norm_layer(config: StackConfig) -> Callable[[int], nn.Module]:
    """The constructor of the configured norm, a function of the width."""

    def norm(dim: int) -> nn.Module:
        options = {"dim": dim, "eps": config.norm_eps, "bias": config.biases[2]}
        return make(config.norm, NORMS, "norm", **options)

    return norm


def vector_norm_layer(config: StackConfig) -> Callable[[int], nn.Module]:
    """As `norm_layer`, but LayerNorm instead of BatchNorm: for heads, and for q and k."""
    return norm_layer(replace(config, norm="layer") if config.norm == "batch" else config)


def build_stack(
    config: StackConfig,
    side: Literal["encoder", "decoder"],
    *,
    context: int,
    embed_dim: int | None = None,
) -> Stack:
    """Build the encoder or the decoder of a configuration."""
    norm_placement = NormPlacement(
        config.norm_placement,
        _deepnorm_constants(config, side)[0] if config.norm_placement == "deepnorm" else 1.0,
    )
    norm = norm_layer(config)
    embed_dim = config.dim if embed_dim is None else embed_dim
    heads, ffn_dim = config.heads_and_ffn_dim(side)
    head_dim = config.dim // heads if config.head_dim is None else config.head_dim
    sizes = {"heads": heads, "head_dim": head_dim, "context": context}
    position = _build_position(config, embed_dim, causal=side == "decoder", **sizes)
    attention = partial(
        Attention,
        config.dim,
        heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        qk_norm=vector_norm_layer(config) if config.qk_norm else None,
        bias=config.biases[0],
        out_bias=config.biases[1],
        dropout=config.attention_dropout,
    )

    def ffn() -> nn.Module | None:
        options = {"bias": config.biases[2], "dropout": config.ffn_dropout}
        if config.ffn is None:
            return None
        return make(config.ffn, FFNS, "ffn", dim=config.dim, ffn_dim=ffn_dim, **options)

    encoder_layers, decoder_layers = config.depths
    layers = encoder_layers if side == "encoder" else decoder_layers
    cross = side == "decoder" and encoder_layers > 0
    relative = kind_of(config.score)[0] in RELATIVE_SCORES
    blocks = [
        Block(
            attention(score=config.score),
            ffn(),
            partial(norm, config.dim),
            norm_placement,
            cross=attention(score="scaled_dot" if relative else config.score) if cross else None,
            dropout=config.dropout,
        )
        for _ in range(1 if config.shared_layers else layers)
    ]
    score = blocks[0].attention.score
    return Stack(
        blocks,
        position,
        windows=_layer_windows(config, layers),
        embed_norm=norm(embed_dim) if config.embed_norm else None,
        project=None if embed_dim == config.dim else nn.Linear(embed_dim, config.dim),
        norm=norm(config.dim) if norm_placement.needs_final_norm else None,
        relative_embedding=score.new_embedding(config.dim, norm)
        if isinstance(score, Disentangled)
        else None,
        dropout=config.dropout,
    )


def _build_position(
    config: StackConfig, embed_dim: int, *, head_dim: int, **options: int
) -> Position:
    """Build the position encoding, with the width of the vectors to which it is added."""
    dim = embed_dim
    if option(config.position, POSITIONS, "each_layer"):
        after_projection = option(config.position, POSITIONS, "after_projection")
        dim = head_dim if after_projection else config.dim
    return make(config.position, POSITIONS, "position", dim=dim, head_dim=head_dim, **options)


def _layer_windows(config: StackConfig, layers: int) -> list[int | None]:
    """The sliding window of each layer; None: full attention."""
    every, global_layers = config.global_every, config.global_layers or []
    return [
        None if index in global_layers or (every and not (index + 1) % every) else config.window
        for index in range(layers)
    ]
