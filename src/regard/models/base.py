"""What every model promises: the protocols that tasks, generation and explaining rely on."""

from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from regard.nn.state import Source


@runtime_checkable
class State(Protocol):
    """What decoding remembers of each row. `step` may write into it and so use it up."""

    @property
    def lengths(self) -> Int[Tensor, " rows"]:
        """How many ids each row has taken in."""

    def select(self, rows: Int[Tensor, " chosen"]) -> "State":
        """The state of these rows, in this order; a row may come several times."""

    def rewind(self, lengths: Int[Tensor, " rows"]) -> "State":
        """Forget all but the first `lengths` ids of each row.

        A recurrent state can only go back within the ids of the last `step`.
        """


@runtime_checkable
class Capturable(State, Protocol):
    """A state whose buffers stay where they are, so that a step can be recorded and replayed."""

    @property
    def capacity(self) -> int:
        """The most ids a row can hold."""

    def with_static_shapes(self) -> State:
        """The same, with shapes that do not depend on how far rows have come."""

    def reset(self) -> State:
        """The same buffers, with nothing in them yet."""


@runtime_checkable
class Language(Protocol):
    """A model that can be asked what comes next."""

    @property
    def context(self) -> int | None:
        """The most ids a row can hold; None: no limit."""

    def start(self, rows: int, capacity: int, source: Source | None = None) -> State:
        """An empty state for `rows` rows of up to `capacity` ids each."""

    def step(
        self,
        ids: Int[Tensor, "rows time"],
        state: State,
        *,
        counts: Int[Tensor, " rows"] | None = None,
        every: bool = False,
    ) -> tuple[Float[Tensor, "rows scored vocab"], State]:
        """Take in one or more ids per row; give the logits of what follows.

        Rows may be right-padded: `counts` says how many ids of each row are real. The logits
        are those after each row's last real id (scored = 1), or after every id (`every`).
        """


@runtime_checkable
class Hidden(Language, Protocol):
    """A language that shows the vectors it reads its logits off."""

    head: Any  # hidden states to logits

    def hidden(
        self,
        ids: Int[Tensor, "rows time"],
        state: State,
        *,
        counts: Int[Tensor, " rows"] | None = None,
    ) -> tuple[Float[Tensor, "rows time dim"], State]:
        """Take in ids as `step` does; give the hidden state after each."""
