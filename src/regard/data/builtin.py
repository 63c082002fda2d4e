"""Built-in datasets: generated from a seed, or part of every Python installation."""

import sysconfig
from collections.abc import Callable, Iterator, Sequence
from datetime import date, timedelta
from itertools import pairwise
from math import inf, pi, sin
from pathlib import Path
from random import Random
from string import ascii_lowercase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.data import labels as labelled
from regard.data import pairs, series, text
from regard.data.captions import Box, Captions, from_pixels
from regard.data.corrections import corrupt, find_sentences
from regard.data.digits import write_number
from regard.data.labels import LabelledText
from regard.data.number_words import english, french
from regard.data.pairs import Pairs
from regard.data.series import Series
from regard.data.strokes import Strokes, from_drawings
from regard.data.text import Text
from regard.errors import ConfigError, DataError

Grid = NDArray[Any]  # coordinates of pixels, or whether each is inside a shape
_MONTHS = str.split(
    "January February March April May June July August September October November December"
)
_DAYS = str.split("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")


def reversal(
    *, examples: int = 20_000, min_length: int = 4, max_length: int = 16, seed: int = 1
) -> Pairs:
    """Random letters and their reversal: abc becomes cba."""
    words = _random_words(examples, min_length, max_length, seed)
    description = f"letters to be reversed, {min_length} to {max_length} long"
    return pairs.from_rows("reversal", description, [(word, word[::-1]) for word in words])


def copy(
    *, examples: int = 20_000, min_length: int = 4, max_length: int = 16, seed: int = 1
) -> Pairs:
    """Random letters and the same letters."""
    words = _random_words(examples, min_length, max_length, seed)
    description = f"letters to be copied, {min_length} to {max_length} long"
    return pairs.from_rows("copy", description, [(word, word) for word in words])


def numbers(*, examples: int = 20_000, max_number: int = 999_999, seed: int = 1) -> Pairs:
    """Distinct numbers in English words and in French words.

    Numbers below 1000 and numbers of four, five and six digits are about equally frequent. A group
    with too few numbers for its share contributes all of them, and larger groups supply the rest.
    """
    _check_range("examples", examples, 1)
    _check_range("max_number", max_number, 1, 999_999)
    inner = (bound for bound in (1000, 10_000, 100_000) if bound <= max_number)
    bounds = [0, *inner, max_number + 1]
    ranges = [range(low, high) for low, high in pairwise(bounds)]
    random, sample = Random(seed), list[int]()
    # the smallest range first: larger ranges supply the examples that it lacks
    for index, values in enumerate(sorted(ranges, key=len)):
        quota = -(-(examples - len(sample)) // (len(ranges) - index))
        sample += random.sample(values, min(quota, len(values)))
    random.shuffle(sample)
    rows = [(english(number), french(number)) for number in sample]
    return pairs.from_rows("numbers", f"English to French, 0 to {max_number:,}", rows)


def dates(
    *, examples: int = 20_000, first_year: int = 1900, last_year: int = 2099, seed: int = 1
) -> Pairs:
    """Dates in various formats and in ISO format, such as 1987-03-09.

    Dates with slashes are American (month first), with dots European (day first).
    """
    _check_range("examples", examples, 1)
    _check_range("first_year", first_year, 1)
    _check_range("last_year", last_year, first_year, 9998)
    random = Random(seed)
    start = date(first_year, 1, 1)
    days = (date(last_year + 1, 1, 1) - start).days
    rows = []
    for _ in range(examples):
        day = start + timedelta(days=random.randrange(days))
        rows.append((random.choice(_DATE_FORMATS)(day), day.isoformat()))
    return pairs.from_rows("dates", f"written dates to ISO, {first_year} to {last_year}", rows)


def corrections(
    *,
    file: str = "",
    examples: int = 20_000,
    min_length: int = 20,
    max_length: int = 100,
    error_rate: float = 0.15,
    seed: int = 1,
) -> Pairs:
    """Sentences with generated errors in spelling, case and punctuation, and the correct ones.

    The sentences are those of a text `file`, by default of `python-docs`. Each occurs once, so that
    no validation sentence is in the training data. `error_rate` is the probability of a spelling
    mistake in a word of four letters or more. The description says how many sentences are kept.
    """
    _check_range("examples", examples, 2)
    _check_range("min_length", min_length, 1)
    _check_range("max_length", max_length, min_length)
    if not 0 <= error_rate <= 1:
        raise ConfigError(f"error_rate={error_rate} must be a probability, from 0 to 1")
    data = text.from_file(Path(file)) if file else python_docs()
    sentences = find_sentences(data, min_length, max_length)
    if len(sentences.kept) < 2:
        raise DataError(
            f"{data.name} has too few sentences to correct, two are needed: {sentences.note};\n"
            "give another file, or other values of min_length and max_length"
        )
    random, clean = Random(seed), list(sentences.kept)
    random.shuffle(clean)
    rows = [(corrupt(sentence, error_rate, random), sentence) for sentence in clean[:examples]]
    origin = f"sentences of {data.name} to be corrected ({sentences.note})"
    return pairs.from_rows("corrections", origin, rows)


def _month(day: date) -> str:
    return _MONTHS[day.month - 1]


def _ordinal(day: date) -> str:
    teen = 11 <= day.day <= 13
    return f"{day.day}" + ("th" if teen else {1: "st", 2: "nd", 3: "rd"}.get(day.day % 10, "th"))


_DATE_FORMATS: list[Callable[[date], str]] = [  # English names: strftime's depend on the locale
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
    *, examples: int = 20_000, max_length: int = 40, types: int = 5, seed: int = 1
) -> LabelledText:
    """Balanced and unbalanced brackets of several types (Dyck-k), half of each.

    The bracket i, from 0 to 4, is closed by 9 - i; with one type, 0 opens and 9 closes. An
    unbalanced sequence has the symbols of a balanced one, so that counting symbols does not help:
    half of the unbalanced ones are shuffled, in the other half two symbols are swapped.
    """
    _check_range("examples", examples, 2)
    random = Random(seed)
    lines = list(_balanced_lines(random, examples, max_length, types))
    rows = [
        ([line], ["balanced"]) if index % 2 else ([_unbalance(random, line)], ["unbalanced"])
        for index, line in enumerate(lines)
    ]
    description = f"{2 * types} symbols, up to {max_length} long"
    data = labelled.from_rows("labels", "parentheses", description, rows)
    return data.with_class_names(("unbalanced", "balanced"))  # class 1 is the positive one


def heights(*, examples: int = 20_000, people: int = 4, seed: int = 1) -> LabelledText:
    """Statements of who is taller than whom, and a claim that they imply or contradict.

    The classes are true and false. The statements compare 2 to `people` people, and the claim any
    two of them, so that many claims need several statements. Models learn the short texts first.
    """
    _check_range("examples", examples, 2)
    _check_range("people", people, 2, len(_PEOPLE))
    random = Random(seed)
    rows = []
    for index in range(examples):
        count = random.randint(2, people)
        by_height = random.sample(_PEOPLE, count)  # the tallest first
        statements = [f"{tall} is taller than {short}" for tall, short in pairwise(by_height)]
        random.shuffle(statements)
        tall, short = sorted(random.sample(range(count), 2))
        first, second = (tall, short) if index % 2 else (short, tall)
        claim = f"{by_height[first]} is taller than {by_height[second]}"
        rows.append(([" . ".join(statements), claim], ["true" if index % 2 else "false"]))
    return labelled.from_rows("labels", "heights", f"chains of up to {people} people", rows)


_PEOPLE = str.split("Ada Bob Eve Ida Kim Lee Max Noa Sam Tom")


def dyck(*, examples: int = 20_000, max_length: int = 40, types: int = 5, seed: int = 1) -> Text:
    """The Dyck-k language as a text: one balanced sequence per line; see `parentheses`."""
    _check_range("examples", examples, 1)
    lines = _balanced_lines(Random(seed), examples, max_length, types)
    description = f"text, {examples:,} lines of balanced brackets"
    return text.from_strings("dyck", description, ["\n".join(lines) + "\n"])


def _balanced_lines(random: Random, examples: int, max_length: int, types: int) -> Iterator[str]:
    _check_range("max_length", max_length, 2)
    _check_range("types", types, 1, 5)
    return (
        _balanced_sequence(random, 2 * random.randint(1, max_length // 2), types)
        for _ in range(examples)
    )


def _unbalance(random: Random, line: str) -> str:
    """The same symbols in an order that is not balanced."""
    shuffle = random.random() < 0.5
    while True:
        symbols = list(line)
        if shuffle:
            random.shuffle(symbols)
        else:
            i, j = random.sample(range(len(symbols)), 2)
            symbols[i], symbols[j] = symbols[j], symbols[i]
        if not is_balanced(symbols):
            return "".join(symbols)


def is_balanced(symbols: Sequence[str]) -> bool:
    """Whether each symbol i above 4 closes the last open 9 - i, and all are closed.

    >>> is_balanced("0189"), is_balanced("0198")
    (True, False)
    """
    open_symbols: list[int] = []
    for symbol in map(int, symbols):
        if symbol < 5:
            open_symbols.append(symbol)
        elif not open_symbols or open_symbols.pop() != 9 - symbol:
            return False
    return not open_symbols


def _balanced_sequence(random: Random, length: int, types: int) -> str:
    symbols, open_symbols = "", list[int]()
    for remaining in range(length, 0, -1):
        if len(open_symbols) < remaining and (not open_symbols or random.random() < 0.5):
            open_symbols.append(random.randrange(types))
            symbols += str(open_symbols[-1])
        else:
            symbols += str(9 - open_symbols.pop())
    return symbols


def python_docs() -> Text:
    """The language reference of `help()`: English prose, a document per topic."""
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError:
        raise DataError(
            "python-docs needs the module pydoc_data, which this Python lacks; give a file"
        ) from None
    documents = [topics[name] for name in sorted(topics)]
    return text.from_strings("python-docs", f"text, {len(documents)} topics", documents)


def python_source() -> Text:
    """The .py files of the standard library, without its tests, a document each."""
    library = Path(sysconfig.get_path("stdlib"))
    excluded = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    paths = [
        path
        for path in sorted(library.rglob("*.py"))
        if excluded.isdisjoint(path.relative_to(library).parts)
    ]
    return text.from_files("python-source", paths, {})


def sines(*, examples: int = 4000, waves: int = 3, noise: float = 0.1, seed: int = 1) -> Series:
    """A sum of sines with periods of 8 to 100 steps, plus Gaussian noise.

    `noise` is the standard deviation of the noise.
    """
    _check_range("examples", examples, 2)
    _check_range("waves", waves, 1)
    if not 0 <= noise < inf:
        raise ConfigError(f"noise={noise!r} must be a finite number, 0 or more")
    random = Random(seed)
    components = [(random.uniform(8, 100), random.uniform(0, 2 * pi)) for _ in range(waves)]
    values = [
        sum(sin(2 * pi * t / period + phase) for period, phase in components)
        + random.gauss(0, noise)
        for t in range(examples)
    ]
    return series.from_columns("sines", f", {waves} sines and noise", {"value": values})


def shapes(*, examples: int = 6000, side: int = 48, seed: int = 1) -> Captions:
    """One or two coloured shapes on a grey background: "a red circle above a blue square"."""
    _check_range("examples", examples, 2)
    _check_range("side", side, 32, 256)
    _check_range("seed", seed, 0)
    random = Random(seed)
    rng = np.random.Generator(np.random.PCG64(seed))
    pixels = np.empty((examples, 3, side, side), np.uint8)
    captions: list[tuple[str, ...]] = []
    word_boxes: list[dict[int, Box]] = []
    for image in pixels:
        image[:] = random.randint(90, 165) + rng.integers(-12, 13, (3, side, side))
        words, boxes_by_word = list[str](), dict[int, Box]()
        boxes, relation = _place_shapes(random, side)
        for box in boxes:
            colour, shape = random.choice(list(_COLOURS)), random.choice(list(_SHAPES))
            _draw(image, box, _COLOURS[colour], _SHAPES[shape])
            words += [*(relation if words else ()), "a", colour, shape]
            boxes_by_word |= {len(words) - 2: box, len(words) - 1: box}
        captions.append((" ".join(words),))
        word_boxes.append(boxes_by_word)
    description = f"{side} × {side} pixels, coloured shapes"
    return from_pixels("shapes", description, pixels, captions, word_boxes)


_COLOURS = {
    "red": (214, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 70, 200),
    "yellow": (240, 210, 40),
    "white": (250, 250, 250),
    "black": (10, 10, 10),
}
_SHAPES: dict[str, Callable[[Grid, Grid], Grid]] = {  # whether (y, x) is in the shape
    "circle": lambda y, x: x**2 + y**2 <= 1,
    "square": lambda y, x: np.maximum(abs(x), abs(y)) <= 0.9,
    "triangle": lambda y, x: 2 * abs(x) <= y + 1,
    "cross": lambda y, x: np.minimum(abs(x), abs(y)) <= 0.35,
}


def _place_shapes(random: Random, side: int) -> tuple[list[Box], list[str]]:
    """The boxes of one or two shapes, and the words for the relation of the first to the second.

    Two shapes do not overlap, and are further apart along one axis than along the other; the upper
    or the left one is the first.
    """
    sizes = [random.randint(side // 4, side // 3) for _ in range(random.randint(1, 2))]
    while True:
        corners = [[random.randrange(side - size + 1) for _ in range(2)] for size in sizes]
        boxes = [(y, x, y + s, x + s) for (y, x), s in zip(corners, sizes, strict=True)]
        if len(boxes) == 1:
            return boxes, []
        (y, x, *_), (other_y, other_x, *_) = boxes
        dy, dx = abs(y - other_y), abs(x - other_x)
        if max(dy, dx) >= max(sizes) + 2 and abs(dy - dx) >= side // 8:
            axis = 0 if dy > dx else 1
            return sorted(boxes, key=lambda box: box[axis]), [["above"], ["left", "of"]][axis]


def _draw(
    image: NDArray[np.uint8],
    box: Box,
    colour: Sequence[int],
    inside: Callable[[Grid, Grid], Grid],
) -> None:
    """Draw a shape into its box, whose coordinates go from -1 to 1."""
    top, left, bottom, right = box
    y, x = np.mgrid[: bottom - top, : right - left] * 2.0 / (bottom - top - 1) - 1
    region = image[:, top:bottom, left:right]
    region[:, inside(y, x)] = np.array(colour, np.uint8)[:, None]


def digits(
    *, examples: int = 4000, min_length: int = 2, max_length: int = 5, seed: int = 1
) -> Strokes:
    """Numbers as pen strokes, as if written by hand, each with its digits as text."""
    _check_range("examples", examples, 2)
    _check_range("min_length", min_length, 1)
    _check_range("max_length", max_length, min_length)
    random = Random(seed)
    lengths = [random.randint(min_length, max_length) for _ in range(examples)]
    texts = ["".join(random.choices("0123456789", k=length)) for length in lengths]
    return from_drawings("digits", [write_number(text, random) for text in texts], texts)


BUILTINS: dict[str, Callable[..., Text | Pairs | LabelledText | Series | Captions | Strokes]] = {
    "reversal": reversal,
    "copy": copy,
    "numbers": numbers,
    "dates": dates,
    "corrections": corrections,
    "parentheses": parentheses,
    "dyck": dyck,
    "heights": heights,
    "sines": sines,
    "shapes": shapes,
    "digits": digits,
    "python-docs": python_docs,
    "python-source": python_source,
}


def _random_words(examples: int, min_length: int, max_length: int, seed: int) -> list[str]:
    _check_range("examples", examples, 1)
    _check_range("min_length", min_length, 1)
    _check_range("max_length", max_length, min_length)
    random = Random(seed)
    return [
        "".join(random.choices(ascii_lowercase, k=random.randint(min_length, max_length)))
        for _ in range(examples)
    ]


def _check_range(name: str, value: int, low: int, high: int | None = None) -> None:
    # Options come from recipes, and nothing has validated them before.
    if not isinstance(value, int) or value < low or (high is not None and value > high):
        rule = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ConfigError(f"{name}={value!r} must be an integer, {rule}")
