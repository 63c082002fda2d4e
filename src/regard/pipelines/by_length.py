"""Metrics for short and for long texts separately."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

RANGES = 8  # approximate number of ranges


@dataclass(frozen=True, slots=True)
class LengthRange:
    """The metrics of a model on texts of similar length."""

    shortest: int  # length of the shortest text
    longest: int  # length of the longest text
    mean: float  # mean length
    examples: int
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class MetricsByLength:
    """Metrics for each range of lengths, shortest first."""

    unit: str  # words; characters where no text has more than one word
    ranges: list[LengthRange]

    @property
    def metric_names(self) -> list[str]:
        """The metrics of the ranges; BLEU is undefined in some."""
        return max((list(span.metrics) for span in self.ranges), key=len)


def metrics_by_length(
    texts: Sequence[str], evaluate: Callable[[Sequence[int]], dict[str, float]]
) -> MetricsByLength:
    """Evaluate texts of similar length together; `evaluate` gets the indices of their rows.

    Ranges are equally wide, with round widths: 1-5, 6-10, …  The last one also holds the longest
    1 % of the texts, so that a few long texts do not make all ranges wide.
    """
    has_words = any(len(text.split()) > 1 for text in texts)
    lengths = [len(text.split()) if has_words else len(text) for text in texts]
    width, longest = _range_width(lengths)
    groups: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        groups.setdefault((min(length, longest) - 1) // width, []).append(row)
    ranges = []
    for _, rows in sorted(groups.items()):
        in_range = [lengths[row] for row in rows]
        mean = sum(in_range) / len(in_range)
        ranges.append(LengthRange(min(in_range), max(in_range), mean, len(rows), evaluate(rows)))
    return MetricsByLength("words" if has_words else "characters", ranges)


def _range_width(lengths: Sequence[int]) -> tuple[int, int]:
    """The width of a range, and the 99th percentile of the lengths.

    >>> _range_width(range(1, 41)), _range_width([3] * 99 + [4] * 900 + [200])
    ((5, 40), (1, 4))
    """
    ordered = sorted(lengths)
    low, high = ordered[0], ordered[-1 - len(ordered) // 100]
    widths = (digit * 10**power for power in count() for digit in (1, 2, 5))
    return next(width for width in widths if width * RANGES > high - low), high
