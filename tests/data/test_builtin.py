from collections import Counter
from datetime import date

import pytest

from regard.data.builtin import BUILTINS
from regard.data.number_words import english, french
from regard.errors import ConfigError, DataError
from regard.pipelines import open_data

NUMERALS = {
    0: ("zero", "zéro"),
    1: ("one", "un"),
    16: ("sixteen", "seize"),
    17: ("seventeen", "dix-sept"),
    20: ("twenty", "vingt"),
    21: ("twenty-one", "vingt et un"),
    22: ("twenty-two", "vingt-deux"),
    61: ("sixty-one", "soixante et un"),
    70: ("seventy", "soixante-dix"),
    71: ("seventy-one", "soixante et onze"),
    77: ("seventy-seven", "soixante-dix-sept"),
    80: ("eighty", "quatre-vingts"),
    81: ("eighty-one", "quatre-vingt-un"),
    90: ("ninety", "quatre-vingt-dix"),
    91: ("ninety-one", "quatre-vingt-onze"),
    99: ("ninety-nine", "quatre-vingt-dix-neuf"),
    100: ("one hundred", "cent"),
    101: ("one hundred one", "cent un"),
    180: ("one hundred eighty", "cent quatre-vingts"),
    200: ("two hundred", "deux cents"),
    201: ("two hundred one", "deux cent un"),
    280: ("two hundred eighty", "deux cent quatre-vingts"),
    1000: ("one thousand", "mille"),
    1001: ("one thousand one", "mille un"),
    1100: ("one thousand one hundred", "mille cent"),
    2000: ("two thousand", "deux mille"),
    2200: ("two thousand two hundred", "deux mille deux cents"),
    21_000: ("twenty-one thousand", "vingt et un mille"),
    80_000: ("eighty thousand", "quatre-vingt mille"),
    80_080: ("eighty thousand eighty", "quatre-vingt mille quatre-vingts"),
    100_000: ("one hundred thousand", "cent mille"),
    200_000: ("two hundred thousand", "deux cent mille"),
    300_000: ("three hundred thousand", "trois cent mille"),
    999_201: (
        "nine hundred ninety-nine thousand two hundred one",
        "neuf cent quatre-vingt-dix-neuf mille deux cent un",
    ),
    999_999: (
        "nine hundred ninety-nine thousand nine hundred ninety-nine",
        "neuf cent quatre-vingt-dix-neuf mille neuf cent quatre-vingt-dix-neuf",
    ),
}


def test_corrections_are_pairs_of_a_corrupted_sentence_and_the_sentence(tmp_path):
    path = tmp_path / "a.txt"
    names = [f"{a}{b}" for a in "abcdefgh" for b in "klmnopqr"]
    clean = [f"The animal called {name}, it is said, sleeps on the roof." for name in names]
    path.write_text("\n".join([*clean, *clean, "1 = x is no sentence.", "Too short."]))
    table = {"kind": "corrections", "file": str(path), "error_rate": 0.3}
    rows = list(open_data(table).rows())
    assert sorted(target for _, target in rows) == sorted(clean)  # each once
    assert sum(source != target for source, target in rows) > 50
    plain = [source for source, _ in rows]
    assert 15 < sum(source == source.lower() for source in plain) < 49
    assert 15 < sum("," not in source for source in plain) < 49
    words = [word for source in plain for word in source.lower().replace(",", "").split()]
    wrong = sum(word not in " ".join(clean).lower() for word in words)
    assert 40 < wrong < 160  # of 64 x 6 words of four letters or more, 0.3
    kept = open_data({**table, "error_rate": 0.0}).rows()
    assert {source.lower().rstrip(".").replace(",", "") for source, _ in kept} == {
        target.lower().rstrip(".").replace(",", "") for target in clean
    }
    path.write_text("nothing here")
    with pytest.raises(
        DataError,
        match="kept 0 of 1 sentence; left out: 1 shorter than 20 characters;\ngive another",
    ):
        open_data(table)


def test_sentences_with_accents_and_digits_are_corrected_too(tmp_path):
    path = tmp_path / "a.txt"
    clean = [
        "L’élève a 12 ans, près de l’école.",
        "Дети играют в большом парке.",
        "Ça coûte 3.5 euros.",
    ]
    others = ["def f(x_1): return x_1 + 1 to all.", "this is not the begin of one.", "No end of it"]
    path.write_text(" ".join([*clean, *clean[:1], *others, "So &."]))
    data = open_data({"kind": "corrections", "file": str(path), "error_rate": 1.0, "min_length": 9})
    rows = list(data.rows())
    assert {target for _, target in rows} == {*clean}
    assert {source for source, _ in rows}.isdisjoint(clean)
    assert all("12" in source for source, target in rows if "12" in target)
    assert all("3.5" in source for source, target in rows if "3.5" in target)
    assert "kept 3 of 7 sentences; left out: " in data.description
    for reason in ("1 repeated", "2 without a capital letter or a digit at the beginning"):
        assert reason in data.description
    path.write_text(
        "\n".join(["Use f(x) = {y} for this.", *["A long line. " + "b" * 120 + "."] * 2])
    )
    with pytest.raises(
        DataError, match=r"2 longer than 100 .* 1 with other characters \([={}] [={}] [={}]\)"
    ):
        open_data({"kind": "corrections", "file": str(path)})


@pytest.mark.parametrize("number", NUMERALS)
def test_numbers_are_spelled_as_by_hand(number):
    assert (english(number), french(number)) == NUMERALS[number]


def test_numbers_are_all_different_and_small_ones_are_there():
    rows = list(open_data("numbers").rows())
    assert len(rows) == len(set(rows)) == 20_000
    assert {(english(n), french(n)) for n in range(1000)} <= set(rows)
    thousands = sum("mille" in target for _, target in rows)
    assert thousands == 19_000


@pytest.mark.parametrize(
    ("max_number", "examples"), [(9, 5), (9, 50), (999, 20_000), (10_050, 8000)]
)
def test_numbers_gives_as_many_as_asked_or_as_there_are(max_number, examples):
    opened = open_data({"kind": "numbers", "max_number": max_number, "examples": examples})
    rows = list(opened.rows())
    assert len(set(rows)) == len(rows) == min(examples, max_number + 1)
    assert set(rows) <= {(english(n), french(n)) for n in range(max_number + 1)}


def test_reversal_and_copy_do_what_their_names_say():
    for source, target in open_data({"kind": "reversal", "examples": 100}).rows():
        assert target == source[::-1]
        assert 4 <= len(source) <= 16
    for source, target in open_data({"kind": "copy", "examples": 100, "min_length": 1}).rows():
        assert target == source


def read_date(written: str) -> tuple[int, set[int]]:
    """The year, and all other numbers, of a written date."""
    numbers = [int(word) for word in "".join(c if c.isdigit() else " " for c in written).split()]
    year = next(number for number in numbers if number > 31)
    return year, {number for number in numbers if number <= 31}


def test_dates_are_true_and_in_many_formats():
    rows = list(open_data({"kind": "dates", "examples": 2000}).rows())
    months = str.split("jan feb mar apr may jun jul aug sep oct nov dec")
    days = str.split("mon tue wed thu fri sat sun")
    shapes = Counter()
    for written, iso in rows:
        day = date.fromisoformat(iso)
        year, numbers = read_date(written)
        assert year == day.year
        assert day.day in numbers
        words = ["".join(filter(str.isalpha, word))[:3].lower() for word in written.split()]
        words += ["".join(filter(str.isalpha, word))[:3].lower() for word in written.split("-")]
        named = [months.index(word) + 1 for word in words if word in months]
        assert (named and named[0] == day.month) or numbers == {day.day, day.month}
        assert all(days.index(word) == day.weekday() for word in words if word in days)
        shapes["".join("9" if c.isdigit() else "a" if c.isalpha() else c for c in written)[:3]] += 1
        if "/" in written:
            assert written == f"{day.month}/{day.day}/{day.year}"
        if written.count(".") == 2:
            assert written == f"{day.day}.{day.month}.{day.year}"
    assert len(shapes) >= 8


@pytest.mark.parametrize(
    ("day", "ordinal"),
    [(1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (12, "12th"), (13, "13th"),
     (21, "21st"), (22, "22nd"), (23, "23rd"), (30, "30th"), (31, "31st")],
)  # fmt: skip
def test_ordinals_are_english(day, ordinal):
    from regard.data.builtin import _ordinal

    assert _ordinal(date(2000, 1, day)) == ordinal


def test_dyck_lines_are_balanced_and_of_all_types():
    opened = open_data({"kind": "dyck", "examples": 500, "max_length": 20})
    [(content, ends)] = opened.chunks()
    lines = content.splitlines()
    assert ends
    assert len(lines) == 500
    assert max(map(len, lines)) == 20
    for line in lines:
        waiting = []
        for symbol in map(int, line):
            if symbol < 5:
                waiting.append(symbol)
            else:
                assert waiting.pop() == 9 - symbol
        assert not waiting
    assert set(content) == set("0123456789\n")


def test_python_docs_has_a_document_per_topic():
    from pydoc_data.topics import topics

    opened = open_data("python-docs")
    assert len(opened.documents) == len(topics)
    assert topics["lambda"] in [piece for piece, _ in opened.chunks()]


def test_python_source_is_the_standard_library_without_tests():
    opened = open_data("python-source")
    paths = [document.origin for document in opened.documents]
    assert any(path.name == "argparse.py" for path in paths)
    assert not any("test" in path.parts or "site-packages" in path.parts for path in paths)
    assert opened.size > 5_000_000


SEEDED = [name for name in BUILTINS if not name.startswith("python-")]


@pytest.mark.parametrize("name", SEEDED)
def test_the_seed_decides_everything(name):
    def made(seed):
        return open_data({"kind": name, "examples": 50, "seed": seed}).fingerprint()

    assert made(1) == made(1)
    assert made(1) != made(2)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"kind": "numbers", "max_number": 1_000_000},
            "max_number=1000000 must be an integer, from 1",
        ),
        ({"kind": "numbers", "examples": "many"}, "examples must be an integer, not 'many'"),
        (
            {"kind": "copy", "min_length": 9, "max_length": 3},
            "max_length=3 must be an integer, at least 9",
        ),
        ({"kind": "parentheses", "types": 6}, "types=6"),
        ({"kind": "dates", "last_year": 1066}, "last_year=1066"),
        ({"kind": "corrections", "error_rate": 2.0}, "error_rate=2.0 must be a probability"),
    ],
)
def test_wrong_options_are_config_errors(table, message):
    with pytest.raises(ConfigError, match=message):
        open_data(table)


def test_a_claim_about_heights_is_true_if_the_statements_imply_it():
    data = open_data({"kind": "heights", "examples": 400, "people": 4})
    lengths, labels = Counter(), Counter()
    for (statements, claim), (index,) in data.rows:
        shorter = {}  # the next smaller person of each
        for statement in statements.split(" . "):
            tall, small = statement.split(" is taller than ")
            shorter[tall] = small
        tall, small = claim.split(" is taller than ")
        below = tall
        while below in shorter and below != small:
            below = shorter[below]
        label = data.class_names[index]
        assert label == ("true" if below == small else "false")
        lengths[len(shorter)] += 1
        labels[label] += 1
    assert set(lengths) == {1, 2, 3}
    assert labels["true"] == labels["false"]


@pytest.mark.parametrize("options", [{"noise": float("inf")}, {"noise": float("nan")}])
def test_the_noise_of_sines_is_finite(options):
    with pytest.raises(ConfigError, match="finite"):
        BUILTINS["sines"](examples=4, **options)


def test_the_seed_of_shapes_is_not_negative():
    with pytest.raises(ConfigError, match="seed=-1"):
        BUILTINS["shapes"](examples=4, seed=-1)
