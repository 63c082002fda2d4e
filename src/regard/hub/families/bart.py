"""BART (Lewis et al. 2020), whose layers and their names are also Marian's."""

from typing import Any

from regard.config import kind_of
from regard.errors import ConfigError
from regard.hub.family import Family, Table, activation, activation_name
from regard.hub.weight_mapping import Rule, Wrapped, renamed

LAYER = {
    "self_attn.q_proj": "attention.query",
    "self_attn.k_proj": "attention.key",
    "self_attn.v_proj": "attention.value",
    "self_attn.out_proj": "attention.out",
    "self_attn_layer_norm": "attention_norm",
    "encoder_attn.q_proj": "cross.query",
    "encoder_attn.k_proj": "cross.key",
    "encoder_attn.v_proj": "cross.value",
    "encoder_attn.out_proj": "cross.out",
    "encoder_attn_layer_norm": "cross_norm",
    "fc1": "ffn.up",
    "fc2": "ffn.down",
    "final_layer_norm": "ffn_norm",
}
ONE = {  # vocabulary for both sides; the copies are in old files
    "shared": "embed.token",
    "encoder.embed_tokens": "embed.token",
    "decoder.embed_tokens": "embed.token",
}
TWO = {"encoder.embed_tokens": "source_embed.token", "decoder.embed_tokens": "embed.token"}
SIDE = {"embed_positions": "position.table", "layernorm_embedding": "embed_norm"}
FIELDS = {
    "max_position_embeddings": "context",
    "d_model": "dim",
    "encoder_layers": "encoder_layers",
    "decoder_layers": "layers",
    "encoder_attention_heads": "heads",
    "encoder_ffn_dim": "ffn_dim",
    "scale_embedding": "embed_scaled",
    "dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "activation_dropout": "ffn_dropout",
    "tie_word_embeddings": "tied",
}
DEFAULTS = {
    "max_position_embeddings": 1024,
    "d_model": 1024,
    "encoder_layers": 12,
    "decoder_layers": 12,
    "encoder_attention_heads": 16,
    "decoder_attention_heads": 16,
    "encoder_ffn_dim": 4096,
    "decoder_ffn_dim": 4096,
    "activation_function": "gelu",
    "scale_embedding": False,
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "tie_word_embeddings": True,
}
ALWAYS = {"shape": "encoder-decoder", "norm_order": "post"}
ONLY = {"is_decoder": False, "normalize_before": False, "add_final_layer_norm": False}
HEADS = {
    "classify": {
        "classification_head.dense": "head.hidden",
        "classification_head.out_proj": "head.out",
    },
    "span": {"qa_outputs": "head.out"},
}
EQUAL = ("ffn_dim", "attention_heads")  # the two sides have the same


def rules(config: Any) -> list[Rule]:
    """The names of both sides and of the head."""
    sides = [
        rule
        for side in ("encoder", "decoder")
        for rule in (
            *renamed(SIDE, f"{side}.", f"{side}."),
            *renamed(LAYER, f"{side}.layers.{{i}}.", f"{side}.blocks.{{i}}."),
        )
    ]
    tables = ONE if config.source_vocab_size is None else TWO
    return [
        *renamed(tables),
        *sides,
        Rule("lm_head.weight", "head.weight"),
        Rule("final_logits_bias", "head.bias", Wrapped()),
        *renamed(HEADS.get(kind_of(config.head)[0], {})),
    ]


def read(theirs: Table) -> Table:
    """What both families compute alike."""
    for name in EQUAL:
        encoder, decoder = theirs[f"encoder_{name}"], theirs[f"decoder_{name}"]
        if encoder != decoder:
            raise ConfigError(
                f"encoder_{name}={encoder!r} with decoder_{name}={decoder!r} is not supported: "
                "encoder and decoder have layers of one size"
            )
    return {"ffn": activation(theirs["activation_function"])}


def write(config: Any) -> Table:
    """The same, backwards."""
    return {
        "activation_function": activation_name(config.ffn),
        "decoder_ffn_dim": config.width,
        "decoder_attention_heads": config.heads,
        "is_encoder_decoder": True,
    }


BART = Family(
    name="bart",
    prefix="model.",
    heads={
        "BartForConditionalGeneration": {"kind": "linear", "bias": True},
        "BartModel": "none",
        "BartForSequenceClassification": {"kind": "classify", "pool": "last", "hidden": "tanh"},
        "BartForQuestionAnswering": "span",
    },
    fields={"vocab_size": "vocab_size", **FIELDS},
    always={**ALWAYS, "embed_norm": True, "position": {"kind": "learned", "offset": 2}},
    only={**ONLY, "normalize_embedding": True, "static_position_embeddings": False},
    defaults={"vocab_size": 50265, **DEFAULTS},
    ignored=("encoder.version", "decoder.version"),
    rules=rules,
    read=read,
    write=write,
)
