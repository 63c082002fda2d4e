"""The order in which samplers are applied, as in regard and in other systems.

The same settings in another order give another distribution: which tokens top-p keeps depends on
whether the temperature was applied before it. A `SamplerOrder` is the order of one system,
together with its default settings.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.errors import ConfigError, unknown
from regard.generate.samplers import SAMPLERS, sampler_name
from regard.generate.samplers.logits_processor import Sampler, as_logits_processor
from regard.generate.samplers.mirostat import Mirostat1, Mirostat2
from regard.generate.samplers.penalties import DRY, Frequency, Presence, Repetition
from regard.generate.samplers.temperature import Temperature
from regard.generate.samplers.truncation import XTC, MinP, TopK, TopNSigma, TopP

MIROSTAT = ("mirostat_1", "mirostat_2")


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerOrder:
    """The order of a system's samplers, and its defaults where the user sets nothing."""

    names: tuple[str, ...] | None = None  # None: all samplers, in the order of `SAMPLERS`
    defaults: tuple[Sampler, ...] = ()
    window: int | None = None  # default window of penalties
    # replaces samplers that the system implements differently, such as top-k with exactly k tokens
    adapt: Callable[[list[Sampler]], list[Sampler]] = list

    @property
    def order(self) -> tuple[str, ...]:
        """The names of the samplers it has, in the order in which they are applied."""
        return tuple(SAMPLERS) if self.names is None else self.names


class SampleStdTopNSigma(TopNSigma):
    """Top-n-sigma as in text-generation-webui: Bessel-corrected, removed logits count as 0."""

    __slots__ = ()

    def deviation(self, logits: Tensor) -> Tensor:
        """The sample standard deviation over all tokens."""
        return logits.masked_fill(logits == -torch.inf, 0.0).std(-1, keepdim=True)


def _as_llama_cpp(samplers: list[Sampler]) -> list[Sampler]:
    """Top-k keeps exactly k; a dynamic temperature replaces the constant one.

    With mirostat, only bias, ban and the temperature are applied before it.
    """
    samplers = [replace(s, exact=True) if isinstance(s, TopK) else s for s in samplers]
    names = [sampler_name(sampler) for sampler in samplers]
    if set(names) & set(MIROSTAT):
        used = {"bias", "ban", "temperature", "dynamic_temperature", *MIROSTAT}
        samplers = [s for s, name in zip(samplers, names, strict=True) if name in used]
    if "dynamic_temperature" in names:
        samplers = [sampler for sampler in samplers if not isinstance(sampler, Temperature)]
    return samplers


def _as_textgen(samplers: list[Sampler]) -> list[Sampler]:
    """Top-n-sigma with the sample standard deviation; with mirostat, XTC is dropped.

    textgen's mirostat has already sampled the token when XTC is called.
    """
    samplers = [
        SampleStdTopNSigma(s.n, min_keep=s.min_keep) if isinstance(s, TopNSigma) else s
        for s in samplers
    ]
    if any(isinstance(sampler, Mirostat1 | Mirostat2) for sampler in samplers):
        samplers = [sampler for sampler in samplers if not isinstance(sampler, XTC)]
    return samplers


def _as_hf(samplers: list[Sampler]) -> list[Sampler]:
    for sampler in samplers:
        if isinstance(sampler, Temperature) and sampler.greedy:
            raise ConfigError(
                "the order hf does not accept temperature=0; use greedy without an order"
            )
    return samplers


_CONSTRAINTS = ("ban", "allow", "min_new_tokens", "force")
# Orders of samplers by the name that `--order` takes.
SAMPLER_ORDERS: dict[str, SamplerOrder] = {
    "regard": SamplerOrder(),
    "hf": SamplerOrder(
        names=(
            *("bias", "repetition", "no_repeat_ngram", *_CONSTRAINTS, "temperature", "top_h"),
            *("top_k", "top_p", "min_p", "typical", "epsilon", "eta"),
        ),
        defaults=(TopK(50),),
        adapt=_as_hf,
    ),
    "llama.cpp": SamplerOrder(
        names=(
            *("bias", "ban", "repetition", "frequency", "presence", "dry", "top_n_sigma"),
            *("top_k", "typical", "top_p", "min_p", "xtc", "temperature", "dynamic_temperature"),
            *("adaptive_p", *MIROSTAT),
        ),
        defaults=(TopK(40), TopP(0.95), MinP(0.05), Temperature(0.8)),
        window=64,
        adapt=_as_llama_cpp,
    ),
    "textgen": SamplerOrder(
        names=(
            *("bias", "ban", "repetition", "presence", "frequency", "dry", "top_n_sigma"),
            *("temperature", "dynamic_temperature", "quadratic", "top_k", "top_p", "typical"),
            *("epsilon", "eta", "tail_free", "top_a", "min_p", "xtc", "no_repeat_ngram"),
            *("adaptive_p", *MIROSTAT),
        ),
        window=1024,
        adapt=_as_textgen,
    ),
}


def arrange(samplers: Iterable[Sampler], order: str) -> tuple[Sampler, ...]:
    """The given samplers and the defaults of a `SamplerOrder`, in its order."""
    if order not in SAMPLER_ORDERS:
        raise ConfigError(unknown("order", order, SAMPLER_ORDERS))
    system = SAMPLER_ORDERS[order]
    known = system.order
    chosen = [s for s in samplers if sampler_name(s) in known or not _is_off(s)]
    names = [sampler_name(sampler) for sampler in chosen]
    for sampler, name in zip(chosen, names, strict=True):
        if name not in known:
            raise ConfigError(
                f"the order {order} does not include {name or sampler}; it includes "
                f"{', '.join(known)}"
            )
        if name != "bias" and names.count(name) > 1:
            raise ConfigError(f"{name} is given twice; the order {order} applies each sampler once")
    chosen += [sampler for sampler in system.defaults if sampler_name(sampler) not in names]
    # stateful samplers must be last, even if a sampler was added to the end of `SAMPLERS`
    chosen.sort(key=lambda s: (_is_stateful(s), known.index(str(sampler_name(s)))))
    active = [sampler for sampler in chosen if not _is_off(sampler)]
    return tuple(system.adapt([_with_window(sampler, system.window) for sampler in active]))


def _is_off(sampler: Sampler) -> bool:
    return as_logits_processor(sampler).is_off


def _is_stateful(sampler: Sampler) -> bool:
    return as_logits_processor(sampler).stateful


def _with_window(sampler: Any, window: int | None) -> Sampler:
    """The sampler; a penalty whose window is None gets the system's window."""
    penalties = (Repetition, Presence, Frequency, DRY)
    unset = isinstance(sampler, penalties) and sampler.window is None
    return replace(sampler, window=window) if unset and window is not None else sampler


assert all(set(system.order) <= set(SAMPLERS) for system in SAMPLER_ORDERS.values())
