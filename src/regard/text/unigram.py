"""Unigram tokenizer, as in SentencePiece and T5."""

import json
from collections.abc import Iterable

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from regard.text.special_tokens import SPECIAL_TOKENS
from regard.text.tokenizer import (
    METASPACE,
    Tokenizer,
    added_special_tokens,
    characters,
    check_vocab_size,
)


def train(texts: Iterable[str], *, vocab_size: int = 8000, lower: bool = False) -> Tokenizer:
    """Train a unigram language model of pieces; a text gets its most probable segmentation.

        p(x_1 … x_n) = p(x_1) · … · p(x_n),     pieces(text) = argmax over all segmentations

    Training starts with many pieces and repeatedly removes those whose removal lowers the
    likelihood least. A space is written '▁' and belongs to the next piece; unlike SentencePiece,
    no space is added before the text. Decoding restores a text of known characters exactly,
    except that '▁' becomes a space. Kudo 2018.
    """
    texts = list(texts)
    alphabet = characters(texts, lower=lower)
    check_vocab_size(
        vocab_size, len(alphabet), f"{len(alphabet)} characters; bpe needs only 256 bytes"
    )
    backend = tokenizers.Tokenizer(models.Unigram())
    if lower:
        backend.normalizer = normalizers.Lowercase()
    # A piece never mixes letters, digits and other characters, so '<pad>' in a text is never
    # encoded as the special token.
    letters, digits = r"\p{L}\p{M}", r"\p{N}"
    runs = (f"[{letters}]+", f"{digits}+", f"[^{METASPACE}{letters}{digits}]+")
    word = "|".join(f"{METASPACE}?{run}" for run in runs)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(replacement=METASPACE, prepend_scheme="never", split=False),
            pre_tokenizers.Split(Regex(word), "isolated"),
        ]
    )
    backend.decoder = decoders.Metaspace(replacement=METASPACE, prepend_scheme="never")
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size,
        special_tokens=added_special_tokens(),
        unk_token="<unk>",
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    scores = dict(json.loads(backend.to_str())["model"]["vocab"])
    backend.model = models.Unigram(_sorted_pieces(scores), SPECIAL_TOKENS.index("<unk>"), False)
    return Tokenizer(backend)


def _sorted_pieces(scores: dict[str, float]) -> list[tuple[str, float]]:
    """The trained pieces in a deterministic order with deterministic scores.

    The trainer (tokenizers 0.23) visits words in a random order: sums differ in the last bits,
    pieces of equal score come in any order, and characters without probability get the lowest
    score plus 0.0001, 0.0002, … in any order. Those get the lowest score; all scores are rounded.
    """
    pieces = {piece: score for piece, score in scores.items() if piece not in SPECIAL_TOKENS}
    lowest = min(pieces.values(), default=0.0)
    near_lowest = lowest + 0.0001 * sum(len(piece) == 1 for piece in pieces)
    for piece, score in pieces.items():
        has_no_probability = len(piece) == 1 and score < near_lowest
        pieces[piece] = round(lowest if has_no_probability else score, 3)
    ordered = sorted(pieces.items(), key=lambda item: (-item[1], item[0]))
    return [*((token, 0.0) for token in SPECIAL_TOKENS), *ordered]
