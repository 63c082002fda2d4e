"""What masking must know of a vocabulary: special ids, where words begin, where sentences end."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from jaxtyping import Bool, Int
from numpy.typing import NDArray

from regard.text import Tokenizer
from regard.text.wordpiece import CONTINUATION

BLANK = "<mask>"  # how a user writes it, whatever the vocabulary calls it
LEADING = ("bpe", "unigram")  # kinds in which a space belongs to the piece after it
HALF = re.compile("<0x..>")  # of a character that several pieces make together
ENDS = (".", "!", "?", "。", "\n")  # of sentences


def _alone(piece: str) -> tuple[bool, bool]:
    return False, False


def _marked(piece: str) -> tuple[bool, bool]:
    return piece.startswith(CONTINUATION), True


def _lettered(piece: str) -> tuple[bool, bool]:
    letters = HALF.sub("x", piece)
    return letters[:1].isalnum(), letters[-1:].isalnum() or letters == " "


# Whether a piece goes on with the word before it, and whether another may go on with it.
JOINTS: dict[str, Callable[[str], tuple[bool, bool]]] = {
    "char": _alone,
    "word": _alone,
    "wordpiece": _marked,
    "bpe": _lettered,
    "unigram": _lettered,
}


@dataclass(frozen=True, kw_only=True)
class VocabInfo:
    """A vocabulary as arrays over its ids.

        id t begins a word  <=>  not (continues[id_t] and open[id_{t-1}])

    In a WordPiece vocabulary ## continues. In BPE and unigram ones a letter or digit does, if
    the piece before ends in one or is a space; so a leading space begins a word, and so does
    punctuation.
    Characters and words stand each for itself.
    """

    mask_id: int
    cls_id: int
    sep_id: int
    ordinary: NDArray[np.bool_] = field(repr=False)  # not special
    ids: NDArray[np.int64] = field(repr=False)  # the ordinary ones
    continues: NDArray[np.bool_] = field(repr=False)
    open: NDArray[np.bool_] = field(repr=False)
    closes: NDArray[np.bool_] = field(repr=False)  # ends a sentence

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        """Look at every piece of a vocabulary once."""
        ordinary = np.ones(tokenizer.size, np.bool_)
        ordinary[tokenizer.special_ids] = False
        pieces = [tokenizer.piece(id) if ordinary[id] else "" for id in range(tokenizer.size)]
        ordinary &= np.array([bool(piece) for piece in pieces])  # foreign ones may have gaps
        joint = JOINTS[tokenizer.kind]
        joints = np.array([joint(piece) if piece else (False, False) for piece in pieces])
        return cls(
            mask_id=tokenizer.mask_id,
            cls_id=tokenizer.cls_id,
            sep_id=tokenizer.sep_id,
            ordinary=ordinary,
            ids=np.flatnonzero(ordinary),
            continues=joints[:, 0],
            open=joints[:, 1],
            closes=np.array([piece.rstrip(" ").endswith(ENDS) for piece in pieces]),
        )

    def begins(self, ids: Int[np.ndarray, "batch time"]) -> Bool[np.ndarray, "batch time"]:
        """Where a word begins; the first of a row always does."""
        first = np.ones((len(ids), 1), np.bool_)
        inside = self.continues[ids[:, 1:]] & self.open[ids[:, :-1]]
        return np.concatenate([first, ~inside], axis=1)

    def sentence_end(self, ids: Int[np.ndarray, " time"], least: int, most: int) -> int:
        """Behind the last sentence that ends after `least` and at most `most` ids; else `most`."""
        ends = np.flatnonzero(self.closes[ids[least:most]])
        return least + int(ends[-1]) + 1 if len(ends) else most

    def text(self, tokenizer: Tokenizer, ids: Sequence[int]) -> str:
        """The text of some ids, with ___ where one is hidden."""
        parts: list[list[int]] = [[]]
        for id in ids:
            if id == self.mask_id:
                parts.append([])
            else:
                parts[-1].append(id)
        return " ___ ".join(map(tokenizer.decode, parts))


def framed(tokenizer: Tokenizer, text: str) -> tuple[list[int], list[int]]:
    """The ids of a text as an encoder reads it, <cls> … <sep>, and where it says <mask>."""
    own = tokenizer.piece(tokenizer.mask_id)
    parts = re.split(f"{re.escape(BLANK)}|{re.escape(own)}", text)
    if tokenizer.kind in LEADING:  # the hidden piece has the space in front of it
        parts = [*(part.removesuffix(" ") for part in parts[:-1]), parts[-1]]
    ids, places = [tokenizer.cls_id], list[int]()
    for number, part in enumerate(parts):
        if number:
            places.append(len(ids))
            ids.append(tokenizer.mask_id)
        ids += tokenizer.encode(part)
    return [*ids, tokenizer.sep_id], places
