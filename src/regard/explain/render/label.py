"""Tokens as labels, every character visible, harmless and of known width; and weights as shades."""

import math
import unicodedata
from collections.abc import Sequence

Colour = tuple[int, int, int]

SIGNS = {" ": "␣", "\n": "⏎", "\t": "⇥", "": "∅"}
SELECTORS = range(0xFE00, 0xFE10)  # they only ask for another style of the same character


def visible(token: str) -> str:
    r"""A token as it can be shown: white space as signs, whatever controls a terminal escaped.

    >>> visible(" a\n\x1b[2J")
    '␣a⏎\\x1b[2J'
    """
    if not token:
        return SIGNS[""]
    return "".join(_visible(character) for character in token)


def _visible(character: str) -> str:
    if character in SIGNS:
        return SIGNS[character]
    if ord(character) in SELECTORS:
        return ""
    # C*: control, format (bidi too), surrogate, private, unassigned; Z*: other spaces
    if unicodedata.category(character)[0] in "CZ":
        return character.encode("unicode_escape").decode("ascii")
    return character


def clusters(text: str) -> list[str]:
    """Split a text into what stands in one place: a character with the marks upon it.

    >>> [len(each) for each in clusters("e\u0301a")]
    [2, 1]
    """
    result: list[str] = []
    for character in text:
        if unicodedata.category(character) not in ("Mn", "Me"):
            result.append(character)
        elif result:
            result[-1] += character
        else:
            result.append("◌" + character)  # the sign for "a mark without its letter"
    return result


def cells(text: str) -> int:
    """How many terminal cells a text takes; East Asian wide characters take two.

    >>> cells("注意"), cells("e\u0301")
    (4, 1)
    """
    return sum(2 if unicodedata.east_asian_width(each[0]) in "WF" else 1 for each in clusters(text))


def cut(text: str, most: int) -> str:
    """A text in at most `most` cells, ending in … where it was longer.

    >>> cut("attention", 6)
    'atten…'
    """
    if cells(text) <= most:
        return text
    result, used = "", 1
    for each in clusters(text):
        used += cells(each)
        if used > most:
            break
        result += each
    return result + "…"


def shade(weight: float, largest: float) -> float:
    """How dark a cell is, from 0 to 1: the square root of its share of the largest weight."""
    return math.sqrt(weight / largest) if largest > 0 else 0.0


def blend(colours: Sequence[Colour], share: float) -> Colour:
    """The colour at `share` of the way (0 to 1) through evenly spaced colours.

    >>> blend([(0, 0, 0), (200, 100, 0)], 0.5)
    (100, 50, 0)
    """
    place = share * (len(colours) - 1)
    before = min(int(place), len(colours) - 2)
    part = place - before
    red, green, blue = (
        round(a + part * (b - a)) for a, b in zip(colours[before], colours[before + 1], strict=True)
    )
    return red, green, blue
