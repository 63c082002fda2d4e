"""Recurrent language models: RNN, GRU, LSTM, unidirectional or bidirectional."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from regard.config import Choice, Settings, kind_of, make
from regard.errors import ConfigError, unknown
from regard.models.base import LanguageModel, State
from regard.models.compatibility import (
    check_dropout,
    check_input_dim,
    check_sizes,
    option,
    require_common_head,
    require_generating_head,
)
from regard.nn.characters import CharacterConvolution
from regard.nn.head import HEADS
from regard.nn.recurrent import CELLS, OneHot, Recurrent, RecurrentLayer
from regard.nn.state import CapturableRecurrentState, CellState, Inputs, RecurrentState, Source


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class RecurrentConfig(Settings):
    """A stack of recurrent layers with a language modelling, classification or tagging head."""

    vocab_size: int  # number of tokens
    cell: Choice = "lstm"  # the recurrent cell (nn.recurrent.CELLS)
    dim: int = 256  # width of the embedding and of every layer
    layers: int = 2  # number of layers
    bidirectional: bool = False  # read in both directions; for classification and tagging heads
    dropout: float = 0.0  # dropout of the output of every layer
    char_dim: int = 0  # for tagging: width of the character vector of each word; 0: none
    one_hot: bool = False  # read ids as one-hot vectors, without an embedding
    input_skip: bool = False  # the head also reads the input of the same step
    tied: bool = True  # output matrix = embedding matrix, where they have the same width
    context: int = 256  # ids per training block; generation has no limit
    input_dim: int = 0  # width of the input vectors (series, strokes); 0: the inputs are ids
    head: Choice = "linear"  # the output layer (models.compatibility.COMMON_HEADS)

    def __post_init__(self) -> None:
        check_sizes(self, "vocab_size", "dim", "layers", "context")
        check_input_dim(self)
        if self.char_dim < 0:
            raise ConfigError(f"char_dim={self.char_dim} must be at least 0; 0: none")
        if self.one_hot and (self.input_dim or self.char_dim):
            raise ConfigError(
                "one_hot=true is for ids alone; leave out one_hot, or input_dim and char_dim"
            )
        check_dropout(self)
        kind, _ = kind_of(self.cell)
        if kind not in CELLS:
            raise ConfigError(unknown("cell", kind, CELLS))
        require_common_head(self.head)
        pool = option(self.head, HEADS, "pool")
        if self.bidirectional and pool in ("first", "last"):
            is_forecast = kind_of(self.head)[0] == "forecast"
            pools = "'mean' or 'flatten'" if is_forecast else "'ends', 'mean' or 'max'"
            raise ConfigError(
                f"head={self.head!r} reads one position, where with bidirectional=true only one "
                f"direction has read the whole input;\nset head.pool to {pools}"
            )
        if pool == "ends" and (not self.bidirectional or self.input_skip):
            raise ConfigError(
                "head.pool='ends' splits the vector of a position into two directions: it needs "
                "bidirectional=true and input_skip=false;\nchoose another head.pool, or set these"
            )

    @property
    def architecture(self) -> str:
        """Causal (decoder) or bidirectional (encoder)."""
        return "encoder" if self.bidirectional else "decoder"

    @property
    def input_width(self) -> int:
        """The width of x."""
        return (self.vocab_size if self.one_hot else self.dim) + self.char_dim

    @property
    def head_width(self) -> int:
        """The input width of the head: h in each direction, and x with `input_skip`."""
        return (1 + self.bidirectional) * self.dim + self.input_skip * self.input_width

    @property
    def shares_embedding(self) -> bool:
        """Whether the output matrix is the embedding matrix: with `tied`, if the widths agree."""
        has_embedding = not self.input_dim and not self.one_hot
        return self.tied and has_embedding and self.head_width == self.dim


class RecurrentLM(LanguageModel):
    r"""A recurrent language model.

    x_t = E[id_t],    h_t = cell_L(... cell_1(x_1 ... x_t)),    logits_t = W h_t

    With `one_hot`, x_t has a 1 at id_t and 0 elsewhere. With `input_skip`, the output also reads
    the input, logits_t = W_h h_t + W_x x_t, one matrix W over [h_t; x_t] (Graves 2013).

    With `input_dim`, the model reads vectors v_t instead of ids: x_t = E v_t + e.

    With `char_dim`, x_t = [E[id_t]; c_t], c_t the vector of the characters of the word
    (`nn.characters`).
    """

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.config = config
        self.embed: nn.Embedding | nn.Linear | OneHot
        if config.input_dim:
            self.embed = nn.Linear(config.input_dim, config.dim)
        elif config.one_hot:
            self.embed = OneHot(config.vocab_size)
        else:
            self.embed = nn.Embedding(config.vocab_size, config.dim)
            # logits of a tied W then have a standard deviation near 1
            nn.init.normal_(self.embed.weight, std=config.dim**-0.5)
        width = config.char_dim
        self.characters = CharacterConvolution(width) if width else None
        self.layers = Recurrent(
            config.cell,
            config.input_width,
            config.dim,
            config.layers,
            bidirectional=config.bidirectional,
            dropout=config.dropout,
        )
        # whether lengths are read on the host, to pack sequences
        self.uses_packed_sequence = config.bidirectional
        tied = self.embed if config.shares_embedding else None
        self.head: Any = make(
            config.head,
            HEADS,
            "head",
            dim=config.head_width,
            vocab_size=config.vocab_size,
            tied=tied,
            positions=config.context,
        )

    def forward(
        self,
        ids: Inputs,
        *,
        lengths: Int[Tensor, " batch"] | None = None,
        word_bytes: UInt8[Tensor, "batch time bytes"] | None = None,
    ) -> Float[Tensor, "batch time dim"]:
        """The hidden states of the top layer, which `head` maps to logits.

        Rows may be right-padded: `lengths` gives the number of valid ids, which only a
        bidirectional model needs. `word_bytes` are the bytes of the word of each id.
        """
        x = self._embed(ids)
        if self.characters is not None:
            if word_bytes is None:
                raise ConfigError("this model reads the characters of words; give `word_bytes`")
            x = torch.cat([x, self.characters(word_bytes)], -1)
        h, _ = self.layers(x, lengths if self.config.bidirectional else None)
        return self._with_input(h, x)

    def start(self, rows: int, capacity: int, source: Source | None = None) -> RecurrentState:
        """A zero state; its size does not depend on `capacity`."""
        if source is not None:
            raise ConfigError("a recurrent language model takes no source; an encoder-decoder does")
        require_generating_head(self.head, self.config.head)
        if self.config.bidirectional:
            raise ConfigError("a bidirectional model cannot generate; set bidirectional=false")
        states = [layer.start(rows) for layer in self._cells()]
        if self.config.input_skip:  # the head reads the last input, which the state then holds
            states.append((states[0][0].new_zeros(rows, self.config.input_width),))
        return CapturableRecurrentState.initial(states)

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
            states = next_state.current()
            h = self.layers.apply_dropout(states[self.config.layers - 1][0])
            x = self._with_input(h, states[-1][0]).unsqueeze(1)
        return self.head(x), next_state

    def hidden(
        self,
        ids: Inputs,
        state: State,
        *,
        counts: Int[Tensor, " rows"] | None = None,
    ) -> tuple[Float[Tensor, "rows time dim"], RecurrentState]:
        """The hidden states of the top layer, and the state after `ids`.

        The loop over time runs here, since the fused kernel returns only the final state.
        """
        assert isinstance(state, RecurrentState)
        h = x = self._embed(ids)
        snapshots: list[CellState] = []
        states = state.current()
        for layer, initial in zip(self._cells(), states[: self.config.layers], strict=True):
            layer_states = layer.loop(h, initial)
            h = self.layers.apply_dropout(layer_states[0])
            pairs = zip(initial, layer_states, strict=True)
            snapshots.append(tuple(torch.cat([old.unsqueeze(1), new], 1) for old, new in pairs))
        if self.config.input_skip:
            snapshots.append((torch.cat([states[-1][0].unsqueeze(1), x], 1),))
        return self._with_input(h, x), state.advance(snapshots, counts)

    def _embed(self, ids: Inputs) -> Tensor:
        x: Tensor = self.embed(ids)
        return x.to(next(self.layers.parameters()).dtype) if self.config.one_hot else x

    def _with_input(self, h: Tensor, x: Tensor) -> Tensor:
        """The input of the head: h, or [h; x] with `input_skip`."""
        return torch.cat([h, x], -1) if self.config.input_skip else h

    def _cells(self) -> list[RecurrentLayer]:
        return cast(list[RecurrentLayer], list(self.layers))

    if TYPE_CHECKING:
        __call__ = forward
