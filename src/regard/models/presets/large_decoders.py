"""Large decoders of 2020 to 2022, from GPT-3 to GLM-130B, as described in their papers.

Where a paper does not state a setting, the docstring says which one is used here.
"""

from collections.abc import Callable
from dataclasses import replace

from regard.models.presets.gpt import gpt2
from regard.models.transformer import TransformerConfig


def _gpt(dim: int, layers: int, heads: int, vocab_size: int, context: int) -> TransformerConfig:
    """GPT-2's block at another size."""
    return replace(
        gpt2(), dim=dim, layers=layers, heads=heads, vocab_size=vocab_size, context=context
    )


def gpt3() -> TransformerConfig:
    """Brown et al. 2020, table 2.1: GPT-2, larger. Its layers alternate dense and banded sparse
    attention, whose width is not published; here all layers are dense.
    """
    return _gpt(12_288, 96, 96, 50_257, 2048)


def pangu_alpha() -> TransformerConfig:
    """Zeng et al. 2021, table 1 and section 3: GPT-2's block. The paper's query layer, a last
    attention whose query is the next position, is left out.
    """
    return _gpt(16_384, 64, 128, 40_000, 1024)


def mt_nlg() -> TransformerConfig:
    """Smith et al. 2022, section 3. The paper does not state norm, positions and activation; here
    they are those of GPT-2.
    """
    return _gpt(20_480, 105, 128, 50_257, 2048)


def jurassic1() -> TransformerConfig:
    """Lieber et al. 2021, table 1: shallower and wider than GPT-3, with a vocabulary of 256 k."""
    return _gpt(13_824, 76, 96, 256_000, 2048)


def galactica() -> TransformerConfig:
    """Taylor et al. 2022, table 5 and section 3: GELU, learned positions, no bias anywhere."""
    return replace(_gpt(10_240, 96, 80, 50_000, 2048), ffn="gelu", bias=False)


def palm() -> TransformerConfig:
    """Chowdhery et al. 2022, table 1 and section 2.

    Parallel attention and feed-forward, multi-query attention, heads of width 256,
    and logits divided by sqrt(dim).
    """
    return TransformerConfig(
        vocab_size=256_000,
        dim=18_432,
        layers=118,
        heads=48,
        kv_heads=1,
        head_dim=256,
        ffn_dim=73_728,
        context=2048,
        position="rotary",
        norm_placement="parallel",
        ffn="swiglu",
        bias=False,
        head={"kind": "linear", "scaled": True},
    )


def gopher(dim: int = 16_384, heads: int = 128) -> TransformerConfig:
    """Rae et al. 2021, table 1 and section 3.1: RMSNorm, and Transformer-XL's positions.

    Activation, biases and norm placement are not stated; they are GPT-2's.
    """
    return TransformerConfig(
        vocab_size=32_000,
        dim=dim,
        layers=80,
        heads=heads,
        head_dim=128,
        context=2048,
        score="transformer_xl",
        position="none",
        norm="rms",
        norm_eps=1e-6,
        ffn="gelu_tanh",
    )


def chinchilla() -> TransformerConfig:
    """Hoffmann et al. 2022, table 4: Gopher at half the width, on four times the data."""
    return gopher(8192, 64)


def lamda() -> TransformerConfig:
    """Thoppilan et al. 2022, section 3: gated GELU, T5's relative attention.

    Norm and biases are not stated; as in T5, RMSNorm and no biases.
    """
    return TransformerConfig(
        vocab_size=32_000,
        dim=8192,
        layers=64,
        heads=128,
        head_dim=128,
        ffn_dim=65_536,
        context=2048,
        position="t5",
        norm="rms",
        norm_eps=1e-6,
        ffn="geglu",
        bias=False,
    )


def glm_130b() -> TransformerConfig:
    """Zeng et al. 2022, section 2 and appendix: DeepNorm, RoPE, GeGLU.

    The residual scale is (2 layers)^(1/2), not DeepNorm's (2 layers)^(1/4). It is a
    prefix LM.
    """
    layers = 70
    return TransformerConfig(
        vocab_size=150_528,
        dim=12_288,
        layers=layers,
        heads=96,
        ffn_dim=32_768,
        context=2048,
        position="rotary",
        norm_placement="deepnorm",
        residual_scale=(2 * layers) ** 0.5,
        ffn="geglu",
        prefix=True,
    )


LARGE_DECODERS: dict[str, Callable[[], TransformerConfig]] = {
    "gpt3-175b": gpt3,
    "pangu-alpha-207b": pangu_alpha,
    "palm-540b": palm,
    "mt-nlg-530b": mt_nlg,
    "gopher-280b": gopher,
    "chinchilla-70b": chinchilla,
    "galactica-120b": galactica,
    "lamda-137b": lamda,
    "jurassic-1-178b": jurassic1,
    "glm-130b": glm_130b,
}
