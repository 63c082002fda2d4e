"""End a text where certain words come, wherever tokens are cut."""

from collections.abc import Iterable, Iterator, Sequence

from regard.errors import ConfigError


def until(pieces: Iterable[str], stops: Sequence[str]) -> Iterator[str]:
    """The pieces of a text up to the first of `stops` that is complete, which is not shown.

    What may be the beginning of a stop is held back until it is known.

    >>> list(until(["On", "ce.\\n", "\\nTh", "e end"], ["\\n\\n"]))
    ['On', 'ce.']
    """
    if "" in stops:
        raise ConfigError("a stop text is empty; every text would end before it begins")
    held = ""
    for piece in pieces:
        held += piece
        ends = [(held.index(stop) + len(stop), held.index(stop)) for stop in stops if stop in held]
        sure = min(ends)[1] if ends else len(held) - _begun(held, stops)
        if sure:
            yield held[:sure]
        if ends:
            return
        held = held[sure:]
    if held:
        yield held


def _begun(text: str, stops: Sequence[str]) -> int:
    """How many of the last characters of a text may be the first of a stop."""
    lengths = (
        length for stop in stops for length in range(1, len(stop)) if text.endswith(stop[:length])
    )
    return max(lengths, default=0)
