"""Vocabulary files of older tokenizers: GPT-2's vocab.json and merges.txt, BERT's vocab.txt."""

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from regard.errors import CheckpointError
from regard.files.untrusted import JSONObject, check_vocab_ids, read_json, read_text
from regard.text.tokenizer_limits import check_token_lengths

# Qwen's pre-tokenizer: unlike in GPT-2, each digit is split off, a word may begin with any one
# punctuation mark, and contractions are recognized in upper case too.
CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
QWEN = "|".join([CONTRACTION, WORD, r"\p{N}", PUNCTUATION, r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])
BERT_JAPANESE = "BertJapaneseTokenizer"
SPLIT_PATTERNS = {"qwen2": QWEN, "qwen3": QWEN}  # by model_type; others split as GPT-2 does


def read_bpe(vocab: Path, merges: Path, settings: JSONObject) -> tokenizers.Tokenizer:
    """Byte-level BPE (GPT-2): vocab.json and merges.txt, or encoder.json and vocab.bpe."""
    ids = read_vocab(vocab)
    if any(token.endswith("</w>") for token in ids):
        raise CheckpointError(
            f"{vocab} is not byte-level BPE: it marks ends of words with </w>, as GPT-1 does;\n"
            "save it with transformers as a tokenizer.json first"
        )
    check_vocab_ids(ids.values())
    backend = tokenizers.Tokenizer(models.BPE(ids, _read_merges(merges)))
    prefix = bool(settings.get("add_prefix_space", False))
    pattern = SPLIT_PATTERNS.get(str(settings.get("model_type")))
    if pattern is None:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    else:
        backend.normalizer = normalizers.NFC()
        steps: list[Any] = [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False),
        ]
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def read_wordpiece(vocab: Path, settings: JSONObject) -> tokenizers.Tokenizer:
    """BERT's vocab.txt, one piece per line.

    Without `do_lower_case`, text is lowercased if no piece has an upper-case letter.
    """
    if settings.get("tokenizer_class") == BERT_JAPANESE:
        raise CheckpointError(
            f"{vocab} belongs to {BERT_JAPANESE}, which is not supported: it first splits text "
            "into words with a Japanese morphological analyzer"
        )
    try:
        pieces = read_text(vocab).split("\n")
    except UnicodeDecodeError:
        raise CheckpointError(f"{vocab} is not UTF-8") from None
    while pieces and not pieces[-1]:
        pieces.pop()
    check_token_lengths(pieces)
    ids = {piece: id for id, piece in enumerate(pieces)}  # for duplicate lines, the last id wins
    lower = settings.get("do_lower_case")
    if lower is None:
        ordinary = (piece for piece in ids if not piece.startswith(("[", "<")))
        lower = all(piece == piece.lower() for piece in ordinary)
    unknown = next((name for name in ("[UNK]", "<unk>") if name in ids), None)
    if unknown is None:
        raise CheckpointError(f"{vocab} has no unknown token [UNK]")
    backend = tokenizers.Tokenizer(models.WordPiece(ids, unk_token=unknown))
    backend.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=bool(settings.get("tokenize_chinese_chars", True)),
        strip_accents=settings.get("strip_accents"),  # None: if text is lowercased
        lowercase=bool(lower),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    return backend


def read_vocab(path: Path) -> dict[str, int]:
    """Read a JSON object of tokens and their ids."""
    table = read_json(path)
    ids = list(table.values())
    if not ids or not all(type(id) is int and 0 <= id < 2**31 for id in ids):
        raise CheckpointError(f"{path} is corrupted: the id of every token must be an integer >= 0")
    if len(set(ids)) < len(ids):
        raise CheckpointError(f"{path} is corrupted: two tokens have the same id")
    check_token_lengths(table)
    return table


def _read_merges(path: Path) -> list[tuple[str, str]]:
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
