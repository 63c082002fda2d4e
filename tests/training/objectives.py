"""A small model of every shape, its task, and something for it to learn."""

import torch

from regard.data.batch import (
    CaptionBatch,
    DialogueBatch,
    ImageBatch,
    LabelBatch,
    MaskedBatch,
    PairBatch,
    RegressionBatch,
    SpanBatch,
    StrokeBatch,
    TagBatch,
    TextBatch,
)
from regard.models.build import build_model, preset
from regard.nn.state import ImageSource, Source
from regard.tasks import (
    Caption,
    Causal,
    ImageClassification,
    Masked,
    Seq2Seq,
    Span,
    Tag,
    TextClassification,
    TextRegression,
)
from regard.tasks.handwriting import Handwriting
from regard.tasks.instruct import Instruct
from regard.training.loop import Objective

TINY = {"dim": 16, "layers": 6, "heads": 2}
READER = {**TINY, "vocab_size": 23, "context": 12}
SENTENCES = {"head": {"kind": "masked", "next_sentence": True}, "segments": 2}
IMAGES = {"image_size": 8, "patch_size": 2, "channels": 3, "cls": True}
STROKES = {**READER, "vocab_size": 1, "input_dim": 5, "head": {"kind": "mixture", "components": 2}}
NUMBER = {"head": {"kind": "classification", "classes": 1}}
CLASSES = {"head": {"kind": "classification", "classes": 3}}


def text_batch():
    ids = torch.randint(23, (3, 13))
    return TextBatch(ids[:, :-1], ids[:, 1:].masked_fill(ids[:, 1:] == 5, -1))


def pair_batch():
    ids = torch.randint(23, (3, 13))
    source = Source(torch.randint(23, (3, 6)), torch.tensor([6, 4, 1]))
    return PairBatch(source, ids[:, :-1], ids[:, 1:].masked_fill(ids[:, 1:] == 5, -1))


def masked_batch(**more):
    at = torch.arange(12).expand(3, 12)
    return MaskedBatch(
        ids=torch.randint(23, (3, 12)),
        documents=1 + (at > 6).long(),
        positions=at,
        masked_positions=torch.tensor([[1, 4], [0, 2], [7, 9]]),
        targets=torch.tensor([[3, 8], [11, -1], [0, 22]]),
        **more,
    )


def sentence_batch():
    follows = torch.tensor([0, 1, 1])
    return masked_batch(
        segments=(torch.arange(12) > 6).long().expand(3, 12), next_sentence_targets=follows
    )


def image_batch():
    return ImageBatch(torch.randn(3, 3, 8, 8), torch.tensor([0, 2, 1]))


def label_batch():
    lengths = torch.tensor([12, 7, 1])
    return LabelBatch(torch.randint(23, (3, 12)), lengths, torch.tensor([0, 2, 1]))


def score_batch():
    lengths = torch.tensor([12, 7, 1])
    targets = torch.tensor([0.5, -2.0, 3.0], dtype=torch.get_default_dtype())
    return RegressionBatch(torch.randint(23, (3, 12)), lengths, targets)


def tag_batch():
    lengths = torch.tensor([12, 7, 1])
    scored = torch.arange(12) < lengths.unsqueeze(1)
    return TagBatch(
        torch.randint(23, (3, 12)), lengths, torch.randint(3, (3, 12)).where(scored, -1)
    )


def span_batch():
    bounds = torch.tensor([[3, 11], [3, 6], [0, 1]])
    return SpanBatch(
        ids=torch.randint(23, (3, 12)),
        lengths=torch.tensor([12, 7, 1]),
        context=bounds,
        targets=torch.tensor([[4, 6], [3, 3], [0, 0]]),
        window_indices=torch.arange(3),
        segments=(torch.arange(12) > 2).long().expand(3, 12),
    )


def caption_batch():
    ids = torch.randint(23, (3, 13))
    source = ImageSource.of(torch.randn(3, 3, 8, 8), 4)
    return CaptionBatch(source, ids[:, :-1], ids[:, 1:].masked_fill(ids[:, 1:] == 5, -1))


def dialogue_batch():
    ids, at = torch.randint(23, (3, 13)), torch.arange(12).expand(3, 12)
    return DialogueBatch(
        ids=ids[:, :-1],
        targets=ids[:, 1:].masked_fill(at % 6 < 2, -1),
        documents=1 + at // 6,
        positions=at % 6,
        prefix_lengths=torch.full((3,), 2),
    )


def stroke_batch():
    pen = torch.randint(2, (3, 12, 1)).to(torch.get_default_dtype())
    targets = torch.cat([torch.randn(3, 12, 2), pen], 2)
    return StrokeBatch(torch.randn(3, 12, 5), targets, torch.tensor([12, 7, 1]))


OBJECTIVES = {
    "decoder": ("modern", {**READER, "kv_heads": 1}, Causal(), text_batch),
    "side by side": ("gpt2", {**READER, "norm_placement": "parallel"}, Causal(), text_batch),
    "windows": ("gpt2", {**READER, "position": "alibi", "window": 3}, Causal(), text_batch),
    "encoder": ("tiny-encoder", READER, Masked(label_smoothing=0.1), masked_batch),
    "one block": ("tiny-encoder", {**READER, "shared_layers": True}, Masked(), masked_batch),
    "sentences": (
        "tiny-encoder",
        {**READER, **SENTENCES},
        Masked(next_sentence=True),
        sentence_batch,
    ),
    "encoder-decoder": ("transformer-base", READER, Seq2Seq(label_smoothing=0.1), pair_batch),
    "text_classification": (
        "tiny-encoder",
        {**READER, **CLASSES},
        TextClassification(),
        label_batch,
    ),
    "score": ("tiny-encoder", {**READER, **NUMBER}, TextRegression(mean=1.0), score_batch),
    "tag": ("tiny-encoder", {**READER, "head": {"kind": "tag", "classes": 3}}, Tag(), tag_batch),
    "span": ("tiny-encoder", {**READER, "segments": 2, "head": "span"}, Span(), span_batch),
    "caption": (
        "tiny-captioner",
        {**READER, "image_size": 8, "patch_size": 4, "encoder_layers": 6},
        Caption(),
        caption_batch,
    ),
    "dialogues": ("gpt2", READER, Instruct(), dialogue_batch),
    "strokes": ("gpt2", STROKES, Handwriting(components=2), stroke_batch),
    "vision": ("tiny-vit", {**TINY, **IMAGES, **CLASSES}, ImageClassification(), image_batch),
}


def make_objective(name, **over):
    """The objective of this name, always with the same weights, and its batch."""
    model, fields, task, batch = OBJECTIVES[name]
    torch.manual_seed(1)
    return Objective(build_model(preset(model, **{**fields, **over})), task).train(), batch()
