"""Decoders: GPT-1, GPT-2, GPT-2 with modern parts, and a tiny one for a CPU."""

from dataclasses import replace

from regard.models.transformer import TransformerConfig


def gpt1() -> TransformerConfig:
    """GPT-1, 117 M (Radford et al. 2018, section 4.1): post-norm; tanh GELU as released."""
    return TransformerConfig(
        vocab_size=40_478,
        dim=768,
        layers=12,
        heads=12,
        context=512,
        norm_placement="post",
        ffn="gelu_tanh",
        dropout=0.1,
        attention_dropout=0.1,
    )


def _gpt2(dim: int, layers: int, heads: int) -> TransformerConfig:
    return TransformerConfig(
        vocab_size=50257, dim=dim, layers=layers, heads=heads, context=1024, ffn="gelu_tanh"
    )


def gpt2() -> TransformerConfig:
    """GPT-2 small, 124 M (Radford et al. 2019, table 2; heads and tanh GELU as released)."""
    return _gpt2(768, 12, 12)


def gpt2_medium() -> TransformerConfig:
    """GPT-2 medium, 355 M (Radford et al. 2019)."""
    return _gpt2(1024, 24, 16)


def gpt2_large() -> TransformerConfig:
    """GPT-2 large, 774 M (Radford et al. 2019)."""
    return _gpt2(1280, 36, 20)


def gpt2_xl() -> TransformerConfig:
    """GPT-2 XL, 1.56 B (Radford et al. 2019)."""
    return _gpt2(1600, 48, 25)


def modern() -> TransformerConfig:
    """GPT-2 small with RoPE, RMSNorm, SwiGLU and grouped-query attention (GQA)."""
    return replace(
        gpt2(), kv_heads=4, position="rotary", norm="rms", norm_eps=1e-6, ffn="swiglu", bias=False
    )


def tiny_decoder() -> TransformerConfig:
    """A decoder that a laptop's CPU trains in minutes.

    LayerNorm without bias, squared ReLU and interleaved RoPE reach the same loss at this size and
    are a third faster on a CPU than RMSNorm (not fused there), SwiGLU and half-split RoPE.
    """
    return replace(
        modern(),
        dim=128,
        layers=4,
        heads=4,
        kv_heads=None,
        context=64,
        position={"kind": "rotary", "interleaved": True},
        norm="layer",
        norm_eps=1e-5,
        ffn="relu2",
    )
