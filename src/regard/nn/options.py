"""Validation of numeric options."""

import math

from regard.errors import ConfigError


def require_positive(owner: str, **options: float | int | None) -> None:
    """Raise `ConfigError` unless every option is positive and finite; None is allowed.

    >>> require_positive("score 'dot'", cap=0.0)
    Traceback (most recent call last):
        ...
    regard.errors.ConfigError: score 'dot': cap=0.0 must be more than 0
    """
    for name, value in options.items():
        if value is not None and not 0 < value < math.inf:
            finite = " and finite" if value == math.inf else ""
            raise ConfigError(f"{owner}: {name}={value} must be more than 0{finite}")
