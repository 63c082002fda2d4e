"""Whether the options of a part make sense."""

import math

from regard.errors import ConfigError


def positive(part: str, **options: float | int | None) -> None:
    """Refuse what is not more than 0, or has no end; None is an option that is off.

    >>> positive("score 'dot'", cap=0.0)
    Traceback (most recent call last):
        ...
    regard.errors.ConfigError: score 'dot': cap=0.0 must be more than 0
    """
    for name, value in options.items():
        if value is not None and not 0 < value < math.inf:
            end = " and finite" if value == math.inf else ""
            raise ConfigError(f"{part}: {name}={value} must be more than 0{end}")
