"""Recurrent layers (RNN, GRU, LSTM, bidirectional) and the decoding state of recurrent models."""

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
from regard.nn.hook_point import CarryHookPoint, StepHookPoint

CellState = tuple[Tensor, ...]  # the state of a cell, (batch, dim) each: h, or h and c
Hook = Callable[[str, Tensor], Tensor]  # from a gate's name and value to the value that is used
OPEN_GATE = 100.0  # a bias whose sigmoid is exactly 1


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """The decoding state of a recurrent model: snapshots before the last step and after each id.

    A recurrence cannot be inverted, so earlier states are stored. `rewind` can go back to the
    beginning of the last step and no further. After a step with different `counts`, rows are at
    different snapshots.

        snapshot     0        1        2       …  time
                  before   after x1  after x2     after all
    """

    layers: list[CellState]  # the states of each layer: (rows, time + 1, …)
    lengths: Int[Tensor, " rows"]
    index: Int[Tensor, " rows"]  # the current snapshot of each row

    @classmethod
    def initial(cls, layers: list[CellState]) -> "RecurrentState":
        """The state before the first id: one snapshot."""
        zeros = layers[0][0].new_zeros(len(layers[0][0]), dtype=torch.long)
        return cls([tuple(part.unsqueeze(1) for part in layer) for layer in layers], zeros, zeros)

    def current(self) -> list[CellState]:
        """The state of each layer at the current snapshot of each row: (rows, …)."""
        rows = torch.arange(len(self.index), device=self.index.device)
        return [tuple(part[rows, self.index] for part in layer) for layer in self.layers]

    def advance(
        self, layers: list[CellState], counts: Int[Tensor, " rows"] | None
    ) -> "RecurrentState":
        """The state after a step with these snapshots; `counts` ids per row are valid."""
        if counts is None:
            counts = torch.full_like(self.index, layers[0][0].shape[1] - 1)
        return RecurrentState(layers, self.lengths + counts, counts)

    def select(self, rows: Int[Tensor, " selected"]) -> "RecurrentState":
        """The state of these rows, in this order."""
        return RecurrentState(
            [tuple(part.index_select(0, rows) for part in layer) for layer in self.layers],
            self.lengths.index_select(0, rows),
            self.index.index_select(0, rows),
        )

    def rewind(self, lengths: Int[Tensor, " rows"]) -> "RecurrentState":
        """Truncate each row to its first `lengths` ids, within the last step."""
        index = self.index - (self.lengths - lengths)
        if bool(((index < 0) | (index > self.index)).any()):
            raise ShapeError(
                f"cannot rewind from lengths {self.lengths.tolist()} to {lengths.tolist()}: "
                f"only the states of the last step are stored, {self.index.tolist()} ids per row.\n"
                "To go back further, call start() and step through the first ids again."
            )
        return replace(self, lengths=lengths, index=index)


class RecurrentLayer(nn.Module):
    r"""A recurrent layer.

        state_t = step(W x_t + b, state_{t-1}),      state_0 = 0

    The first vector of a state is the hidden state h, the output of the layer. W and U (`input`,
    `hidden`) hold the matrices of all gates, one below the other. torch's fused kernel runs where
    it computes the same equation; otherwise, or when a hook point has hooks, a loop over time. The
    hook points are inside the loop: later steps see a replaced gate or state.
    """

    state_vectors = 1  # 1: h; 2: h and c
    hook_names: tuple[str, ...] = ()  # values inside `step` with a hook point, besides the state
    kernel: Callable[..., Any] | None = None

    def __init__(
        self, dim_in: int, dim_out: int, num_chunks: int, *, hidden_bias: bool = False
    ) -> None:
        super().__init__()
        self.dim = dim_out
        self.input = nn.Linear(dim_in, num_chunks * dim_out)  # W, b
        self.hidden = nn.Linear(dim_out, num_chunks * dim_out, bias=hidden_bias)  # U
        nn.init.zeros_(self.input.bias)
        if hidden_bias:
            nn.init.zeros_(self.hidden.bias)
        self.carry_hook = CarryHookPoint()
        for name in ("state", *self.hook_names):
            self.add_module(f"{name}_hook", StepHookPoint())

    def step(self, from_input: Tensor, state: CellState, hook: Hook) -> CellState:
        """The next state from `from_input` = W x + b; gates and state pass through `hook`."""
        raise NotImplementedError

    def start(self, rows: int) -> CellState:
        """The initial state: zeros."""
        return (self.hidden.weight.new_zeros(rows, self.dim),) * self.state_vectors

    def forward(
        self,
        x: Float[Tensor, "batch time dim_in"],
        lengths: Int[Tensor, " batch"] | None = None,
        state: CellState | None = None,
    ) -> tuple[Float[Tensor, "batch time dim_out"], CellState]:
        """h after each x, and the final state.

        Rows may be right-padded: h is zero beyond a row's length, and the final state of a row
        is the one after its last valid x.
        """
        state = self.start(len(x)) if state is None else state
        run = self._loop_padded if self.kernel is None or self._has_hooks() else self._fused
        return run(x, lengths, state)

    def loop(self, x: Float[Tensor, "batch time dim_in"], state: CellState) -> CellState:
        """The state after each x, (batch, time, dim) per vector: a loop over time."""
        states: list[CellState] = []
        has_hooks = self._has_hooks()
        for step, from_input in enumerate(self.input(x).unbind(1)):
            hook = self.hook_function(step, x.shape[1]) if has_hooks else _no_hook
            state = self.step(from_input, state, hook)
            if self.carry_hook.has_hooks:
                state = self.carry_hook(torch.cat(state, -1)).split(self.dim, -1)
            states.append(state)
        return tuple(torch.stack(vectors, 1) for vectors in zip(*states, strict=True))

    def hook_function(self, step: int, steps: int) -> Hook:
        """A function that passes the values of a step through their hook points."""
        if not self._has_hooks():
            return _no_hook

        def through_hook_point(name: str, value: Tensor) -> Tensor:
            hook_point = cast(StepHookPoint, getattr(self, f"{name}_hook"))
            return (
                hook_point(value.unsqueeze(1), step, steps).squeeze(1)
                if hook_point.has_hooks
                else value
            )

        return through_hook_point

    def weights(self) -> list[Tensor]:
        """W, U and the two biases with which torch's kernel computes the equation."""
        bias = self.input.bias
        return [self.input.weight, self.hidden.weight, bias, torch.zeros_like(bias)]

    def _has_hooks(self) -> bool:
        return any(part._forward_hooks for part in self.children())

    def _loop_padded(
        self, x: Tensor, lengths: Tensor | None, state: CellState
    ) -> tuple[Tensor, CellState]:
        states = self.loop(x, state)
        if lengths is None:
            return states[0], tuple(vector[:, -1] for vector in states)
        rows, time = (torch.arange(size, device=x.device) for size in x.shape[:2])
        valid = (time < lengths.unsqueeze(1)).unsqueeze(-1)
        return states[0].where(valid, 0.0), tuple(vector[rows, lengths - 1] for vector in states)

    def _fused(
        self, x: Tensor, lengths: Tensor | None, state: CellState
    ) -> tuple[Tensor, CellState]:
        assert self.kernel is not None
        if x.is_cuda and torch.is_autocast_enabled("cuda"):
            # autocast runs cuDNN RNNs in float16, also if its dtype is bfloat16
            dtype = self.hidden.weight.dtype
            with torch.autocast("cuda", enabled=False):
                return self._fused(x.to(dtype), lengths, tuple(v.to(dtype) for v in state))
        weights = self.weights()
        if x.is_cuda:  # cuDNN warns unless its weights are contiguous in memory
            flat = torch.cat([weight.flatten() for weight in weights])
            parts = flat.split([weight.numel() for weight in weights])
            weights = [part.view_as(w) for part, w in zip(parts, weights, strict=True)]
        options = (weights, True, 1, 0.0, self.training, False)  # one layer, in one direction
        if lengths is None:
            y, *last = self.kernel(x, _add_layer_axis(state), *options, True)
            return y, tuple(vector[0] for vector in last)
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        by_length, original = packed.sorted_indices, packed.unsorted_indices
        assert by_length is not None
        assert original is not None
        initial = _add_layer_axis(tuple(vector[by_length] for vector in state))
        y, *last = self.kernel(packed.data, packed.batch_sizes, initial, *options)
        y, _ = pad_packed_sequence(packed._replace(data=y), True, total_length=x.shape[1])
        return y, tuple(vector[0, original] for vector in last)

    if TYPE_CHECKING:
        __call__ = forward


def _no_hook(_: str, value: Tensor) -> Tensor:
    return value


def _add_layer_axis(state: CellState) -> Tensor | CellState:
    """A state as torch's kernels expect it: (1, batch, dim), and h alone instead of (h,)."""
    layered = tuple(vector.unsqueeze(0) for vector in state)
    return layered if len(layered) > 1 else layered[0]


class Elman(RecurrentLayer):
    r"""The simple recurrent network (vanilla RNN).

        h <- f(W x + U h + b),      f = tanh or ReLU

    Elman 1990.
    """

    def __init__(
        self, dim_in: int, dim_out: int, *, activation: Literal["tanh", "relu"] = "tanh"
    ) -> None:
        super().__init__(dim_in, dim_out, num_chunks=1)
        self.kernel = {"tanh": torch.rnn_tanh, "relu": torch.rnn_relu}[activation]
        self.activation = {"tanh": torch.tanh, "relu": torch.relu}[activation]

    def step(self, from_input: Tensor, state: CellState, hook: Hook) -> CellState:
        """h."""
        (h,) = state
        return (hook("state", self.activation(from_input + self.hidden(h))),)


class UpdateGateRNN(RecurrentLayer):
    r"""An RNN with an update gate only, the step between `Elman` and `GRU`.

        z  = sigmoid(W_z x + U_z h + b_z)       update gate
        h~ = relu(W x + U h + b)                candidate state
        h <- z * h + (1 - z) * h~

    W, U and b hold two parts, in the order z, h~.
    """

    hook_names = ("update_gate", "candidate")

    def __init__(self, dim_in: int, dim_out: int) -> None:
        super().__init__(dim_in, dim_out, num_chunks=2)

    def step(self, from_input: Tensor, state: CellState, hook: Hook) -> CellState:
        """h, from z and h~."""
        (h,) = state
        z, candidate = (from_input + self.hidden(h)).chunk(2, -1)
        z = hook("update_gate", z.sigmoid())
        candidate = hook("candidate", candidate.relu())
        return (hook("state", z * h + (1 - z) * candidate),)


class GRU(RecurrentLayer):
    r"""The gated recurrent unit.

        r  = sigmoid(W_r x + U_r h + b_r)       reset gate
        z  = sigmoid(W_z x + U_z h + b_z)       update gate
        h~ = tanh(W x + U (r * h) + b)          candidate state
        h <- z * h + (1 - z) * h~

    W, U and b hold three parts, in the order r, z, h~. Publications differ in two points:

        reset = "after"     h~ = tanh(W x + b + r * (U h + d)), the form of torch's fused kernel;
                            U has its own bias d, in three parts as in the kernel
        update = "write"    h <- (1 - z) * h + z * h~

    Cho et al. 2014; "after" as in cuDNN and torch, "write" as in Chung et al. 2014.
    """

    hook_names = ("reset_gate", "update_gate", "candidate")

    def __init__(
        self,
        dim_in: int,
        dim_out: int,
        *,
        reset: Literal["before", "after"] = "before",
        update: Literal["keep", "write"] = "keep",
    ) -> None:
        super().__init__(dim_in, dim_out, num_chunks=3, hidden_bias=reset == "after")
        self.reset, self.update = reset, update
        self.kernel = torch.gru if reset == "after" else None

    def step(self, from_input: Tensor, state: CellState, hook: Hook) -> CellState:
        """h, from r, z and h~."""
        (h,) = state
        r, z, candidate = from_input.chunk(3, -1)
        if self.reset == "after":
            u_r, u_z, u = self.hidden(h).chunk(3, -1)
            r, z = hook("reset_gate", (r + u_r).sigmoid()), (z + u_z).sigmoid()
            candidate = (candidate + r * u).tanh()
        else:
            gates, u = self.hidden.weight.split([2 * self.dim, self.dim])
            u_r, u_z = F.linear(h, gates).chunk(2, -1)
            r, z = hook("reset_gate", (r + u_r).sigmoid()), (z + u_z).sigmoid()
            candidate = (candidate + F.linear(r * h, u)).tanh()
        z, candidate = hook("update_gate", z), hook("candidate", candidate)
        keep = z if self.update == "keep" else 1 - z
        return (hook("state", keep * h + (1 - keep) * candidate),)

    def weights(self) -> list[Tensor]:
        """For update = "write" the part of z is negated, since 1 - sigmoid(a) = sigmoid(-a)."""
        weights = [self.input.weight, self.hidden.weight, self.input.bias, self.hidden.bias]
        if self.update == "keep":
            return weights
        parts = [weight.chunk(3) for weight in weights]
        return [torch.cat([r, -z, candidate]) for r, z, candidate in parts]


class LSTM(RecurrentLayer):
    r"""Long short-term memory.

        i, f, o = sigmoid(W x + U h + b)        input, forget and output gate
        g       = tanh(W x + U h + b)           candidate
        c <- f * c + i * g
        h <- o * tanh(c)

    W, U and b hold four parts, in the order i, f, g, o. The bias of the forget gate is
    initialized to 1. With `forget` = false there is no forget gate, f = 1, as in 1997.
    Hochreiter & Schmidhuber 1997; forget gate Gers et al. 2000, its bias Jozefowicz et al. 2015.
    """

    state_vectors = 2  # h and c
    hook_names = ("input_gate", "forget_gate", "candidate", "output_gate", "cell")
    kernel = torch.lstm

    def __init__(self, dim_in: int, dim_out: int, *, forget: bool = True) -> None:
        super().__init__(dim_in, dim_out, num_chunks=4 if forget else 3)
        self.forget = forget
        if forget:
            nn.init.ones_(self.input.bias[dim_out : 2 * dim_out])

    def step(self, from_input: Tensor, state: CellState, hook: Hook) -> CellState:
        """h and c, from i, f, g and o."""
        h, c = state
        i, *f, g, o = (from_input + self.hidden(h)).split(self.dim, -1)
        i = hook("input_gate", i.sigmoid())
        keep = hook("forget_gate", f[0].sigmoid() if f else torch.ones_like(c))
        g, o = hook("candidate", g.tanh()), hook("output_gate", o.sigmoid())
        c = hook("cell", keep * c + i * g)
        return hook("state", o * c.tanh()), c

    def weights(self) -> list[Tensor]:
        """torch's kernel always has a forget gate; without `forget`, a large bias keeps it at 1."""
        if self.forget:
            return super().weights()
        padded = []
        for weight, fill in zip(super().weights(), (0.0, 0.0, OPEN_GATE, 0.0), strict=True):
            i, g, o = weight.chunk(3)
            padded.append(torch.cat([i, torch.full_like(i, fill), g, o]))
        return padded


CELLS: dict[str, Callable[..., RecurrentLayer]] = {
    "elman": Elman,
    "update_gate": UpdateGateRNN,
    "gru": GRU,
    "lstm": LSTM,
}


class OneHot(nn.Module):
    r"""x_t = e_{id_t}: 1 at the id, 0 elsewhere, so that W x_t is a column of W."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size

    def forward(self, ids: Int[Tensor, "batch time"]) -> Float[Tensor, "batch time vocab"]:
        """The one-hot vectors."""
        return F.one_hot(ids, self.vocab_size).float()

    if TYPE_CHECKING:
        __call__ = forward


class Bidirectional(nn.Module):
    r"""A bidirectional layer: a forward and a backward layer, their outputs concatenated.

        y_t = [forward(x_1 ... x_t); backward(x_T ... x_t)]

    Schuster & Paliwal 1997.
    """

    def __init__(self, forward_layer: RecurrentLayer, backward_layer: RecurrentLayer) -> None:
        super().__init__()
        self.forward_layer, self.backward_layer = forward_layer, backward_layer

    def forward(
        self, x: Float[Tensor, "batch time dim_in"], lengths: Int[Tensor, " batch"] | None = None
    ) -> tuple[Float[Tensor, "batch time width"], CellState]:
        """Both h at each x, and both final states: of the backward layer that at the first x."""
        time = torch.arange(x.shape[1], device=x.device)
        ends = time.new_full((len(x),), x.shape[1]) if lengths is None else lengths
        # reverses the valid part of each row; the padding stays at the end
        reversed_time = (ends.unsqueeze(1) - 1 - time).remainder(x.shape[1])
        rows = torch.arange(len(x), device=x.device).unsqueeze(1)
        y, last = self.forward_layer(x, lengths)
        y_backward, last_backward = self.backward_layer(x[rows, reversed_time], lengths)
        pairs = zip(last, last_backward, strict=True)
        y = torch.cat([y, y_backward[rows, reversed_time]], -1)
        return y, tuple(torch.cat(pair, -1) for pair in pairs)

    if TYPE_CHECKING:
        __call__ = forward


class Recurrent(nn.ModuleList):
    """A stack of recurrent layers.

    Dropout applies between layers, not between time steps (Zaremba et al. 2014).
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
        def new_cell(width: int) -> RecurrentLayer:
            return make(cell, CELLS, "cell", dim_in=width, dim_out=dim_out)

        widths = [dim_in] + [(1 + bidirectional) * dim_out] * (layers - 1)
        super().__init__(
            Bidirectional(new_cell(width), new_cell(width)) if bidirectional else new_cell(width)
            for width in widths
        )
        self.dropout = dropout

    def forward(
        self, x: Float[Tensor, "batch time dim_in"], lengths: Int[Tensor, " batch"] | None = None
    ) -> tuple[Float[Tensor, "batch time dim"], list[CellState]]:
        """The outputs of the top layer, and the final state of every layer.

        Rows may be right-padded: outputs are zero beyond a row's length, and the final state of
        a row is the one after its last valid x.
        """
        if lengths is not None and not bool(((lengths > 0) & (lengths <= x.shape[1])).all()):
            raise ShapeError(
                f"lengths {lengths.tolist()} must be at least 1 and at most {x.shape[1]}, "
                "the number of vectors in a row"
            )
        last: list[CellState] = []
        for layer in self:
            x, state = cast(RecurrentLayer | Bidirectional, layer)(x, lengths)
            x = self.apply_dropout(x)
            last.append(state)
        return x, last

    def apply_dropout(self, x: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows dim"]:
        """Dropout on the output of a layer."""
        return F.dropout(x, self.dropout, self.training)

    if TYPE_CHECKING:
        __call__ = forward
