"""Marian (Junczys-Dowmunt et al. 2018): the 2017 Transformer, as the OPUS-MT models have it."""

from typing import Any

from regard.hub.families import bart
from regard.hub.family import Family, Table


def _read(theirs: Table) -> Table:
    target = theirs["decoder_vocab_size"] or theirs["vocab_size"]
    one = theirs["share_encoder_decoder_embeddings"]
    return {
        **bart.read(theirs),
        "vocab_size": theirs["vocab_size"] if one else target,
        "source_vocab_size": None if one else theirs["vocab_size"],
    }


def _write(config: Any) -> Table:
    last = config.vocab_size - 1  # pads and starts by custom; a tokenizer may know better
    return {
        **bart.write(config),
        "pad_token_id": last,
        "decoder_start_token_id": last,
        "vocab_size": config.source_vocab_size or config.vocab_size,
        "decoder_vocab_size": config.vocab_size,
        "share_encoder_decoder_embeddings": config.source_vocab_size is None,
    }


MARIAN = Family(
    name="marian",
    prefix="model.",
    heads={"MarianMTModel": {"kind": "linear", "bias": True}, "MarianModel": "none"},
    fields=bart.FIELDS,
    always={**bart.ALWAYS, "position": {"kind": "sinusoidal", "halves": True}},
    only={**bart.ONLY, "normalize_embedding": False, "static_position_embeddings": True},
    defaults={
        "vocab_size": 58101,
        "decoder_vocab_size": None,
        "share_encoder_decoder_embeddings": True,
        **bart.DEFAULTS,
    },
    ignored=("encoder.embed_positions.weight", "decoder.embed_positions.weight"),
    rules=bart.rules,
    read=_read,
    write=_write,
)
