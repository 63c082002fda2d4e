"""Data that is always there: generated from a seed, or part of every Python installation."""

import sysconfig
from collections.abc import Callable
from datetime import date, timedelta
from itertools import pairwise
from pathlib import Path
from random import Random

from regard.data import pairs, text
from regard.data.numerals import english, french
from regard.data.pairs import Pairs
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
) -> Text:
    """Well-nested coloured parentheses, one sequence per line: opening i is closed by 9 - i."""
    _within("examples", examples, 1)
    _within("longest", longest, 2)
    _within("colours", colours, 1, 5)
    random = Random(seed)
    lines = (_nested(random, 2 * random.randint(1, longest // 2), colours) for _ in range(examples))
    description = f"text, {examples:,} lines of coloured parentheses"
    return text.from_strings("parentheses", description, ["\n".join(lines) + "\n"])


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


BUILTINS: dict[str, Callable[..., Text | Pairs]] = {
    "reversal": reversal,
    "copy": copy,
    "numbers": numbers,
    "dates": dates,
    "parentheses": parentheses,
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
