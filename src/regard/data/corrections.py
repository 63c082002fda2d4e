"""Sentences with errors, and the same sentences without: pairs for learning to correct a text."""

import re
from collections.abc import Iterator
from random import Random
from string import ascii_lowercase

from regard.data.text import Text

_SENTENCE = re.compile(r"[A-Z][A-Za-z,;:'\"() -]*[.!?]")
_PUNCTUATION = re.compile(r"[,;:.!?\"']")
_WORD = re.compile(r"[A-Za-z]{4,}")


def sentences(data: Text, min_length: int, max_length: int) -> Iterator[str]:
    """Yield the distinct English sentences of a text that have no digits and no symbols.

    Line breaks within a sentence become spaces. A sentence has `min_length` to `max_length`
    characters.
    """
    seen = set()
    for chunk, _ in data.chunks():
        for paragraph in re.split(r"\n\s*\n", chunk):
            for sentence in re.split(r"(?<=[.!?])\s+", " ".join(paragraph.split())):
                fits = min_length <= len(sentence) <= max_length and sentence not in seen
                if fits and _SENTENCE.fullmatch(sentence):
                    seen.add(sentence)
                    yield sentence


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
    return random.choice(
        [
            word[:i] + word[i + 1] + word[i] + word[i + 2 :],
            word[:i] + word[i + 1 :],
            word[:i] + word[i] + word[i:],
            word[:i] + random.choice(ascii_lowercase) + word[i + 1 :],
        ]
    )
