"""The `Search` protocol: decoding by search instead of sampling."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from regard.errors import ConfigError
from regard.generate.decode import check_prompts
from regard.models.base import Language
from regard.nn.state import Source


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One continuation that a search returns."""

    ids: list[int]  # without prompt and stop id
    score: float  # hypotheses are ranked by it


@runtime_checkable
class Search(Protocol):
    """Finds continuations of prompts, the best of each first. Nothing is sampled."""

    def __call__(
        self,
        model: Language,
        prompts: Sequence[Sequence[int]],
        *,
        tokens: int,
        stop: Collection[int] = (),
        source: Source | None = None,
    ) -> list[list[Hypothesis]]:
        """The continuations of each prompt, of up to `tokens` ids or to a full context."""


def max_new_tokens(
    model: Language,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    source: Source | None,
    *,
    unread: int = 1,
) -> int:
    """How many ids may follow the longest prompt: `tokens`, or the room left in the context.

    The model never reads the last `unread` ids of an answer, and so they need no room.
    """
    check_prompts(prompts, tokens, source)
    if model.context is None:
        return tokens
    longest = max(map(len, prompts), default=0)
    max_tokens = model.context - longest + unread
    if max_tokens < 1:
        raise ConfigError(
            f"a prompt of {longest} ids fills the model's context of {model.context}; shorten it"
        )
    return min(tokens, max_tokens)
