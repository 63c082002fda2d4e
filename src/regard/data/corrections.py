"""Sentences with errors, and the same sentences without: pairs for learning to correct a text."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from random import Random
from string import ascii_lowercase
from unicodedata import category

from regard.data.text import Text
from regard.units import count_noun

QUOTES = "\"'\u2018\u2019\u201c\u201d\u201e\u00ab\u00bb"
# besides letters and digits; other characters within a sentence suggest code or markup
ALLOWED_CHARACTERS = {*QUOTES, *",;:()- \u2013\u2014"}
OTHER_CHARACTERS = "with other characters"
_DECIMAL_POINT = re.compile(r"(?<=\d)\.(?=\d)")
_PUNCTUATION = re.compile(rf"(?<!\d)[,;:.!?{QUOTES}]|[,;:.!?{QUOTES}](?!\d)")  # not that of 3.5
_WORD = re.compile(r"[^\W\d_]{4,}")


@dataclass(frozen=True, slots=True)
class SelectedSentences:
    """The distinct sentences of a text, and why others are left out."""

    kept: list[str]
    left_out: Counter[str]  # reason → number of sentences
    other_characters: Counter[str]  # because of which sentences are left out

    @property
    def note(self) -> str:
        """How many sentences are kept, and why others are not, for a description or a message."""
        total = len(self.kept) + self.left_out.total()
        characters = " ".join(character for character, _ in self.other_characters.most_common(5))
        reasons = ", ".join(
            f"{count:,} {reason}" + (f" ({characters})" if reason == OTHER_CHARACTERS else "")
            for reason, count in self.left_out.most_common()
        )
        note = f"kept {len(self.kept):,} of {count_noun(total, 'sentence')}"
        return f"{note}; left out: {reasons}" if reasons else note


def find_sentences(data: Text, min_length: int, max_length: int) -> SelectedSentences:
    """The distinct sentences of a text, of `min_length` to `max_length` characters.

    A sentence begins with a digit or with a letter that is not in lower case, ends with . ! or ?
    and consists of letters, digits, spaces and the usual punctuation. Line breaks within a sentence
    become spaces.
    """
    kept: dict[str, None] = {}
    left_out, other_characters = Counter[str](), Counter[str]()
    for sentence in _split_sentences(data):
        reason = _reason_to_leave_out(sentence, min_length, max_length)
        if reason is None and sentence in kept:
            reason = "repeated"
        if reason is None:
            kept[sentence] = None
        else:
            left_out[reason] += 1
            other_characters.update(
                _other_characters(sentence) if reason == OTHER_CHARACTERS else ()
            )
    return SelectedSentences([*kept], left_out, other_characters)


def _split_sentences(data: Text) -> Iterator[str]:
    for chunk, _ in data.chunks():
        for paragraph in re.split(r"\n\s*\n", chunk):
            yield from filter(None, re.split(r"(?<=[.!?])\s+", " ".join(paragraph.split())))


def _reason_to_leave_out(sentence: str, min_length: int, max_length: int) -> str | None:
    if len(sentence) < min_length:
        return f"shorter than {min_length} characters"
    if len(sentence) > max_length:
        return f"longer than {max_length} characters"
    if not sentence[0].isalnum() or sentence[0].islower():
        return "without a capital letter or a digit at the beginning"
    if sentence[-1] not in ".!?":
        return "without . ! or ? at the end"
    return OTHER_CHARACTERS if _other_characters(sentence) else None


def _other_characters(sentence: str) -> set[str]:
    return {c for c in _DECIMAL_POINT.sub("", sentence[:-1]) if not _is_allowed(c)}


@cache
def _is_allowed(character: str) -> bool:
    return (
        character in ALLOWED_CHARACTERS or category(character)[0] in "LMN"
    )  # letters, marks, numbers


def corrupt(sentence: str, error_rate: float, random: Random) -> str:
    """A sentence with spelling mistakes, and often without capital letters or punctuation.

    A word of four letters or more has a spelling mistake with the probability `error_rate`. Half of
    the sentences lose their capital letters and half, independently, their punctuation.
    """
    corrupted = _WORD.sub(
        lambda match: _misspell(match[0], random) if random.random() < error_rate else match[0],
        sentence,
    )
    if random.random() < 0.5:
        corrupted = corrupted.lower()
    if random.random() < 0.5:
        corrupted = _PUNCTUATION.sub("", corrupted)
    return corrupted


def _misspell(word: str, random: Random) -> str:
    """A word with two letters swapped, or with a letter missing, doubled or wrong."""
    i = random.randrange(1, len(word) - 1)
    letters = ascii_lowercase if word.isascii() else word.lower()  # of its own script
    return random.choice(
        [
            word[:i] + word[i + 1] + word[i] + word[i + 2 :],
            word[:i] + word[i + 1 :],
            word[:i] + word[i] + word[i:],
            word[:i] + random.choice(letters) + word[i + 1 :],
        ]
    )
