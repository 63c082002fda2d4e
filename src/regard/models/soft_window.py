"""Handwriting synthesis: a recurrent network reads pen points, and a text through a soft window."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.config import Choice, Settings, kind_of, make
from regard.errors import ConfigError, unknown
from regard.models.base import LanguageModel
from regard.models.compatibility import check_dropout, check_sizes
from regard.nn.head import HEADS
from regard.nn.recurrent import CELLS, Recurrent, RecurrentLayer
from regard.nn.soft_window import SoftWindow
from regard.nn.state import CellState, Source


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class SoftWindowConfig(Settings):
    """A recurrent network with Graves' soft window over a text."""

    architecture: ClassVar[str] = "decoder"
    vocab_size: int  # number of characters
    input_dim: int = 5  # width of a point: dx, dy, and the pen as one of three classes
    cell: Choice = "lstm"  # the recurrent cell (nn.recurrent.CELLS)
    dim: int = 128  # width of every layer
    layers: int = 2  # number of layers: the first moves the window, the others read its vector w
    components: int = 10  # mixture components of the soft window
    dropout: float = 0.0  # dropout between layers, and of the head's input
    head: Choice = "mixture"  # the output layer (nn.head.HEADS)
    context: int = 256  # maximum number of points of a training drawing

    def __post_init__(self) -> None:
        check_sizes(self, "vocab_size", "input_dim", "dim", "components", "context")
        if self.layers < 2:
            raise ConfigError(
                f"layers={self.layers} must be at least 2: the first layer moves the window, the "
                "others read the window vector"
            )
        check_dropout(self)
        if (kind := kind_of(self.cell)[0]) not in CELLS:
            raise ConfigError(unknown("cell", kind, CELLS))
        if (kind := kind_of(self.head)[0]) != "mixture":
            raise ConfigError(f"head={kind!r} must be 'mixture', which predicts pen points")


@dataclass(frozen=True, slots=True, eq=False)
class SoftWindowState:
    """The states of the layers and of the window, and the text."""

    first: CellState  # of the first layer
    upper: list[CellState]  # of the layers above it
    w: Tensor  # the window vector
    kappa: Tensor  # the locations of the components
    text: Tensor  # one-hot characters
    lengths: Tensor  # of the texts


class SoftWindowLM(LanguageModel):
    r"""Predicts the next pen point of a handwritten text.

        h^1_t = cell_1([x_t; w_{t-1}])
        w_t   = window(h^1_t)                    (`nn.soft_window`)
        h_t   = cell_L(... cell_2([x_t; h^1_t; w_t]))

    x_t = E v_t + e of a point v_t. Graves 2013, section 5, without his other skip connections.
    """

    def __init__(self, config: SoftWindowConfig) -> None:
        super().__init__()
        self.config = config
        dim, width = config.dim, config.vocab_size
        self.embed = nn.Linear(config.input_dim, dim)
        self.first = make(config.cell, CELLS, "cell", dim_in=dim + width, dim_out=dim)
        self.window = SoftWindow(dim, components=config.components)
        self.layers = Recurrent(
            config.cell, 2 * dim + width, dim, config.layers - 1, dropout=config.dropout
        )
        self.head: Any = make(
            config.head, HEADS, "head", dim=dim, vocab_size=width, positions=config.context
        )

    def forward(
        self, points: Float[Tensor, "batch time input_dim"], *, source: Source
    ) -> Float[Tensor, "batch time dim"]:
        """The hidden states for points; `source` holds the characters of each text."""
        x, h_and_w, _ = self._read(points, self.start(len(points), points.shape[1], source))
        x, _ = self.layers(torch.cat([x, h_and_w], -1))
        return x

    def start(self, rows: int, capacity: int, source: Source | None = None) -> SoftWindowState:
        """The state before the first point; the window is at the first character."""
        if source is None:
            raise ConfigError("a soft window needs a text; pass source=Source(ids, lengths)")
        like = self.embed.weight
        return SoftWindowState(
            self.first.start(rows),
            [cast(RecurrentLayer, cell).start(rows) for cell in self.layers],
            like.new_zeros(rows, self.config.vocab_size),
            like.new_zeros(
                rows, self.config.components, dtype=torch.promote_types(like.dtype, torch.float32)
            ),
            F.one_hot(source.ids, self.config.vocab_size).to(like.dtype),
            source.lengths,
        )

    def step(
        self, points: Float[Tensor, "rows time input_dim"], state: SoftWindowState
    ) -> tuple[Float[Tensor, "rows 1 parameters"], SoftWindowState]:
        """The output of the head after the last of these points, and the state."""
        x, h_and_w, next_state = self._read(points, state)
        x, upper = torch.cat([x, h_and_w], -1), []
        for cell, initial in zip(self.layers, state.upper, strict=True):
            states = cast(RecurrentLayer, cell).loop(x, initial)
            x = self.layers.apply_dropout(states[0])
            upper.append(tuple(vector[:, -1] for vector in states))
        parameters: Tensor = self.head(x[:, -1:])
        return parameters, SoftWindowState(
            next_state.first, upper, next_state.w, next_state.kappa, state.text, state.lengths
        )

    def _read(
        self, points: Tensor, state: SoftWindowState
    ) -> tuple[Tensor, Tensor, SoftWindowState]:
        """x and [h^1; w] at each point, and the new state; its upper layers are unchanged."""
        x: Tensor = self.embed(points)
        cell, (first, w, kappa) = self.first, (state.first, state.w, state.kappa)
        h_and_w = []
        for step, point in enumerate(x.unbind(1)):
            from_input = cell.input(torch.cat([point, w.to(point.dtype)], -1))
            first = cell.step(from_input, first, cell.hook_function(step, x.shape[1]))
            w, kappa = self.window(
                first[0], kappa, state.text, state.lengths, first=step, steps=x.shape[1]
            )
            h_and_w.append(torch.cat([first[0], w.to(first[0].dtype)], -1))
        next_state = SoftWindowState(first, state.upper, w, kappa, state.text, state.lengths)
        return x, torch.stack(h_and_w, 1), next_state

    if TYPE_CHECKING:
        __call__ = forward
