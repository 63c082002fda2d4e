"""Numbers, durations and text for a terminal, and values for JSON."""

import json
import math
import os
import shutil
import unicodedata
from collections.abc import Mapping
from typing import Any, TextIO

from regard.units import with_prefix as with_prefix


def is_interactive(stream: TextIO) -> bool:
    """Whether a stream is a terminal that supports colours and cursor movement."""
    disabled = any(os.environ.get(name) for name in ("NO_COLOR", "CI"))
    return stream.isatty() and not disabled and os.environ.get("TERM") != "dumb"


def terminal_width() -> int:
    """The number of columns of the terminal."""
    return shutil.get_terminal_size().columns


def strip_control(text: str) -> str:
    r"""A text without terminal control characters; line breaks and tabs stay.

    >>> strip_control("a\x1b[2Jb\n")
    'a[2Jb\n'
    """
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c)[0] != "C")


def format_number(value: float) -> str:
    """A number with four decimals, or two where it is large.

    >>> format_number(1.48213), format_number(41.2345), format_number(12345)
    ('1.4821', '41.23', '12,345')
    """
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.4f}" if abs(value) < 10 else f"{value:,.2f}"


def format_size(parameters: int) -> str:
    """The size of a model; 0 parameters: a model that is fitted without gradients.

    >>> format_size(124_439_808), format_size(0)
    ('124,439,808 parameters', 'fitted without gradients')
    """
    return f"{parameters:,} parameters" if parameters else "fitted without gradients"


def format_duration(seconds: float) -> str:
    """A duration in minutes and seconds, or hours.

    >>> format_duration(72), format_duration(7384)
    ('1:12', '2:03:04')
    """
    total_minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(total_minutes, 60)
    return f"{hours}:{minutes:02}:{whole_seconds:02}" if hours else f"{minutes}:{whole_seconds:02}"


def to_json(value: Any) -> str:
    """A value as JSON in one line; NaN and infinities become null, dates of a table strings."""
    return json.dumps(replace_non_finite(value), ensure_ascii=False, allow_nan=False, default=str)


def replace_non_finite(value: Any) -> Any:
    """A value for JSON, which has no NaN and no infinities: they become None.

    >>> replace_non_finite({"loss": math.nan, "scores": (1.0, math.inf)})
    {'loss': None, 'scores': [1.0, None]}
    """
    if isinstance(value, Mapping):
        return {key: replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_non_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
