"""From tokens to words: which tokens of a text form a word, and maps between words."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from regard.text import Tokenizer

Groups = list[list[int]]  # the positions of the tokens of each word


def word_groups(tokenizer: Tokenizer, ids: Sequence[int]) -> Groups:
    """The positions of the tokens of each word; special tokens and punctuation are words.

    A word begins at white space, which belongs to it, and where letters or digits meet other
    characters. WordPiece continues a word with "##".
    """
    groups, text, special = Groups(), "", set(tokenizer.special_ids)
    for position, id in enumerate(ids):
        piece = tokenizer.piece(id)
        if tokenizer.kind == "wordpiece":
            starts = not piece.startswith("##")
        elif tokenizer.kind == "word":
            starts = True
        else:
            starts = _starts_word(text, piece)
        if id in special or starts or not groups:
            groups.append([position])
            text = ""
        else:
            groups[-1].append(position)
        text = "\n" if id in special else text + piece  # a word starts after a special token
    return groups


def _starts_word(before: str, piece: str) -> bool:
    """Whether a piece starts a word after the text of the current one."""
    if not piece or before[-1:] == "\n" or piece[0].isspace():
        return True
    if not before or before.isspace():
        return False  # the white space belongs to this word
    return _in_word(before[-1]) != _in_word(piece[0])


def _in_word(character: str) -> bool:
    return character.isalnum() or character in "'’_<>"  # <0xE2> is one byte of a character


def words_of(tokenizer: Tokenizer, ids: Sequence[int], groups: Groups) -> list[str]:
    """The text of each word."""
    words = []
    for group in groups:
        if len(group) == 1:
            words.append(tokenizer.piece(ids[group[0]]).strip(" ") or " ")
        else:
            text = tokenizer.decode([ids[position] for position in group])
            words.append(text.strip(" ") or "".join(tokenizer.piece(ids[i]) for i in group))
    return words


def merge_words(
    weights: Float[Tensor, "heads rows columns"], rows: Groups, columns: Groups
) -> Float[Tensor, "heads words words"]:
    r"""Attention from words to words: w_ab = (1 / |a|) sum_{i in a} sum_{j in b} w_ij.

    The weights to the tokens of a word are added, those from them averaged, so a row still sums
    to 1. Clark et al. 2019.
    """
    summed = torch.stack([weights[..., group].sum(-1) for group in columns], -1)
    return torch.stack([summed[:, group].mean(1) for group in rows], 1)
