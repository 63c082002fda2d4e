"""A Transformer's layers: embedding, feed-forward network, block, stack of blocks.

`norm_placement` is where the norms of a block are (`norm_first` of torch.nn.Transformer). With
n and m norms, and f a branch (attention, then the feed-forward network):

    pre             x + f(n(x))         GPT-2, LLaMA, ViT
    post            n(x + f(x))         the 2017 Transformer, BERT
    sandwich        x + m(f(n(x)))      CogView, Gemma 2
    deepnorm        n(alpha x + f(x))   Wang et al. 2022; alpha = (2 layers)^(1/4) for a decoder
    no_residual     f(n(x))             deep stacks then do not train

Both branches in parallel, f attention and g the feed-forward network:

    parallel        x + f(n(x)) + g(n(x))       GPT-J, PaLM, Phi
    parallel_norms  x + f(n(x)) + g(m(x))       GPT-NeoX
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import ConfigError
from regard.nn.attention import Attention, AttentionInputs, Mask
from regard.nn.hook_point import CarryHookPoint, HookPoint, add_hook_points
from regard.nn.norm import Norm, bind_padding_mask
from regard.nn.position import Position
from regard.nn.score import RelativePositionEmbedding
from regard.nn.state import KVCache, TransformerState

Activation = Callable[[Tensor], Tensor]


class Embedding(nn.Module):
    r"""x_t = s E[id_t] + S[segment_t]

    E and S are learned; s = sqrt(dim) in Vaswani et al. 2017 and Gemma, else 1. S is BERT's
    embedding of sentence A or B (`token_type_ids` of transformers). If `embed_dim` differs from
    `dim`, a linear layer projects x (factorized embedding, OPT 350M).
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        *,
        scaled: bool = False,
        segments: int = 0,
        embed_dim: int | None = None,
    ) -> None:
        super().__init__()
        width = dim if embed_dim is None else embed_dim
        self.token = nn.Embedding(vocab_size, width)
        self.segment = nn.Embedding(segments, width) if segments else None
        self.project = None if width == dim else nn.Linear(width, dim, bias=False)
        self.scale = math.sqrt(dim) if scaled else 1.0

    def forward(
        self,
        ids: Int[Tensor, "batch time"],
        segments: Int[Tensor, "batch time"] | None = None,
    ) -> Float[Tensor, "batch time dim"]:
        """The embeddings; without `segments` every token belongs to segment 0."""
        x: Tensor = self.token(ids)
        x = x if self.scale == 1.0 else x * self.scale
        if self.segment is not None:
            x = x + (self.segment.weight[0] if segments is None else self.segment(segments))
        elif segments is not None:
            raise ConfigError("segments were given, but the model has none; set model.segments")
        return x if self.project is None else self.project(x)

    if TYPE_CHECKING:
        __call__ = forward


class VectorEmbedding(nn.Module):
    r"""x_t = E v_t + e, for vectors v_t in place of ids."""

    def __init__(self, input_dim: int, dim: int) -> None:
        super().__init__()
        self.value = nn.Linear(input_dim, dim)

    def forward(
        self, values: Float[Tensor, "batch time input_dim"], segments: None = None
    ) -> Float[Tensor, "batch time dim"]:
        """The projected vectors; there are no segments."""
        x: Tensor = self.value(values)
        return x

    if TYPE_CHECKING:
        __call__ = forward


ResidualStream = Float[Tensor, "batch time dim"]
NormPlacementKind = Literal[
    "pre", "post", "sandwich", "deepnorm", "no_residual", "parallel", "parallel_norms"
]


class FeedForward(nn.Module):
    r"""y = f(x W_up + b) W_down + c

    f(u) = max(u, 0) (ReLU, 2017), u Φ(u) (GELU), its tanh approximation (GPT-2) …
    """

    hidden_hook: HookPoint

    def __init__(
        self,
        dim: int,
        ffn_dim: int,
        activation: Activation,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.up = nn.Linear(dim, ffn_dim, bias=bias)
        self.down = nn.Linear(ffn_dim, dim, bias=bias)
        self.activation, self.dropout = activation, dropout
        add_hook_points(self, hidden_hook=HookPoint())

    def forward(self, x: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows dim"]:
        """Project up, apply the activation, project down."""
        hidden = self.hidden_hook(self.activation(self.up(x)))
        return self.down(F.dropout(hidden, self.dropout, self.training))

    if TYPE_CHECKING:
        __call__ = forward


class GatedFeedForward(FeedForward):
    r"""y = (x W_up ⊙ f(x W_gate)) W_down,   f = SiLU (SwiGLU) or GELU (GeGLU) (Shazeer 2020)."""

    def __init__(
        self,
        dim: int,
        ffn_dim: int,
        activation: Activation,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(dim, ffn_dim, activation, bias, dropout)
        self.gate = nn.Linear(dim, ffn_dim, bias=bias)

    def forward(self, x: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows dim"]:
        """Project up, multiply by the activated gate, project down."""
        hidden = self.hidden_hook(self.up(x) * self.activation(self.gate(x)))
        return self.down(F.dropout(hidden, self.dropout, self.training))


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)^2 (So et al. 2021)."""
    return torch.relu(x).square()


def gelu_tanh(x: Tensor) -> Tensor:
    """0.5 x (1 + tanh u), u = sqrt(2/π) (x + 0.044715 x³): GPT-2's GELU."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Activation] = {
    "relu": F.relu,
    "relu2": squared_relu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "silu": F.silu,
}
GATED_ACTIVATIONS: dict[str, Activation] = {
    "reglu": F.relu,
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": ACTIVATIONS["gelu_tanh"],  # T5 v1.1, Gemma
}
FFNS: dict[str, Callable[..., FeedForward]] = {
    **{name: partial(FeedForward, activation=f) for name, f in ACTIVATIONS.items()},
    **{name: partial(GatedFeedForward, activation=f) for name, f in GATED_ACTIVATIONS.items()},
}


@dataclass(frozen=True, slots=True)
class NormPlacement:
    """The norm placement of a block, and the residual scale alpha of DeepNorm."""

    kind: NormPlacementKind
    residual_scale: float = 1.0

    @property
    def needs_final_norm(self) -> bool:
        """Whether the stack needs a final norm: the blocks leave their output unnormalized."""
        return self.kind not in ("post", "deepnorm")

    @property
    def parallel(self) -> bool:
        """Whether attention and feed-forward read the same x."""
        return self.kind in ("parallel", "parallel_norms")


def residual(
    x: ResidualStream,
    branch: Callable[[Tensor], Tensor],
    norm: Norm,
    norm_placement: NormPlacement,
    post_norm: Norm | None = None,
) -> ResidualStream:
    """One branch with its residual connection and norms, as in the table of this module.

    `norm` is n, `post_norm` m.
    """
    if norm_placement.kind == "pre":
        return x + branch(norm(x))
    if norm_placement.kind == "post":
        return norm(x + branch(x))
    if norm_placement.kind == "deepnorm":
        return norm(norm_placement.residual_scale * x + branch(x))
    if norm_placement.kind == "sandwich":
        assert post_norm is not None
        return x + post_norm(branch(norm(x)))
    assert norm_placement.kind == "no_residual"
    return branch(norm(x))


def deepnorm_constants(
    side: Literal["encoder", "decoder"], encoder_layers: int, decoder_layers: int
) -> tuple[float, float]:
    r"""DeepNorm's residual scale alpha and initialization gain beta (Wang et al. 2022, table 1).

        encoder only, N layers       alpha = (2N)^(1/4)              beta = (8N)^(-1/4)
        decoder only, M layers       alpha = (2M)^(1/4)              beta = (8M)^(-1/4)
        encoder of encoder-decoder   alpha = 0.81 (N^4 M)^(1/16)     beta = 0.87 (N^4 M)^(-1/16)
        decoder of encoder-decoder   alpha = (3M)^(1/4)              beta = (12M)^(-1/4)

    >>> deepnorm_constants("decoder", 0, 8)[0]
    2.0
    """
    n, m = encoder_layers, decoder_layers
    if not n or not m:
        return (2 * (n + m)) ** 0.25, (8 * (n + m)) ** -0.25
    if side == "encoder":
        return 0.81 * (n**4 * m) ** 0.0625, 0.87 * (n**4 * m) ** -0.0625
    return (3 * m) ** 0.25, (12 * m) ** -0.25


class Block(nn.Module):
    """One layer: self-attention, cross-attention to `memory` if there is one, feed-forward.

    It is the counterpart of `torch.nn.TransformerEncoderLayer` and `TransformerDecoderLayer`.
    `norm_placement` places the norms, as in the table of this module. Without `ffn` a layer is
    attention only (Elhage et al. 2021).
    """

    carry_hook: CarryHookPoint
    out_hook: HookPoint

    def __init__(
        self,
        attention: Attention,
        ffn: nn.Module | None,
        norm: Callable[[], nn.Module],
        norm_placement: NormPlacement,
        cross: Attention | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if norm_placement.parallel and cross is not None:
            raise ConfigError(
                f"norm_placement={norm_placement.kind!r} does not support cross-attention; "
                "an encoder-decoder needs pre, post, sandwich, deepnorm or no_residual"
            )
        post_norm = norm if norm_placement.kind == "sandwich" else lambda: None
        self.attention, self.attention_norm = attention, norm()
        self.attention_post_norm = post_norm()
        if cross is not None:
            self.cross_norm, self.cross_post_norm = norm(), post_norm()
        self.cross = cross
        self.ffn, self.ffn_post_norm = ffn, None if ffn is None else post_norm()
        self.ffn_norm = None if ffn is None or norm_placement.kind == "parallel" else norm()
        self.norm_placement, self.dropout = norm_placement, dropout
        add_hook_points(self, carry_hook=CarryHookPoint(), out_hook=HookPoint())

    def forward(
        self,
        x: Float[Tensor, "batch time dim"],
        memory: Float[Tensor, "batch seen dim"] | None = None,
        *,
        inputs: AttentionInputs,
        memory_inputs: AttentionInputs | None = None,
        state: KVCache | None = None,
        memory_kv: tuple[Tensor, Tensor] | None = None,
    ) -> Float[Tensor, "batch time dim"]:
        """The residual stream after this layer."""
        x, drop = self.carry_hook(x), self._drop
        norms = (self.attention_norm, self.attention_post_norm, self.ffn_norm, self.ffn_post_norm)
        attention_norm, attention_post_norm, ffn_norm, ffn_post_norm = (
            bind_padding_mask(norm, inputs.valid) for norm in norms
        )
        assert attention_norm is not None
        if self.norm_placement.parallel:
            normed = attention_norm(x)
            attention_output = self.attention(normed, inputs=inputs, state=state)
            assert self.ffn is not None
            ffn_output = self.ffn(normed if ffn_norm is None else ffn_norm(x))
            return self.out_hook(x + drop(attention_output) + drop(ffn_output))
        x = residual(
            x,
            lambda x: drop(self.attention(x, inputs=inputs, state=state)),
            attention_norm,
            self.norm_placement,
            attention_post_norm,
        )
        if self.cross is not None:
            cross = self.cross
            assert memory_inputs is not None
            x = residual(
                x,
                lambda x: drop(cross(x, memory, inputs=memory_inputs, memory_kv=memory_kv)),
                self.cross_norm,
                self.norm_placement,
                self.cross_post_norm,
            )
        if self.ffn is not None:
            ffn = self.ffn
            assert ffn_norm is not None
            x = residual(x, lambda x: drop(ffn(x)), ffn_norm, self.norm_placement, ffn_post_norm)
        return self.out_hook(x)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x

    if TYPE_CHECKING:
        __call__ = forward


class Stack(nn.Module):
    """An encoder or a decoder: position embeddings, the blocks, and a final norm.

    It is the counterpart of `torch.nn.TransformerEncoder` and `TransformerDecoder`. The final norm
    exists only where `norm_placement` needs one.

    `windows` holds the sliding window of each layer (None: full attention); its length is the
    number of layers. Fewer blocks than layers are repeated in order (ALBERT has one block).
    `project` maps embeddings of another width to dim. `relative_embedding` holds the relative
    position embeddings of disentangled attention.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        position: Position,
        *,
        windows: Sequence[int | None],
        embed_norm: nn.Module | None = None,
        project: nn.Module | None = None,
        norm: nn.Module | None = None,
        relative_embedding: RelativePositionEmbedding | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.position = position
        self.relative_embedding = relative_embedding
        self.embed_norm = embed_norm
        self.project = project
        self.blocks = nn.ModuleList(blocks)
        self.windows = tuple(windows)
        self.norm = norm
        self.dropout = dropout

    @property
    def layers(self) -> list[Block]:
        """The block of each layer, in order."""
        blocks = cast(list[Block], list(self.blocks))
        return [blocks[index % len(blocks)] for index in range(len(self.windows))]

    def forward(
        self,
        x: Float[Tensor, "batch time width"],
        *,
        positions: Int[Tensor, "#batch time"],
        mask: Mask,
        memory: Float[Tensor, "batch source dim"] | None = None,
        memory_mask: Mask | None = None,
        state: TransformerState | None = None,
    ) -> Float[Tensor, "batch time dim"]:
        """The output of the last layer. `state` holds the KV cache of earlier tokens."""
        position_embedding = None if self.position.each_layer else self.position.embed(positions)
        if position_embedding is not None:
            x = x + position_embedding.to(x.dtype)
        valid = mask.valid(positions)
        embed_norm, norm = (bind_padding_mask(n, valid) for n in (self.embed_norm, self.norm))
        if embed_norm is not None:
            x = embed_norm(x)
        x = F.dropout(x, self.dropout, self.training)
        # autocast casts the inputs of matmuls only, so the residual stream is cast here
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if self.project is not None:
            x = self.project(x)

        key_positions = None
        if state is not None and (seen := state.length_after(x.shape[1])) > x.shape[1]:
            key_positions = torch.arange(seen, device=x.device).unsqueeze(0)
        relative = None if self.relative_embedding is None else self.relative_embedding()
        inputs_by_window = {
            window: AttentionInputs.of(
                _add_window(mask, window),
                positions,
                key_positions,
                self.position if window is None else self.position.for_sliding_window(),
                relative,
            )
            for window in set(self.windows)
        }
        memory_inputs = None
        if memory_mask is not None:
            seen = memory.shape[1] if memory is not None else state.memory_kv[0][0].shape[2]  # type: ignore[union-attr, index]
            memory_inputs = AttentionInputs.of(
                memory_mask, positions, torch.arange(seen, device=x.device).unsqueeze(0)
            )
        for index, block in enumerate(self.layers):
            x = block(
                x,
                memory,
                inputs=inputs_by_window[self.windows[index]],
                memory_inputs=memory_inputs,
                state=None if state is None else state.layers[index],
                memory_kv=None
                if state is None or state.memory_kv is None
                else state.memory_kv[index],
            )
        return x if norm is None else norm(x)

    if TYPE_CHECKING:
        __call__ = forward


def _add_window(mask: Mask, window: int | None) -> Mask:
    return mask if window is None else mask & Mask.window(window)
