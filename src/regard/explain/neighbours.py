"""Which words a model takes to be alike: cosines between rows of its table of vectors."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Any, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.errors import ConfigError
from regard.text import Tokenizer

SHOWN = 5  # words of a sample, and the likes of each
SIGNS = {"+": 1.0, "-": -1.0}
Terms = list[tuple[float, str]]  # how often each word is added


@dataclass(frozen=True)
class WordVectors:
    """The words of a vocabulary and the direction of each one's vector."""

    table: Float[Tensor, "vocab dim"]  # rows of length 1
    tokenizer: Tokenizer

    @classmethod
    def of(cls, model: Any, tokenizer: Tokenizer) -> Self:
        """Those a model reads ids by."""
        embed = getattr(model, "embed", None)
        embed = getattr(embed, "token", embed)
        if not isinstance(embed, nn.Embedding):
            kind = type(model).__name__
            raise ConfigError(f"the model of this run, {kind}, has no vector for each word")
        return cls(nn.functional.normalize(embed.weight.detach().float()), tokenizer)

    @cached_property
    def words(self) -> dict[str, int]:
        """The id of every word; of a piece with and without a space, the one with it."""
        pieces = [(self.tokenizer.piece(id), id) for id in range(self.tokenizer.size)]
        known = sorted((piece.startswith(" "), piece.strip(" "), id) for piece, id in pieces)
        special = set(self.tokenizer.special_ids)
        return {word: id for _, word, id in known if word.strip() and id not in special}

    def id(self, word: str) -> int:
        """The id of a word; one that the vocabulary does not have is refused with its likes."""
        for text in (f" {word}", word):
            ids = self.tokenizer.encode(text)
            if len(ids) == 1 and ids[0] in self.words.values():
                return ids[0]
        if word in self.words:
            return self.words[word]
        close = get_close_matches(word, self.words, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "ask for a more frequent one"
        raise ConfigError(f"{word!r} is no word of this run's vocabulary; {hint}")

    def near(self, terms: Terms, top: int = 10) -> list[tuple[str, float]]:
        r"""The words whose vectors point most nearly where a sum of others does, best first.

            cos(v_w, sum_i s_i v_i),    s_i = ±1,  each v of length 1

        "man is to king as woman is to ?" asks for king - man + woman (Mikolov et al. 2013). The
        words that were asked with are left out.
        """
        asked = [self.id(word) for _, word in terms]
        scale = self.table.new_tensor([sign for sign, _ in terms])
        goal = nn.functional.normalize(scale @ self.table[asked], dim=0)
        names = {id: word for word, id in self.words.items() if id not in asked}
        ids = torch.tensor(list(names), device=self.table.device)
        best = (self.table[ids] @ goal).topk(min(top, len(ids)))
        found = zip(ids[best.indices].tolist(), best.values.tolist(), strict=True)
        return [(names[id], cosine) for id, cosine in found]

    def sample(self, ids: Sequence[int]) -> str:
        """The first long words of a text, each with those most like it."""
        known = {id: word for word, id in self.words.items()}
        long = [known[id] for id in dict.fromkeys(ids) if len(known.get(id, "")) > 3][:SHOWN]
        found = ((word, self.near([(1.0, word)], SHOWN)) for word in long)
        return "\n".join(f"{word}: {', '.join(each for each, _ in near)}" for word, near in found)


def parse_terms(words: Iterable[str]) -> list[Terms]:
    """Sums of words, as they are written: those that no sign joins stand each for itself.

    >>> parse_terms("war king - man + woman".split())
    [[(1.0, 'war')], [(1.0, 'king'), (-1.0, 'man'), (1.0, 'woman')]]
    """
    sums: list[Terms] = []
    sign = None
    for word in words:
        if word in SIGNS:
            if sign is not None or not sums:
                raise ConfigError(f"{word!r} stands between two words, as in: king - man + woman")
            sign = word
        elif sign is None:
            sums.append([(1.0, word)])
        else:
            sums[-1].append((SIGNS[sign], word))
            sign = None
    if sign is not None or not sums:
        raise ConfigError("a word is missing; ask as in: king - man + woman")
    return sums


def said(terms: Terms) -> str:
    """A sum of words as one writes it.

    >>> said([(1.0, "king"), (-1.0, "man")])
    'king - man'
    """
    signed = (f"{'-' if sign < 0 else '+'} {word}" for sign, word in terms)
    return " ".join(signed).removeprefix("+ ")


def cosines(vectors: Float[Tensor, "places dim"]) -> Float[Tensor, "places places"]:
    """How alike each two are."""
    x = nn.functional.normalize(vectors.float(), dim=-1)
    return x @ x.T
