"""Stop strings: end a generated text before a given string, however it is tokenized."""

from collections.abc import Iterable, Iterator, Sequence

from regard.errors import ConfigError


def truncate_at_stop(pieces: Iterable[str], stop_strings: Sequence[str]) -> Iterator[str]:
    """The pieces of a text up to the first complete stop string, which is not included.

    Characters that may begin a stop string are buffered until later pieces decide.

    >>> list(truncate_at_stop(["On", "ce.\\n", "\\nTh", "e end"], ["\\n\\n"]))
    ['On', 'ce.']
    """
    stop_filter = StopStringFilter(stop_strings)
    for piece in pieces:
        if text := stop_filter.append(piece):
            yield text
        if stop_filter.stopped:
            return
    if remaining := stop_filter.end():
        yield remaining


class StopStringFilter:
    """Passes on the pieces of a text up to the first complete stop string."""

    def __init__(self, stop_strings: Sequence[str]) -> None:
        if "" in stop_strings:
            raise ConfigError("a stop string must have at least one character")
        self.stop_strings = stop_strings
        self.stopped = False  # a stop string is complete, and the text ends before it
        self._pending = ""  # may begin a stop string

    def append(self, piece: str) -> str:
        """Append a piece; return the new text that cannot belong to a stop string."""
        pending = self._pending + piece
        matches = [  # end and start: the stop string that ends first is complete first
            (pending.index(stop) + len(stop), pending.index(stop))
            for stop in self.stop_strings
            if stop in pending
        ]
        self.stopped = bool(matches)
        if matches:
            _, length = min(matches)
        else:
            length = len(pending) - _partial_match(pending, self.stop_strings)
        self._pending = "" if matches else pending[length:]
        return pending[:length]

    def end(self) -> str:
        """The buffered text; call it after the last piece."""
        return self._pending


def _partial_match(text: str, stop_strings: Sequence[str]) -> int:
    """The length of the longest suffix of `text` that begins a stop string."""
    lengths = (
        length
        for stop in stop_strings
        for length in range(1, len(stop))
        if text.endswith(stop[:length])
    )
    return max(lengths, default=0)
