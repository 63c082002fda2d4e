"""The table of all samplers: what a word of a chain may name."""

from collections.abc import Callable

from regard.generate.sampler_context import Sampler
from regard.generate.samplers.constraints import Allow, Ban, Bias, Force, MinLength
from regard.generate.samplers.mirostat import AdaptiveP, Mirostat1, Mirostat2
from regard.generate.samplers.penalties import DRY, Frequency, NoRepeatNGram, Presence, Repetition
from regard.generate.samplers.temperature import DynamicTemperature, Quadratic, Temperature
from regard.generate.samplers.truncation import (
    XTC,
    Epsilon,
    Eta,
    MinP,
    TailFree,
    TopA,
    TopH,
    TopK,
    TopNSigma,
    TopP,
    Typical,
)

__all__ = [
    "DRY",
    "SAMPLERS",
    "XTC",
    "AdaptiveP",
    "Allow",
    "Ban",
    "Bias",
    "DynamicTemperature",
    "Epsilon",
    "Eta",
    "Force",
    "Frequency",
    "MinLength",
    "MinP",
    "Mirostat1",
    "Mirostat2",
    "NoRepeatNGram",
    "Presence",
    "Quadratic",
    "Repetition",
    "TailFree",
    "Temperature",
    "TopA",
    "TopH",
    "TopK",
    "TopNSigma",
    "TopP",
    "Typical",
    "name_of",
]

SAMPLERS: dict[str, Callable[..., Sampler]] = {
    "bias": Bias,
    "ban": Ban,
    "allow": Allow,
    "force": Force,
    "min_length": MinLength,
    "repetition": Repetition,
    "presence": Presence,
    "frequency": Frequency,
    "no_repeat_ngram": NoRepeatNGram,
    "dry": DRY,
    "temperature": Temperature,
    "dynamic_temperature": DynamicTemperature,
    "quadratic": Quadratic,
    "top_n_sigma": TopNSigma,
    "top_k": TopK,
    "top_p": TopP,
    "min_p": MinP,
    "top_a": TopA,
    "top_h": TopH,
    "typical": Typical,
    "epsilon": Epsilon,
    "eta": Eta,
    "tail_free": TailFree,
    "xtc": XTC,
    "mirostat_1": Mirostat1,
    "mirostat_2": Mirostat2,
    "adaptive_p": AdaptiveP,
}


def name_of(sampler: Sampler) -> str | None:
    """The name of a sampler in the table; a variant of one goes by its name."""
    kinds = {sampler: name for name, sampler in SAMPLERS.items()}
    return next((kinds[kind] for kind in type(sampler).__mro__ if kind in kinds), None)
