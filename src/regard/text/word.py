"""Word-level tokenizer: the most frequent words and punctuation marks of a text."""

from collections.abc import Iterable

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from regard.text.tokenizer import (
    JOINER,
    Tokenizer,
    added_special_tokens,
    check_text,
    check_vocab_size,
)


def train(texts: Iterable[str], *, vocab_size: int = 20_000, lower: bool = False) -> Tokenizer:
    """Train a tokenizer on the most frequent words and punctuation marks; others become `<unk>`.

    `vocab_size` includes the special tokens. A word is a run of letters, digits and underscores.
    Every other visible character is one token, and so is a line break. A joiner on a punctuation
    mark says on which side it had no space, so that a word has one form only and decoding restores
    the spaces:

        say "don't",   ->   say  "￭  don  ￭'￭  t  ￭"  ￭,   ->   say "don't",

    Not restored: the number of spaces between two words, spaces around line breaks, and a "￭" in
    the text.
    """
    check_vocab_size(vocab_size, 1, "a word")
    backend = tokenizers.Tokenizer(models.WordLevel(unk_token="<unk>"))
    joiners = [
        normalizers.Replace(Regex(r"(?<=\S)(?=[^\w\s])"), JOINER),
        normalizers.Replace(Regex(r"(?<=[^\w\s])(?=\w)"), JOINER),
    ]
    backend.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), *joiners] if lower else joiners
    )
    word = rf"\w+|\n|{JOINER}?[^\w\s{JOINER}](?:{JOINER}(?=\w))?"
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(word), "removed", invert=True)
    backend.decoder = decoders.Sequence(
        [
            decoders.WordPiece(prefix=JOINER, cleanup=False),  # a space, except before a joiner
            decoders.Fuse(),
            decoders.Replace(Regex(f"{JOINER} ?"), ""),
            decoders.Replace(Regex(" ?\n ?"), "\n"),
        ]
    )
    trainer = trainers.WordLevelTrainer(
        vocab_size=vocab_size, special_tokens=added_special_tokens(), show_progress=False
    )
    backend.train_from_iterator(map(check_text, texts), trainer)
    return Tokenizer(backend)
