"""Recurrent layers: RNN, GRU, LSTM and others, bidirectional, stacked."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from regard.config import Choice, make
from regard.errors import ShapeError
from regard.nn.hook_point import CarryHookPoint, StepHookPoint
from regard.nn.state import CellState

Hook = Callable[[str, Tensor], Tensor]  # from a gate's name and value to the value that is used
OPEN_GATE = 100.0  # a bias whose sigmoid is exactly 1


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
        self,
        dim_in: int,
        dim_out: int,
        num_chunks: int,
        *,
        hidden_chunks: int | None = None,
        hidden_bias: bool = False,
    ) -> None:
        super().__init__()
        self.dim = dim_out
        self.input: nn.Linear | InputWithSkip = nn.Linear(dim_in, num_chunks * dim_out)  # W, b
        hidden_dim = (num_chunks if hidden_chunks is None else hidden_chunks) * dim_out
        self.hidden = nn.Linear(dim_out, hidden_dim, bias=hidden_bias)  # U
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
        compute = self._loop_padded if self.kernel is None or self._has_hooks() else self._fused
        return compute(x, lengths, state)

    def loop(self, x: Float[Tensor, "batch time dim_in"], state: CellState) -> CellState:
        """The state after each x, (batch, time, dim) per vector: a loop over time."""
        states: list[CellState] = []
        has_hooks = self._has_hooks()
        for step, from_input in enumerate(self.input(x).unbind(1)):
            hook = self.hook_function(step, x.shape[1]) if has_hooks else _no_hook
            state = self.step(from_input, state, hook)
            if has_hooks and self.carry_hook.has_hooks:
                state = self.carry_hook(torch.cat(state, -1)).split(self.dim, -1)
            states.append(state)
        return tuple(torch.stack(vectors, 1) for vectors in zip(*states, strict=True))

    def hook_function(self, step: int, steps: int) -> Hook:
        """A function that passes the values of a step through their hook points."""
        if not self._has_hooks():
            return _no_hook

        def apply_hook_point(name: str, value: Tensor) -> Tensor:
            hook_point = cast(StepHookPoint, getattr(self, f"{name}_hook"))
            return (
                hook_point(value.unsqueeze(1), step, steps).squeeze(1)
                if hook_point.has_hooks
                else value
            )

        return apply_hook_point

    def kernel_weights(self) -> list[Tensor]:
        """W, U and the two biases with which torch's kernel computes the equation."""
        bias = self.input.bias
        return [self.input.weight, self.hidden.weight, bias, torch.zeros_like(bias)]

    def _has_hooks(self) -> bool:
        return any(module._forward_hooks for module in self.children())

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
            # autocast runs cuDNN RNNs in float16, even if its dtype is bfloat16
            dtype = self.hidden.weight.dtype
            with torch.autocast("cuda", enabled=False):
                return self._fused(x.to(dtype), lengths, tuple(v.to(dtype) for v in state))
        weights = self.kernel_weights()
        if x.is_cuda:  # cuDNN warns unless its weights are contiguous in memory
            flat_weights = torch.cat([weight.flatten() for weight in weights])
            parts = flat_weights.split([weight.numel() for weight in weights])
            weights = [part.view_as(w) for part, w in zip(parts, weights, strict=True)]
        options = (weights, True, 1, 0.0, self.training, False)  # one layer, in one direction
        if lengths is None:
            y, *final_state = self.kernel(x, _add_layer_axis(state), *options, True)
            return y, tuple(vector[0] for vector in final_state)
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        sorted_indices, unsorted_indices = packed.sorted_indices, packed.unsorted_indices
        assert sorted_indices is not None
        assert unsorted_indices is not None
        initial = _add_layer_axis(tuple(vector[sorted_indices] for vector in state))
        y, *final_state = self.kernel(packed.data, packed.batch_sizes, initial, *options)
        y, _ = pad_packed_sequence(packed._replace(data=y), True, total_length=x.shape[1])
        return y, tuple(vector[0, unsorted_indices] for vector in final_state)

    if TYPE_CHECKING:
        __call__ = forward


def _no_hook(_: str, value: Tensor) -> Tensor:
    return value


def _add_layer_axis(state: CellState) -> Tensor | CellState:
    """A state in the form of torch's kernels: (1, batch, dim) each, and h instead of (h,)."""
    vectors = tuple(vector.unsqueeze(0) for vector in state)
    return vectors if len(vectors) > 1 else vectors[0]


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
        """The next h."""
        (h,) = state
        return (hook("state", self.activation(from_input + self.hidden(h))),)


class UpdateGateRNN(RecurrentLayer):
    r"""An RNN with an update gate only, the step between `Elman` and `GRU`.

        z  = sigmoid(W_z x + U_z h + b_z)       update gate
        h~ = relu(W x + U h + b)                candidate state
        h <- z * h + (1 - z) * h~

    W, U and b are stacked in the order z, h~.
    """

    hook_names = ("update_gate", "candidate")

    def __init__(self, dim_in: int, dim_out: int) -> None:
        super().__init__(dim_in, dim_out, num_chunks=2)

    def step(self, from_input: Tensor, state: CellState, hook: Hook) -> CellState:
        """The next h, from z and h~."""
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

    W, U and b are stacked in the order r, z, h~. Publications differ in two points:

        reset = "after"     h~ = tanh(W x + b + r * (U h + d)), the form of torch's fused kernel;
                            U has a bias d for all three, as in the kernel
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
        """The next h, from r, z and h~."""
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

    def kernel_weights(self) -> list[Tensor]:
        """The weights of torch's kernel.

        For update = "write" those of z are negated, since 1 - sigmoid(a) = sigmoid(-a).
        """
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

    W, U and b are stacked in the order i, f, g, o. The bias of the forget gate is initialized to
    `forget_bias`. A gate that is switched off (`input_gate`, `forget_gate`, `output_gate` = false)
    is 1 and has no weights; the LSTM of 1997 has no forget gate.
    Hochreiter & Schmidhuber 1997; forget gate Gers et al. 2000; the bias of 1 and the comparison
    of LSTMs without a gate Jozefowicz et al. 2015.
    """

    state_vectors = 2  # h and c
    hook_names = ("input_gate", "forget_gate", "candidate", "output_gate", "cell")
    kernel = torch.lstm

    def __init__(
        self,
        dim_in: int,
        dim_out: int,
        *,
        input_gate: bool = True,
        forget_gate: bool = True,
        output_gate: bool = True,
        forget_bias: float = 1.0,
    ) -> None:
        self.gates = (input_gate, forget_gate, True, output_gate)  # whether there is i, f, g, o
        super().__init__(dim_in, dim_out, num_chunks=sum(self.gates))
        if forget_gate:
            start = input_gate * dim_out
            nn.init.constant_(self.input.bias[start : start + dim_out], forget_bias)

    def step(self, from_input: Tensor, state: CellState, hook: Hook) -> CellState:
        """The next h and c, from i, f, g and o."""
        h, c = state
        parts = iter((from_input + self.hidden(h)).split(self.dim, -1))
        i, f, g, o = (next(parts) if has_gate else None for has_gate in self.gates)
        one = torch.ones_like(c)
        assert g is not None
        i = hook("input_gate", one if i is None else i.sigmoid())
        f = hook("forget_gate", one if f is None else f.sigmoid())
        g = hook("candidate", g.tanh())
        o = hook("output_gate", one if o is None else o.sigmoid())
        c = hook("cell", f * c + i * g)
        return hook("state", o * c.tanh()), c

    def kernel_weights(self) -> list[Tensor]:
        """The weights of torch's kernel; a gate that is switched off is 1 by a large bias."""
        weights = super().kernel_weights()
        if all(self.gates):
            return weights
        full_weights = []
        for weight, fill in zip(weights, (0.0, 0.0, OPEN_GATE, 0.0), strict=True):
            parts = iter(weight.split(self.dim))
            constant = torch.full_like(weight[: self.dim], fill)
            full_weights.append(torch.cat([next(parts) if g else constant for g in self.gates]))
        return full_weights


class InputWithSkip(nn.Module):
    """The input layer of MUT1 and MUT2: W x + b, concatenated with x.

    Where x and h differ in width, P x replaces x; the paper has no such projection P.
    """

    def __init__(self, linear: nn.Linear, dim: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features + dim
        self.linear = linear
        same_width = self.in_features == dim
        self.skip = None if same_width else nn.Linear(self.in_features, dim, bias=False)  # P

    @property
    def weight(self) -> Float[Tensor, "width dim_in"]:
        """W, and the identity or P below it."""
        weight = self.linear.weight
        if self.skip is not None:
            return torch.cat([weight, self.skip.weight])
        eye = torch.eye(self.in_features, dtype=weight.dtype, device=weight.device)
        return torch.cat([weight, eye])

    @property
    def bias(self) -> Float[Tensor, " width"]:
        """b, and zeros for x."""
        bias = self.linear.bias
        return torch.cat([bias, bias.new_zeros(self.out_features - len(bias))])

    def forward(self, x: Float[Tensor, "*rows dim_in"]) -> Float[Tensor, "*rows width"]:
        """W x + b and x."""
        return torch.cat([self.linear(x), x if self.skip is None else self.skip(x)], -1)

    if TYPE_CHECKING:
        __call__ = forward


class MUT1(RecurrentLayer):
    r"""The first of three mutations of the GRU that an evolutionary search found.

        r  = sigmoid(W_r x + U_r h + b_r)           reset gate
        z  = sigmoid(W_z x + b_z)                   update gate
        h~ = tanh(U (r * h) + tanh(x) + b)          candidate state
        h <- (1 - z) * h + z * h~

    W holds r and z, U holds r and h~; `InputWithSkip` provides the x of h~.
    Jozefowicz et al. 2015.
    """

    hook_names = ("reset_gate", "update_gate", "candidate")

    def __init__(self, dim_in: int, dim_out: int) -> None:
        super().__init__(dim_in, dim_out, num_chunks=2)
        self.input = InputWithSkip(cast(nn.Linear, self.input), dim_out)
        self.bias = nn.Parameter(torch.zeros(dim_out))

    def step(self, from_input: Tensor, state: CellState, hook: Hook) -> CellState:
        """The next h, from r, z and h~."""
        (h,) = state
        r, z, x = from_input.chunk(3, -1)
        u_r, u = self.hidden.weight.chunk(2)
        r = hook("reset_gate", (r + F.linear(h, u_r)).sigmoid())
        z = hook("update_gate", z.sigmoid())
        candidate = hook("candidate", (F.linear(r * h, u) + x.tanh() + self.bias).tanh())
        return (hook("state", (1 - z) * h + z * candidate),)


class MUT2(RecurrentLayer):
    r"""The second mutation of the GRU.

        r  = sigmoid(x + U_r h + b_r)               reset gate
        z  = sigmoid(W_z x + U_z h + b_z)           update gate
        h~ = tanh(W x + U (r * h) + b)              candidate state
        h <- (1 - z) * h + z * h~

    W holds z and h~, U holds r, z and h~; `InputWithSkip` provides the x of r.
    Jozefowicz et al. 2015.
    """

    hook_names = ("reset_gate", "update_gate", "candidate")

    def __init__(self, dim_in: int, dim_out: int) -> None:
        super().__init__(dim_in, dim_out, num_chunks=2, hidden_chunks=3)
        self.input = InputWithSkip(cast(nn.Linear, self.input), dim_out)
        self.bias = nn.Parameter(torch.zeros(dim_out))

    def step(self, from_input: Tensor, state: CellState, hook: Hook) -> CellState:
        """The next h, from r, z and h~."""
        (h,) = state
        z, candidate, x = from_input.chunk(3, -1)
        u_r, u_z, u = self.hidden.weight.chunk(3)
        r = hook("reset_gate", (x + F.linear(h, u_r) + self.bias).sigmoid())
        z = hook("update_gate", (z + F.linear(h, u_z)).sigmoid())
        candidate = hook("candidate", (candidate + F.linear(r * h, u)).tanh())
        return (hook("state", (1 - z) * h + z * candidate),)


class MUT3(RecurrentLayer):
    r"""The third mutation of the GRU.

        r  = sigmoid(W_r x + U_r h + b_r)           reset gate
        z  = sigmoid(W_z x + U_z tanh(h) + b_z)     update gate
        h~ = tanh(W x + U (r * h) + b)              candidate state
        h <- (1 - z) * h + z * h~

    W, U and b are stacked in the order r, z, h~. Jozefowicz et al. 2015.
    """

    hook_names = ("reset_gate", "update_gate", "candidate")

    def __init__(self, dim_in: int, dim_out: int) -> None:
        super().__init__(dim_in, dim_out, num_chunks=3)

    def step(self, from_input: Tensor, state: CellState, hook: Hook) -> CellState:
        """The next h, from r, z and h~."""
        (h,) = state
        r, z, candidate = from_input.chunk(3, -1)
        u_r, u_z, u = self.hidden.weight.chunk(3)
        r = hook("reset_gate", (r + F.linear(h, u_r)).sigmoid())
        z = hook("update_gate", (z + F.linear(h.tanh(), u_z)).sigmoid())
        candidate = hook("candidate", (candidate + F.linear(r * h, u)).tanh())
        return (hook("state", (1 - z) * h + z * candidate),)


CELLS: dict[str, Callable[..., RecurrentLayer]] = {
    "elman": Elman,
    "update_gate": UpdateGateRNN,
    "gru": GRU,
    "lstm": LSTM,
    "mut1": MUT1,
    "mut2": MUT2,
    "mut3": MUT3,
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
        """[forward h; backward h] at each x, and the concatenated final states.

        The final state of the backward layer is its state at the first x.
        """
        row_lengths = lengths
        if row_lengths is None:
            row_lengths = torch.full(x.shape[:1], x.shape[1], device=x.device)
        reversal = reversal_index(row_lengths, x.shape[1])
        y, final_state = self.forward_layer(x, lengths)
        y_backward, backward_final_state = self.backward_layer(x[reversal], lengths)
        pairs = zip(final_state, backward_final_state, strict=True)
        y = torch.cat([y, y_backward[reversal]], -1)
        return y, tuple(torch.cat(pair, -1) for pair in pairs)

    if TYPE_CHECKING:
        __call__ = forward


def reversal_index(lengths: Int[Tensor, " batch"], time: int) -> tuple[Tensor, Tensor]:
    """The index that reverses the valid part of each row; the padding stays at the end."""
    rows = torch.arange(len(lengths), device=lengths.device).unsqueeze(1)
    positions = torch.arange(time, device=lengths.device)
    return rows, (lengths.unsqueeze(1) - 1 - positions).remainder(time)


class Recurrent(nn.ModuleList):
    """A stack of recurrent layers.

    Dropout applies to the output of every layer, not between time steps (Zaremba et al. 2014).
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
        final_states: list[CellState] = []
        for layer in self:
            x, state = cast(RecurrentLayer | Bidirectional, layer)(x, lengths)
            x = self.apply_dropout(x)
            final_states.append(state)
        return x, final_states

    def apply_dropout(self, x: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows dim"]:
        """Dropout on the output of a layer."""
        return F.dropout(x, self.dropout, self.training)

    if TYPE_CHECKING:
        __call__ = forward
