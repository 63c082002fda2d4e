"""The table of tokenizers, and how one is learned from a stream of text of any length."""

from collections.abc import Callable, Iterable
from pathlib import Path

from regard.config import Choice, make
from regard.errors import DataError
from regard.text import bpe, char, unigram, word, wordpiece
from regard.text.tokenizer import Tokenizer, check_text

TOKENIZERS: dict[str, Callable[..., Tokenizer]] = {
    "char": char.train,
    "word": word.train,
    "bpe": bpe.train,
    "wordpiece": wordpiece.train,
    "unigram": unigram.train,
}

LIMIT = 100_000_000  # bytes of text that a tokenizer is learned from, at most
WINDOW = 1 << 16  # characters; longer pieces are cut, so that few long ones can be sampled too


def train_tokenizer(
    choice: Choice, pieces: Iterable[str], *, total: int | None = None
) -> Tokenizer:
    """Learn the tokenizer that `choice` names from text that is read once, piece by piece.

    Of more than 100 MB of text, evenly spread pieces are taken. `total`, the bytes of all pieces
    where that is known, only saves collecting what would be dropped again.

    >>> train_tokenizer({"kind": "bpe", "size": 300}, ["a rose is a rose is a rose"])
    Tokenizer('bpe', size=270)
    """
    taken = sample(pieces, LIMIT, total=total)
    if not taken:
        raise DataError("there is no text to learn a tokenizer from; is the file empty?")
    return make(choice, TOKENIZERS, "tokenizer", pieces=taken)


def load_tokenizer(path: Path | str) -> Tokenizer:
    """Read a `tokenizer.json`."""
    return Tokenizer.load(path)


def sample(pieces: Iterable[str], limit: int, *, total: int | None = None) -> list[str]:
    """At most `limit` bytes of text, every `stride`-th piece of the stream.

    The stride is tripled, and two of three pieces dropped, whenever the limit is passed. It stays
    odd, so that of a stream that alternates between two languages both are kept alike.
    """
    stride = 1 if total is None else -(-total // limit) | 1
    taken: list[str] = []
    size = 0
    for number, piece in enumerate(_windows(pieces)):
        if number % stride:
            continue
        taken.append(piece)
        size += _bytes(piece)
        while size > limit and len(taken) > 1:
            taken = taken[::3]
            stride *= 3
            size = sum(map(_bytes, taken))
    return taken


def _windows(pieces: Iterable[str]) -> Iterable[str]:
    for piece in pieces:
        for start in range(0, len(piece), WINDOW):
            yield piece[start : start + WINDOW]


def _bytes(piece: str) -> int:
    return len(piece) if piece.isascii() else len(check_text(piece).encode())
