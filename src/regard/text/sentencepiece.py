"""SentencePiece's `.model` files, read without that library, and llama2.c's `tokenizer.bin`.

A `.model` is a protocol buffer: the pieces with their scores, how they are used, and how text
is normalised first. Files are not trusted: every length is checked before it is used.
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
from regard.text.tokenizer import HIDDEN, SPACE

UNIGRAM, BPE = 1, 2  # trainer_spec.model_type
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)  # what a piece is for
KINDS = {NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE}
MARK = re.compile(r"<[a-z]+>|</s>|>>.+<<")
LONGEST = 1 << 16  # bytes of one piece; real ones have some tens


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece of the vocabulary; its place in the list is its id."""

    text: str
    score: float
    kind: int = NORMAL


@dataclass(kw_only=True, slots=True)
class Pieces:
    """All that a `.model` says about how text is cut."""

    pieces: list[Piece] = field(default_factory=list)
    model: int = UNIGRAM
    fallback: bool = False  # what is unknown becomes its bytes, '<0xE2>'
    suffix: bool = False  # a space belongs to the word before it
    charsmap: bytes = b""  # which characters are replaced by which
    prefix: bool = True  # a space is put before the text
    squeeze: bool = True  # spaces at both ends and repeated ones go
    escape: bool = True  # spaces are written '▁'


# Field numbers of the protocol buffer, and our name for what they hold.
SPECS = {
    2: {3: "model", 24: "suffix", 35: "fallback"},  # trainer_spec
    3: {2: "charsmap", 3: "prefix", 4: "squeeze", 5: "escape"},  # normalizer_spec
}


def read_pieces(path: Path) -> Pieces:
    """Read a `.model` or `.spm` file."""
    data = read_bytes(path)
    try:
        result = Pieces()
        for number, value in _fields(data):
            if number == 1:
                result.pieces.append(_piece(_bytes(value)))
            elif number in SPECS:
                for inner, each in _fields(_bytes(value)):
                    if inner in SPECS[number]:
                        _set(result, SPECS[number][inner], each)
        _check(result)
    except (ValueError, struct.error) as error:
        raise CheckpointError(f"{path} is not a SentencePiece model, or damaged: {error}") from None
    return result


def read_llama2c(path: Path) -> Pieces:
    """Read llama2.c's tokenizer.bin: the length of the longest piece, then score, length, bytes.

    Spaces stand as they are, and the first three pieces are `<unk>`, `<s>` and `</s>`.
    """
    data = read_bytes(path)
    try:
        (longest,) = struct.unpack_from("<i", data)
        names, at = [], 4
        while at < len(data):
            score, length = struct.unpack_from("<fi", data, at)
            if not 0 <= length <= min(longest, len(data) - at - 8) or not math.isfinite(score):
                _fail(f"no piece at byte {at}")
            names.append((data[at + 8 : at + 8 + length].decode(), score))
            at += 8 + length
        pieces = [Piece("<unk>", 0.0, UNKNOWN), Piece("<s>", 0.0, CONTROL)]
        pieces.append(Piece("</s>", 0.0, CONTROL))
        for name, score in names[3:]:
            byte = len(name) == 6 and name.startswith("<0x")
            pieces.append(Piece(name.replace(" ", SPACE), score, BYTE if byte else NORMAL))
        result = Pieces(pieces=pieces, model=BPE, fallback=True, squeeze=False)
        _check(result)
    except (ValueError, struct.error) as error:
        raise CheckpointError(f"{path} is not a llama2.c tokenizer, or damaged: {error}") from None
    return result


def build(spec: Pieces, order: dict[str, int] | None = None) -> tokenizers.Tokenizer:
    """A tokenizer that cuts text as SentencePiece does.

    `order` gives the pieces other ids (Marian's vocab.json). Its pieces that `spec` lacks belong
    to the other side of a translation: they are hidden, decoded but never found in text. Marks
    such as '<pad>' and '>>fr<<' are on both sides.
    """
    library = tokenizers.Tokenizer(MODELS[spec.model](spec, order))
    added = [piece for piece in spec.pieces if piece.kind in _added(spec)]
    prefix_once = spec.prefix and any(piece.kind == USER for piece in added)
    steps: list[Any] = []
    if spec.charsmap:
        steps.append(normalizers.Precompiled(spec.charsmap))
    if spec.squeeze:
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if spec.prefix and not prefix_once:
        steps.append(normalizers.Prepend(SPACE if spec.escape else " "))
    if spec.escape:
        steps.append(normalizers.Replace(" ", SPACE))
    if steps:
        library.normalizer = normalizers.Sequence(steps)
    if prefix_once:  # added tokens cut the text before it is normalised; only its start counts
        library.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "first", split=False)
    library.decoder = decoders.Sequence(
        [
            decoders.Replace(HIDDEN, ""),
            decoders.Replace(SPACE, " "),
            *([decoders.ByteFallback()] if spec.fallback else []),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if spec.prefix else []),
        ]
    )
    library.add_tokens(
        [
            AddedToken(piece.text, normalized=False, special=piece.kind != USER)
            for piece in added
            if order is None or piece.text in order
        ]
    )
    return library


def _added(spec: Pieces) -> set[int]:
    return {UNKNOWN, CONTROL} if spec.model == UNIGRAM else {UNKNOWN, CONTROL, USER}


def _unigram(spec: Pieces, order: dict[str, int] | None) -> models.Model:
    """Scores as they are; a piece of the user's own wins over all ways to cut it."""
    normal = [piece.score for piece in spec.pieces if piece.kind == NORMAL]
    best = max(normal, default=0.0)
    scores = {}
    for piece in spec.pieces:
        own = len(piece.text) * best - 0.1
        scores[piece.text] = own if piece.kind == USER else piece.score
    unknown = next(piece.text for piece in spec.pieces if piece.kind == UNKNOWN)
    if order is None:
        names = [piece.text for piece in spec.pieces]
        return models.Unigram(
            [(name, scores[name]) for name in names], names.index(unknown), spec.fallback
        )
    lowest = min(normal, default=0.0)
    vocab = []
    for name in sorted(order, key=lambda name: order[name]):
        known = name in scores or MARK.fullmatch(name)
        vocab.append((name if known else HIDDEN + name, scores.get(name, lowest)))
    return models.Unigram(vocab, order[unknown], spec.fallback)


def _bpe(spec: Pieces, order: dict[str, int] | None) -> models.Model:
    """Of all pairs that give a piece, the one whose piece has the best score is joined first."""
    if order is not None:
        _fail("a BPE model with a vocab.json of its own is not supported")
    ids = {piece.text: id for id, piece in enumerate(spec.pieces)}
    usable = {piece.text for piece in spec.pieces if piece.kind in (NORMAL, USER)}
    merges = []
    for piece in spec.pieces:
        if piece.kind != NORMAL:
            continue
        for cut in range(1, len(piece.text)):
            left, right = piece.text[:cut], piece.text[cut:]
            if left in usable and right in usable:
                merges.append((-piece.score, ids[piece.text], cut, left, right))
    merges.sort()
    unknown = next(piece.text for piece in spec.pieces if piece.kind == UNKNOWN)
    return models.BPE(
        ids,
        [(left, right) for *_, left, right in merges],
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=spec.fallback,
    )


MODELS = {UNIGRAM: _unigram, BPE: _bpe}


def _check(spec: Pieces) -> None:
    if spec.model not in MODELS:
        _fail(f"model_type={spec.model} is neither unigram (1) nor bpe (2)")
    if spec.suffix:
        _fail("treat_whitespace_as_suffix is not supported")
    if len({piece.text for piece in spec.pieces}) < len(spec.pieces):
        _fail("a piece stands twice")
    if not any(piece.kind == UNKNOWN for piece in spec.pieces):
        _fail("no piece for what is unknown")
    if spec.fallback and len([piece for piece in spec.pieces if piece.kind == BYTE]) != 256:
        _fail("it falls back on bytes and has not all 256")
    if spec.charsmap:
        check_charsmap(spec.charsmap)


def _piece(data: bytes) -> Piece:
    text, score, kind = "", 0.0, NORMAL
    for number, value in _fields(data):
        if number == 1:
            text = _bytes(value).decode()
        elif number == 2:
            (score,) = struct.unpack("<f", _bytes(value))
        elif number == 3:
            kind = value if value in KINDS else _fail(f"a piece of kind {value!r}")
    if not text or len(text) > LONGEST or not math.isfinite(score):
        _fail(f"a piece of {len(text)} characters with score {score}")
    return Piece(text, score, kind)


def _set(spec: Pieces, name: str, value: int | bytes) -> None:
    wanted = type(getattr(spec, name))
    if isinstance(value, bytes) != (wanted is bytes):
        _fail(f"{name} is of the wrong type")
    setattr(spec, name, wanted(value))


def _bytes(value: int | bytes) -> bytes:
    return value if isinstance(value, bytes) else _fail("a number where text must be")


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a protocol buffer: a tag of number and type, then a number or some bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = {1: 8, 5: 4}[wire]
        else:
            _fail(f"wire type {wire} at byte {at}")
        if size > len(data) - at:
            _fail(f"{size} bytes at byte {at} of {len(data)}")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            _fail("it ends inside a number")
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
    return _fail("a number of more than ten bytes")


def _fail(why: str) -> NoReturn:
    raise ValueError(why)
