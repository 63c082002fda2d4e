"""Vocabularies kept as plain lists: GPT-2's pairs of bytes and BERT's word pieces."""

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from regard.errors import CheckpointError
from regard.files.untrusted import check_vocab_ids, read_json, read_text
from regard.text.special_tokens import Table

# How Qwen's makers cut text before pairs are joined: unlike GPT-2, each digit stands alone, a
# word may begin with any one mark, and contractions are found in capitals too.
CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
QWEN = "|".join([CONTRACTION, WORD, r"\p{N}", MARKS, r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])
CUTS = {"qwen2": QWEN, "qwen3": QWEN}  # by model_type; all others are cut as in GPT-2


def byte_pairs(vocab: Path, merges: Path, settings: Table) -> tokenizers.Tokenizer:
    """GPT-2's vocab.json and merges.txt, or encoder.json and vocab.bpe, as is RoBERTa's."""
    ids = read_vocab(vocab)
    if any(token.endswith("</w>") for token in ids):
        raise CheckpointError(
            f"{vocab} marks the ends of words with </w>, as GPT-1 did, and not bytes as GPT-2;\n"
            "save it with transformers as a tokenizer.json first"
        )
    check_vocab_ids(ids.values())
    library = tokenizers.Tokenizer(models.BPE(ids, _merges(merges)))
    prefix = bool(settings.get("add_prefix_space", False))
    cut = CUTS.get(str(settings.get("model_type")))
    if cut is None:
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    else:
        library.normalizer = normalizers.NFC()
        steps: list[Any] = [
            pre_tokenizers.Split(Regex(cut), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False),
        ]
        library.pre_tokenizer = pre_tokenizers.Sequence(steps)
    library.decoder = decoders.ByteLevel()
    return library


def word_pieces(vocab: Path, settings: Table) -> tokenizers.Tokenizer:
    """BERT's vocab.txt, one piece in each line.

    Where nothing says whether text is lowered first, it is if no piece has a capital letter.
    """
    try:
        pieces = read_text(vocab).split("\n")
    except UnicodeDecodeError:
        raise CheckpointError(f"{vocab} is not UTF-8") from None
    while pieces and not pieces[-1]:
        pieces.pop()
    ids = {piece: id for id, piece in enumerate(pieces)}  # of two lines alike the later counts
    lower = settings.get("do_lower_case")
    if lower is None:
        ordinary = (piece for piece in ids if not piece.startswith(("[", "<")))
        lower = all(piece == piece.lower() for piece in ordinary)
    unknown = next((name for name in ("[UNK]", "<unk>") if name in ids), None)
    if unknown is None:
        raise CheckpointError(f"{vocab} has no piece [UNK] for what is unknown")
    library = tokenizers.Tokenizer(models.WordPiece(ids, unk_token=unknown))
    library.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=bool(settings.get("tokenize_chinese_chars", True)),
        strip_accents=settings.get("strip_accents"),  # None: where text is lowered
        lowercase=bool(lower),
    )
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece(prefix="##")
    return library


def read_vocab(path: Path) -> dict[str, int]:
    """A table from tokens to ids."""
    table = read_json(path)
    ids = list(table.values())
    if not ids or not all(type(id) is int and 0 <= id < 2**31 for id in ids):
        raise CheckpointError(f"{path} is damaged: it must give each token its number")
    if len(set(ids)) < len(ids):
        raise CheckpointError(f"{path} is damaged: two tokens have one number")
    return table


def _merges(path: Path) -> list[tuple[str, str]]:
    try:
        lines = read_text(path).split("\n")
    except UnicodeDecodeError:
        raise CheckpointError(f"{path} is not UTF-8") from None
    first = 1 if lines[0].startswith("#version") else 0
    merges = []
    for number, line in enumerate(lines[first:], first + 1):
        parts = line.split(" ")
        if line and len(parts) != 2:
            raise CheckpointError(f"{path}, line {number}: {line[:40]!r} is not a pair of tokens")
        if line:
            merges.append((parts[0], parts[1]))
    return merges
