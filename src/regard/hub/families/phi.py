"""Phi-1 and Phi-2 (Gunasekar et al. 2023)."""

from typing import Any

from regard.hub.families.llama import FIELDS, heads, rules
from regard.hub.family import Family, Table, activation, activation_name
from regard.hub.rope_config import read_rotary, write_rotary

LAYER = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.query",
    "self_attn.k_proj": "attention.key",
    "self_attn.v_proj": "attention.value",
    "self_attn.q_layernorm": "attention.q_norm",
    "self_attn.k_layernorm": "attention.k_norm",
    "self_attn.dense": "attention.out",
    "mlp.fc1": "ffn.up",
    "mlp.fc2": "ffn.down",
}


def _read(theirs: Table) -> Table:
    return {"ffn": activation(theirs["hidden_act"]), "position": read_rotary(theirs, fraction=0.5)}


def _write(config: Any) -> Table:
    rotary = write_rotary(config.position, fraction_key="partial_rotary_factor")
    return {"hidden_act": activation_name(config.ffn), **rotary}


PHI = Family(
    name="phi",
    prefix="model.",
    heads={**heads("Phi"), "PhiForCausalLM": {"kind": "linear", "bias": True}},
    fields={
        **{key: FIELDS[key] for key in FIELDS if key not in ("rms_norm_eps", "head_dim")},
        "layer_norm_eps": "norm_eps",
        "resid_pdrop": "dropout",
        "qk_layernorm": "qk_norm",
    },
    always={"norm_order": "parallel"},
    defaults={
        "vocab_size": 51200,
        "max_position_embeddings": 2048,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "intermediate_size": 8192,
        "layer_norm_eps": 1e-5,
        "hidden_act": "gelu_new",
        "resid_pdrop": 0.0,
        "attention_dropout": 0.0,
        "qk_layernorm": False,
        "tie_word_embeddings": False,
    },
    rules=rules(LAYER, "final_layernorm"),
    read=_read,
    write=_write,
)
