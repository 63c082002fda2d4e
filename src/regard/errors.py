"""The errors of the library, and the exit codes of the command line.

RegardError               1   something failed
├── ConfigError           2   a setting is wrong                    (ValueError)
│   └── ShapeError        2   sizes or shapes do not match
├── DataError             3   the user's data cannot be used        (ValueError)
├── CheckpointError       4   a run folder, checkpoint or disk      (OSError)
├── DivergedError         5   loss, gradients or weights not finite (ArithmeticError)
└── Stopped              75   ended by a signal, saved, resumable (130 for Ctrl-C)
"""

import re
from collections.abc import Iterable
from difflib import get_close_matches

MAX_WORD, MAX_LINE = 300, 1_000  # characters of a message


def shorten(message: str) -> str:
    """A message without the middle of its very long words and lines.

    >>> len(shorten("x" * 5000))
    201
    """
    message = re.sub(rf"\S{{{MAX_WORD},}}", lambda word: _ends(word[0], 100), message)
    lines = message.split("\n")
    return "\n".join(_ends(line, 400) if len(line) > MAX_LINE else line for line in lines)


def _ends(text: str, each: int) -> str:
    return f"{text[:each]}…{text[-each:]}"


class RegardError(Exception):
    """Base class; the message names the value, the rule and what to do."""

    exit_code = 1

    def __str__(self) -> str:
        return shorten(super().__str__())


class ConfigError(RegardError, ValueError):
    """A setting is unknown, mistyped or does not fit with the others."""

    exit_code = 2


class ShapeError(ConfigError):
    """Sizes or shapes do not match."""


class DataError(RegardError, ValueError):
    """The user's data cannot be read, or not used for the task."""

    exit_code = 3


class CheckpointError(RegardError, OSError):
    """A run folder or checkpoint is missing, corrupted or cannot be written."""

    exit_code = 4


class DivergedError(RegardError, ArithmeticError):
    """The loss, the gradients or the weights are not finite."""

    exit_code = 5


class Stopped(RegardError):
    """Training was stopped by a signal; the run is saved and can be resumed."""

    def __init__(self, message: str, exit_code: int = 75) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class RegardWarning(UserWarning):
    """A warning of this library; the command line shows it as one line."""


RENAMED = {  # settings of earlier versions, and what they are called now
    "rate": "lr",
    "average": "ema",
    "recompute": "activation_checkpointing",
    "watch": "trackers",
    "season": "seasonal_period",
    "size": "vocab_size",  # of a tokenizer
    "evaluate_tokens": "evaluate_targets",
    "held_out": "validation_fraction",
    "order": "norm_placement",
    "rounds": "iterations",
    "projected": "after_projection",
    "width": "kernel_size",
    "curves": "components",
    "norm_order": "norm_placement",
    "stream_scale": "residual_scale",
    "inputs": "input_dim",
    "both_ways": "bidirectional",
    "feeding": "input_feeding",
    "attention": "score",
    "smoothing": "label_smoothing",
    "sampled": "scheduled_sampling",
    "share": "mask_fraction",
    "reach": "max_distance",
    "max_answer": "max_answer_length",
    "shape": "architecture",
    "nested": "dyck",
    "colours": "types",
    "characters": "char_dim",
    "factored": "factorize_positions",
    "fraction": "partial_rotary_factor",
    "independent": "channel_independent",
    "most": "max_probability",
    "over": "ramp_fraction",
    "label": "text_classification",  # values of settings from here on
    "classify": "image_classification",
    "content": "cosine",
    "last": "last_layers",
    "gradual": "gradual_unfreezing",
    "stable_decay": "warmup_stable_decay",
}
SHOWN = 40  # names of a table in a message


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """The message for a name that is not in a table.

    >>> unknown("sampler", "topp", ["top_k", "top_p"])
    "unknown sampler 'topp'; did you mean 'top_p'?"
    >>> unknown("key", "rate", ["lr", "steps"])
    "unknown key 'rate'; it is called 'lr' now"
    """
    names = sorted(known)
    if RENAMED.get(name) in names:
        return f"unknown {what} {name!r}; it is called {RENAMED[name]!r} now"
    same = [known_name for known_name in names if known_name.lower() == name.lower()]
    close = same or get_close_matches(name, names, n=1, cutoff=0.6)
    shown = names if len(names) <= SHOWN else [*names[:SHOWN], f"… ({len(names)} in all)"]
    known_ones = f"known: {', '.join(shown)}" if names else "there are none"
    hint = f"did you mean {close[0]!r}?" if close else known_ones
    return f"unknown {what} {name!r}; {hint}"
