"""Phi-1 and Phi-2 (Gunasekar et al. 2023): causal language model, classifier, tagger.

Differs from LLaMA: LayerNorm with biases, attention and feed-forward in parallel after one norm,
no gate, and RoPE on a fraction of each head. Phi-3 is in `llama`.
"""

from typing import Any

from regard.hub.model_type import ConfigDict, ModelType, read_activation, write_activation
from regard.hub.model_types.llama import FIELDS, heads, rules
from regard.hub.rope_config import read_rope, write_rope

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


def _read(hf: ConfigDict) -> ConfigDict:
    return {
        "ffn": read_activation(hf["hidden_act"]),
        "position": read_rope(hf, partial_rotary_factor=0.5),
    }


def _write(config: Any) -> ConfigDict:
    rotary = write_rope(config.position, partial_rotary_factor_key="partial_rotary_factor")
    return {"hidden_act": write_activation(config.ffn), **rotary}


PHI = ModelType(
    name="phi",
    prefix="model.",
    heads={**heads("Phi"), "PhiForCausalLM": {"kind": "linear", "bias": True}},
    fields={
        **{key: FIELDS[key] for key in FIELDS if key not in ("rms_norm_eps", "head_dim")},
        "layer_norm_eps": "norm_eps",
        "resid_pdrop": "dropout",
        "qk_layernorm": "qk_norm",
    },
    constants={"norm_placement": "parallel"},
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
    read_settings=_read,
    write_settings=_write,
)
