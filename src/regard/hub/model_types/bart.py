"""BART (Lewis et al. 2020): encoder-decoder for generation, classification, span extraction.

Post-norm with learned positions that start at row 2, a norm after the embeddings and a bias on
the logits. Marian shares its layers, their names and most settings. mBART (Liu et al. 2020) and
BARThez (Kamal Eddine et al. 2021) are pre-norm, with a norm at the end of both stacks.
"""

from dataclasses import replace
from typing import Any

from regard.config import kind_of
from regard.hub.model_type import ConfigDict, ModelType, read_activation, write_activation
from regard.hub.weight_mapping import LeadingAxes, Rule, module_rules

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
SHARED_EMBEDDING = {  # one vocabulary for both sides; old files hold copies
    "shared": "embed.token",
    "encoder.embed_tokens": "embed.token",
    "decoder.embed_tokens": "embed.token",
}
SEPARATE_EMBEDDINGS = {
    "encoder.embed_tokens": "source_embed.token",
    "decoder.embed_tokens": "embed.token",
}
STACK = {
    "embed_positions": "position.table",
    "layernorm_embedding": "embed_norm",
    "layer_norm": "norm",
}
FIELDS = {
    "max_position_embeddings": "context",
    "d_model": "dim",
    "encoder_layers": "encoder_layers",
    "decoder_layers": "layers",
    "encoder_attention_heads": "encoder_heads",
    "encoder_ffn_dim": "encoder_ffn_dim",
    "decoder_attention_heads": "heads",
    "decoder_ffn_dim": "ffn_dim",
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
CONSTANTS = {"architecture": "encoder-decoder", "norm_placement": "post"}
SUPPORTED_VALUES = {"is_decoder": False, "normalize_before": False, "add_final_layer_norm": False}
HEADS = {
    "classification": {
        "classification_head.dense": "head.hidden",
        "classification_head.out_proj": "head.out",
    },
    "span": {"qa_outputs": "head.out"},
}


def rules(config: Any) -> list[Rule]:
    """The rules for encoder, decoder and head."""
    sides = [
        rule
        for side in ("encoder", "decoder")
        for rule in (
            *module_rules(STACK, f"{side}.", f"{side}."),
            *module_rules(LAYER, f"{side}.layers.{{i}}.", f"{side}.blocks.{{i}}."),
        )
    ]
    shared = config.source_vocab_size is None
    return [
        *module_rules(SHARED_EMBEDDING if shared else SEPARATE_EMBEDDINGS),
        *sides,
        Rule("lm_head.weight", "head.weight"),
        Rule("final_logits_bias", "head.bias", LeadingAxes(2)),
        *module_rules(HEADS.get(kind_of(config.head)[0], {})),
    ]


def read_settings(hf: ConfigDict) -> ConfigDict:
    """The settings that BART and Marian have in common."""
    return {"ffn": read_activation(hf["activation_function"])}


def write_settings(config: Any) -> ConfigDict:
    """The reverse of `read_settings`."""
    return {
        "activation_function": write_activation(config.ffn),
        "is_encoder_decoder": True,
    }


BART = ModelType(
    name="bart",
    prefix="model.",
    heads={
        "BartForConditionalGeneration": {"kind": "linear", "bias": True},
        "BartModel": "none",
        "BartForSequenceClassification": {
            "kind": "classification",
            "pool": "last",
            "hidden": "tanh",
        },
        "BartForQuestionAnswering": "span",
    },
    fields={"vocab_size": "vocab_size", **FIELDS},
    constants={**CONSTANTS, "embed_norm": True, "position": {"kind": "learned", "offset": 2}},
    supported_values={
        **SUPPORTED_VALUES,
        "normalize_embedding": True,
        "static_position_embeddings": False,
    },
    defaults={"vocab_size": 50265, **DEFAULTS},
    ignored_tensors=("encoder.version", "decoder.version"),
    rules=rules,
    read_settings=read_settings,
    write_settings=write_settings,
)
MBART = replace(
    BART,
    name="mbart",
    heads={name.replace("Bart", "MBart"): head for name, head in BART.heads.items()},
    constants={**BART.constants, "norm_placement": "pre"},
    supported_values={
        **BART.supported_values,
        "normalize_before": True,
        "add_final_layer_norm": True,
    },
)
