"""Language models that read one id after the other and remember in a state of fixed size."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import ConfigError
from regard.models.base import State
from regard.nn.head import Head
from regard.nn.recurrent import LSTM, Snapshots
from regard.nn.state import Source


@dataclass(frozen=True, kw_only=True, slots=True)
class LSTMConfig:
    """A stack of LSTM layers that predicts the next id."""

    vocab_size: int
    dim: int = 256  # of the embedding and of every layer
    layers: int = 2
    dropout: float = 0.0
    tied: bool = True  # output matrix = embedding matrix
    context: int = 256  # ids per training block; generating has no limit

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "layers", "context"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout={self.dropout} must be at least 0 and below 1")


class LSTMLanguage(nn.Module):
    r"""A language model whose only memory is the state of its LSTM layers.

        x_t = E[id_t],    h_t = LSTM_L(... LSTM_1(x_1 ... x_t)),    logits_t = W h_t

    What a layer hands upward is dropped out, what it hands onward in time is not
    (Zaremba et al. 2014).
    """

    context: int | None = None

    def __init__(self, config: LSTMConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        nn.init.normal_(self.embed.weight, std=config.dim**-0.5)  # as W it gives logits near 1
        self.layers = nn.ModuleList(LSTM(config.dim, config.dim) for _ in range(config.layers))
        self.dropout = nn.Dropout(config.dropout)
        tied = self.embed if config.tied else None
        self.head = Head(config.dim, config.vocab_size, tied=tied)

    def forward(self, ids: Int[Tensor, "batch time"]) -> Float[Tensor, "batch time dim"]:
        """The top layer's h after each id; `head` makes logits of it."""
        x = self.embed(ids)
        for layer in self.layers:
            x = self.dropout(layer(x))
        return x

    def start(self, rows: int, capacity: int, source: Source | None = None) -> Snapshots:
        """Zeros. A state of fixed size has room for any `capacity`."""
        if source is not None:
            raise ConfigError("an LSTM language model reads no source; it only continues text")
        return Snapshots.first([layer.start(rows) for layer in self._lstms()])

    def step(
        self,
        ids: Int[Tensor, "rows time"],
        state: State,
        *,
        counts: Int[Tensor, " rows"] | None = None,
        every: bool = False,
    ) -> tuple[Float[Tensor, "rows scored vocab"], Snapshots]:
        """Take in one or more ids per row; see `Language.step`."""
        x, after = self.hidden(ids, state, counts=counts)
        if not every:
            x = self.dropout(after.now()[-1][0]).unsqueeze(1)
        return self.head(x), after

    def hidden(
        self,
        ids: Int[Tensor, "rows time"],
        state: State,
        *,
        counts: Int[Tensor, " rows"] | None = None,
    ) -> tuple[Float[Tensor, "rows time dim"], Snapshots]:
        """The top layer's h after each id, and the state with `ids` taken in.

        The readable loop runs here, since the fused kernel shows only the last cell.
        """
        assert isinstance(state, Snapshots)
        x = self.embed(ids)
        snapshots: list[tuple[Tensor, ...]] = []
        for layer, (h, c) in zip(self._lstms(), state.now(), strict=True):
            after = layer.loop(x, (h, c))
            x = self.dropout(after[0])
            both = zip((h, c), after, strict=True)
            snapshots.append(tuple(torch.cat([old.unsqueeze(1), new], 1) for old, new in both))
        return x, state.advanced(snapshots, counts)

    def _lstms(self) -> list[LSTM]:
        return cast(list[LSTM], list(self.layers))

    if TYPE_CHECKING:
        __call__ = forward
