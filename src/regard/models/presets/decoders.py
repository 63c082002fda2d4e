"""GPT-NeoX, Pythia, OPT and BLOOM."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from regard.models.transformer import TransformerConfig


def neox(
    dim: int, layers: int, heads: int, vocab_size: int = 50_304, ffn: str = "gelu"
) -> TransformerConfig:
    """Black et al. 2022, section 2.1, and Pythia (Biderman et al. 2023, table 1).

    Parallel attention and feed-forward, RoPE on a quarter of each head, untied embeddings.
    GPT-NeoX-20B was released with the tanh approximation of GELU, Pythia with GELU itself.
    """
    return TransformerConfig(
        vocab_size=vocab_size,
        dim=dim,
        layers=layers,
        heads=heads,
        context=2048,
        position={"kind": "rotary", "partial_rotary_factor": 0.25},
        norm_placement="parallel_norms",
        ffn=ffn,
        tied=False,
    )


def opt(dim: int, layers: int, heads: int) -> TransformerConfig:
    """Zhang et al. 2022, table 1: GPT-3 with ReLU; positions start at row 2 of their table."""
    return TransformerConfig(
        vocab_size=50_272,
        dim=dim,
        layers=layers,
        heads=heads,
        context=2048,
        position={"kind": "learned", "offset": 2},
        ffn="relu",
        dropout=0.1,
    )


def opt_350m() -> TransformerConfig:
    """The only post-norm OPT, with embeddings of half its width (as released)."""
    return replace(
        opt(1024, 24, 16), norm_placement="post", embed_dim=512, factorize_positions=False
    )


def bloom(dim: int, layers: int, heads: int) -> TransformerConfig:
    """Le Scao et al. 2022, table 3 and section 3.2: ALiBi, and LayerNorm after the embedding."""
    return TransformerConfig(
        vocab_size=250_880,
        dim=dim,
        layers=layers,
        heads=heads,
        context=2048,
        position="alibi",
        ffn="gelu_tanh",
        embed_norm=True,
    )


DECODERS: dict[str, Callable[[], TransformerConfig]] = {
    "gpt-neox-20b": partial(neox, 6144, 44, 64, vocab_size=50_432, ffn="gelu_tanh"),
    "pythia-70m": partial(neox, 512, 6, 8),
    "pythia-160m": partial(neox, 768, 12, 12),
    "pythia-410m": partial(neox, 1024, 24, 16),
    "pythia-1b": partial(neox, 2048, 16, 8),
    "pythia-1.4b": partial(neox, 2048, 24, 16),
    "pythia-2.8b": partial(neox, 2560, 32, 32),
    "pythia-6.9b": partial(neox, 4096, 32, 32, vocab_size=50_432),
    "pythia-12b": partial(neox, 5120, 36, 40, vocab_size=50_688),
    "opt-125m": partial(opt, 768, 12, 12),
    "opt-350m": opt_350m,
    "opt-1.3b": partial(opt, 2048, 24, 32),
    "opt-2.7b": partial(opt, 2560, 32, 32),
    "opt-6.7b": partial(opt, 4096, 32, 32),
    "opt-13b": partial(opt, 5120, 40, 40),
    "opt-30b": partial(opt, 7168, 48, 56),
    "opt-66b": partial(opt, 9216, 64, 72),
    "opt-175b": partial(opt, 12_288, 96, 96),
    "bloom-560m": partial(bloom, 1024, 24, 16),
    "bloom-1b1": partial(bloom, 1536, 24, 16),
    "bloom-1b7": partial(bloom, 2048, 24, 16),
    "bloom-3b": partial(bloom, 2560, 30, 32),
    "bloom-7b1": partial(bloom, 4096, 30, 32),
    "bloom-176b": partial(bloom, 14_336, 70, 112),
}
