"""BLOOM (BigScience 2022): causal language model, classifier, tagger.

Differs from GPT-2: ALiBi instead of learned positions, a norm after the embeddings, and query, key
and value rows grouped by head, as in GPT-NeoX.
"""

from typing import Any

from regard.config import kind_of
from regard.hub.model_type import ConfigDict, ModelType
from regard.hub.model_types.gpt2 import HEADS
from regard.hub.weight_mapping import GroupedByHead, Rule, module_rules

LAYER = {
    "input_layernorm": "attention_norm",
    "self_attention.dense": "attention.out",
    "post_attention_layernorm": "ffn_norm",
    "mlp.dense_h_to_4h": "ffn.up",
    "mlp.dense_4h_to_h": "ffn.down",
}
QKV = {"self_attention.query_key_value": ("attention.query", "attention.key", "attention.value")}
NORMS = {"word_embeddings_layernorm": "decoder.embed_norm", "ln_f": "decoder.norm"}


def _rules(config: Any) -> list[Rule]:
    return [
        Rule("word_embeddings.weight", "embed.token.weight"),
        *module_rules(NORMS),
        *module_rules(LAYER, "h.{i}.", "decoder.blocks.{i}."),
        *module_rules(QKV, "h.{i}.", "decoder.blocks.{i}.", GroupedByHead(config.heads)),
        Rule("lm_head.weight", "head.weight"),
        *module_rules(HEADS.get(kind_of(config.head)[0], {})),
    ]


def _read(hf: ConfigDict) -> ConfigDict:
    old = {name: hf[key] for key, name in OLD_FIELDS.items() if hf.get(key) is not None}
    context = hf.get("seq_length")
    return {**old, "context": 2048 if context is None else context}  # ALiBi has no position table


def _write(config: Any) -> ConfigDict:
    return {"seq_length": config.context}


OLD_FIELDS = {"n_embed": "dim", "num_attention_heads": "heads", "num_hidden_layers": "layers"}
BLOOM = ModelType(
    name="bloom",
    prefix="transformer.",
    heads={
        "BloomForCausalLM": "linear",
        "BloomModel": "none",
        "BloomForSequenceClassification": {"kind": "classification", "pool": "last", "bias": False},
        "BloomForTokenClassification": "tag",
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
    constants={"position": "alibi", "ffn": "gelu_tanh", "embed_norm": True},
    supported_values={"apply_residual_connection_post_layernorm": False},
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
    read_settings=_read,
    write_settings=_write,
)
