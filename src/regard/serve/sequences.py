"""The sequences that the engine generates, and those in prefill."""

from dataclasses import dataclass

from regard.generate.sampling_state import SamplingState
from regard.models.base import State
from regard.serve.request import Request


@dataclass(eq=False, slots=True)
class Sequence:
    """One continuation that is being generated."""

    request: Request
    index: int
    window: list[int]  # the ids that the model has read, and the newest
    count: int = 0  # new tokens
    since: int = 0  # new tokens since it was last prefilled


@dataclass(eq=False, slots=True)
class Prefill:
    """A prompt in prefill, for one or several continuations of it."""

    sequences: list[Sequence]
    ids: list[int]
    sampling: SamplingState | None = None  # of a sequence that continues
    state: State | None = None
    done: int = 0  # tokens that are prefilled

    @property
    def request(self) -> Request:
        """The request of its sequences."""
        return self.sequences[0].request

    def need(self, context: int | None) -> int:
        """The most ids that each of its sequences will hold."""
        need = len(self.ids) + self.request.tokens - self.sequences[0].count - 1
        return max(1, need if context is None else min(need, context))


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    requests: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    steps: int = 0
    preempted: int = 0
