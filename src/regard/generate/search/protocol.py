"""The `Search` protocol: decoding by search instead of sampling."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from regard.errors import ConfigError, ShapeError
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
    """Finds the best continuations of prompts, best first, without random numbers."""

    def __call__(
        self,
        model: Language,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | Sequence[int],
        stop: Collection[int] = (),
        source: Source | None = None,
    ) -> list[list[Hypothesis]]:
        """The continuations of each prompt, of up to `max_new_tokens` ids or to a full context.

        `max_new_tokens` is one limit for all prompts or one for each. A row does not depend on the
        other rows, up to rounding of its logits.
        """


def token_limits(
    model: Language,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int],
    source: Source | None,
    *,
    unread: int = 1,
) -> list[int]:
    """How many ids may follow each prompt: `max_new_tokens`, or fewer where the context ends.

    The last `unread` generated ids are never fed to the model, so they take no position.
    """
    if not isinstance(max_new_tokens, Sequence):
        max_new_tokens = [max_new_tokens] * len(prompts)
    limits = list(max_new_tokens)
    if len(limits) != len(prompts):
        raise ShapeError(
            f"max_new_tokens has {len(limits)} limits for {len(prompts)} prompts; "
            "give one per prompt"
        )
    for limit in limits:
        check_prompts(prompts, limit, source)
    if model.context is None:
        return limits
    longest = max(map(len, prompts), default=0)
    if model.context - longest + unread < 1:
        raise ConfigError(
            f"a prompt of {longest} ids fills the model's context of {model.context}; shorten it"
        )
    free_positions = (model.context - len(prompt) + unread for prompt in prompts)
    return list(map(min, limits, free_positions))
