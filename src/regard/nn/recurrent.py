"""Layers that read one id after the other, and what such models remember while they write."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import ShapeError


@dataclass(frozen=True, slots=True)
class Snapshots:
    """What a recurrent model remembers: its state before the last step and after each of its ids.

    A state cannot be undone, only kept. So `rewind` reaches back to the beginning of the last
    step and no further, and rows of different `counts` stand at different snapshots.

        snapshot     0        1        2       …  time
                  before   after x1  after x2     after all
    """

    layers: list[tuple[Tensor, ...]]  # of each layer, what it keeps: (rows, time + 1, …)
    lengths: Int[Tensor, " rows"]
    taken: Int[Tensor, " rows"]  # the snapshot each row stands at

    @classmethod
    def first(cls, layers: list[tuple[Tensor, ...]]) -> "Snapshots":
        """The state before the first id, of which there is one snapshot."""
        zeros = layers[0][0].new_zeros(len(layers[0][0]), dtype=torch.long)
        return cls([tuple(part.unsqueeze(1) for part in layer) for layer in layers], zeros, zeros)

    def now(self) -> list[tuple[Tensor, ...]]:
        """Of each layer, what it keeps at the snapshot where each row stands: (rows, …)."""
        rows = torch.arange(len(self.taken), device=self.taken.device)
        return [tuple(part[rows, self.taken] for part in layer) for layer in self.layers]

    def advanced(
        self, layers: list[tuple[Tensor, ...]], counts: Int[Tensor, " rows"] | None
    ) -> "Snapshots":
        """The state after a step that left these snapshots; `counts` of its ids are real."""
        if counts is None:
            counts = torch.full_like(self.taken, layers[0][0].shape[1] - 1)
        return Snapshots(layers, self.lengths + counts, counts)

    def select(self, rows: Int[Tensor, " chosen"]) -> "Snapshots":
        """The state of these rows, in this order."""
        return Snapshots(
            [tuple(part.index_select(0, rows) for part in layer) for layer in self.layers],
            self.lengths.index_select(0, rows),
            self.taken.index_select(0, rows),
        )

    def rewind(self, lengths: Int[Tensor, " rows"]) -> "Snapshots":
        """Forget all but the first `lengths` ids of each row, within the last step."""
        taken = self.taken - (self.lengths - lengths)
        if bool(((taken < 0) | (taken > self.taken)).any()):
            raise ShapeError(
                f"cannot rewind from lengths {self.lengths.tolist()} to {lengths.tolist()}: "
                f"only the last step is kept, {self.taken.tolist()} ids per row.\n"
                "To go back further, start anew and step through the ids to keep."
            )
        return replace(self, lengths=lengths, taken=taken)


class LSTM(nn.Module):
    r"""A layer that carries a cell, and learns what to forget, to write and to show.

        i, f, o = sigmoid(W x + U h + b)        what to write, to keep, to show
        g       = tanh(W x + U h + b)           what could be written
        c <- f * c + i * g
        h <- o * tanh(c)

    W, U and b hold four parts, in the order i, f, g, o. The forget gate begins open, b_f = 1.
    Hochreiter & Schmidhuber 1997; forget gate Gers et al. 2000, its bias Jozefowicz et al. 2015.
    """

    def __init__(self, dim_in: int, dim_out: int) -> None:
        super().__init__()
        self.dim = dim_out
        self.input = nn.Linear(dim_in, 4 * dim_out)  # W, b
        self.hidden = nn.Linear(dim_out, 4 * dim_out, bias=False)  # U
        nn.init.zeros_(self.input.bias)
        nn.init.ones_(self.input.bias[dim_out : 2 * dim_out])

    def start(self, rows: int) -> tuple[Tensor, Tensor]:
        """h and c before the first id: zeros."""
        zeros = self.hidden.weight.new_zeros(rows, self.dim)
        return zeros, zeros

    def forward(self, x: Float[Tensor, "batch time dim_in"]) -> Float[Tensor, "batch time dim_out"]:
        """h after each x, from an empty state, by the fused kernel."""
        weights = [self.input.weight, self.hidden.weight, self.input.bias]
        weights.append(torch.zeros_like(self.input.bias))  # the kernel adds a second bias
        if x.is_cuda:  # cuDNN wants its weights side by side, and warns when they are not
            flat = torch.cat([weight.flatten() for weight in weights])
            parts = flat.split([weight.numel() for weight in weights])
            weights = [part.view_as(w) for part, w in zip(parts, weights, strict=True)]
        h, c = self.start(len(x))
        state = (h.unsqueeze(0), c.unsqueeze(0))
        y, _, _ = torch.lstm(x, state, weights, True, 1, 0.0, self.training, False, True)
        return y

    def loop(
        self,
        x: Float[Tensor, "batch time dim_in"],
        state: tuple[Float[Tensor, "batch dim_out"], Float[Tensor, "batch dim_out"]],
    ) -> tuple[Float[Tensor, "batch time dim_out"], Float[Tensor, "batch time dim_out"]]:
        """h and c after each x, from any state: the formula, in a loop that shows all of them."""
        h, c = state
        hidden, cell = [], []
        for from_input in self.input(x).unbind(1):
            i, f, g, o = (from_input + self.hidden(h)).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            hidden.append(h)
            cell.append(c)
        return torch.stack(hidden, 1), torch.stack(cell, 1)

    if TYPE_CHECKING:
        __call__ = forward
