"""Bidirectional encoders for masked language modelling: BERT, RoBERTa, ALBERT, DeBERTa, …"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from regard.models.transformer import TransformerConfig


def bert(dim: int = 768, layers: int = 12, heads: int = 12) -> TransformerConfig:
    """Devlin et al. 2018, section 3: post-norm, learned positions, two segments.

    The head predicts masked tokens; `head = { kind = "masked", next_sentence = true }` adds BERT's
    next-sentence prediction, `head = "pooled"` is BERT's pooler.
    """
    return TransformerConfig(
        vocab_size=30_522,
        dim=dim,
        layers=layers,
        heads=heads,
        context=512,
        architecture="encoder",
        norm_eps=1e-12,
        norm_placement="post",
        embed_norm=True,
        segments=2,
        head="masked",
        dropout=0.1,
        attention_dropout=0.1,
    )


def roberta(dim: int = 768, layers: int = 12, heads: int = 12) -> TransformerConfig:
    """Liu et al. 2019, table 9: BERT with byte-level BPE and one segment.

    The first two rows of the position table are unused: positions start after the padding id.
    """
    return replace(
        bert(dim, layers, heads),
        vocab_size=50_265,
        position={"kind": "learned", "offset": 2},
        norm_eps=1e-5,
        segments=1,
    )


def mbert() -> TransformerConfig:
    """Multilingual BERT (Devlin et al. 2018; cased): BERT base on 104 languages."""
    return replace(bert(), vocab_size=119_547)


def camembert(dim: int = 768, layers: int = 12, heads: int = 12) -> TransformerConfig:
    """Martin et al. 2020: RoBERTa on French, with SentencePiece."""
    return replace(roberta(dim, layers, heads), vocab_size=32_005)


def deberta_v3(dim: int = 768, layers: int = 12, heads: int = 12) -> TransformerConfig:
    """He et al. 2021 (DeBERTa, version 3): BERT with disentangled attention in 256 logarithmic
    buckets of distances, no positions in the embeddings and no segments.
    """
    score = {
        "kind": "disentangled",
        "max_distance": 512,
        "buckets": 256,
        "norm_relative_embeddings": True,
    }
    return replace(
        bert(dim, layers, heads),
        vocab_size=128_100,
        norm_eps=1e-7,
        segments=0,
        position="none",
        score=score,
    )


def deberta(dim: int = 768, layers: int = 12, heads: int = 12) -> TransformerConfig:
    """He et al. 2021 (DeBERTa, version 1): BERT with disentangled attention over 512 distances,
    separate projections for distances, and no positions in the embeddings.
    """
    return replace(
        deberta_v3(dim, layers, heads),
        vocab_size=50_265,
        score={"kind": "disentangled", "max_distance": 512, "position_projections": True},
    )


def distilbert() -> TransformerConfig:
    """Sanh et al. 2019, section 3: every other layer of BERT base, and no segments."""
    return replace(bert(layers=6), segments=0)


def albert(
    dim: int = 768, layers: int = 12, heads: int = 12, dropout: float = 0.0
) -> TransformerConfig:
    """Lan et al. 2019, table 1: shared layers, factorized embeddings of width 128 (version 2)."""
    return replace(
        bert(dim, layers, heads),
        vocab_size=30_000,
        embed_dim=128,
        ffn="gelu_tanh",
        shared_layers=True,
        head={"kind": "masked", "activation": "gelu_tanh"},
        dropout=dropout,
        attention_dropout=dropout,
    )


ENCODERS: dict[str, Callable[[], TransformerConfig]] = {
    "bert-base": bert,
    "bert-large": partial(bert, 1024, 24, 16),
    "roberta-base": roberta,
    "roberta-large": partial(roberta, 1024, 24, 16),
    "mbert": mbert,
    "camembert-base": camembert,
    "camembert-large": partial(camembert, 1024, 24, 16),
    "deberta-base": deberta,
    "deberta-large": partial(deberta, 1024, 24, 16),
    "deberta-v3-xsmall": partial(deberta_v3, 384, 12, 6),
    "deberta-v3-small": partial(deberta_v3, 768, 6, 12),
    "deberta-v3-base": deberta_v3,
    "deberta-v3-large": partial(deberta_v3, 1024, 24, 16),
    "distilbert": distilbert,
    "albert-base": albert,
    "albert-large": partial(albert, 1024, 24, 16),
    "albert-xlarge": partial(albert, 2048, 24, 16),
    "albert-xxlarge": partial(albert, 4096, 12, 64),
}
