"""Protocols of models that generate text, which tasks, `generate` and `explain` use."""

from dataclasses import replace
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.nn.state import Source


@runtime_checkable
class State(Protocol):
    """The decoding state of a batch of rows: a KV cache, hidden states or the last ids.

    `step` may modify the state in place; only the state that it returns may be used afterwards.
    """

    @property
    def lengths(self) -> Int[Tensor, " rows"]:
        """The number of ids that each row has read."""

    def select(self, rows: Int[Tensor, " selected"]) -> "State":
        """The state of these rows, in this order; a row may occur several times."""

    def rewind(self, lengths: Int[Tensor, " rows"]) -> "State":
        """Truncate each row to its first `lengths` ids.

        A recurrent state can only be rewound to a position within the last `step`.
        """


@runtime_checkable
class Capturable(State, Protocol):
    """A state with preallocated buffers, so that a decode step can be captured as a CUDA graph."""

    def with_static_shapes(self) -> State:
        """The same state, with shapes that do not depend on the lengths of the rows."""

    def matches_capacity(self, capacity: int) -> bool:
        """Whether the buffers are those of a state that was started with this capacity."""

    def reset(self, initial: Any = None) -> State:
        """An empty state in the same buffers, with the source of `initial` if the model has one."""


@runtime_checkable
class Language(Protocol):
    """A model that predicts the next token, one decode step at a time."""

    @property
    def vocab_size(self) -> int:
        """The number of logits per position."""

    @property
    def device(self) -> torch.device:
        """The device of the weights; ids must be on it."""

    @property
    def context(self) -> int | None:
        """The maximum number of ids per row; None: no limit."""

    def start(self, rows: int, capacity: int, source: Source | None = None) -> State:
        """An empty state for `rows` rows of up to `capacity` ids each; `source` is encoded here."""

    def step(
        self,
        ids: Int[Tensor, "rows time"],
        state: State,
        *,
        counts: Int[Tensor, " rows"] | None = None,
        all_logits: bool = False,
    ) -> tuple[Float[Tensor, "rows scored vocab"], State]:
        """Read one or more ids per row (prefill, or a decode step); return the next id's logits.

        Rows may be right-padded: `counts` gives the number of valid ids of each row. The logits
        are those after each row's last valid id (scored = 1), or after every id (`all_logits`).
        """


@runtime_checkable
class SupportsHidden(Language, Protocol):
    """A `Language` that also returns the hidden states that its head projects to logits."""

    head: Any  # hidden states to logits

    def hidden(
        self,
        ids: Int[Tensor, "rows time"],
        state: State,
        *,
        counts: Int[Tensor, " rows"] | None = None,
    ) -> tuple[Float[Tensor, "rows time dim"], State]:
        """Read ids as `step` does; return the hidden state after each."""


def is_prefix_lm(model: Any) -> bool:
    """Whether a model reads prompts bidirectionally.

    Of a `CudaGraphDecoder` or a `ContrastiveDecoding`: whether a model inside it does.
    """
    inner = [getattr(model, name, None) for name in ("model", "expert", "amateur")]
    if any(part is not None for part in inner):
        return any(is_prefix_lm(part) for part in inner if part is not None)
    return bool(getattr(getattr(model, "config", None), "prefix", False))


def mark_prompt_as_prefix(model: Any, state: Any) -> Any:
    """Mark the next ids of an empty state as the prompt, which a prefix LM reads bidirectionally.

    Return the marked state; for other models, the state itself.
    """
    return replace(state, prefix=True) if is_prefix_lm(model) else state


class LanguageModel(nn.Module):
    """Base class of the modules that implement `Language`."""

    config: Any
    context: int | None = None

    @property
    def vocab_size(self) -> int:
        """The number of logits per position."""
        size: int = self.config.vocab_size
        return size

    @property
    def device(self) -> torch.device:
        """The device of the first parameter, or else of the first buffer."""
        return next(chain(self.parameters(), self.buffers())).device
