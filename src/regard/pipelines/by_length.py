"""How good a model is at short texts and at long ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

MOST = 8  # about as many ranges of lengths


@dataclass(frozen=True, slots=True)
class Span:
    """What a model is worth on the texts of some lengths."""

    shortest: int  # of the lengths that occur
    longest: int
    mean: float
    examples: int
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class ByLength:
    """The same metrics for one range of lengths after the other, shortest first."""

    unit: str  # words; letters where no text has more than one word
    spans: list[Span]


def by_length(texts: Sequence[str], judge: Callable[[Sequence[int]], dict[str, float]]) -> ByLength:
    """Judge texts of similar length together; `judge` is given the numbers of their rows.

    Ranges are equally wide, and round: 1-5, 6-10, …  The last also holds the longest hundredth,
    since a few long texts should not make all ranges wide.
    """
    worded = any(len(text.split()) > 1 for text in texts)
    lengths = [len(text.split()) if worded else len(text) for text in texts]
    width, top = _width(lengths)
    groups: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        groups.setdefault((min(length, top) - 1) // width, []).append(row)
    spans = []
    for _, rows in sorted(groups.items()):
        found = [lengths[row] for row in rows]
        mean = sum(found) / len(found)
        spans.append(Span(min(found), max(found), mean, len(rows), judge(rows)))
    return ByLength("words" if worded else "letters", spans)


def _width(lengths: Sequence[int]) -> tuple[int, int]:
    """How wide a range of lengths is, and the length that 99 of 100 texts do not exceed.

    >>> _width(range(1, 41)), _width([3] * 99 + [4] * 900 + [200])
    ((5, 40), (1, 4))
    """
    ordered = sorted(lengths)
    low, top = ordered[0], ordered[-1 - len(ordered) // 100]
    widths = (each * 10**power for power in count() for each in (1, 2, 5))
    return next(width for width in widths if width * MOST > top - low), top
