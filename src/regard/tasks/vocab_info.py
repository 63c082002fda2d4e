"""Properties of a vocabulary for masking: special ids, word starts, sentence ends."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool, Int
from numpy.typing import NDArray

from regard.text import Tokenizer
from regard.text.wordpiece import CONTINUATION

MASK = "<mask>"  # the mask token in user input, whatever its name in the vocabulary
SPACE_PREFIXED = ("bpe", "unigram")  # kinds in which a space belongs to the piece after it
BYTE_PIECE = re.compile("<0x..>")  # one byte of a character that has several
SENTENCE_ENDS = (".", "!", "?", "。", "\n")


def _whole_words(piece: str) -> tuple[bool, bool]:
    return False, False


def _wordpiece(piece: str) -> tuple[bool, bool]:
    return piece.startswith(CONTINUATION), True


def _subwords(piece: str) -> tuple[bool, bool]:
    letters = BYTE_PIECE.sub("x", piece)
    return letters[:1].isalnum(), letters[-1:].isalnum() or letters == " "


# Whether a piece continues the word before it, and whether the next piece may continue it.
CONTINUATION_RULES: dict[str, Callable[[str], tuple[bool, bool]]] = {
    "char": _whole_words,
    "word": _whole_words,
    "wordpiece": _wordpiece,
    "bpe": _subwords,
    "unigram": _subwords,
}


@dataclass(frozen=True, kw_only=True)
class VocabInfo:
    """A vocabulary as arrays over its ids.

        id t begins a word  <=>  not (continues[id_t] and can_continue[id_{t-1}])

    A WordPiece piece with ## continues a word. In BPE and unigram vocabularies a piece continues a
    word if it begins with a letter or digit, and the piece before it ends in one or is a space; so
    a leading space begins a word, and so does punctuation. In vocabularies of characters or words
    every id is a word.
    """

    mask_id: int
    cls_id: int
    sep_id: int
    ordinary: NDArray[np.bool_] = field(repr=False)  # not special
    ordinary_ids: NDArray[np.int64] = field(repr=False)
    continues: NDArray[np.bool_] = field(repr=False)
    can_continue: NDArray[np.bool_] = field(repr=False)  # the next id may continue its word
    ends_sentence: NDArray[np.bool_] = field(repr=False)

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> "VocabInfo":
        """Read every piece of a vocabulary once."""
        ordinary = np.ones(tokenizer.vocab_size, np.bool_)
        ordinary[tokenizer.special_ids] = False
        pieces = [tokenizer.piece(id) if ordinary[id] else "" for id in range(tokenizer.vocab_size)]
        ordinary &= np.array(
            [bool(piece) for piece in pieces]
        )  # imported vocabularies may have gaps
        rule = CONTINUATION_RULES[tokenizer.kind]
        flags = np.array([rule(piece) if piece else (False, False) for piece in pieces])
        return cls(
            mask_id=tokenizer.mask_id,
            cls_id=tokenizer.cls_id,
            sep_id=tokenizer.sep_id,
            ordinary=ordinary,
            ordinary_ids=np.flatnonzero(ordinary),
            continues=flags[:, 0],
            can_continue=flags[:, 1],
            ends_sentence=np.array([piece.rstrip(" ").endswith(SENTENCE_ENDS) for piece in pieces]),
        )

    def begins_word(self, ids: Int[np.ndarray, "batch time"]) -> Bool[np.ndarray, "batch time"]:
        """True where a word begins; the first token of a row always does."""
        first = np.ones((len(ids), 1), np.bool_)
        continues_word = self.continues[ids[:, 1:]] & self.can_continue[ids[:, :-1]]
        return np.concatenate([first, ~continues_word], axis=1)

    def sentence_end(self, ids: Int[np.ndarray, " time"], start: int, stop: int) -> int:
        """The index after the last sentence end within ids[start:stop]; `stop` if there is none."""
        ends = np.flatnonzero(self.ends_sentence[ids[start:stop]])
        return start + int(ends[-1]) + 1 if len(ends) else stop

    def text(self, tokenizer: Tokenizer, ids: Sequence[int]) -> str:
        """The text of ids, with ___ for each masked one."""
        parts: list[list[int]] = [[]]
        for id in ids:
            if id == self.mask_id:
                parts.append([])
            else:
                parts[-1].append(id)
        return " ___ ".join(map(tokenizer.decode, parts))


def encode_with_masks(tokenizer: Tokenizer, text: str) -> tuple[list[int], list[int]]:
    """The ids of a text as an encoder reads it, <cls> … <sep>, and the positions of <mask>."""
    mask_piece = tokenizer.piece(tokenizer.mask_id)
    parts = re.split(f"{re.escape(MASK)}|{re.escape(mask_piece)}", text)
    if tokenizer.kind in SPACE_PREFIXED:  # the space before <mask> belongs to the masked piece
        parts = [*(part.removesuffix(" ") for part in parts[:-1]), parts[-1]]
    ids, positions = [tokenizer.cls_id], list[int]()
    for index, part in enumerate(parts):
        if index:
            positions.append(len(ids))
            ids.append(tokenizer.mask_id)
        ids += tokenizer.encode(part)
    return [*ids, tokenizer.sep_id], positions
