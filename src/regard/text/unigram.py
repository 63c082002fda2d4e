"""Unigram pieces, as in SentencePiece and T5."""

import json
from collections.abc import Iterable

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from regard.text.special_tokens import SPECIAL_TOKENS
from regard.text.tokenizer import SPACE, Tokenizer, characters, check_size, special_tokens


def train(pieces: Iterable[str], *, size: int = 8000, lower: bool = False) -> Tokenizer:
    """Each piece has a probability; a text is cut in the most probable way.

        p(x_1 … x_n) = p(x_1) · … · p(x_n),     pieces(text) = argmax over all ways to cut it

    Begins with many pieces and drops, round by round, those whose loss lowers the likelihood
    least. A space is written '▁' and belongs to the piece after it, so spaces come back; unlike
    SentencePiece none is put before the text. Text of seen characters comes back exactly, save
    that a '▁' in it becomes a space. Kudo 2018.
    """
    pieces = list(pieces)
    alphabet = characters(pieces, lower=lower)
    check_size(size, len(alphabet), f"{len(alphabet)} characters; or take bpe, with its 256 bytes")
    library = tokenizers.Tokenizer(models.Unigram())
    if lower:
        library.normalizer = normalizers.Lowercase()
    # Letters, digits and the rest never share a piece. That also keeps '<pad>' in a text from
    # being found in the vocabulary.
    word = rf"{SPACE}?[\p{{L}}\p{{M}}]+|{SPACE}?\p{{N}}+|{SPACE}?[^{SPACE}\p{{L}}\p{{M}}\p{{N}}]+"
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="never", split=False),
            pre_tokenizers.Split(Regex(word), "isolated"),
        ]
    )
    library.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme="never")
    trainer = trainers.UnigramTrainer(
        vocab_size=size, special_tokens=special_tokens(), unk_token="<unk>", show_progress=False
    )
    library.train_from_iterator(pieces, trainer)
    scores = dict(json.loads(library.to_str())["model"]["vocab"])
    library.model = models.Unigram(_settled(scores), SPECIAL_TOKENS.index("<unk>"), False)
    return Tokenizer(library)


def _settled(scores: dict[str, float]) -> list[tuple[str, float]]:
    """The trained pieces in a fixed order, with the same scores for the same text.

    The trainer (tokenizers 0.23) visits words in a random order: sums differ in their last bits,
    pieces of equal score stand in any order, and characters that lost all probability get the
    lowest score plus 0.0001, 0.0002, … in any order. Those get the lowest score; all are rounded.
    """
    learned = {piece: score for piece, score in scores.items() if piece not in SPECIAL_TOKENS}
    lowest = min(learned.values(), default=0.0)
    near = lowest + 0.0001 * sum(len(piece) == 1 for piece in learned)
    for piece, score in learned.items():
        lost = len(piece) == 1 and score < near
        learned[piece] = round(lowest if lost else score, 3)
    ordered = sorted(learned.items(), key=lambda item: (-item[1], item[0]))
    return [*((token, 0.0) for token in SPECIAL_TOKENS), *ordered]
