"""In which order samplers act, in the words of several systems.

The same settings in another order give another text: what top-p cuts off depends on whether
the temperature came before it. A dialect is such an order, with the settings that the system
has where the user gives none.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.errors import ConfigError, unknown
from regard.generate.sampler_context import Sampler
from regard.generate.samplers import (
    DRY,
    SAMPLERS,
    XTC,
    Frequency,
    MinP,
    Mirostat1,
    Mirostat2,
    Presence,
    Repetition,
    Temperature,
    TopK,
    TopNSigma,
    TopP,
    name_of,
)
from regard.generate.samplers.logits_processor import as_stage

MIROSTAT = ("mirostat_1", "mirostat_2")


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerOrder:
    """An order of samplers, and what a system has where nothing is said."""

    order: tuple[str, ...]
    defaults: tuple[Sampler, ...] = ()
    window: int | None = None  # how far penalties look back where nothing is said
    quirk: Callable[[list[Sampler]], list[Sampler]] = list


class SampleSigma(TopNSigma):
    """Top-n-sigma as text-generation-webui has it: n - 1 below, removed logits count as 0."""

    __slots__ = ()

    def deviation(self, logits: Tensor) -> Tensor:
        """The standard deviation of a sample, of all tokens."""
        return logits.masked_fill(logits == -torch.inf, 0.0).std(-1, keepdim=True)


def _llama(stages: list[Sampler]) -> list[Sampler]:
    """Exactly k tokens; mirostat stands alone behind the temperature; one temperature only."""
    stages = [replace(s, exact=True) if isinstance(s, TopK) else s for s in stages]
    names = [name_of(stage) for stage in stages]
    if set(names) & set(MIROSTAT):
        alone = {"bias", "ban", "temperature", "dynamic_temperature", *MIROSTAT}
        stages = [s for s, name in zip(stages, names, strict=True) if name in alone]
    if "dynamic_temperature" in names:
        stages = [stage for stage in stages if not isinstance(stage, Temperature)]
    return stages


def _textgen(stages: list[Sampler]) -> list[Sampler]:
    """Its own sigma; behind mirostat, which has already drawn, XTC finds nothing to exclude."""
    stages = [
        SampleSigma(s.n, min_keep=s.min_keep) if isinstance(s, TopNSigma) else s for s in stages
    ]
    if any(isinstance(stage, Mirostat1 | Mirostat2) for stage in stages):
        stages = [stage for stage in stages if not isinstance(stage, XTC)]
    return stages


def _hf(stages: list[Sampler]) -> list[Sampler]:
    for stage in stages:
        if isinstance(stage, Temperature) and stage.greedy:
            raise ConfigError("the order hf refuses temperature=0; write greedy without an order")
    return stages


_NAMED = ("ban", "allow", "min_length", "force")
SAMPLER_ORDERS: dict[str, SamplerOrder] = {
    "regard": SamplerOrder(
        order=(
            *("bias", "repetition", "presence", "frequency", "dry", "no_repeat_ngram", *_NAMED),
            *("top_n_sigma", "temperature", "dynamic_temperature", "quadratic"),
            *("top_k", "top_h", "top_p", "min_p", "top_a", "typical", "epsilon", "eta"),
            *("tail_free", "xtc", "adaptive_p", *MIROSTAT),
        ),
    ),
    "hf": SamplerOrder(
        order=(
            *("bias", "repetition", "no_repeat_ngram", *_NAMED, "temperature", "top_h"),
            *("top_k", "top_p", "min_p", "typical", "epsilon", "eta"),
        ),
        defaults=(TopK(50),),
        quirk=_hf,
    ),
    "llama.cpp": SamplerOrder(
        order=(
            *("bias", "ban", "repetition", "frequency", "presence", "dry", "top_n_sigma"),
            *("top_k", "typical", "top_p", "min_p", "xtc", "temperature", "dynamic_temperature"),
            *("adaptive_p", *MIROSTAT),
        ),
        defaults=(TopK(40), TopP(0.95), MinP(0.05), Temperature(0.8)),
        window=64,
        quirk=_llama,
    ),
    "textgen": SamplerOrder(
        order=(
            *("bias", "ban", "repetition", "presence", "frequency", "dry", "top_n_sigma"),
            *("temperature", "dynamic_temperature", "quadratic", "top_k", "top_p", "typical"),
            *("epsilon", "eta", "tail_free", "top_a", "min_p", "xtc", "no_repeat_ngram"),
            *("adaptive_p", *MIROSTAT),
        ),
        window=1024,
        quirk=_textgen,
    ),
}


def arranged(samplers: Iterable[Sampler], order: str) -> tuple[Sampler, ...]:
    """These samplers and a dialect's defaults, in the order in which it lets them act."""
    if order not in SAMPLER_ORDERS:
        raise ConfigError(unknown("order", order, SAMPLER_ORDERS))
    dialect = SAMPLER_ORDERS[order]
    given = [each for each in samplers if name_of(each) in dialect.order or not _neutral(each)]
    names = [name_of(sampler) for sampler in given]
    for sampler, name in zip(given, names, strict=True):
        if name not in dialect.order:
            raise ConfigError(
                f"the order {order} has no place for {name or sampler}; it knows "
                f"{', '.join(dialect.order)}"
            )
        if name != "bias" and names.count(name) > 1:
            raise ConfigError(f"{name} is given twice; in the order {order} it acts once")
    given += [each for each in dialect.defaults if name_of(each) not in names]
    given.sort(key=lambda sampler: dialect.order.index(str(name_of(sampler))))
    acting = [sampler for sampler in given if not _neutral(sampler)]
    return tuple(dialect.quirk([_windowed(sampler, dialect.window) for sampler in acting]))


def _neutral(sampler: Sampler) -> bool:
    return as_stage(sampler).neutral


def _windowed(sampler: Any, window: int | None) -> Sampler:
    """A penalty that says nothing of its window looks back as far as the dialect does."""
    penalties = (Repetition, Presence, Frequency, DRY)
    silent = isinstance(sampler, penalties) and sampler.window is None
    return replace(sampler, window=window) if silent and window is not None else sampler


assert all(set(dialect.order) <= set(SAMPLERS) for dialect in SAMPLER_ORDERS.values())
