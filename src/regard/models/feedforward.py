"""The first neural language model: the next id from the few before it, by one hidden layer."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import ConfigError
from regard.models.base import LanguageModel, State
from regard.nn.head import Head
from regard.nn.recurrent import Snapshots
from regard.nn.state import Source
from regard.nn.tap import Carry


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedforwardConfig:
    """A hidden layer over the vectors of the last `order - 1` ids."""

    vocab_size: int
    order: int = 9  # the next id depends on the order - 1 ids before it
    dim: int = 64  # of the vector of an id
    hidden_dim: int = 256
    direct: bool = True  # the vectors also reach the output past the hidden layer
    context: int = 256  # ids per training block; generating has no limit

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "hidden_dim", "context"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.order < 2:
            raise ConfigError(f"order={self.order} must be at least 2: the id before, and the next")


class Feedforward(LanguageModel):
    r"""A language model that looks at the vectors of the last few ids, side by side.

        x = [C[id_{t-n+1}]; ...; C[id_t]]
        y = b + W x + U tanh(d + H x)

    n is order - 1, C the table of vectors, W x the direct connection, which may be left out.
    `forward` gives [tanh(d + H x); x] and the head multiplies by [U W], so both are one product.
    Before the beginning of a text the vectors are zero. Bengio et al. 2003.
    """

    def __init__(self, config: FeedforwardConfig) -> None:
        super().__init__()
        self.config = config
        width = (config.order - 1) * config.dim
        self.embed = nn.Embedding(config.vocab_size, config.dim)  # C
        self.carry = Carry()
        self.hidden_layer = nn.Linear(width, config.hidden_dim)  # H, d
        shown = config.hidden_dim + config.direct * width
        self.head = Head(shown, config.vocab_size, bias=True)  # U, W, b

    def forward(self, ids: Int[Tensor, "batch time"]) -> Float[Tensor, "batch time dim"]:
        """What the head reads after each id."""
        windows = self._windows(ids, self._nothing(len(ids)))
        return self._read(windows[:, 1:])

    def start(self, rows: int, capacity: int, source: Source | None = None) -> Snapshots:
        """Nothing read. The state is the last order - 1 vectors, so any `capacity` fits."""
        if source is not None:
            raise ConfigError("a feed-forward language model reads no source; it only continues")
        return Snapshots.initial([(self._nothing(rows),)])

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
            [(last,)] = after.current()
            x = self._read(last.unsqueeze(1))
        return self.head(x), after

    def hidden(
        self,
        ids: Int[Tensor, "rows time"],
        state: State,
        *,
        counts: Int[Tensor, " rows"] | None = None,
    ) -> tuple[Float[Tensor, "rows time dim"], Snapshots]:
        """What the head reads after each id, and the state with `ids` taken in."""
        assert isinstance(state, Snapshots)
        [(last,)] = state.current()
        windows = self._windows(ids, last)
        return self._read(windows[:, 1:]), state.advance([(windows,)], counts)

    def _nothing(self, rows: int) -> Tensor:
        return self.embed.weight.new_zeros(rows, self.config.order - 1, self.config.dim)

    def _windows(self, ids: Tensor, before: Tensor) -> Tensor:
        """The last order - 1 vectors before these ids and after each of them."""
        seen = torch.cat([before, self.carry(self.embed(ids))], 1)
        return seen.unfold(1, before.shape[1], 1).transpose(2, 3)

    def _read(self, windows: Tensor) -> Tensor:
        x = windows.flatten(-2)
        shown = self.hidden_layer(x).tanh()
        return torch.cat([shown, x], -1) if self.config.direct else shown

    if TYPE_CHECKING:
        __call__ = forward
