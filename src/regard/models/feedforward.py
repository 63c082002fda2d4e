"""Bengio's feed-forward neural language model (NNLM, NPLM): a neural n-gram."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.config import Settings
from regard.errors import ConfigError
from regard.models.base import LanguageModel, State
from regard.models.compatibility import check_sizes
from regard.nn.head import LMHead
from regard.nn.hook_point import CarryHookPoint
from regard.nn.state import RecurrentState, Source


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class FeedForwardConfig(Settings):
    """A hidden layer over the embeddings of the last `order - 1` ids."""

    vocab_size: int  # number of tokens
    order: int = 9  # the next id depends on the order - 1 ids before it
    dim: int = 64  # width of the embeddings
    hidden_dim: int = 256  # width of the hidden layer
    direct_connections: bool = True  # direct connections from the embeddings to the output
    context: int = 256  # ids per training block; generation has no limit

    def __post_init__(self) -> None:
        check_sizes(self, "vocab_size", "dim", "hidden_dim", "context")
        if self.order < 2:
            raise ConfigError(
                f"order={self.order} must be at least 2: one id of context and the next id"
            )


class FeedForwardLM(LanguageModel):
    r"""A feed-forward language model over the concatenated embeddings of the last few ids.

        x = [C[id_{t-k+1}]; ...; C[id_t]]
        y = b + W x + U tanh(d + H x)

    k is order - 1, C the embedding table, W x the optional direct connection. `forward` returns
    [tanh(d + H x); x] and the head multiplies by [U W] in one matmul. Before the beginning of a
    text the embeddings are zero. Bengio et al. 2003.
    """

    def __init__(self, config: FeedForwardConfig) -> None:
        super().__init__()
        self.config = config
        width = (config.order - 1) * config.dim
        self.embed = nn.Embedding(config.vocab_size, config.dim)  # C
        self.carry_hook = CarryHookPoint()
        self.hidden_layer = nn.Linear(width, config.hidden_dim)  # H, d
        features = config.hidden_dim + config.direct_connections * width
        self.head = LMHead(features, config.vocab_size, bias=True)  # U, W, b

    def forward(self, ids: Int[Tensor, "batch time"]) -> Float[Tensor, "batch time dim"]:
        """The input of the head after each id."""
        windows = self._windows(ids, self._zeros(len(ids)))
        return self._features(windows[:, 1:])

    def start(self, rows: int, capacity: int, source: Source | None = None) -> RecurrentState:
        """The state is the last order - 1 embeddings; its size does not depend on `capacity`."""
        if source is not None:
            raise ConfigError(
                "a feed-forward language model takes no source; an encoder-decoder does"
            )
        return RecurrentState.initial([(self._zeros(rows),)])

    def step(
        self,
        ids: Int[Tensor, "rows time"],
        state: State,
        *,
        counts: Int[Tensor, " rows"] | None = None,
        all_logits: bool = False,
    ) -> tuple[Float[Tensor, "rows scored vocab"], RecurrentState]:
        """Read one or more ids per row; see `Language.step`."""
        x, next_state = self.hidden(ids, state, counts=counts)
        if not all_logits:
            [(history,)] = next_state.current()
            x = self._features(history.unsqueeze(1))
        return self.head(x), next_state

    def hidden(
        self,
        ids: Int[Tensor, "rows time"],
        state: State,
        *,
        counts: Int[Tensor, " rows"] | None = None,
    ) -> tuple[Float[Tensor, "rows time dim"], RecurrentState]:
        """The input of the head after each id, and the state after `ids`."""
        assert isinstance(state, RecurrentState)
        [(history,)] = state.current()
        windows = self._windows(ids, history)
        return self._features(windows[:, 1:]), state.advance([(windows,)], counts)

    def _zeros(self, rows: int) -> Tensor:
        return self.embed.weight.new_zeros(rows, self.config.order - 1, self.config.dim)

    def _windows(self, ids: Tensor, history: Tensor) -> Tensor:
        """The last order - 1 embeddings, before these ids and after each of them."""
        embeddings = torch.cat([history, self.carry_hook(self.embed(ids))], 1)
        return embeddings.unfold(1, history.shape[1], 1).transpose(2, 3)

    def _features(self, windows: Tensor) -> Tensor:
        x = windows.flatten(-2)
        hidden = self.hidden_layer(x).tanh()
        return torch.cat([hidden, x], -1) if self.config.direct_connections else hidden

    if TYPE_CHECKING:
        __call__ = forward
