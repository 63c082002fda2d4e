"""Marian (Junczys-Dowmunt et al. 2018): the translation models of OPUS-MT.

Differs from BART: sinusoidal positions, no norm after the embeddings, and possibly two
vocabularies.
"""

from typing import Any

from regard.hub.model_type import ConfigDict, ModelType
from regard.hub.model_types import bart


def _read(hf: ConfigDict) -> ConfigDict:
    target = hf["decoder_vocab_size"] or hf["vocab_size"]
    shared = hf["share_encoder_decoder_embeddings"]
    return {
        **bart.read_settings(hf),
        "vocab_size": hf["vocab_size"] if shared else target,
        "source_vocab_size": None if shared else hf["vocab_size"],
    }


def _write(config: Any) -> ConfigDict:
    last = config.vocab_size - 1  # Marian's convention; the ids of a tokenizer replace it
    return {
        **bart.write_settings(config),
        "pad_token_id": last,
        "decoder_start_token_id": last,
        "vocab_size": config.source_vocab_size or config.vocab_size,
        "decoder_vocab_size": config.vocab_size,
        "share_encoder_decoder_embeddings": config.source_vocab_size is None,
    }


MARIAN = ModelType(
    name="marian",
    prefix="model.",
    heads={"MarianMTModel": {"kind": "linear", "bias": True}, "MarianModel": "none"},
    fields=bart.FIELDS,
    constants={**bart.CONSTANTS, "position": {"kind": "sinusoidal", "interleaved": False}},
    supported_values={
        **bart.SUPPORTED_VALUES,
        "normalize_embedding": False,
        "static_position_embeddings": True,
    },
    defaults={
        "vocab_size": 58101,
        "decoder_vocab_size": None,
        "share_encoder_decoder_embeddings": True,
        **bart.DEFAULTS,
    },
    ignored_tensors=("encoder.embed_positions.weight", "decoder.embed_positions.weight"),
    rules=bart.rules,
    read_settings=_read,
    write_settings=_write,
)
