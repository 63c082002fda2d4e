"""The 2017 Transformer, and small encoders and encoder-decoders for a CPU."""

from dataclasses import replace

from regard.models.transformer import TransformerConfig


def transformer_base() -> TransformerConfig:
    """Vaswani et al. 2017, table 3 (base): 65 M in the paper, with 37 k shared subwords."""
    return TransformerConfig(
        vocab_size=37_000,
        dim=512,
        layers=6,
        heads=8,
        context=1024,
        architecture="encoder-decoder",
        position="sinusoidal",
        norm_placement="post",
        ffn="relu",
        init="xavier",
        embed_scaled=True,
        dropout=0.1,
    )


def transformer_big() -> TransformerConfig:
    """Vaswani et al. 2017, table 3 (big): 213 M in the paper."""
    return replace(transformer_base(), dim=1024, heads=16, dropout=0.3)


def tiny_encoder_decoder() -> TransformerConfig:
    """An encoder-decoder that a laptop's CPU trains in minutes; pre-norm trains more stably."""
    return replace(
        transformer_base(),
        dim=128,
        layers=2,
        heads=4,
        context=128,
        norm_placement="pre",
        dropout=0.0,
    )


def tiny_encoder() -> TransformerConfig:
    """An encoder that a laptop's CPU trains in minutes: BERT with RoPE."""
    return TransformerConfig(
        vocab_size=8000,
        dim=128,
        layers=4,
        heads=4,
        context=128,
        architecture="encoder",
        position="rotary",
        head="masked",
    )
