"""Digits as pen strokes."""

from random import Random

import numpy as np
from numpy.typing import NDArray

WIDTH, GAP = 4.0, 1.6  # widths of a digit and of the gap between two; a digit is 6 high
NOISE = 0.07
# the strokes of each digit, x to the right and y down
DIGITS: dict[str, list[list[tuple[float, float]]]] = {
    "0": [[(2, 0), (0.5, 1), (0, 3), (0.5, 5), (2, 6), (3.5, 5), (4, 3), (3.5, 1), (2, 0)]],
    "1": [[(0.8, 1.2), (2, 0), (2, 3), (2, 6)]],
    "2": [[(0, 1.5), (0.5, 0.4), (2, 0), (3.5, 0.5), (3.8, 2), (2.5, 3.8), (0, 6), (4, 6)]],
    "3": [
        [
            *((0.2, 0.8), (2, 0), (3.6, 1), (3, 2.5), (1.8, 2.9)),
            *((3.4, 3.6), (3.8, 4.8), (2, 6), (0.2, 5.2)),
        ]
    ],
    "4": [[(2.6, 0), (1.3, 2), (0, 4), (2, 4), (4, 4)], [(3, 2), (3, 4), (3, 6)]],
    "5": [
        [(0.5, 0), (0.3, 2.6), (2.2, 2.2), (3.8, 3.6), (3.2, 5.5), (1.5, 6), (0, 5.3)],
        [(0.5, 0), (3.6, 0)],
    ],
    "6": [
        [
            *((3.4, 0.3), (1.2, 1.6), (0.1, 4), (0.8, 5.6), (2.2, 6)),
            *((3.7, 5), (3.2, 3.5), (1.6, 3.1), (0.2, 4.2)),
        ]
    ],
    "7": [[(0, 0), (2, 0), (4, 0), (2.8, 3), (1.5, 6)]],
    "8": [
        [
            *((2, 2.8), (0.5, 1.6), (2, 0), (3.5, 1.6), (2, 2.8)),
            *((0.1, 4.5), (2, 6), (3.9, 4.5), (2, 2.8)),
        ]
    ],
    "9": [[(3.8, 2), (2, 3.2), (0.3, 2), (1.8, 0), (3.8, 1.6), (3.6, 4), (2.6, 6)]],
}


def write_number(text: str, random: Random) -> NDArray[np.float32]:
    """A number as if written by hand: points (dx, dy, lift).

    The size, the slant, the slope of the baseline and the position of every point are random.
    """
    size, slant = random.uniform(0.8, 1.2), random.uniform(-0.25, 0.25)
    slope = random.gauss(0, 0.04)
    points: list[tuple[float, float, float]] = []
    for position, digit in enumerate(text):
        left = position * (WIDTH + GAP) + random.gauss(0, 0.15)
        height = random.uniform(0.9, 1.1)
        for stroke in DIGITS[digit]:
            for index, (x, y) in enumerate(stroke):
                x, y = x + random.gauss(0, NOISE), height * y + random.gauss(0, NOISE)
                x, y = left + x + slant * (6 - y), y + slope * (left + x)
                points.append((size * x, size * y, float(index == len(stroke) - 1)))
    rows = np.array(points)
    rows[:, :2] = np.diff(rows[:, :2], axis=0, prepend=rows[:1, :2])
    return rows.astype(np.float32)
