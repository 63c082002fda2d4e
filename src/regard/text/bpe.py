"""Byte-level byte pair encoding (BPE), as in GPT-2."""

from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from regard.text.tokenizer import Tokenizer, added_special_tokens, check_text, check_vocab_size


def train(texts: Iterable[str], *, vocab_size: int = 8000, lower: bool = False) -> Tokenizer:
    """Start with the 256 bytes and repeatedly merge the most frequent adjacent pair of tokens.

        (a, b) = argmax count(a b),     vocabulary += ab,     until it has `vocab_size` tokens

    Pairs are merged within words only and must occur twice, so a short text gives fewer tokens.
    No text is out of vocabulary: decoding restores any text exactly (with `lower`, in lower
    case).
    Sennrich et al. 2016; on bytes, Radford et al. 2019.
    """
    check_vocab_size(vocab_size, 256, "256 bytes")
    backend = tokenizers.Tokenizer(models.BPE())
    if lower:
        backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=added_special_tokens(),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(map(check_text, texts), trainer)
    return Tokenizer(backend)
