"""Byte pair encoding on bytes, as in GPT-2."""

from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from regard.text.tokenizer import Tokenizer, check_size, check_text, special_tokens


def train(pieces: Iterable[str], *, size: int = 8000, lower: bool = False) -> Tokenizer:
    """Begins with the 256 bytes and joins the most frequent neighbouring pair, again and again.

        (a, b) = argmax count(a b),     vocabulary += ab,     until there are `size` tokens

    Pairs are joined inside words only, and not if seen but once, so a short text gives fewer
    tokens. Nothing is unknown to bytes: any text comes back exactly (with `lower`, in lower case).
    Sennrich et al. 2016; on bytes, Radford et al. 2019.
    """
    check_size(size, 256, "256 bytes")
    library = tokenizers.Tokenizer(models.BPE())
    if lower:
        library.normalizer = normalizers.Lowercase()
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=special_tokens(),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    library.train_from_iterator(map(check_text, pieces), trainer)
    return Tokenizer(library)
