"""Tokens as labels: printable, safe for a terminal, of known width; and values as colours."""

import math
import unicodedata
from collections.abc import Iterable, Sequence

Colour = tuple[int, int, int]

SEQUENTIAL = [(255, 255, 255), (133, 180, 222), (33, 96, 165), (8, 36, 84)]  # light to dark
DIVERGING = [(5, 48, 97), (67, 147, 195), (255, 255, 255), (214, 96, 77), (103, 0, 31)]
SYMBOLS = {" ": "␣", "\n": "⏎", "\t": "⇥", "": "∅"}
SELECTORS = range(0xFE00, 0xFE10)  # variation selectors, which only change a character's style


def visible(token: str) -> str:
    r"""A printable form of a token: white space as symbols, control characters escaped.

    >>> visible(" a\n\x1b[2J")
    '␣a⏎\\x1b[2J'
    """
    if not token:
        return SYMBOLS[""]
    return "".join(_visible(character) for character in token)


def _visible(character: str) -> str:
    if character in SYMBOLS:
        return SYMBOLS[character]
    if ord(character) in SELECTORS:
        return ""
    # C*: control, format (bidi too), surrogate, private, unassigned; Z*: other spaces
    if unicodedata.category(character)[0] in "CZ":
        return character.encode("unicode_escape").decode("ascii")
    return character


def visible_words(text: str) -> str:
    r"""A printable form of a text: spaces stay spaces, control characters are escaped.

    >>> visible_words("a b\n")
    'a b⏎'
    """
    return "".join(" " if character == " " else visible(character) for character in text)


def clusters(text: str) -> list[str]:
    """Split a text into grapheme clusters: characters, each with its combining marks.

    >>> [len(cluster) for cluster in clusters("e\u0301a")]
    [2, 1]
    """
    result: list[str] = []
    for character in text:
        if unicodedata.category(character) not in ("Mn", "Me"):
            result.append(character)
        elif result:
            result[-1] += character
        else:
            result.append("◌" + character)  # the symbol for a combining mark without a base
    return result


def display_width(text: str) -> int:
    """The width of a text in terminal cells; East Asian wide characters take two.

    >>> display_width("注意"), display_width("e\u0301")
    (4, 1)
    """
    return sum(
        2 if unicodedata.east_asian_width(cluster[0]) in "WF" else 1 for cluster in clusters(text)
    )


def truncate(text: str, max_cells: int) -> str:
    """A text truncated to `max_cells` terminal cells, with … at the end.

    >>> truncate("attention", 6)
    'atten…'
    """
    if display_width(text) <= max_cells:
        return text
    result, used = "", 1
    for cluster in clusters(text):
        used += display_width(cluster)
        if used > max_cells:
            break
        result += cluster
    return result + "…"


def shade(value: float, largest: float, *, signed: bool = False) -> float:
    """The strength of a cell's colour: sqrt(value / largest), 0 to 1, so that small weights show.

    For signed values: value / largest, from -1 to 1.

    >>> shade(0.25, 1.0), shade(-0.25, 1.0, signed=True)
    (0.5, -0.25)
    """
    fraction = value / largest if largest > 0 else 0.0
    return fraction if signed else math.sqrt(fraction)


def head_names(heads: Iterable[int]) -> list[str]:
    """The names of heads.

    >>> head_names(range(2))
    ['head 0', 'head 1']
    """
    return [f"head {head}" for head in heads]


def ordinal(number: int) -> str:
    """A number as an ordinal.

    >>> ordinal(2), ordinal(13), ordinal(21)
    ('2nd', '13th', '21st')
    """
    teen = 10 < number % 100 < 14
    return f"{number}{'th' if teen else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


def attention_vmax(largest: float, keys: int) -> float:
    """The attention weight of the strongest colour (vmax): the largest, but at least 4 / keys.

    Uniform weights then get a medium colour, not the strongest.

    >>> attention_vmax(0.9, 10), attention_vmax(0.1, 10), attention_vmax(0.5, 2)
    (0.9, 0.4, 1.0)
    """
    return max(largest, min(1.0, 4 / max(keys, 1)))


def css_colour(strength: float, *, signed: bool = False) -> str:
    """The colour of a cell on a white page; signed: blue below 0, red above.

    >>> css_colour(0.0), css_colour(1.0, signed=True)
    ('#ffffff', '#67001f')
    """
    colours, fraction = (DIVERGING, (strength + 1) / 2) if signed else (SEQUENTIAL, strength)
    red, green, blue = blend(colours, fraction)
    return f"#{red:02x}{green:02x}{blue:02x}"


def blend(colours: Sequence[Colour], fraction: float) -> Colour:
    """Linear interpolation in a colour map, at `fraction` (0 to 1).

    >>> blend([(0, 0, 0), (200, 100, 0)], 0.5)
    (100, 50, 0)
    """
    position = fraction * (len(colours) - 1)
    index = min(int(position), len(colours) - 2)
    weight = position - index
    red, green, blue = (
        round(a + weight * (b - a)) for a, b in zip(colours[index], colours[index + 1], strict=True)
    )
    return red, green, blue
