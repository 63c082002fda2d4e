"""SentencePiece's `.model` files and llama2.c's `tokenizer.bin`, read without their libraries.

A `.model` is a protocol buffer: the pieces with their scores and types, and how text is
normalized. Files are untrusted: every length is checked before it is used.
"""

import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from regard.errors import CheckpointError
from regard.files.untrusted import check_charsmap, read_bytes
from regard.text.tokenizer import DECODE_ONLY_PREFIX, METASPACE
from regard.text.tokenizer_limits import (
    MAX_TOKEN_LENGTH,
    MAX_UNIGRAM_PREFIXES,
    check_prefixes,
    check_token_lengths,
)

UNIGRAM, BPE = 1, 2  # trainer_spec.model_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of pieces
PIECE_TYPES = {NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE}
CONTROL_TEXT = re.compile(r"<[a-z]+>|</s>|>>.+<<")
# Trying all splits of an n-character piece into two parts copies about n ** 2 characters.
MAX_SPLIT_COST = 200_000_000  # sum over the pieces of a BPE model; Gemma has 16 million


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece of the vocabulary; its index in the list is its id."""

    text: str
    score: float
    type: int = NORMAL


@dataclass(kw_only=True, slots=True)
class SentencePieceModel:
    """The content of a `.model` file that affects tokenization."""

    pieces: list[Piece] = field(default_factory=list)
    model_type: int = UNIGRAM
    byte_fallback: bool = False  # unknown characters become bytes, '<0xE2>'
    treat_whitespace_as_suffix: bool = False  # a space belongs to the word before it
    precompiled_charsmap: bytes = b""  # replacements of characters, as a trie
    add_dummy_prefix: bool = True  # a space is added before the text
    remove_extra_whitespaces: bool = True  # at both ends, and repeated ones
    escape_whitespaces: bool = True  # spaces are written '▁'


# Field numbers of the protocol buffer and the attributes that they set.
SPECS = {
    2: {3: "model_type", 24: "treat_whitespace_as_suffix", 35: "byte_fallback"},  # trainer_spec
    3: {  # normalizer_spec
        2: "precompiled_charsmap",
        3: "add_dummy_prefix",
        4: "remove_extra_whitespaces",
        5: "escape_whitespaces",
    },
}


def read_model(path: Path) -> SentencePieceModel:
    """Read a `.model` or `.spm` file."""
    data = read_bytes(path)
    try:
        model = SentencePieceModel()
        for number, value in _fields(data):
            if number == 1:
                model.pieces.append(_parse_piece(_bytes(value)))
            elif number in SPECS:
                for field_number, field_value in _fields(_bytes(value)):
                    if field_number in SPECS[number]:
                        _set(model, SPECS[number][field_number], field_value)
        _check(model)
    except (ValueError, struct.error) as error:
        raise CheckpointError(
            f"{path} is not a SentencePiece model, or corrupted: {error}"
        ) from None
    return model


def read_llama2c(path: Path) -> SentencePieceModel:
    """Read llama2.c's tokenizer.bin: maximum piece length, then score, length, bytes of each piece.

    Spaces are not escaped, and the first three pieces are `<unk>`, `<s>` and `</s>`.
    """
    data = read_bytes(path)
    try:
        (max_length,) = struct.unpack_from("<i", data)
        entries, offset = [], 4
        while offset < len(data):
            score, length = struct.unpack_from("<fi", data, offset)
            if not 0 <= length <= min(max_length, len(data) - offset - 8) or not math.isfinite(
                score
            ):
                _fail(f"no valid piece at byte {offset}")
            entries.append((data[offset + 8 : offset + 8 + length].decode(), score))
            offset += 8 + length
        pieces = [Piece("<unk>", 0.0, UNKNOWN), Piece("<s>", 0.0, CONTROL)]
        pieces.append(Piece("</s>", 0.0, CONTROL))
        for text, score in entries[3:]:
            is_byte = len(text) == 6 and text.startswith("<0x")
            pieces.append(Piece(text.replace(" ", METASPACE), score, BYTE if is_byte else NORMAL))
        model = SentencePieceModel(
            pieces=pieces, model_type=BPE, byte_fallback=True, remove_extra_whitespaces=False
        )
        _check(model)
    except (ValueError, struct.error) as error:
        raise CheckpointError(
            f"{path} is not a llama2.c tokenizer, or corrupted: {error}"
        ) from None
    return model


def build_tokenizer(
    model: SentencePieceModel, ids: dict[str, int] | None = None
) -> tokenizers.Tokenizer:
    """A tokenizer that segments text as SentencePiece does.

    `ids` gives the pieces other ids (Marian's vocab.json). Its pieces that `model` lacks belong to
    the other language of a pair: they are decoded but never encoded. Control tokens such as
    '<pad>' and '>>fr<<' belong to both languages.
    """
    backend = tokenizers.Tokenizer(BACKEND_MODELS[model.model_type](model, ids))
    added = [piece for piece in model.pieces if piece.type in _added_types(model)]
    prefix_once = model.add_dummy_prefix and any(piece.type == USER_DEFINED for piece in added)
    steps: list[Any] = []
    if model.precompiled_charsmap:
        steps.append(normalizers.Precompiled(model.precompiled_charsmap))
    if model.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if model.add_dummy_prefix and not prefix_once:
        steps.append(normalizers.Prepend(METASPACE if model.escape_whitespaces else " "))
    if model.escape_whitespaces:
        steps.append(normalizers.Replace(" ", METASPACE))
    if steps:
        backend.normalizer = normalizers.Sequence(steps)
    # Added tokens split the text before it is normalized; only its start gets the prefix.
    if prefix_once:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(METASPACE, "first", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(DECODE_ONLY_PREFIX, ""),
            decoders.Replace(METASPACE, " "),
            *([decoders.ByteFallback()] if model.byte_fallback else []),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if model.add_dummy_prefix else []),
        ]
    )
    backend.add_tokens(
        [
            AddedToken(piece.text, normalized=False, special=piece.type != USER_DEFINED)
            for piece in added
            if ids is None or piece.text in ids
        ]
    )
    return backend


def _added_types(model: SentencePieceModel) -> set[int]:
    return {UNKNOWN, CONTROL} if model.model_type == UNIGRAM else {UNKNOWN, CONTROL, USER_DEFINED}


def _unigram(model: SentencePieceModel, ids: dict[str, int] | None) -> models.Model:
    """Keep the scores of the file; a user-defined piece outscores every segmentation of it."""
    normal_scores = [piece.score for piece in model.pieces if piece.type == NORMAL]
    best = max(normal_scores, default=0.0)
    scores = {}
    for piece in model.pieces:
        user_score = len(piece.text) * best - 0.1
        scores[piece.text] = user_score if piece.type == USER_DEFINED else piece.score
    unknown = next(piece.text for piece in model.pieces if piece.type == UNKNOWN)
    if ids is None:
        names = [piece.text for piece in model.pieces]
        return models.Unigram(
            [(name, scores[name]) for name in names], names.index(unknown), model.byte_fallback
        )
    lowest = min(normal_scores, default=0.0)
    vocab = []
    for name in sorted(ids, key=lambda name: ids[name]):
        known = name in scores or CONTROL_TEXT.fullmatch(name)
        vocab.append((name if known else DECODE_ONLY_PREFIX + name, scores.get(name, lowest)))
    return models.Unigram(vocab, ids[unknown], model.byte_fallback)


def _bpe(model: SentencePieceModel, ids: dict[str, int] | None) -> models.Model:
    """Order the merges by the scores of the pieces that they produce."""
    if ids is not None:
        _fail("a BPE model with a separate vocab.json is not supported")
    ids = {piece.text: id for id, piece in enumerate(model.pieces)}
    usable = {piece.text for piece in model.pieces if piece.type in (NORMAL, USER_DEFINED)}
    merges = []
    for piece in model.pieces:
        if piece.type != NORMAL:
            continue
        for cut in range(1, len(piece.text)):
            left, right = piece.text[:cut], piece.text[cut:]
            if left in usable and right in usable:
                merges.append((-piece.score, ids[piece.text], cut, left, right))
    merges.sort()
    unknown = next(piece.text for piece in model.pieces if piece.type == UNKNOWN)
    return models.BPE(
        ids,
        [(left, right) for *_, left, right in merges],
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
    )


BACKEND_MODELS = {UNIGRAM: _unigram, BPE: _bpe}


def _check(model: SentencePieceModel) -> None:
    if model.model_type not in BACKEND_MODELS:
        _fail(f"model_type={model.model_type} is neither unigram (1) nor bpe (2)")
    if model.treat_whitespace_as_suffix:
        _fail("treat_whitespace_as_suffix is not supported")
    if len({piece.text for piece in model.pieces}) < len(model.pieces):
        _fail("a piece appears twice")
    if not any(piece.type == UNKNOWN for piece in model.pieces):
        _fail("it has no unknown piece")
    if model.byte_fallback and len([piece for piece in model.pieces if piece.type == BYTE]) != 256:
        _fail("it uses byte_fallback but lacks some of the 256 byte pieces")
    if model.precompiled_charsmap:
        check_charsmap(model.precompiled_charsmap)
    texts = [piece.text for piece in model.pieces]
    check_token_lengths(texts)
    if model.model_type == UNIGRAM:
        check_prefixes(texts, MAX_UNIGRAM_PREFIXES, "the model")
    elif (cost := sum(len(text) ** 2 for text in texts)) > MAX_SPLIT_COST:
        _fail(
            f"its pieces are too long: their squared lengths sum to {cost:,}, and the limit is "
            f"{MAX_SPLIT_COST:,}"
        )


def _parse_piece(data: bytes) -> Piece:
    text, score, piece_type = "", 0.0, NORMAL
    for number, value in _fields(data):
        if number == 1:
            text = _bytes(value).decode()
        elif number == 2:
            (score,) = struct.unpack("<f", _bytes(value))
        elif number == 3:
            piece_type = value if value in PIECE_TYPES else _fail(f"unknown piece type {value!r}")
    if not text or len(text) > MAX_TOKEN_LENGTH or not math.isfinite(score):
        _fail(
            f"a piece has {len(text)} characters and score {score}; it must have 1 to "
            f"{MAX_TOKEN_LENGTH:,} characters and a finite score"
        )
    return Piece(text, score, piece_type)


def _set(model: SentencePieceModel, name: str, value: int | bytes) -> None:
    field_type = type(getattr(model, name))
    if isinstance(value, bytes) != (field_type is bytes):
        _fail(f"{name} has the wrong type")
    setattr(model, name, field_type(value))


def _bytes(value: int | bytes) -> bytes:
    return value if isinstance(value, bytes) else _fail("a field has a number instead of bytes")


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a protocol buffer: a tag of number and wire type, then an integer or bytes."""
    offset = 0
    while offset < len(data):
        tag, offset = _varint(data, offset)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, offset = _varint(data, offset)
            yield number, value
            continue
        if wire == 2:
            size, offset = _varint(data, offset)
        elif wire in (1, 5):
            size = {1: 8, 5: 4}[wire]
        else:
            _fail(f"unknown wire type {wire} at byte {offset}")
        if size > len(data) - offset:
            _fail(f"a field of {size} bytes at byte {offset} exceeds the {len(data)} bytes")
        yield number, data[offset : offset + size]
        offset += size


def _varint(data: bytes, offset: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if offset >= len(data):
            _fail("it ends inside a varint")
        value |= (data[offset] & 0x7F) << shift
        offset += 1
        if data[offset - 1] < 0x80:
            return value, offset
    return _fail("a varint of more than ten bytes")


def _fail(problem: str) -> NoReturn:
    raise ValueError(problem)
