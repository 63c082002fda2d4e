"""BLOOM (BigScience 2022)."""

from typing import Any

from regard.hub.family import Family, Table
from regard.hub.weight_mapping import ByHead, Rule, renamed

LAYER = {
    "input_layernorm": "attention_norm",
    "self_attention.dense": "attention.out",
    "post_attention_layernorm": "ffn_norm",
    "mlp.dense_h_to_4h": "ffn.up",
    "mlp.dense_4h_to_h": "ffn.down",
}
LOOK = {"self_attention.query_key_value": ("attention.query", "attention.key", "attention.value")}
REST = {"word_embeddings_layernorm": "decoder.embed_norm", "ln_f": "decoder.norm"}


def _rules(config: Any) -> list[Rule]:
    return [
        Rule("word_embeddings.weight", "embed.token.weight"),
        *renamed(REST),
        *renamed(LAYER, "h.{i}.", "decoder.blocks.{i}."),
        *renamed(LOOK, "h.{i}.", "decoder.blocks.{i}.", ByHead(config.heads)),
        Rule("lm_head.weight", "head.weight"),
        Rule("score.weight", "head.out.weight"),
    ]


def _read(theirs: Table) -> Table:
    old = {ours: theirs[key] for key, ours in OLD.items() if key in theirs}
    return {**old, "context": theirs.get("seq_length", 2048)}  # which it does not depend on


def _write(config: Any) -> Table:
    return {"seq_length": config.context}


OLD = {"n_embed": "dim", "num_attention_heads": "heads", "num_hidden_layers": "layers"}
BLOOM = Family(
    name="bloom",
    prefix="transformer.",
    heads={
        "BloomForCausalLM": "linear",
        "BloomModel": "none",
        "BloomForSequenceClassification": {"kind": "classify", "pool": "last", "bias": False},
    },
    fields={
        "vocab_size": "vocab_size",
        "hidden_size": "dim",
        "n_layer": "layers",
        "n_head": "heads",
        "layer_norm_epsilon": "norm_eps",
        "hidden_dropout": "dropout",
        "attention_dropout": "attention_dropout",
        "tie_word_embeddings": "tied",
    },
    always={"position": "alibi", "ffn": "gelu_tanh", "embed_norm": True},
    only={"apply_residual_connection_post_layernorm": False},
    defaults={
        "vocab_size": 250880,
        "hidden_size": 64,
        "n_layer": 2,
        "n_head": 8,
        "layer_norm_epsilon": 1e-5,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
    },
    rules=_rules,
    read=_read,
    write=_write,
)
