"""A language model of dilated causal convolutions (WaveNet)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.config import Choice, Settings, make
from regard.errors import ConfigError
from regard.models.base import LanguageModel, State
from regard.models.compatibility import (
    check_dropout,
    check_input_dim,
    check_sizes,
    require_common_head,
    require_generating_head,
)
from regard.nn.convolution import CausalConvolution, slice_rows
from regard.nn.head import HEADS
from regard.nn.state import Inputs, RecurrentState, Source

MAX_CONVOLUTIONS = 20  # with a receptive field of about a million ids


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class ConvolutionConfig(Settings):
    """A stack of causal convolutions with dilations 1, 2, 4, …"""

    vocab_size: int  # number of tokens
    dim: int = 128  # width of the embedding and of every layer
    layers: int = 8  # number of layers
    kernel_size: int = 2  # kernel size of the convolutions
    dropout: float = 0.0  # dropout of the output of every layer
    context: int = 256  # ids per training block; generation has no limit
    input_dim: int = 0  # width of the input vectors (series, strokes); 0: the inputs are ids
    head: Choice = "linear"  # the output layer (models.compatibility.COMMON_HEADS)

    def __post_init__(self) -> None:
        check_sizes(self, "vocab_size", "dim", "layers", "context")
        check_input_dim(self)
        if self.kernel_size < 2:
            raise ConfigError(
                f"kernel_size={self.kernel_size} must be at least 2: 1 would read no earlier id"
            )
        if self.layers > MAX_CONVOLUTIONS:
            raise ConfigError(
                f"layers={self.layers} must be at most {MAX_CONVOLUTIONS}: "
                "each doubles the receptive field"
            )
        check_dropout(self)
        require_common_head(self.head)

    @property
    def receptive_field(self) -> int:
        """The number of ids that the next one depends on."""
        return 1 + (self.kernel_size - 1) * (2**self.layers - 1)


class ConvolutionLM(LanguageModel):
    r"""A convolutional language model with residual and skip connections.

        x = E[ids] (with `input_dim`, E v + e of vectors v);
        y_l = convolution_l(x),  x <- x + y_l,      l = 1 ... L, dilation 2^(l - 1)
        h = relu(M relu(y_1 + ... + y_L) + m),    logits = W h

    The receptive field is 1 + (k - 1) (2^L - 1) ids, k the kernel size. WaveNet (van den
    Oord et al. 2016) on ids instead of audio.
    """

    def __init__(self, config: ConvolutionConfig) -> None:
        super().__init__()
        self.config = config
        self.embed: nn.Embedding | nn.Linear
        if config.input_dim:
            self.embed = nn.Linear(config.input_dim, config.dim)
        else:
            self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(
            CausalConvolution(config.dim, config.kernel_size, 2**n) for n in range(config.layers)
        )
        self.dropout = nn.Dropout(config.dropout)
        self.mix = nn.Linear(config.dim, config.dim)  # M, m
        self.head: Any = make(
            config.head,
            HEADS,
            "head",
            dim=config.dim,
            vocab_size=config.vocab_size,
            tied=None,
            positions=config.context,
        )

    def forward(
        self, ids: Inputs, *, lengths: Int[Tensor, " batch"] | None = None
    ) -> Float[Tensor, "batch time dim"]:
        """The hidden states, which `head` maps to logits.

        Rows may be right-padded; `lengths` is not needed: no position sees later ids.
        """
        x, _ = self._run(ids, self._zero_left_contexts(len(ids)))
        return x

    def start(self, rows: int, capacity: int, source: Source | None = None) -> RecurrentState:
        """A zero state: left contexts and h; its size does not depend on `capacity`."""
        if source is not None:
            raise ConfigError(
                "a convolutional language model takes no source; an encoder-decoder does"
            )
        require_generating_head(self.head, self.config.head)
        h = self.embed.weight.new_zeros(rows, 1, self.config.dim)
        zeros = torch.zeros(rows, dtype=torch.long, device=h.device)
        return RecurrentState(
            [*((context,) for context in self._zero_left_contexts(rows)), (h,)], zeros, zeros
        )

    def step(
        self,
        ids: Inputs,
        state: State,
        *,
        counts: Int[Tensor, " rows"] | None = None,
        all_logits: bool = False,
    ) -> tuple[Float[Tensor, "rows scored vocab"], RecurrentState]:
        """Read one or more ids per row; see `Language.step`."""
        x, next_state = self.hidden(ids, state, counts=counts)
        if not all_logits:
            [(h,)] = next_state.layers[-1:]
            x = slice_rows(h, next_state.index, 1)
        return self.head(x), next_state

    def hidden(
        self,
        ids: Inputs,
        state: State,
        *,
        counts: Int[Tensor, " rows"] | None = None,
    ) -> tuple[Float[Tensor, "rows time dim"], RecurrentState]:
        """The hidden states, and the state after `ids`.

        The state of a layer is its inputs, those before the step and those of the step. The left
        context of the next step is a slice of them, at each row's current snapshot.
        """
        assert isinstance(state, RecurrentState)
        *layers, (h,) = state.layers
        left_contexts = [
            slice_rows(inputs, state.index, layer.left_context)
            for layer, (inputs,) in zip(self._convolutions(), layers, strict=True)
        ]
        x, layer_inputs = self._run(ids, left_contexts)
        h = torch.cat([slice_rows(h, state.index, 1), x], 1)
        if counts is None:
            counts = torch.full_like(state.index, ids.shape[1])
        return x, state.advance([*((inputs,) for inputs in layer_inputs), (h,)], counts)

    def _run(self, ids: Tensor, left_contexts: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The hidden states, and the inputs of each layer."""
        x = self.embed(ids)
        skips, layer_inputs = torch.zeros_like(x), []
        for layer, left_context in zip(self._convolutions(), left_contexts, strict=True):
            x = layer.carry_hook(x)
            layer_inputs.append(torch.cat([left_context, x], 1))
            y = self.dropout(layer(layer_inputs[-1]))
            x, skips = x + y, skips + y
        return F.relu(self.mix(F.relu(skips))), layer_inputs

    def _zero_left_contexts(self, rows: int) -> list[Tensor]:
        """The left context of each layer at the beginning of a text: zeros."""
        zeros = self.embed.weight.new_zeros
        return [zeros(rows, layer.left_context, self.config.dim) for layer in self._convolutions()]

    def _convolutions(self) -> list[CausalConvolution]:
        return cast(list[CausalConvolution], list(self.layers))

    if TYPE_CHECKING:
        __call__ = forward
