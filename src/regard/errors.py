"""The errors of the library, and the exit codes of the command line.

RegardError               1   something failed
├── ConfigError           2   a setting is wrong                    (ValueError)
│   └── ShapeError        2   sizes or shapes do not match
├── DataError             3   the user's data cannot be used        (ValueError)
├── CheckpointError       4   run folder or checkpoint is unusable  (OSError)
├── DivergedError         5   loss, gradients or weights not finite (ArithmeticError)
└── TrainingStopped      75   ended by a signal, saved, resumable (130 for Ctrl-C)
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches

from regard.renamed import OTHER_LIBRARIES, current_names

MAX_WORD, MAX_LINE = 300, 1_000  # characters of a word and of a line of a message


def shorten(message: str) -> str:
    """Cut out the middle of very long words and lines of a message.

    >>> len(shorten("x" * 5000))
    201
    """
    message = re.sub(rf"\S{{{MAX_WORD},}}", lambda word: _cut_middle(word[0], 100), message)
    lines = message.split("\n")
    return "\n".join(_cut_middle(line, 400) if len(line) > MAX_LINE else line for line in lines)


def _cut_middle(text: str, length: int) -> str:
    """The first and the last `length` characters of a text."""
    return f"{text[:length]}…{text[-length:]}"


class RegardError(Exception):
    """Base class; the message names the value, the rule and what to do."""

    exit_code = 1

    def __str__(self) -> str:
        return shorten(super().__str__())


class ConfigError(RegardError, ValueError):
    """A setting is unknown, has the wrong type or conflicts with another one."""

    exit_code = 2


class ShapeError(ConfigError):
    """Sizes or shapes do not match."""


class DataError(RegardError, ValueError):
    """The user's data cannot be read, or cannot be used for the task."""

    exit_code = 3


class CheckpointError(RegardError, OSError):
    """A run folder or checkpoint is missing, corrupted or cannot be written."""

    exit_code = 4


class DivergedError(RegardError, ArithmeticError):
    """The loss, the gradients or the weights are not finite."""

    exit_code = 5


class TrainingStopped(RegardError):
    """Training was stopped by a signal; the run is saved and can be resumed."""

    def __init__(self, message: str, exit_code: int = 75) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class RegardWarning(UserWarning):
    """A warning of this library; the command line shows it as one line."""


MAX_NAMES = 40  # names that a message lists


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """The message for a name that is not one of `known`.

    >>> unknown("sampler", "topp", ["top_k", "top_p"])
    "unknown sampler 'topp'; did you mean 'top_p'?"
    >>> unknown("key", "rate", ["lr", "steps"])
    "unknown key 'rate'; it is called 'lr' now"
    >>> unknown("key", "rope_theta", ["layers", "position"])
    "unknown key 'rope_theta'; did you mean 'position.base'?"
    """
    names = sorted(known)
    renamed = [new for new in current_names(name) if new in names]
    if len(renamed) > 1:
        return f"unknown {what} {name!r}; did you mean {' or '.join(map(repr, renamed))}?"
    if renamed:
        return f"unknown {what} {name!r}; it is called {renamed[0]!r} now"
    if (other := OTHER_LIBRARIES.get(name)) and other.partition(".")[0] in names:
        return f"unknown {what} {name!r}; did you mean {other!r}?"
    equal_ignoring_case = [known_name for known_name in names if known_name.lower() == name.lower()]
    close = equal_ignoring_case or get_close_matches(name, names, n=1, cutoff=0.65)
    known_names = f"known: {list_names(names)}" if names else "there are none"
    hint = f"did you mean {close[0]!r}?" if close else known_names
    return f"unknown {what} {name!r}; {hint}"


def reject_options(reason: str, options: Mapping[str, object]) -> None:
    """Raise `ConfigError` if one of `options` is given: it does not apply, for this `reason`.

    An option that is not given is None or False.

    >>> reject_options("a forecast has no classes", {"--top": 3, "--data": None})
    Traceback (most recent call last):
    regard.errors.ConfigError: a forecast has no classes; leave out --top
    """
    given = [name for name, value in options.items() if value is not None and value is not False]
    if given:
        raise ConfigError(f"{reason}; leave out {', '.join(given)}")


def indented_list(problems: Sequence[str], limit: int = 5) -> str:
    """The first problems, one per indented line, and how many more there are.

    >>> indented_list(["a", "b", "c"], limit=2)
    '\\n  a\\n  b\\n  … and 1 more'
    """
    more = [f"… and {len(problems) - limit} more"] if len(problems) > limit else []
    return "".join(f"\n  {line}" for line in [*problems[:limit], *more])


def list_names(names: Sequence[str]) -> str:
    """Names separated by commas; of many names, the first ones and the count."""
    shown = names if len(names) <= MAX_NAMES else [*names[:MAX_NAMES], f"… ({len(names)} in all)"]
    return ", ".join(shown)
