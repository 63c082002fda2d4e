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
        tokens: int | Sequence[int],
        stop: Collection[int] = (),
        source: Source | None = None,
    ) -> list[list[Hypothesis]]:
        """The continuations of each prompt, of up to `tokens` ids or to a full context.

        `tokens` is one limit for all prompts or one for each. A row does not depend on the other
        rows, up to rounding of its logits.
        """


def max_new_tokens(
    model: Language,
    prompts: Sequence[Sequence[int]],
    tokens: int | Sequence[int],
    source: Source | None,
    *,
    unread: int = 1,
) -> list[int]:
    """How many ids may follow each prompt: its `tokens`, or fewer if the context is full before.

    The last `unread` generated ids are never fed to the model, so they take no position.
    """
    limits = list(tokens) if isinstance(tokens, Sequence) else [tokens] * len(prompts)
    if len(limits) != len(prompts):
        raise ShapeError(f"{len(limits)} limits for {len(prompts)} prompts; give one per prompt")
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
