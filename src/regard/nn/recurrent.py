"""Layers that read one id after the other, and what such models remember while they write."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from regard.config import Choice, make
from regard.errors import ShapeError
from regard.nn.tap import Carry, Tap

Vectors = tuple[Tensor, ...]  # what a cell keeps, (batch, dim) each: h, and whatever is behind it
OPEN = 100.0  # its sigmoid is 1 to the last bit


@dataclass(frozen=True, slots=True)
class Snapshots:
    """What a recurrent model remembers: its state before the last step and after each of its ids.

    A state cannot be undone, only kept. So `rewind` reaches back to the beginning of the last
    step and no further, and rows of different `counts` stand at different snapshots.

        snapshot     0        1        2       …  time
                  before   after x1  after x2     after all
    """

    layers: list[Vectors]  # of each layer, what it keeps: (rows, time + 1, …)
    lengths: Int[Tensor, " rows"]
    taken: Int[Tensor, " rows"]  # the snapshot each row stands at

    @classmethod
    def first(cls, layers: list[Vectors]) -> "Snapshots":
        """The state before the first id, of which there is one snapshot."""
        zeros = layers[0][0].new_zeros(len(layers[0][0]), dtype=torch.long)
        return cls([tuple(part.unsqueeze(1) for part in layer) for layer in layers], zeros, zeros)

    def now(self) -> list[Vectors]:
        """Of each layer, what it keeps at the snapshot where each row stands: (rows, …)."""
        rows = torch.arange(len(self.taken), device=self.taken.device)
        return [tuple(part[rows, self.taken] for part in layer) for layer in self.layers]

    def advance(self, layers: list[Vectors], counts: Int[Tensor, " rows"] | None) -> "Snapshots":
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


class Cell(nn.Module):
    r"""A layer that reads one x after the other and carries what it keeps of them in a state.

        state_t = equation(W x_t + b, state_{t-1}),      state_0 = 0

    The first vector of a state is h, which is what the layer shows. W and U (`input`, `hidden`)
    hold one part below the other, as the cell says. The kernel of torch runs where it has one
    for the equation; else, and when somebody listens at a gate, the loop over the equation.
    """

    kept = 1  # vectors in a state
    gates: tuple[str, ...] = ()  # what the equation gives beside the state; each has a tap
    kernel: Callable[..., Any] | None = None

    def __init__(self, dim_in: int, dim_out: int, parts: int, *, hidden_bias: bool = False) -> None:
        super().__init__()
        self.dim = dim_out
        self.input = nn.Linear(dim_in, parts * dim_out)  # W, b
        self.hidden = nn.Linear(dim_out, parts * dim_out, bias=hidden_bias)  # U
        nn.init.zeros_(self.input.bias)
        if hidden_bias:
            nn.init.zeros_(self.hidden.bias)
        self.state_tap = Tap()
        self.carry = Carry()
        for name in self.gates:
            self.add_module(f"{name}_tap", Tap())

    def equation(self, from_input: Tensor, state: Vectors) -> tuple[Vectors, Vectors]:
        """The state after one more x, of which `from_input` is W x + b; and the gates."""
        raise NotImplementedError

    def start(self, rows: int) -> Vectors:
        """The state before the first id: zeros."""
        return (self.hidden.weight.new_zeros(rows, self.dim),) * self.kept

    def forward(
        self,
        x: Float[Tensor, "batch time dim_in"],
        lengths: Int[Tensor, " batch"] | None = None,
        state: Vectors | None = None,
    ) -> tuple[Float[Tensor, "batch time dim_out"], Vectors]:
        """h after each x, and the state after the last.

        Rows may be right-padded: beyond its length a row shows zeros, and its last state is
        the one at its real end.
        """
        state = self.start(len(x)) if state is None else state
        run = self._looped if self.kernel is None or self._watched() else self._fused
        if torch.compiler.is_compiling():  # it would unroll loop and kernel, and take minutes
            run = torch.compiler.disable(run)
        y, last = run(x, lengths, state)
        return self.state_tap(y), last

    def loop(self, x: Float[Tensor, "batch time dim_in"], state: Vectors) -> Vectors:
        """The state after each x, (batch, time, dim) each: the equation, one x at a time."""
        states: list[Vectors] = []
        gates: list[Vectors] = []
        for from_input in self.input(x).unbind(1):
            state, opened = self.equation(from_input, state)
            if self.carry.has_hooks:
                state = self.carry(torch.cat(state, -1)).split(self.dim, -1)
            states.append(state)
            gates.append(opened)
        for number, name in enumerate(self.gates):
            tap = cast(Tap, getattr(self, f"{name}_tap"))
            if tap.has_hooks:
                tap(torch.stack([opened[number] for opened in gates], 1))
        return tuple(torch.stack(each, 1) for each in zip(*states, strict=True))

    def weights(self) -> list[Tensor]:
        """W, U and two biases that make torch's kernel compute the equation."""
        bias = self.input.bias
        none = torch.zeros_like(bias)
        return [self.input.weight, self.hidden.weight, bias, none]

    def _watched(self) -> bool:
        gates = (cast(Tap, getattr(self, f"{name}_tap")) for name in self.gates)
        return self.carry.has_hooks or any(tap.has_hooks for tap in gates)

    def _looped(self, x: Tensor, lengths: Tensor | None, state: Vectors) -> tuple[Tensor, Vectors]:
        states = self.loop(x, state)
        if lengths is None:
            return states[0], tuple(each[:, -1] for each in states)
        rows, at = torch.arange(len(x), device=x.device), torch.arange(x.shape[1], device=x.device)
        real = (at < lengths.unsqueeze(1)).unsqueeze(-1)
        return states[0].where(real, 0.0), tuple(each[rows, lengths - 1] for each in states)

    def _fused(self, x: Tensor, lengths: Tensor | None, state: Vectors) -> tuple[Tensor, Vectors]:
        assert self.kernel is not None
        if x.is_cuda and torch.is_autocast_enabled("cuda"):  # float16, whatever type is asked for
            kind = self.hidden.weight.dtype
            with torch.autocast("cuda", enabled=False):
                return self._fused(x.to(kind), lengths, tuple(each.to(kind) for each in state))
        weights = self.weights()
        if x.is_cuda:  # cuDNN wants its weights side by side, and warns when they are not
            flat = torch.cat([weight.flatten() for weight in weights])
            parts = flat.split([weight.numel() for weight in weights])
            weights = [part.view_as(w) for part, w in zip(parts, weights, strict=True)]
        options = (weights, True, 1, 0.0, self.training, False)  # one layer, in one direction
        if lengths is None:
            y, *last = self.kernel(x, _stacked(state), *options, True)
            return y, tuple(each[0] for each in last)
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        order, back = packed.sorted_indices, packed.unsorted_indices
        assert order is not None
        assert back is not None
        begin = _stacked(tuple(each[order] for each in state))
        y, *last = self.kernel(packed.data, packed.batch_sizes, begin, *options)
        y, _ = pad_packed_sequence(packed._replace(data=y), True, total_length=x.shape[1])
        return y, tuple(each[0, back] for each in last)

    if TYPE_CHECKING:
        __call__ = forward


def _stacked(state: Vectors) -> Tensor | Vectors:
    """A state as the kernels take it: with an axis for layers, h alone where that is all."""
    layered = tuple(each.unsqueeze(0) for each in state)
    return layered if len(layered) > 1 else layered[0]


class Elman(Cell):
    r"""A layer whose state is a bent sum of what comes in and of the state before.

        h <- f(W x + U h + b),      f = tanh or ReLU

    Elman 1990.
    """

    def __init__(
        self, dim_in: int, dim_out: int, *, activation: Literal["tanh", "relu"] = "tanh"
    ) -> None:
        super().__init__(dim_in, dim_out, parts=1)
        self.kernel = {"tanh": torch.rnn_tanh, "relu": torch.rnn_relu}[activation]
        self.activation = {"tanh": torch.tanh, "relu": torch.relu}[activation]

    def equation(self, from_input: Tensor, state: Vectors) -> tuple[Vectors, Vectors]:
        """h, and no gates."""
        (h,) = state
        return (self.activation(from_input + self.hidden(h)),), ()


class Gated(Cell):
    r"""A layer that learns what of its state to keep: the least that a gate can be.

        z  = sigmoid(W_z x + U_z h + b_z)       what to keep
        h~ = relu(W x + U h + b)                what could take its place
        h <- z * h + (1 - z) * h~

    W, U and b hold two parts, in the order z, h~.
    """

    gates = ("update", "candidate")

    def __init__(self, dim_in: int, dim_out: int) -> None:
        super().__init__(dim_in, dim_out, parts=2)

    def equation(self, from_input: Tensor, state: Vectors) -> tuple[Vectors, Vectors]:
        """h; z and h~."""
        (h,) = state
        z, candidate = (from_input + self.hidden(h)).chunk(2, -1)
        z, candidate = z.sigmoid(), candidate.relu()
        return (z * h + (1 - z) * candidate,), (z, candidate)


class GRU(Cell):
    r"""A layer that learns what of its state to keep, and what of it to look at.

        r  = sigmoid(W_r x + U_r h + b_r)       what to look at
        z  = sigmoid(W_z x + U_z h + b_z)       what to keep
        h~ = tanh(W x + U (r * h) + b)          what could take its place
        h <- z * h + (1 - z) * h~

    W, U and b hold three parts, in the order r, z, h~. Two things are printed differently:

        reset = "after"     h~ = tanh(W x + b + r * (U h + d)), the only one with a fused kernel;
                            U has a bias d of its own, in three parts as the kernel has it
        update = "write"    h <- (1 - z) * h + z * h~

    Cho et al. 2014; "after" as in cuDNN and torch, "write" as in Chung et al. 2014.
    """

    gates = ("reset", "update", "candidate")

    def __init__(
        self,
        dim_in: int,
        dim_out: int,
        *,
        reset: Literal["before", "after"] = "before",
        update: Literal["keep", "write"] = "keep",
    ) -> None:
        super().__init__(dim_in, dim_out, parts=3, hidden_bias=reset == "after")
        self.reset, self.update = reset, update
        self.kernel = torch.gru if reset == "after" else None

    def equation(self, from_input: Tensor, state: Vectors) -> tuple[Vectors, Vectors]:
        """h; r, z and h~."""
        (h,) = state
        r, z, candidate = from_input.chunk(3, -1)
        if self.reset == "after":
            u_r, u_z, u = self.hidden(h).chunk(3, -1)
            r, z = (r + u_r).sigmoid(), (z + u_z).sigmoid()
            candidate = (candidate + r * u).tanh()
        else:
            gates, u = self.hidden.weight.split([2 * self.dim, self.dim])
            u_r, u_z = F.linear(h, gates).chunk(2, -1)
            r, z = (r + u_r).sigmoid(), (z + u_z).sigmoid()
            candidate = (candidate + F.linear(r * h, u)).tanh()
        keep = z if self.update == "keep" else 1 - z
        return (keep * h + (1 - keep) * candidate,), (r, z, candidate)

    def weights(self) -> list[Tensor]:
        """The kernel's z keeps; where ours writes, its part changes sign: 1 - σ(a) = σ(-a)."""
        weights = [self.input.weight, self.hidden.weight, self.input.bias, self.hidden.bias]
        if self.update == "keep":
            return weights
        turned = [weight.chunk(3) for weight in weights]
        return [torch.cat([r, -z, candidate]) for r, z, candidate in turned]


class LSTM(Cell):
    r"""A layer that carries a cell, and learns what to forget, to write and to show.

        i, f, o = sigmoid(W x + U h + b)        what to write, to keep, to show
        g       = tanh(W x + U h + b)           what could be written
        c <- f * c + i * g
        h <- o * tanh(c)

    W, U and b hold four parts, in the order i, f, g, o. The forget gate begins open, b_f = 1.
    Without it (`forget` = false) f is 1 and has no part: the cell only ever adds, as in 1997.
    Hochreiter & Schmidhuber 1997; forget gate Gers et al. 2000, its bias Jozefowicz et al. 2015.
    """

    kept = 2  # h and c
    gates = ("input", "forget", "candidate", "output", "cell")
    kernel = torch.lstm

    def __init__(self, dim_in: int, dim_out: int, *, forget: bool = True) -> None:
        super().__init__(dim_in, dim_out, parts=4 if forget else 3)
        self.forget = forget
        if forget:
            nn.init.ones_(self.input.bias[dim_out : 2 * dim_out])

    def equation(self, from_input: Tensor, state: Vectors) -> tuple[Vectors, Vectors]:
        """h and c; i, f, g, o and c."""
        h, c = state
        i, *f, g, o = (from_input + self.hidden(h)).split(self.dim, -1)
        i, g, o = i.sigmoid(), g.tanh(), o.sigmoid()
        keep = f[0].sigmoid() if f else torch.ones_like(c)
        c = keep * c + i * g
        h = o * c.tanh()
        return (h, c), (i, keep, g, o, c)

    def weights(self) -> list[Tensor]:
        """The kernel always has a forget gate; where the equation has none, it is held open."""
        if self.forget:
            return super().weights()
        padded = []
        for weight, fill in zip(super().weights(), (0.0, 0.0, OPEN, 0.0), strict=True):
            i, g, o = weight.chunk(3)
            padded.append(torch.cat([i, torch.full_like(i, fill), g, o]))
        return padded


CELLS: dict[str, Callable[..., Cell]] = {
    "elman": Elman,
    "gated": Gated,
    "gru": GRU,
    "lstm": LSTM,
}


class Bidirectional(nn.Module):
    r"""Two cells, of which one reads from the end; their states side by side.

        y_t = [ahead(x_1 ... x_t); back(x_T ... x_t)]

    Schuster & Paliwal 1997.
    """

    def __init__(self, ahead: Cell, back: Cell) -> None:
        super().__init__()
        self.ahead, self.back = ahead, back

    def forward(
        self, x: Float[Tensor, "batch time dim_in"], lengths: Int[Tensor, " batch"] | None = None
    ) -> tuple[Float[Tensor, "batch time width"], Vectors]:
        """Both h at each x, and both last states: that of `back` is the one at the first x."""
        time = torch.arange(x.shape[1], device=x.device)
        ends = time.new_full((len(x),), x.shape[1]) if lengths is None else lengths
        turned = (ends.unsqueeze(1) - 1 - time).remainder(x.shape[1])  # padding stays behind
        rows = torch.arange(len(x), device=x.device).unsqueeze(1)
        y, last = self.ahead(x, lengths)
        y_back, last_back = self.back(x[rows, turned], lengths)
        both = zip(last, last_back, strict=True)
        return torch.cat([y, y_back[rows, turned]], -1), tuple(torch.cat(b, -1) for b in both)

    if TYPE_CHECKING:
        __call__ = forward


class Recurrent(nn.ModuleList):
    """Cells in layers: each reads what the one below shows.

    What a layer hands upward is dropped out, what it hands onward in time is not
    (Zaremba et al. 2014).
    """

    def __init__(
        self,
        cell: Choice,
        dim_in: int,
        dim_out: int,
        layers: int,
        *,
        bidirectional: bool = False,
        dropout: float = 0.0,
    ) -> None:
        def made(width: int) -> Cell:
            return make(cell, CELLS, "cell", dim_in=width, dim_out=dim_out)

        widths = [dim_in] + [(1 + bidirectional) * dim_out] * (layers - 1)
        super().__init__(
            Bidirectional(made(w), made(w)) if bidirectional else made(w) for w in widths
        )
        self.dropout = dropout

    def forward(
        self, x: Float[Tensor, "batch time dim_in"], lengths: Int[Tensor, " batch"] | None = None
    ) -> tuple[Float[Tensor, "batch time dim"], list[Vectors]]:
        """What the top layer shows after each x, and the last state of every layer.

        Rows may be right-padded: beyond its length a row shows zeros, and its last state is
        the one at its real end.
        """
        if lengths is not None and not bool(((lengths > 0) & (lengths <= x.shape[1])).all()):
            raise ShapeError(
                f"lengths {lengths.tolist()} must be at least 1 and at most {x.shape[1]}, "
                "the number of vectors in a row"
            )
        last: list[Vectors] = []
        for layer in self:
            x, state = cast(Cell | Bidirectional, layer)(x, lengths)
            x = self.dropped(x)
            last.append(state)
        return x, last

    def dropped(self, x: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows dim"]:
        """What is handed upward of what a layer shows."""
        return F.dropout(x, self.dropout, self.training)

    if TYPE_CHECKING:
        __call__ = forward
