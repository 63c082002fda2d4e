"""Encoder-decoders: T5, BART, BARThez and Marian."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from regard.models.transformer import TransformerConfig


def t5(dim: int, layers: int, heads: int, ffn_dim: int, head_dim: int = 64) -> TransformerConfig:
    """Raffel et al. 2020, section 3.7: relative positions, RMSNorm, no biases, unscaled scores.

    Smaller initial queries replace the scale. `context` is the training length; the relative
    positions have no limit.
    """
    return TransformerConfig(
        vocab_size=32_128,
        dim=dim,
        layers=layers,
        heads=heads,
        head_dim=head_dim,
        ffn_dim=ffn_dim,
        context=512,
        architecture="encoder-decoder",
        score="dot",
        position="t5",
        norm="rms",
        norm_eps=1e-6,
        ffn="relu",
        init="fan_in",
        bias=False,
        head={"kind": "linear", "scaled": True},
        dropout=0.1,
    )


def t5_v1_1(dim: int, layers: int, heads: int, ffn_dim: int) -> TransformerConfig:
    """T5 version 1.1 (Raffel et al., released 2020; Shazeer 2020): GeGLU, untied embeddings."""
    return replace(
        t5(dim, layers, heads, ffn_dim), ffn="geglu_tanh", tied=False, head="linear", dropout=0.0
    )


def bart(dim: int, layers: int, heads: int) -> TransformerConfig:
    """Lewis et al. 2019, section 2: the 2017 Transformer with GELU, learned positions and
    LayerNorm after the embedding; positions start at row 2 of their table.
    """
    return TransformerConfig(
        vocab_size=50_265,
        dim=dim,
        layers=layers,
        heads=heads,
        context=1024,
        architecture="encoder-decoder",
        position={"kind": "learned", "offset": 2},
        norm_placement="post",
        embed_norm=True,
        head={"kind": "linear", "bias": True},
        dropout=0.1,
    )


def barthez(dim: int, layers: int, heads: int) -> TransformerConfig:
    """Kamal Eddine et al. 2021: BART on French with SentencePiece, pre-norm as mBART is, with a
    norm at the end of both stacks.
    """
    return replace(bart(dim, layers, heads), vocab_size=50_002, norm_placement="pre")


def marian(vocab_size: int) -> TransformerConfig:
    """Marian's base Transformer (Junczys-Dowmunt et al. 2018) as in OPUS-MT (Tiedemann &
    Thottingal 2020): SiLU, sines before cosines.
    """
    return TransformerConfig(
        vocab_size=vocab_size,
        dim=512,
        layers=6,
        heads=8,
        context=512,
        architecture="encoder-decoder",
        position={"kind": "sinusoidal", "interleaved": False},
        norm_placement="post",
        ffn="silu",
        embed_scaled=True,
        head={"kind": "linear", "bias": True},
        dropout=0.1,
    )


ENCODER_DECODERS: dict[str, Callable[[], TransformerConfig]] = {
    "t5-small": partial(t5, 512, 6, 8, 2048),
    "t5-base": partial(t5, 768, 12, 12, 3072),
    "t5-large": partial(t5, 1024, 24, 16, 4096),
    "t5-3b": partial(t5, 1024, 24, 32, 16_384, head_dim=128),
    "t5-11b": partial(t5, 1024, 24, 128, 65_536, head_dim=128),
    "t5-v1.1-small": partial(t5_v1_1, 512, 8, 6, 1024),
    "t5-v1.1-base": partial(t5_v1_1, 768, 12, 12, 2048),
    "t5-v1.1-large": partial(t5_v1_1, 1024, 24, 16, 2816),
    "t5-v1.1-xl": partial(t5_v1_1, 2048, 24, 32, 5120),
    "t5-v1.1-xxl": partial(t5_v1_1, 4096, 24, 64, 10_240),
    "bart-base": partial(bart, 768, 6, 12),
    "bart-large": partial(bart, 1024, 12, 16),
    "barthez": partial(barthez, 768, 6, 12),
    "marian-en-de": partial(marian, 58_101),
    "marian-en-fr": partial(marian, 59_514),
}
