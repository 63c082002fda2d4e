"""Gemma 1, 2 and 3 (Gemma Team 2024, 2025): causal language model, classifier, tagger.

Gemma differs from LLaMA: scaled embeddings, RMS norms that multiply by 1 + weight, a GELU gate and
tied weights. Gemma 2 adds a norm after each sublayer, sliding windows in every second layer, and
soft-capping of scores and logits. Gemma 3 has norms on queries and keys instead of soft-capping,
and another RoPE base in layers with a sliding window.
"""

from typing import Any

from regard.config import Choice, kind_of
from regard.errors import ConfigError
from regard.files.untrusted import quote
from regard.hub.model_type import ConfigDict, ModelType, read_gated_ffn, write_gate_activation
from regard.hub.model_types.llama import (
    BIASES,
    DEFAULTS,
    FIELDS,
    FULL,
    LAYER,
    WINDOWED,
    heads,
    read_layer_types,
    read_windows,
    rules,
    write_windows,
)
from regard.hub.rope_config import read_rope, write_rope

CONSTANTS = {"norm": "rms_plus_one", "bias": False, "embed_scaled": True}
SANDWICH = {
    **LAYER,
    "post_attention_layernorm": "attention_post_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "ffn_post_norm",
}


def _read(hf: ConfigDict) -> ConfigDict:
    name = hf.get("hidden_activation") or hf["hidden_act"]
    # The first files say "gelu", but the models were trained with the tanh approximation.
    ffn = read_gated_ffn("gelu_pytorch_tanh" if name == "gelu" else name)
    return {"ffn": ffn, "position": read_rope(hf)}


def _write(config: Any) -> ConfigDict:
    name = write_gate_activation(config.ffn).replace("gelu_new", "gelu_pytorch_tanh")
    return {"hidden_act": name, "hidden_activation": name, **write_rope(config.position)}


def _linear(hf: ConfigDict) -> Choice:
    return {"kind": "linear", "cap": hf["final_logit_softcapping"]}


def _read_gemma2(hf: ConfigDict) -> ConfigDict:
    kinds = [FULL if index % 2 else WINDOWED for index in range(hf["num_hidden_layers"])]
    score = {
        "kind": "scaled_dot",
        "scale_dim": hf["query_pre_attn_scalar"],
        "cap": hf["attn_logit_softcapping"],
    }
    if score["scale_dim"] == hf["head_dim"]:
        score["scale_dim"] = None
    return {**_read(hf), **read_windows(hf, kinds), "score": score}


def _read_gemma3(hf: ConfigDict) -> ConfigDict:
    """The RoPE settings are nested by kind of layer in transformers 5, and flat in older files."""
    nested = hf.get("rope_parameters") or {}
    windowed, full = nested.get(WINDOWED), nested.get(FULL)
    if isinstance(windowed, dict) and isinstance(full, dict):
        if windowed.get("rope_type", "default") != "default":
            raise ConfigError(
                f"rope_parameters={quote(nested)} is not supported: layers with a sliding window "
                "have no RoPE scaling here"
            )
        window_base = windowed.get("rope_theta", 10_000.0)
        hf = {**hf, "rope_parameters": full, "rope_theta": None, "rope_scaling": None}
    else:
        window_base = hf["rope_local_base_freq"]
    every = hf.get("sliding_window_pattern") or 6
    layers = hf["num_hidden_layers"]
    kinds = [WINDOWED if (index + 1) % every else FULL for index in range(layers)]
    position = read_rope(hf, base=1_000_000.0)
    assert isinstance(position, dict)
    common = _read_gemma2({**hf, "layer_types": read_layer_types(hf) or kinds})
    return {
        **common,
        "position": {**position, "window_base": float(window_base)},
        "bias": BIASES[hf["attention_bias"], False],
    }


def _write_gemma3(config: Any) -> ConfigDict:
    return {
        **_write_gemma2(config),
        "rope_local_base_freq": kind_of(config.position)[1].get("window_base", 10_000.0),
        "attention_bias": config.bias == "attention",
    }


def _write_gemma2(config: Any) -> ConfigDict:
    score, head = kind_of(config.score)[1], kind_of(config.head)[1]
    return {
        **_write(config),
        **write_windows(config),
        "query_pre_attn_scalar": score.get("scale_dim")
        or config.head_dim
        or config.dim // config.heads,
        "attn_logit_softcapping": score.get("cap"),
        "final_logit_softcapping": head.get("cap"),
    }


GEMMA = ModelType(
    name="gemma",
    prefix="model.",
    heads=heads("Gemma"),
    fields=FIELDS,
    constants=CONSTANTS,
    supported_values={"attention_bias": False, "use_bidirectional_attention": (None, False)},
    defaults={
        **DEFAULTS,
        "vocab_size": 256_000,
        "max_position_embeddings": 8192,
        "hidden_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "intermediate_size": 24576,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    rules=rules(LAYER),
    read_settings=_read,
    write_settings=_write,
)
GEMMA2 = ModelType(
    name="gemma2",
    prefix="model.",
    heads={**heads("Gemma2"), "Gemma2ForCausalLM": _linear},
    fields=FIELDS,
    constants={**CONSTANTS, "norm_placement": "sandwich"},
    supported_values=GEMMA.supported_values,
    defaults={
        **GEMMA.defaults,
        "hidden_size": 2304,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 9216,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    rules=rules(SANDWICH),
    read_settings=_read_gemma2,
    write_settings=_write_gemma2,
)
GEMMA3 = ModelType(
    name="gemma3_text",
    prefix="model.",
    heads={
        "Gemma3ForCausalLM": _linear,
        "Gemma3TextModel": "none",
        "Gemma3TextForSequenceClassification": {
            "kind": "classification",
            "pool": "last",
            "bias": False,
        },
    },
    fields=FIELDS,
    constants={**CONSTANTS, "norm_placement": "sandwich", "qk_norm": True},
    supported_values={"use_bidirectional_attention": (None, False)},
    defaults={
        **GEMMA2.defaults,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "rope_local_base_freq": 10_000.0,
        "attention_bias": False,
    },
    rules=rules(SANDWICH),
    read_settings=_read_gemma3,
    write_settings=_write_gemma3,
)
