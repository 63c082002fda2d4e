"""The table of samplers: logits processors by the names that `-s NAME=VALUE` uses.

To add a sampler to the library, write its class in one of these modules and one line in
`SAMPLERS`. Its fields are its settings; `setting(default, off=...)` gives the value that
switches it off.
"""

from collections.abc import Callable

from regard.generate.samplers import constraints, mirostat, penalties, temperature, truncation
from regard.generate.samplers.logits_processor import Sampler

# In the order in which `--order regard` applies them; docs/samplers.md explains it.
SAMPLERS: dict[str, Callable[..., Sampler]] = {
    "bias": constraints.Bias,
    "repetition": penalties.Repetition,
    "presence": penalties.Presence,
    "frequency": penalties.Frequency,
    "dry": penalties.DRY,
    "no_repeat_ngram": penalties.NoRepeatNGram,
    "ban": constraints.Ban,
    "allow": constraints.Allow,
    "min_new_tokens": constraints.MinNewTokens,
    "force": constraints.Force,
    "top_n_sigma": truncation.TopNSigma,
    "temperature": temperature.Temperature,
    "dynamic_temperature": temperature.DynamicTemperature,
    "quadratic": temperature.Quadratic,
    "top_k": truncation.TopK,
    "top_h": truncation.TopH,
    "top_p": truncation.TopP,
    "min_p": truncation.MinP,
    "top_a": truncation.TopA,
    "typical": truncation.Typical,
    "epsilon": truncation.Epsilon,
    "eta": truncation.Eta,
    "tail_free": truncation.TailFree,
    "xtc": truncation.XTC,
    "adaptive_p": mirostat.AdaptiveP,
    "mirostat_1": mirostat.Mirostat1,
    "mirostat_2": mirostat.Mirostat2,
}


def sampler_name(sampler: Sampler) -> str | None:
    """The name of a sampler in the table, or that of the class it derives from."""
    names = {kind: name for name, kind in SAMPLERS.items()}
    return next((names[kind] for kind in type(sampler).__mro__ if kind in names), None)
