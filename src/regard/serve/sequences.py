"""The sequences that the engine generates, and those in prefill."""

from dataclasses import dataclass

from regard.generate.sampling_state import SamplingState
from regard.models.base import State
from regard.serve.request import Request


@dataclass(eq=False, slots=True)
class Sequence:
    """One continuation that is being generated."""

    request: Request
    index: int  # of the continuation in its request
    window: list[int]  # the ids that the model has read, and the newest
    prefix_length: int = 0  # tokens of the window that a prefix LM reads bidirectionally
    new_tokens: int = 0
    tokens_since_prefill: int = 0  # new tokens since it was last prefilled


@dataclass(eq=False, slots=True)
class Prefill:
    """A prompt in prefill, for one or several continuations of it."""

    sequences: list[Sequence]
    ids: list[int]
    sampling: SamplingState | None = None  # of a requeued sequence; None: a new sequence
    state: State | None = None
    prefilled: int = 0  # tokens

    @property
    def request(self) -> Request:
        """The request of its sequences."""
        return self.sequences[0].request

    def max_length(self, context: int | None) -> int:
        """The largest number of tokens that each of its sequences will have."""
        length = len(self.ids) + self.request.max_new_tokens - self.sequences[0].new_tokens - 1
        return max(1, length if context is None else min(length, context))


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    requests: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    preempted: int = 0
