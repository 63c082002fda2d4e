"""Published and useful configurations, by name. A preset is a function that cites its source."""

from collections.abc import Callable

from regard.models.ngram import NGramConfig
from regard.models.presets import before, gpt, vaswani
from regard.models.recurrent import LSTMConfig
from regard.models.transformer import TransformerConfig

ModelConfig = TransformerConfig | LSTMConfig | NGramConfig

PRESETS: dict[str, Callable[[], ModelConfig]] = {
    "gpt2": gpt.gpt2,
    "gpt2-medium": gpt.gpt2_medium,
    "gpt2-large": gpt.gpt2_large,
    "gpt2-xl": gpt.gpt2_xl,
    "modern": gpt.modern,
    "tiny-decoder": gpt.tiny_decoder,
    "transformer-base": vaswani.transformer_base,
    "transformer-big": vaswani.transformer_big,
    "tiny-encoder": vaswani.tiny_encoder,
    "tiny-encoder-decoder": vaswani.tiny_encoder_decoder,
    "lstm": before.lstm,
    "ngram": before.ngram,
}

__all__ = ["PRESETS", "ModelConfig"]
