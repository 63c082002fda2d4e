"""Nearest neighbours of words, by cosine similarity in a model's embedding."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.errors import ConfigError
from regard.text import Tokenizer

SAMPLE_WORDS = 5  # words in a sample, and neighbours per word
SIGNS = {"+": 1.0, "-": -1.0}
Terms = list[tuple[float, str]]  # the sign and the word of each term of a sum


@dataclass(frozen=True)
class WordVectors:
    """The words of a vocabulary and their embedding vectors, scaled to length 1."""

    table: Float[Tensor, "vocab dim"]  # rows are L2-normalized
    tokenizer: Tokenizer

    @classmethod
    def from_model(cls, model: Any, tokenizer: Tokenizer) -> "WordVectors":
        """The input embedding of a model."""
        embed = getattr(model, "embed", None)
        embed = getattr(embed, "token", embed)
        if not isinstance(embed, nn.Embedding):
            raise ConfigError(
                "this model has no word embedding; use a model with one, such as cbow"
            )
        return cls(nn.functional.normalize(embed.weight.detach().float()), tokenizer)

    @cached_property
    def words(self) -> dict[str, int]:
        """The id of every word; of two pieces that differ in a leading space, the one with it."""
        pieces = [(self.tokenizer.piece(id), id) for id in range(self.tokenizer.vocab_size)]
        words = sorted((piece.startswith(" "), piece.strip(" "), id) for piece, id in pieces)
        special = set(self.tokenizer.special_ids)
        return {word: id for _, word, id in words if word.strip() and id not in special}

    @cached_property
    def words_by_id(self) -> dict[int, str]:
        """The word of every id in `words`."""
        return {id: word for word, id in self.words.items()}

    def id(self, word: str) -> int:
        """The id of a word; for an unknown word, an error that suggests similar ones."""
        for text in (f" {word}", word):
            ids = self.tokenizer.encode(text)
            if len(ids) == 1 and ids[0] in self.words_by_id:
                return ids[0]
        if word in self.words:
            return self.words[word]
        if all(len(known) == 1 for known in self.words):
            raise ConfigError(
                f"{word!r} is not in this run's vocabulary, which consists of characters;\n"
                "give a character, or train a run with data.tokenizer=word"
            )
        close = get_close_matches(word, self.words, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "try a more frequent word"
        raise ConfigError(f"{word!r} is not in this run's vocabulary; {hint}")

    def nearest(self, terms: Terms, top: int = 10) -> list[tuple[str, float]]:
        r"""The words with the largest cosine to a signed sum of word vectors, best first.

            cos(v_w, sum_i s_i v_i),    s_i = ±1,  each v L2-normalized

        "man is to king as woman is to ?" is king - man + woman (Mikolov et al. 2013). The words
        of the sum are left out.
        """
        query_ids = [self.id(word) for _, word in terms]
        signs = self.table.new_tensor([sign for sign, _ in terms])
        query = nn.functional.normalize(signs @ self.table[query_ids], dim=0)
        names = {id: word for id, word in self.words_by_id.items() if id not in query_ids}
        ids = torch.tensor(list(names), device=self.table.device)
        best = (self.table[ids] @ query).topk(min(top, len(ids)))
        pairs = zip(ids[best.indices].tolist(), best.values.tolist(), strict=True)
        return [(names[id], cosine) for id, cosine in pairs]

    def sample(self, ids: Sequence[int]) -> str:
        """The first words of more than three letters in a text, with their nearest neighbours."""
        words = (self.words_by_id.get(id, "") for id in dict.fromkeys(ids))
        long = [word for word in words if len(word) > 3]
        lines = ((word, self.nearest([(1.0, word)], SAMPLE_WORDS)) for word in long[:SAMPLE_WORDS])
        return "\n".join(f"{word}: {', '.join(name for name, _ in near)}" for word, near in lines)


def parse_terms(words: Iterable[str]) -> list[Terms]:
    """Signed sums of words; a word without a sign before it begins a new sum.

    >>> parse_terms("war king - man + woman".split())
    [[(1.0, 'war')], [(1.0, 'king'), (-1.0, 'man'), (1.0, 'woman')]]
    """
    sums: list[Terms] = []
    sign = None
    for word in words:
        if word in SIGNS:
            if sign is not None or not sums:
                raise ConfigError(f"{word!r} must be between two words, as in: king - man + woman")
            sign = word
        elif sign is None:
            sums.append([(1.0, word)])
        else:
            sums[-1].append((SIGNS[sign], word))
            sign = None
    if sign is not None or not sums:
        raise ConfigError("a word is missing; write for example: king - man + woman")
    return sums


def format_terms(terms: Terms) -> str:
    """A sum of words as text.

    >>> format_terms([(1.0, "king"), (-1.0, "man")])
    'king - man'
    """
    signed = (f"{'-' if sign < 0 else '+'} {word}" for sign, word in terms)
    return " ".join(signed).removeprefix("+ ")


def compare_occurrences(
    model: nn.Module, tokenizer: Tokenizer, word: str, text: str, *, contextual: bool
) -> dict[str, Any]:
    """Cosines between the vectors of a word at all its positions in a text.

    Returns `positions`, counted from 1; `embedding`, the cosines of the embedding vectors, all 1;
    and, if the model is `contextual`, `last layer`, those of the output vectors, which depend on
    the context.
    """
    vectors = WordVectors.from_model(model, tokenizer)
    ids, id = tokenizer.encode(text), vectors.id(word)
    positions = [position for position, other in enumerate(ids) if other == id]
    if len(positions) < 2:
        raise ConfigError(
            f"{word!r} occurs {len(positions)} time{'s'[: len(positions) != 1]} in the text; "
            "comparing needs at least 2"
        )
    result: dict[str, Any] = {"positions": [position + 1 for position in positions]}
    result["embedding"] = cosines(vectors.table[[id] * len(positions)]).tolist()
    if contextual:
        prefix = tokenizer.prefix_ids
        if getattr(model.config, "architecture", None) == "encoder":
            prefix = [tokenizer.cls_id]
            ids = [*ids, tokenizer.sep_id]
        with torch.no_grad():
            x = model(torch.tensor([[*prefix, *ids]], device=vectors.table.device))[0]
        rows = [len(prefix) + position for position in positions]
        result["last layer"] = cosines(x[rows]).tolist()
    return result


def cosines(vectors: Float[Tensor, "positions dim"]) -> Float[Tensor, "positions positions"]:
    """The cosine of every pair of vectors."""
    x = nn.functional.normalize(vectors.float(), dim=-1)
    return x @ x.T
