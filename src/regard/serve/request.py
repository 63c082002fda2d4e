"""Requests to the engine, and the events by which it answers."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from jaxtyping import Float
from torch import Tensor

from regard.generate.chain import Chain

FinishReason = Literal["stop", "length", "cancelled", "error"]


class Constraint(Protocol):
    """Restricts the next token of one sequence, for example to what a JSON schema allows."""

    def mask(self, logits: Float[Tensor, " vocab"]) -> Float[Tensor, " vocab"]:
        """The logits, with those of forbidden tokens at -inf."""

    def append(self, token: int) -> None:
        """Advance by a sampled token; raise `RegardError` if it is not allowed."""


@dataclass(eq=False, slots=True)
class Request:
    """A prompt, of which `n` continuations are generated.

    Continuation i has the seed `seed` + i: it is the same as that of a request with `n` = 1 and
    this seed.
    """

    prompt: Sequence[int]
    chain: Chain
    max_new_tokens: int  # at most this many new tokens
    seed: int
    stop: Collection[int] = ()  # ids that end a continuation
    n: int = 1
    source: Sequence[int] | None = None  # of an encoder-decoder
    # log-probabilities of new tokens, with this many of the most probable
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # the same for the tokens of the prompt
    constraints: Sequence[Constraint] = ()  # one per continuation
    cancelled: bool = False  # set by any thread; its sequences are removed before the next step
    # continuations that a stop string has ended, by index; removed before the next step
    ended: set[int] = field(default_factory=set)
    prompt_token_logprobs: "list[TokenLogprobs]" = field(
        default_factory=list
    )  # of all but the first token


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability of a token according to the model, and those of the most probable tokens.

    `top_ids` and `top_logprobs` are arrays to save memory: responses may have many of them.
    """

    token: int
    logprob: float
    top_ids: Sequence[int] = ()  # best first
    top_logprobs: Sequence[float] = ()

    @property
    def top(self) -> list[tuple[int, float]]:
        """The most probable tokens with their log-probabilities, best first."""
        return list(zip(self.top_ids, self.top_logprobs, strict=True))

    def truncate(self, count: int) -> "TokenLogprobs":
        """The same with at most `count` of the most probable tokens."""
        if len(self.top_ids) <= count:
            return self
        return replace(self, top_ids=self.top_ids[:count], top_logprobs=self.top_logprobs[:count])


@dataclass(slots=True)  # not frozen: one is made for every token
class Event:
    """A new token of a continuation, or its end; the last event has a `finish_reason`."""

    request: Request
    index: int  # of the continuation
    token: int | None = None
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    error: Exception | None = None
