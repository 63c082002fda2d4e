"""GPT-NeoX and Pythia (Black et al. 2022, Biderman et al. 2023): causal LM, classifier, tagger.

Differs from LLaMA: LayerNorm with biases, attention and feed-forward in parallel, RoPE on a
fraction of each head, and query, key and value rows grouped by head, as in BLOOM.
"""

from typing import Any

from regard.config import kind_of
from regard.hub.model_type import ConfigDict, ModelType, read_activation, write_activation
from regard.hub.model_types.gpt2 import HEADS
from regard.hub.rope_config import read_rope, write_rope
from regard.hub.weight_mapping import GroupedByHead, Rule, module_rules

LAYER = {
    "input_layernorm": "attention_norm",
    "attention.dense": "attention.out",
    "post_attention_layernorm": "ffn_norm",
    "mlp.dense_h_to_4h": "ffn.up",
    "mlp.dense_4h_to_h": "ffn.down",
}
QKV = {"attention.query_key_value": ("attention.query", "attention.key", "attention.value")}
NORM_PLACEMENTS = {True: "parallel_norms", False: "pre"}  # by use_parallel_residual


def _rules(config: Any) -> list[Rule]:
    return [
        Rule("embed_in.weight", "embed.token.weight"),
        *module_rules(LAYER, "layers.{i}.", "decoder.blocks.{i}."),
        *module_rules(QKV, "layers.{i}.", "decoder.blocks.{i}.", GroupedByHead(config.heads)),
        *module_rules({"final_layer_norm": "decoder.norm"}),
        Rule("embed_out.weight", "head.weight"),
        Rule("lm_head.weight", "head.weight"),  # its name in transformers 5
        *module_rules(HEADS.get(kind_of(config.head)[0], {})),
    ]


def _read(hf: ConfigDict) -> ConfigDict:
    return {
        "ffn": read_activation(hf["hidden_act"]),
        "norm_placement": NORM_PLACEMENTS[hf["use_parallel_residual"]],
        "bias": {True: True, False: "not_attention"}[hf["attention_bias"]],
        "position": read_rope(
            hf,
            partial_rotary_factor=0.25,
            base_key="rotary_emb_base",
            partial_rotary_factor_key="rotary_pct",
        ),
    }


def _write(config: Any) -> ConfigDict:
    return {
        "hidden_act": write_activation(config.ffn),
        "use_parallel_residual": config.norm_placement == "parallel_norms",
        "attention_bias": config.bias is True,
        **write_rope(
            config.position, base_key="rotary_emb_base", partial_rotary_factor_key="rotary_pct"
        ),
    }


GPT_NEOX = ModelType(
    name="gpt_neox",
    prefix="gpt_neox.",
    heads={
        "GPTNeoXForCausalLM": "linear",
        "GPTNeoXModel": "none",
        "GPTNeoXForSequenceClassification": {
            "kind": "classification",
            "pool": "last",
            "bias": False,
        },
        "GPTNeoXForTokenClassification": "tag",
    },
    fields={
        "vocab_size": "vocab_size",
        "max_position_embeddings": "context",
        "hidden_size": "dim",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "intermediate_size": "ffn_dim",
        "layer_norm_eps": "norm_eps",
        "hidden_dropout": "dropout",
        "attention_dropout": "attention_dropout",
        "tie_word_embeddings": "tied",
    },
    defaults={
        "vocab_size": 50432,
        "max_position_embeddings": 2048,
        "hidden_size": 6144,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "intermediate_size": 24576,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_parallel_residual": True,
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
    ignored_tensors=(
        "layers.{i}.attention.bias",  # the causal mask, in old files
        "layers.{i}.attention.masked_bias",
        "layers.{i}.attention.rotary_emb.inv_freq",
    ),
    rules=_rules,
    read_settings=_read,
    write_settings=_write,
)
