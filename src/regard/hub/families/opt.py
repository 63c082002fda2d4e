"""OPT (Zhang et al. 2022). The one of 350 M norms after each branch and has narrow embeddings."""

from typing import Any

from regard.hub.family import Family, Table, activation, activation_name
from regard.hub.weight_mapping import Rule, renamed

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
ORDERS = {True: "pre", False: "post"}  # by do_layer_norm_before


def _rules(config: Any) -> list[Rule]:
    return [
        Rule("decoder.embed_tokens.weight", "embed.token.weight"),
        Rule("decoder.project_in.weight", "embed.project.weight"),
        Rule("decoder.embed_positions.weight", "decoder.position.table.weight"),
        *renamed(LAYER, "decoder.layers.{i}.", "decoder.blocks.{i}."),
        *renamed({"decoder.final_layer_norm": "decoder.norm"}),
        Rule("model.decoder.project_out.weight", "head.project.weight"),
        Rule("lm_head.weight", "head.weight"),
        Rule("score.weight", "head.out.weight"),
    ]


def _read(theirs: Table) -> Table:
    narrow = theirs["word_embed_proj_dim"]
    width = theirs["hidden_size"] if narrow is None else narrow
    return {
        "embed_dim": width,
        "factored": "tokens" if width != theirs["hidden_size"] else "tables",
        "ffn": activation(theirs["activation_function"]),
        "norm_order": ORDERS[theirs["do_layer_norm_before"]],
        "position": {"kind": "learned", "offset": 2},
    }


def _write(config: Any) -> Table:
    return {
        "word_embed_proj_dim": config.embed_dim or config.dim,
        "activation_function": activation_name(config.ffn),
        "do_layer_norm_before": config.norm_order == "pre",
    }


OPT = Family(
    name="opt",
    prefix="model.",
    heads={
        "OPTForCausalLM": "linear",
        "OPTModel": "none",
        "OPTForSequenceClassification": {"kind": "classify", "pool": "last", "bias": False},
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
    only={
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
    read=_read,
    write=_write,
)
