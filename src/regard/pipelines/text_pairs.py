"""Two texts as one input: the special ids before, between and after them, and their segments."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from regard.models.presets import ModelConfig
from regard.models.transformer import TransformerConfig
from regard.text import Tokenizer

_A, _B = -1, -2  # placeholders for the texts in a template


@dataclass(frozen=True, slots=True)
class PairTemplate:
    r"""How a model reads two texts.

        <cls> A <sep> B <sep>          a Transformer encoder (Devlin et al. 2018), segments 0, 1
        <start> A <sep> B <cls>        a causal model; its last state is read (Radford et al. 2018)
        A <sep> B                      others

    For an encoder, an imported tokenizer may have another template (RoBERTa: <s> A </s></s> B
    </s>). Where a vocabulary lacks one of the special tokens, the end-of-sequence token replaces
    it.
    """

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]
    segmented: bool  # B and the special tokens after it are in segment 1

    @property
    def special_token_count(self) -> int:
        """The number of special tokens."""
        return len(self.before) + len(self.between) + len(self.after)

    def join(self, a: Sequence[int], b: Sequence[int]) -> tuple[NDArray[np.int64], int]:
        """The ids of both texts with the special ids, and the position at which B begins."""
        first = [*self.before, *a, *self.between]
        return np.array([*first, *b, *self.after]), len(first)


def pair_template(model: ModelConfig, tokenizer: Tokenizer) -> PairTemplate:
    """The template of a model and its tokenizer."""
    architecture = getattr(model, "architecture", "decoder")
    if isinstance(model, TransformerConfig) and architecture == "encoder":
        ids, segments = tokenizer.with_special_tokens([_A], [_B])
        if len(ids) == 2:  # a tokenizer trained by regard adds no special tokens
            ids = [tokenizer.cls_id, _A, tokenizer.sep_id, _B, tokenizer.sep_id]
            segments = [0, 0, 0, 1, 1]
        a, b = ids.index(_A), ids.index(_B)
        return PairTemplate(
            tuple(ids[:a]),
            tuple(ids[a + 1 : b]),
            tuple(ids[b + 1 :]),
            model.segments > 1 and segments[b] == 1,
        )
    sep = _special(tokenizer, "sep")
    if architecture == "decoder":
        return PairTemplate(
            (_special(tokenizer, "bos"),), (sep,), (_special(tokenizer, "cls"),), False
        )
    return PairTemplate((), (sep,), (), False)


def encode_pair(
    model: ModelConfig, tokenizer: Tokenizer, first: str, second: str
) -> tuple[list[int], list[int] | None]:
    """The ids of two texts as a model reads them, and their segments if it has any."""
    template = pair_template(model, tokenizer)
    ids, begin = template.join(tokenizer.encode(first), tokenizer.encode(second))
    segments = [int(position >= begin) for position in range(len(ids))]
    return ids.tolist(), segments if template.segmented else None


def _special(tokenizer: Tokenizer, name: str) -> int:
    id = tokenizer.special_id(name)
    return tokenizer.eos_id if id is None else id
