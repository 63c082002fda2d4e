"""What the engine knows of each text that it generates."""

from dataclasses import dataclass

from regard.generate.sampling_state import SamplingState
from regard.models.base import State
from regard.serve.request import Request


@dataclass(eq=False, slots=True)
class Text:
    """One continuation that is being generated."""

    request: Request
    index: int
    window: list[int]  # the ids that the model has read, and the newest
    count: int = 0  # new tokens
    since: int = 0  # new tokens since it got its row


@dataclass(eq=False, slots=True)
class Prefill:
    """A prompt that is being read, for one or several continuations of it."""

    texts: list[Text]
    ids: list[int]
    sampling: SamplingState | None = None  # of a text that continues
    state: State | None = None
    read: int = 0

    @property
    def request(self) -> Request:
        """The request of its texts."""
        return self.texts[0].request

    def need(self, context: int | None) -> int:
        """The most ids that the rows of its texts will hold."""
        need = len(self.ids) + self.request.tokens - self.texts[0].count - 1
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
