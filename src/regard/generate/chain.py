"""A chain of samplers that ends in a draw, and how one is written on the command line."""

import inspect
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.config import build, parse_overrides
from regard.errors import ConfigError, RegardError, unknown
from regard.generate.context import Context, Sampler
from regard.generate.samplers import SAMPLERS, Temperature


def draw(
    logits: Float[Tensor, "rows vocab"], generators: list[torch.Generator]
) -> Int[Tensor, " rows"]:
    r"""Draw one token per row from softmax(logits), with one random number per row.

        the first v  with  P(0) + ... + P(v)  >  u,      u uniform in [0, 1)

    A removed token adds nothing to the sum and so is never the first to pass u.
    """
    # float64 so that no token is too rare for the sum; the Metal backend has none
    dtype = torch.float32 if logits.device.type == "mps" else torch.float64
    reached = logits.to(dtype).softmax(-1).cumsum(-1)
    u = torch.stack([torch.rand(1, generator=each, dtype=dtype) for each in generators])
    u = u.to(logits.device) * reached[:, -1:]  # the sum is 1 only up to rounding
    return torch.searchsorted(reached, u, right=True).squeeze(1)


@dataclass(frozen=True, slots=True)
class Chain:
    """Samplers in the order they act, then a draw. Without any: the model's own distribution.

    >>> from regard.generate import Temperature, TopK
    >>> Chain((TopK(40), Temperature(0.8)))
    Chain(stages=(TopK(k=40), Temperature(value=0.8)))
    """

    stages: tuple[Sampler, ...] = ()

    @property
    def greedy(self) -> bool:
        """Whether a stage leaves a single token, so that there is nothing to draw."""
        return any(isinstance(stage, Temperature) and stage.greedy for stage in self.stages)

    def __call__(
        self, logits: Float[Tensor, "rows vocab"], context: Context
    ) -> Int[Tensor, " rows"]:
        """The next id of each row."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        for stage in self.stages:
            logits = stage(logits, context)
        best, first = logits.max(-1)
        usable = best.isfinite()
        if not usable.all():
            row = int((~usable).nonzero()[0])
            raise RegardError(
                f"row {row} has nothing to draw from: its largest logit is {float(best[row])}\n"
                "either the model gives numbers that are not finite, or the samplers removed all"
            )
        return first if self.greedy else draw(logits, context.generators)


def parse_chain(words: Iterable[str]) -> Chain:
    """Make a chain from words like `top_p=0.9`, which act in the order they are written.

    The value goes to the sampler's first setting; a TOML table names several.

    >>> parse_chain(["temperature=0.7", "top_k=40"])
    Chain(stages=(Temperature(value=0.7), TopK(k=40)))
    >>> parse_chain(["greedy"])
    Chain(stages=(Temperature(value=0.0),))
    """
    return Chain(tuple(_parse(word.strip()) for word in words))


def _parse(word: str) -> Sampler:
    if word == "greedy":
        return Temperature(0.0)
    name, equals, _ = word.partition("=")
    if name not in SAMPLERS:
        raise ConfigError(unknown("sampler", name, [*SAMPLERS, "greedy"]))
    if not equals:
        raise ConfigError(f"{word!r} lacks its value; write name=value, as in top_p=0.9")
    sampler = SAMPLERS[name]
    value = parse_overrides([word])[name]
    if not isinstance(value, dict):
        value = {next(iter(inspect.signature(sampler).parameters)): value}
    return build(sampler, value, name)  # type: ignore[arg-type]
