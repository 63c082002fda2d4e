"""Stop texts: end a generated text before a given string, however it is tokenized."""

from collections.abc import Iterable, Iterator, Sequence

from regard.errors import ConfigError


def truncate_at_stop(pieces: Iterable[str], stop_texts: Sequence[str]) -> Iterator[str]:
    """The pieces of a text up to the first complete stop text, which is not included.

    Characters that may begin a stop text are buffered until later pieces decide.

    >>> list(truncate_at_stop(["On", "ce.\\n", "\\nTh", "e end"], ["\\n\\n"]))
    ['On', 'ce.']
    """
    if "" in stop_texts:
        raise ConfigError("a stop text must have at least one character")
    pending = ""
    for piece in pieces:
        pending += piece
        ends = [
            (pending.index(stop) + len(stop), pending.index(stop))
            for stop in stop_texts
            if stop in pending
        ]
        safe = min(ends)[1] if ends else len(pending) - _partial_match(pending, stop_texts)
        if safe:
            yield pending[:safe]
        if ends:
            return
        pending = pending[safe:]
    if pending:
        yield pending


def _partial_match(text: str, stop_texts: Sequence[str]) -> int:
    """The length of the longest suffix of `text` that begins a stop text."""
    lengths = (
        length
        for stop in stop_texts
        for length in range(1, len(stop))
        if text.endswith(stop[:length])
    )
    return max(lengths, default=0)
