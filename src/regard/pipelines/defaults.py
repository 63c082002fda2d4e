"""Choices for those who gave only data: a recipe, printed and saved like any other."""

from pathlib import Path
from typing import Any

from regard.config import Choice, kind_of
from regard.data.sources import Data, Images, LabelledText, Pairs, Series, Text

GENTLE = {"lr": 1e-4, "optimizer": "adamw"}  # for weights that have learned already
SMALL_TEXT = 10_000_000  # bytes; below, characters are learned faster than sub-words


def choose(
    data: Data, where: dict[str, Any], *, fast: bool, task: Choice = "causal"
) -> dict[str, Any]:
    """The settings of a run on this data; `fast` says that there is a GPU.

    `task` is what is to be learned where the data leaves a choice.
    """
    if isinstance(data, Images):
        return _images(data, where, fast)
    if isinstance(data, Series):
        order = max(1, min(24, len(data) // 20))
        return {
            "task": {"kind": "forecast", "horizon": max(1, min(96, len(data) // 40))},
            "data": where,
            "model": {"family": "autoregression", "order": order},
        }
    if isinstance(data, Pairs):
        return _pairs(data, where, fast)
    if isinstance(data, LabelledText):
        return _labels(data, where, fast)
    kind, options = kind_of(task)
    if kind == "masked":
        return _masked(data, where, fast, pairs=options.get("next_sentence") is True)
    if kind == "cbow":
        return _cbow(data, where)
    return _text(data, where, fast)


def _text(data: Text, where: dict[str, Any], fast: bool) -> dict[str, Any]:
    """A decoder: characters for a small text with a small alphabet, sub-words for the rest."""
    by_character = data.size < SMALL_TEXT and len(_alphabet(data)) <= 256
    size = min(32_000, max(1000, data.size // 500 // 100 * 100))
    shape = (
        {"dim": 384, "layers": 6, "heads": 6, "context": 256, "dropout": 0.2}
        if fast
        else {"dim": 128, "layers": 4, "heads": 4, "context": 64 if by_character else 128}
    )
    return {
        "task": "causal",
        "data": {**where, "tokenizer": "char" if by_character else {"kind": "bpe", "size": size}},
        "model": {"preset": "tiny-decoder", **_fitting(shape, data.size // 20)},
        "train": {
            "steps": 3000 if fast else 2000,
            "batch": 64 if fast else 12,
            "lr": 3e-3 if fast else 6e-3,
            "optimizer": "muon",
            "ema": 0.99,
            "schedule": {"kind": "linear", "warmup": 30},
        },
    }


def _masked(data: Text, where: dict[str, Any], fast: bool, *, pairs: bool) -> dict[str, Any]:
    """An encoder over sub-words; of `pairs` where sentences are told apart."""
    size = min(32_000, max(1000, data.size // 200 // 100 * 100))
    shape = (
        {"dim": 384, "layers": 6, "heads": 6, "context": 256, "dropout": 0.1}
        if fast
        else {"dim": 128, "layers": 4, "heads": 4, "context": 64}
    )
    told = {"head": {"kind": "masked", "next_sentence": True}, "segments": 2} if pairs else {}
    return {
        "task": "masked",
        "data": {**where, "tokenizer": {"kind": "bpe", "size": size}},
        "model": {"preset": "tiny-encoder", **_fitting(shape, data.size // 20, least=8), **told},
        "train": {
            "steps": 5000 if fast else 3500,
            "batch": 64 if fast else 16,
            "lr": 3e-3 if fast else 5e-3,
            "optimizer": "muon",
            "ema": 0.99,
            "schedule": {"kind": "linear", "warmup": 50},
        },
    }


def _cbow(data: Text, where: dict[str, Any]) -> dict[str, Any]:
    """Vectors for the most frequent words, from about twenty looks at each place."""
    words = data.size // 5
    rows = min(128, max(1, words // 64))
    return {
        "task": "cbow",
        "data": {**where, "tokenizer": {"kind": "word", "size": 20_000, "lower": True}},
        "model": {"preset": "cbow", **_fitting({"context": 64}, words // 4)},
        "train": {
            "steps": min(20_000, max(500, 20 * words // (64 * rows))),
            "batch": rows,
            "lr": 5e-3,
            "optimizer": {"kind": "adamw", "decay": 0.0},
            "schedule": {"kind": "linear", "warmup": 50},
            "evaluate_tokens": 10_000,
        },
    }


def _pairs(data: Pairs, where: dict[str, Any], fast: bool) -> dict[str, Any]:
    """An encoder–decoder over joint sub-words."""
    size = min(16_000, max(300, data.count // 4 // 100 * 100))
    shape = {"dim": 256, "layers": 4, "heads": 4} if fast else {"dim": 128, "layers": 2, "heads": 4}
    return {
        "task": "seq2seq",
        "data": {**where, "tokenizer": {"kind": "bpe", "size": size}},
        "model": {"preset": "tiny-encoder-decoder", "dropout": 0.1, **shape},
        "train": {
            "steps": 5000 if fast else 2000,
            "tokens": 8192 if fast else 2048,
            "lr": 2e-3,
            "optimizer": "muon",
            "ema": 0.995,
            "schedule": {"kind": "cosine", "warmup": 100},
        },
    }


def _labels(data: LabelledText, where: dict[str, Any], fast: bool) -> dict[str, Any]:
    """A network that reads whole words both ways; of labels, the maximum of what it shows."""
    texts = data.texts()
    longest = max(len(text.split()) for text in texts)
    worded = longest > 1
    context = min(512, max(8, 2 * longest if worded else max(map(len, texts))))
    head = {"head": {"kind": "classify", "pool": "max"}} if data.kind == "labels" else {}
    return {
        "task": "label" if data.kind == "labels" else "tag",
        "data": {**where, "tokenizer": {"kind": "word", "lower": True} if worded else "char"},
        "model": {
            "preset": "lstm",
            "bidirectional": True,
            "layers": 1,
            "dim": 256 if fast else 128,
            "dropout": 0.5,
            "context": context,
            **head,
        },
        "train": {
            "steps": 3000 if fast else 1000,
            "batch": 64,
            "lr": 2e-3,
            "ema": 0.99,
            "schedule": {"kind": "linear", "warmup": 50},
        },
    }


def _images(data: Images, where: dict[str, Any], fast: bool) -> dict[str, Any]:
    """A small ViT over about four by four patches: their number is what a step costs.

    Images that are seen often are shifted a little, so that they are not learned by heart.
    """
    side = min(data.side, 128 if fast else 64)
    patch = max(2, side // (8 if fast else 4))
    size = max(patch, side // patch * patch)
    shape = {"dim": 192, "layers": 6, "heads": 6} if fast else {"dim": 96, "layers": 4, "heads": 3}
    steps, batch = (5000, 256) if fast else (2000, 64)
    often = steps * batch > 10 * len(data)
    return {
        "task": {"kind": "classify", "crop": max(1, size // 16)} if often else "classify",
        "data": where,
        "model": {"preset": "tiny-vit", "image_size": size, "patch": patch, **shape},
        "train": {
            "steps": steps,
            "batch": batch,
            "lr": 3e-3 if fast else 1e-2,
            "optimizer": "muon",
            "ema": 0.99,
            "schedule": {"kind": "linear", "warmup": 100},
            "evaluate_tokens": 2000,
        },
    }


def _fitting(shape: dict[str, Any], tokens: int, least: int = 2) -> dict[str, Any]:
    """A text of a few hundred tokens gets a block that fits into it."""
    context = max(least, min(shape["context"], tokens))
    return {**shape, "context": context}


def _alphabet(data: Text) -> set[str]:
    letters: set[str] = set()
    for piece, _ in data.chunks():
        letters |= set(piece)
    return letters


def named(path: Choice | None, source: str | None) -> str:
    """A name for a run on this data: that of the file, or of its folder where it says nothing."""
    if path is not None and not (isinstance(path, str) and Path(path).exists()):
        return kind_of(path)[0]  # a built-in
    here = Path(str(path if path is not None else source)).resolve()
    stem = here.name.lstrip(".").split(".")[0]
    return (here.parent.name if stem in ("input", "train", "data", "") else stem) or "text"
