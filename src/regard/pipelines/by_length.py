"""Metrics for short and for long texts separately."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

MAX_RANGES = 8  # about as many ranges of lengths


@dataclass(frozen=True, slots=True)
class LengthRange:
    """The metrics of a model on texts of similar length."""

    shortest: int  # of the lengths that occur
    longest: int
    mean: float
    examples: int
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class ByLength:
    """Metrics for each range of lengths, shortest first."""

    unit: str  # words; characters where no text has more than one word
    ranges: list[LengthRange]


def by_length(
    texts: Sequence[str], evaluate: Callable[[Sequence[int]], dict[str, float]]
) -> ByLength:
    """Evaluate texts of similar length together; `evaluate` gets the indices of their rows.

    Ranges are equally wide, with round widths: 1-5, 6-10, …  The last one also holds the longest
    hundredth, so that a few long texts do not make all ranges wide.
    """
    has_words = any(len(text.split()) > 1 for text in texts)
    lengths = [len(text.split()) if has_words else len(text) for text in texts]
    width, longest = _width(lengths)
    groups: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        groups.setdefault((min(length, longest) - 1) // width, []).append(row)
    ranges = []
    for _, rows in sorted(groups.items()):
        inside = [lengths[row] for row in rows]
        mean = sum(inside) / len(inside)
        ranges.append(LengthRange(min(inside), max(inside), mean, len(rows), evaluate(rows)))
    return ByLength("words" if has_words else "characters", ranges)


def _width(lengths: Sequence[int]) -> tuple[int, int]:
    """The width of a range, and the length that 99 of 100 texts do not exceed.

    >>> _width(range(1, 41)), _width([3] * 99 + [4] * 900 + [200])
    ((5, 40), (1, 4))
    """
    ordered = sorted(lengths)
    low, high = ordered[0], ordered[-1 - len(ordered) // 100]
    widths = (digit * 10**power for power in count() for digit in (1, 2, 5))
    return next(width for width in widths if width * MAX_RANGES > high - low), high
