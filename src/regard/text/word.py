"""Words: whole words and punctuation marks, the most frequent ones of a text."""

from collections.abc import Iterable

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from regard.text.tokenizer import (
    GLUE,
    Tokenizer,
    check_size,
    check_text,
    special_tokens,
)


def train(pieces: Iterable[str], *, size: int = 20_000, lower: bool = False) -> Tokenizer:
    """The `size` most frequent words and punctuation marks; the rest is `<unk>`.

    A word is a run of letters, digits and underscores. Every other visible character is a token
    of its own, and so is the end of a line. A mark remembers on which side it touched its
    neighbour, so that words have one form only and the text can be joined again:

        say "don't",   ->   say  "￭  don  ￭'￭  t  ￭"  ￭,   ->   say "don't",

    What is lost: how many spaces stood between two words, all those around line ends, and a
    "￭" in the text itself.
    """
    check_size(size, 1, "a word")
    library = tokenizers.Tokenizer(models.WordLevel(unk_token="<unk>"))
    glue = [
        normalizers.Replace(Regex(r"(?<=\S)(?=[^\w\s])"), GLUE),
        normalizers.Replace(Regex(r"(?<=[^\w\s])(?=\w)"), GLUE),
    ]
    library.normalizer = normalizers.Sequence([normalizers.Lowercase(), *glue] if lower else glue)
    word = rf"\w+|\n|{GLUE}?[^\w\s{GLUE}](?:{GLUE}(?=\w))?"
    library.pre_tokenizer = pre_tokenizers.Split(Regex(word), "removed", invert=True)
    library.decoder = decoders.Sequence(
        [
            decoders.WordPiece(prefix=GLUE, cleanup=False),  # spaces, save before a glued token
            decoders.Fuse(),
            decoders.Replace(Regex(f"{GLUE} ?"), ""),
            decoders.Replace(Regex(" ?\n ?"), "\n"),
        ]
    )
    trainer = trainers.WordLevelTrainer(
        vocab_size=size, special_tokens=special_tokens(), show_progress=False
    )
    library.train_from_iterator(map(check_text, pieces), trainer)
    return Tokenizer(library)
