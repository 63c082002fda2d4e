"""LLaMA and similar decoders: TinyLlama, Mistral, Qwen, Gemma, Phi, GLM-4."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from regard.models.transformer import TransformerConfig


def llama(dim: int, layers: int, heads: int, ffn_dim: int, **overrides: Any) -> TransformerConfig:
    """Touvron et al. 2023a, table 2: pre-norm with RMSNorm, SwiGLU, RoPE, no biases."""
    config = TransformerConfig(
        vocab_size=32_000,
        dim=dim,
        layers=layers,
        heads=heads,
        ffn_dim=ffn_dim,
        context=2048,
        position="rotary",
        norm="rms",
        norm_eps=1e-6,
        ffn="swiglu",
        bias=False,
        tied=False,
    )
    return replace(config, **overrides)


def llama2(
    dim: int, layers: int, heads: int, ffn_dim: int, kv_heads: int | None = None
) -> TransformerConfig:
    """Touvron et al. 2023b, table 1: twice the context; GQA in the largest."""
    sizes = (dim, layers, heads, ffn_dim)
    return llama(*sizes, kv_heads=kv_heads, context=4096, norm_eps=1e-5)


def llama3(
    dim: int,
    layers: int,
    heads: int,
    ffn_dim: int,
    *,
    rope_factor: float | None = None,
    tied: bool = False,
) -> TransformerConfig:
    """Dubey et al. 2024, table 3: a vocabulary of 128 k, 8 KV heads, RoPE base 500,000.

    Versions 3.1 and 3.2 scale RoPE by `rope_factor`, for wavelengths beyond 8,192 tokens.
    """
    position: dict[str, Any] = {"kind": "rotary", "base": 500_000.0}
    if rope_factor is not None:
        scaling = {"kind": "llama3", "factor": rope_factor, "original_context": 8192}
        position["scaling"] = {**scaling, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return llama(
        dim,
        layers,
        heads,
        ffn_dim,
        vocab_size=128_256,
        kv_heads=8,
        context=8192 if rope_factor is None else 131_072,
        position=position,
        norm_eps=1e-5,
        tied=tied,
    )


def tinyllama() -> TransformerConfig:
    """Zhang et al. 2024, section 2: a small LLaMA 2 with 4 KV heads, half the context."""
    return llama(2048, 22, 32, 5632, kv_heads=4, norm_eps=1e-5)


def mistral() -> TransformerConfig:
    """Jiang et al. 2023, table 1: LLaMA with GQA and a sliding window of 4,096."""
    return llama(4096, 32, 32, 14_336, kv_heads=8, context=32_768, window=4096, norm_eps=1e-5)


def qwen2(
    dim: int,
    layers: int,
    heads: int,
    kv_heads: int,
    ffn_dim: int,
    *,
    vocab_size: int = 152_064,
    tied: bool = False,
) -> TransformerConfig:
    """Yang et al. 2024, table 1: LLaMA with biases of queries, keys and values."""
    return llama(
        dim,
        layers,
        heads,
        ffn_dim,
        vocab_size=vocab_size,
        kv_heads=kv_heads,
        context=131_072,
        position={"kind": "rotary", "base": 1e6},
        bias="qkv",
        tied=tied,
    )


def qwen3(
    dim: int, layers: int, heads: int, ffn_dim: int, *, tied: bool = False
) -> TransformerConfig:
    """Yang et al. 2025, table 1: QK-norm instead of the biases."""
    return replace(
        qwen2(dim, layers, heads, 8, ffn_dim, vocab_size=151_936, tied=tied),
        head_dim=128,
        context=40_960,
        qk_norm=True,
        bias=False,
    )


def gemma(dim: int, layers: int, heads: int, kv_heads: int, ffn_dim: int) -> TransformerConfig:
    """Gemma Team 2024a, table 1: wide heads, GeGLU, embeddings times sqrt(dim), 256 k ids."""
    return llama(
        dim,
        layers,
        heads,
        ffn_dim,
        vocab_size=256_000,
        kv_heads=kv_heads,
        head_dim=256,
        context=8192,
        norm="rms_plus_one",
        ffn="geglu_tanh",
        embed_scaled=True,
        tied=True,
    )


def gemma2(
    dim: int,
    layers: int,
    heads: int,
    kv_heads: int,
    ffn_dim: int,
    *,
    head_dim: int = 256,
    scale_dim: int | None = None,
) -> TransformerConfig:
    """Gemma Team 2024b, table 1: norms before and after each branch, soft-capped scores and
    logits, a sliding window in every other layer. Scores are divided by sqrt(`scale_dim`).
    """
    score: dict[str, Any] = {"kind": "scaled_dot", "cap": 50.0}
    return replace(
        gemma(dim, layers, heads, kv_heads, ffn_dim),
        head_dim=head_dim,
        score=score if scale_dim is None else {**score, "scale_dim": scale_dim},
        window=4096,
        global_every=2,
        norm_placement="sandwich",
        head={"kind": "linear", "cap": 30.0},
    )


def phi(dim: int, layers: int, partial_rotary_factor: float) -> TransformerConfig:
    """Gunasekar et al. 2023, section 2, and Li et al. 2023: parallel attention and
    feed-forward, RoPE on part of each head, biases everywhere, even in the LM head.
    """
    return TransformerConfig(
        vocab_size=51_200,
        dim=dim,
        layers=layers,
        heads=32,
        context=2048,
        position={"kind": "rotary", "partial_rotary_factor": partial_rotary_factor},
        norm_placement="parallel",
        ffn="gelu_tanh",
        tied=False,
        head={"kind": "linear", "bias": True},
    )


def phi3_mini() -> TransformerConfig:
    """Abdin et al. 2024, section 2: LLaMA's block, sliding window as released with 4 k context."""
    sizes = (3072, 32, 32, 8192)
    return llama(*sizes, vocab_size=32_064, context=4096, window=2047, norm_eps=1e-5)


def glm4_9b() -> TransformerConfig:
    """Zeng et al. 2024, section 2: interleaved RoPE on half of each head, biases of queries,
    keys and values only, 2 KV heads.
    """
    return llama(
        4096,
        40,
        32,
        13_696,
        vocab_size=151_552,
        kv_heads=2,
        context=8192,
        position={"kind": "rotary", "partial_rotary_factor": 0.5, "interleaved": True},
        norm_eps=1.5625e-7,
        bias="qkv",
    )


LLAMAS: dict[str, Callable[[], TransformerConfig]] = {
    "llama-7b": partial(llama, 4096, 32, 32, 11_008),
    "llama-13b": partial(llama, 5120, 40, 40, 13_824),
    "llama-33b": partial(llama, 6656, 60, 52, 17_920),
    "llama-65b": partial(llama, 8192, 80, 64, 22_016, norm_eps=1e-5),
    "llama-2-7b": partial(llama2, 4096, 32, 32, 11_008),
    "llama-2-13b": partial(llama2, 5120, 40, 40, 13_824),
    "llama-2-70b": partial(llama2, 8192, 80, 64, 28_672, kv_heads=8),
    "llama-3-8b": partial(llama3, 4096, 32, 32, 14_336),
    "llama-3-70b": partial(llama3, 8192, 80, 64, 28_672),
    "llama-3.1-8b": partial(llama3, 4096, 32, 32, 14_336, rope_factor=8.0),
    "llama-3.2-1b": partial(llama3, 2048, 16, 32, 8192, rope_factor=32.0, tied=True),
    "llama-3.2-3b": partial(llama3, 3072, 28, 24, 8192, rope_factor=32.0, tied=True),
    "tinyllama": tinyllama,
    "mistral-7b": mistral,
    "qwen2-0.5b": partial(qwen2, 896, 24, 14, 2, 4864, vocab_size=151_936, tied=True),
    "qwen2-1.5b": partial(qwen2, 1536, 28, 12, 2, 8960, vocab_size=151_936, tied=True),
    "qwen2-7b": partial(qwen2, 3584, 28, 28, 4, 18_944),
    "qwen2-72b": partial(qwen2, 8192, 80, 64, 8, 29_568),
    "qwen3-0.6b": partial(qwen3, 1024, 28, 16, 3072, tied=True),
    "qwen3-1.7b": partial(qwen3, 2048, 28, 16, 6144, tied=True),
    "qwen3-4b": partial(qwen3, 2560, 36, 32, 9728, tied=True),
    "qwen3-8b": partial(qwen3, 4096, 36, 32, 12_288),
    "qwen3-14b": partial(qwen3, 5120, 40, 40, 17_408),
    "qwen3-32b": partial(qwen3, 5120, 64, 64, 25_600),
    "gemma-2b": partial(gemma, 2048, 18, 8, 1, 16_384),
    "gemma-7b": partial(gemma, 3072, 28, 16, 16, 24_576),
    "gemma-2-2b": partial(gemma2, 2304, 26, 8, 4, 9216),
    "gemma-2-9b": partial(gemma2, 3584, 42, 16, 8, 14_336),
    "gemma-2-27b": partial(gemma2, 4608, 46, 32, 16, 36_864, head_dim=128, scale_dim=144),
    "phi-1": partial(phi, 2048, 24, 0.5),
    "phi-1.5": partial(phi, 2048, 24, 0.5),
    "phi-2": partial(phi, 2560, 32, 0.4),
    "phi-3-mini": phi3_mini,
    "glm-4-9b": glm4_9b,
}
