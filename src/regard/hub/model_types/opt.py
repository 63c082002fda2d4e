"""OPT (Zhang et al. 2022): causal language model, classifier.

Differs from GPT-2: ReLU, separate query, key and value matrices, and positions that start at
row 2. The 350M model is post-norm and has embeddings narrower than its layers.
"""

from typing import Any

from regard.hub.model_type import ConfigDict, ModelType, read_activation, write_activation
from regard.hub.weight_mapping import Rule, module_rules

LAYER = {
    "self_attn_layer_norm": "attention_norm",
    "self_attn.q_proj": "attention.query",
    "self_attn.k_proj": "attention.key",
    "self_attn.v_proj": "attention.value",
    "self_attn.out_proj": "attention.out",
    "final_layer_norm": "ffn_norm",
    "fc1": "ffn.up",
    "fc2": "ffn.down",
}
NORM_PLACEMENTS = {True: "pre", False: "post"}  # by do_layer_norm_before


def _rules(config: Any) -> list[Rule]:
    return [
        Rule("decoder.embed_tokens.weight", "embed.token.weight"),
        Rule("decoder.project_in.weight", "embed.project.weight"),
        Rule("decoder.embed_positions.weight", "decoder.position.table.weight"),
        *module_rules(LAYER, "decoder.layers.{i}.", "decoder.blocks.{i}."),
        *module_rules({"decoder.final_layer_norm": "decoder.norm"}),
        Rule("model.decoder.project_out.weight", "head.project.weight"),
        Rule("lm_head.weight", "head.weight"),
        Rule("score.weight", "head.out.weight"),
    ]


def _read(hf: ConfigDict) -> ConfigDict:
    dim, embed_dim = hf["hidden_size"], hf["word_embed_proj_dim"]
    embed_dim = dim if embed_dim is None else embed_dim
    return {
        "embed_dim": embed_dim,
        "factorize_positions": embed_dim == dim,
        "ffn": read_activation(hf["activation_function"]),
        "norm_placement": NORM_PLACEMENTS[hf["do_layer_norm_before"]],
        "position": {"kind": "learned", "offset": 2},
    }


def _write(config: Any) -> ConfigDict:
    return {
        "word_embed_proj_dim": config.embed_dim or config.dim,
        "activation_function": write_activation(config.ffn),
        "do_layer_norm_before": config.norm_placement == "pre",
    }


OPT = ModelType(
    name="opt",
    prefix="model.",
    heads={
        "OPTForCausalLM": "linear",
        "OPTModel": "none",
        "OPTForSequenceClassification": {"kind": "classification", "pool": "last", "bias": False},
    },
    fields={
        "vocab_size": "vocab_size",
        "max_position_embeddings": "context",
        "hidden_size": "dim",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "ffn_dim": "ffn_dim",
        "dropout": "dropout",
        "attention_dropout": "attention_dropout",
        "tie_word_embeddings": "tied",
    },
    supported_values={
        "_remove_final_layer_norm": False,
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
    },
    defaults={
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "ffn_dim": 3072,
        "word_embed_proj_dim": None,
        "activation_function": "relu",
        "do_layer_norm_before": True,
        "dropout": 0.1,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
    },
    rules=_rules,
    read_settings=_read,
    write_settings=_write,
)
