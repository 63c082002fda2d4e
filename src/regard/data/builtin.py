"""Data that is always there: generated from a seed, or part of every Python installation."""

import sysconfig
from collections.abc import Callable, Iterator, Sequence
from datetime import date, timedelta
from itertools import pairwise
from math import pi, sin
from pathlib import Path
from random import Random

from regard.data import labels as labelled
from regard.data import pairs, series, text
from regard.data.labels import LabelledText
from regard.data.number_words import english, french
from regard.data.pairs import Pairs
from regard.data.series import Series
from regard.data.text import Text
from regard.errors import ConfigError, DataError

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_MONTHS = str.split(
    "January February March April May June July August September October November December"
)
_DAYS = str.split("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")


def reversal(
    *, examples: int = 20_000, shortest: int = 4, longest: int = 16, seed: int = 1
) -> Pairs:
    """Random letters, and the same read backwards: abc becomes cba."""
    words = _words(examples, shortest, longest, seed)
    description = f"letters to be reversed, {shortest} to {longest} long"
    return pairs.from_rows("reversal", description, [(word, word[::-1]) for word in words])


def copy(*, examples: int = 20_000, shortest: int = 4, longest: int = 16, seed: int = 1) -> Pairs:
    """Random letters, and the same again."""
    words = _words(examples, shortest, longest, seed)
    description = f"letters to be copied, {shortest} to {longest} long"
    return pairs.from_rows("copy", description, [(word, word) for word in words])


def numbers(*, examples: int = 20_000, highest: int = 999_999, seed: int = 1) -> Pairs:
    """Numbers in English words, and the same in French, none twice.

    One digit more is as likely as one digit less, so that small numbers are not lost among
    the many large ones; all below 1000 are there if `examples` allows.
    """
    _within("examples", examples, 1)
    _within("highest", highest, 1, 999_999)
    bounds = [0, *(bound for bound in (1000, 10_000, 100_000) if bound <= highest), highest + 1]
    ranges = [range(low, high) for low, high in pairwise(bounds)]
    random, chosen = Random(seed), list[int]()
    for done, each in enumerate(sorted(ranges, key=len)):  # what a small range lacks, others give
        share = -(-(examples - len(chosen)) // (len(ranges) - done))
        chosen += random.sample(each, min(share, len(each)))
    random.shuffle(chosen)
    rows = [(english(number), french(number)) for number in chosen]
    return pairs.from_rows("numbers", f"English to French, 0 to {highest:,}", rows)


def dates(
    *, examples: int = 20_000, first_year: int = 1900, last_year: int = 2099, seed: int = 1
) -> Pairs:
    """Dates as people write them, and the same as 1987-03-09.

    Numbers with slashes are American (month first), with dots European (day first).
    """
    _within("examples", examples, 1)
    _within("first_year", first_year, 1)
    _within("last_year", last_year, first_year, 9998)
    random = Random(seed)
    start = date(first_year, 1, 1)
    days = (date(last_year + 1, 1, 1) - start).days
    rows = []
    for _ in range(examples):
        day = start + timedelta(days=random.randrange(days))
        rows.append((random.choice(_DATE_FORMATS)(day), day.isoformat()))
    return pairs.from_rows("dates", f"written dates to ISO, {first_year} to {last_year}", rows)


def _month(day: date) -> str:
    return _MONTHS[day.month - 1]


def _ordinal(day: date) -> str:
    teen = 11 <= day.day <= 13
    return f"{day.day}" + ("th" if teen else {1: "st", 2: "nd", 3: "rd"}.get(day.day % 10, "th"))


_DATE_FORMATS: list[
    Callable[[date], str]
] = [  # month names of our own: strftime's follow the locale
    lambda d: f"{d.day} {_month(d)} {d.year}",
    lambda d: f"{_month(d)} {d.day}, {d.year}",
    lambda d: f"{d.day} {_month(d)[:3]} {d.year}",
    lambda d: f"{_month(d)[:3]}. {d.day}, {d.year}",
    lambda d: f"{_month(d)} {_ordinal(d)}, {d.year}",
    lambda d: f"the {_ordinal(d)} of {_month(d)} {d.year}",
    lambda d: f"{_DAYS[d.weekday()]}, {_month(d)} {d.day}, {d.year}",
    lambda d: f"{_DAYS[d.weekday()]} {d.day} {_month(d)} {d.year}",
    lambda d: f"{_DAYS[d.weekday()][:3]} {d.day} {_month(d)[:3]} {d.year}",
    lambda d: f"{d.day:02}-{_month(d)[:3].upper()}-{d.year}",
    lambda d: f"{d.month}/{d.day}/{d.year}",
    lambda d: f"{d.day}.{d.month}.{d.year}",
    lambda d: f"{d.year} {_month(d)} {d.day}",
]


def parentheses(
    *, examples: int = 20_000, longest: int = 40, colours: int = 5, seed: int = 1
) -> LabelledText:
    """Coloured parentheses, half of them nested, half broken: opening i is closed by 9 - i.

    What is broken has the very symbols of something nested, so that counting them tells
    nothing: half of the time all are shuffled, half of the time two have changed places. With
    one colour, 0 opens and 9 closes.
    """
    _within("examples", examples, 2)
    random = Random(seed)
    lines = list(_all_nested(random, examples, longest, colours))
    rows = [
        ([line], ["nested"]) if number % 2 else ([_broken(random, line)], ["broken"])
        for number, line in enumerate(lines)
    ]
    how = f"{2 * colours} symbols, up to {longest} long"
    return labelled.from_rows("labels", "parentheses", how, rows)


def nested(*, examples: int = 20_000, longest: int = 40, colours: int = 5, seed: int = 1) -> Text:
    """Well-nested coloured parentheses as a text, one sequence per line; see `parentheses`."""
    _within("examples", examples, 1)
    lines = _all_nested(Random(seed), examples, longest, colours)
    description = f"text, {examples:,} lines of coloured parentheses"
    return text.from_strings("nested", description, ["\n".join(lines) + "\n"])


def _all_nested(random: Random, examples: int, longest: int, colours: int) -> Iterator[str]:
    _within("longest", longest, 2)
    _within("colours", colours, 1, 5)
    return (_nested(random, 2 * random.randint(1, longest // 2), colours) for _ in range(examples))


def _broken(random: Random, line: str) -> str:
    """The same symbols in an order that is not nested."""
    shuffled = random.random() < 0.5
    while True:
        symbols = list(line)
        if shuffled:
            random.shuffle(symbols)
        else:
            one, other = random.sample(range(len(symbols)), 2)
            symbols[one], symbols[other] = symbols[other], symbols[one]
        if not is_nested(symbols):
            return "".join(symbols)


def is_nested(symbols: Sequence[str]) -> bool:
    """Whether each symbol i above 4 closes the last 9 - i that is still open, and all are closed.

    >>> is_nested("0189"), is_nested("0198")
    (True, False)
    """
    waiting: list[int] = []
    for symbol in map(int, symbols):
        if symbol < 5:
            waiting.append(symbol)
        elif not waiting or waiting.pop() != 9 - symbol:
            return False
    return not waiting


def _nested(random: Random, length: int, colours: int) -> str:
    symbols, waiting = "", list[int]()
    for left in range(length, 0, -1):
        if len(waiting) < left and (not waiting or random.random() < 0.5):
            waiting.append(random.randrange(colours))
            symbols += str(waiting[-1])
        else:
            symbols += str(9 - waiting.pop())
    return symbols


def python_docs() -> Text:
    """The language reference that `help()` shows: English prose, a document per topic."""
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError:
        raise DataError("this Python has no pydoc_data, so no python-docs; give a file") from None
    documents = [topics[name] for name in sorted(topics)]
    return text.from_strings("python-docs", f"text, {len(documents)} topics", documents)


def python_source() -> Text:
    """The standard library's own .py files, a document each, without its tests."""
    library = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    paths = [
        path
        for path in sorted(library.rglob("*.py"))
        if left_out.isdisjoint(path.relative_to(library).parts)
    ]
    return text.from_files("python-source", paths, {})


def sines(*, examples: int = 4000, waves: int = 3, noise: float = 0.1, seed: int = 1) -> Series:
    """The sum of a few sines of periods from 8 to 100 steps, and noise of this deviation."""
    _within("examples", examples, 2)
    _within("waves", waves, 1)
    if not noise >= 0:
        raise ConfigError(f"noise={noise!r} must be 0 or more")
    random = Random(seed)
    parts = [(random.uniform(8, 100), random.uniform(0, 2 * pi)) for _ in range(waves)]
    values = [
        sum(sin(2 * pi * t / period + phase) for period, phase in parts) + random.gauss(0, noise)
        for t in range(examples)
    ]
    return series.from_columns("sines", f", {waves} sines and noise", {"value": values})


BUILTINS: dict[str, Callable[..., Text | Pairs | LabelledText | Series]] = {
    "reversal": reversal,
    "copy": copy,
    "numbers": numbers,
    "dates": dates,
    "parentheses": parentheses,
    "nested": nested,
    "sines": sines,
    "python-docs": python_docs,
    "python-source": python_source,
}


def _words(examples: int, shortest: int, longest: int, seed: int) -> list[str]:
    _within("examples", examples, 1)
    _within("shortest", shortest, 1)
    _within("longest", longest, shortest)
    random = Random(seed)
    return [
        "".join(random.choices(_LETTERS, k=random.randint(shortest, longest)))
        for _ in range(examples)
    ]


def _within(name: str, value: int, low: int, high: int | None = None) -> None:
    # The options come from recipes, where nothing has checked them yet.
    if not isinstance(value, int) or value < low or (high is not None and value > high):
        rule = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ConfigError(f"{name}={value!r} must be a whole number, {rule}")
