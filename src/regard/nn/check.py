"""Whether the options of a part make sense."""

from regard.errors import ConfigError


def positive(part: str, **options: float | int | None) -> None:
    """Refuse what is not more than 0; None is an option that is off.

    >>> positive("score 'dot'", cap=0.0)
    Traceback (most recent call last):
        ...
    regard.errors.ConfigError: score 'dot': cap=0.0 must be more than 0
    """
    for name, value in options.items():
        if value is not None and not value > 0:
            raise ConfigError(f"{part}: {name}={value} must be more than 0")
