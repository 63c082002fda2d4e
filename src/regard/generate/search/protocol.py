"""What a search is: it looks for one good text instead of drawing any."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from regard.errors import ConfigError
from regard.generate.decode import check_prompts
from regard.models.base import Language
from regard.nn.state import Source


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One text that a search ended with."""

    ids: list[int]  # without prompt and stop
    score: float  # what the search went by


@runtime_checkable
class Search(Protocol):
    """From prompts to their continuations, the best of each first. Nothing is drawn."""

    def __call__(
        self,
        model: Language,
        prompts: Sequence[Sequence[int]],
        *,
        tokens: int,
        stop: Collection[int] = (),
        source: Source | None = None,
    ) -> list[list[Hypothesis]]:
        """The texts found for each prompt, of up to `tokens` ids or to a full context."""


def longest_answer(
    model: Language,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    source: Source | None,
    *,
    unread: int = 1,
) -> int:
    """How many ids may follow the longest prompt: `tokens`, or what the context has room for.

    The `unread` last ids of an answer are never taken in, and so need no room.
    """
    check_prompts(prompts, tokens, source)
    if model.context is None:
        return tokens
    longest = max(map(len, prompts), default=0)
    room = model.context - longest + unread
    if room < 1:
        raise ConfigError(
            f"a prompt of {longest} ids leaves no room in the model's context of {model.context}"
        )
    return min(tokens, room)
