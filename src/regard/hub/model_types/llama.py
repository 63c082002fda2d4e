"""LLaMA (Touvron et al. 2023), Mistral, Qwen 2 and 3, Phi-3: causal LM, classifier, tagger.

Pre-norm decoders with RMSNorm, RoPE, GQA and a gated feed-forward. They differ as follows:

    LLaMA     biases nowhere, in attention, in the feed-forward, or in both
    Mistral   sliding window
    Qwen 2    biases on query, key and value; sliding window in some layers
    Qwen 3    as Qwen 2, but norms on queries and keys, and biases in attention or nowhere
    Phi-3     qkv and gate-up stored as one matrix each, partial RoPE

Gemma and Phi reuse parts of this module.
"""

from collections.abc import Callable, Mapping
from typing import Any

from regard.config import Choice
from regard.errors import ConfigError
from regard.files.untrusted import quote
from regard.hub.model_type import ConfigDict, ModelType, read_gated_ffn, write_gate_activation
from regard.hub.rope_config import read_rope, write_rope
from regard.hub.weight_mapping import Rule, module_rules

LAYER = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.query",
    "self_attn.k_proj": "attention.key",
    "self_attn.v_proj": "attention.value",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "self_attn.o_proj": "attention.out",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn.gate",
    "mlp.up_proj": "ffn.up",
    "mlp.down_proj": "ffn.down",
}
PACKED_LAYER: dict[str, str | tuple[str, ...]] = {  # of Phi-3: fewer, larger matmuls
    "input_layernorm": "attention_norm",
    "self_attn.qkv_proj": ("attention.query", "attention.key", "attention.value"),
    "self_attn.o_proj": "attention.out",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_up_proj": ("ffn.gate", "ffn.up"),
    "mlp.down_proj": "ffn.down",
}
FIELDS = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "context",
    "hidden_size": "dim",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "ffn_dim",
    "rms_norm_eps": "norm_eps",
    "attention_dropout": "attention_dropout",
    "tie_word_embeddings": "tied",
}
DEFAULTS = {
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "intermediate_size": 11008,
    "rms_norm_eps": 1e-6,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
BIASES = {  # by attention_bias and mlp_bias; RMS norms have none
    (False, False): False,
    (True, True): True,
    (True, False): "attention",
    (False, True): "not_attention",
}
ORIGINAL_CONTEXT = "original_max_position_embeddings"
WINDOWED, FULL = "sliding_attention", "full_attention"


def rules(
    layer: Mapping[str, str | tuple[str, ...]], norm: str = "norm"
) -> Callable[[Any], list[Rule]]:
    """The rules of a decoder with these modules in a layer; `norm` is the final norm."""
    decoder = [
        Rule("embed_tokens.weight", "embed.token.weight"),
        *module_rules(layer, "layers.{i}.", "decoder.blocks.{i}."),
        *module_rules({norm: "decoder.norm"}),
        *module_rules({"lm_head": "head", "score": "head.out"}),
    ]
    return lambda config: decoder


def heads(stem: str) -> dict[str, Choice]:
    """The classes of a decoder, as in `heads("Llama")`, and their heads."""
    return {
        f"{stem}ForCausalLM": "linear",
        f"{stem}Model": "none",
        f"{stem}ForSequenceClassification": {
            "kind": "classification",
            "pool": "last",
            "bias": False,
        },
        f"{stem}ForTokenClassification": "tag",
    }


def read_settings(hf: ConfigDict) -> ConfigDict:
    """The settings that all model types of this module have in common."""
    return {"ffn": read_gated_ffn(hf["hidden_act"]), "position": read_rope(hf)}


def write_settings(config: Any) -> ConfigDict:
    """The reverse of `read_settings`."""
    return {"hidden_act": write_gate_activation(config.ffn), **write_rope(config.position)}


def read_windows(hf: ConfigDict, kinds: list[str]) -> ConfigDict:
    """The sliding windows, from `layer_types` or, if it is missing, from `kinds` of layers."""
    kinds, window = read_layer_types(hf) or kinds, hf.get("sliding_window")
    full = [index for index, kind in enumerate(kinds) if kind == FULL]
    if window is None or len(full) == len(kinds):
        return {"window": None}
    if not full:
        return {"window": window}
    every = full[0] + 1
    if every > 1 and full == list(range(every - 1, len(kinds), every)):
        return {"window": window, "global_every": every}
    return {"window": window, "global_layers": full}


def read_layer_types(hf: ConfigDict) -> list[str] | None:
    """`layer_types` after checking that it has one entry per layer; None if it is missing."""
    kinds, layers = hf.get("layer_types"), hf["num_hidden_layers"]
    if kinds is None:
        return None
    known = isinstance(kinds, list) and all(kind in (WINDOWED, FULL) for kind in kinds)
    if not known or len(kinds) != layers:
        raise ConfigError(
            f"layer_types={quote(kinds)} is not supported: it must list {WINDOWED!r} or {FULL!r} "
            f"for each of the {layers} layers"
        )
    return kinds


def write_windows(config: Any) -> ConfigDict:
    """The reverse of `read_windows`."""
    every, global_layers = config.global_every, config.global_layers or []
    kinds = [
        FULL
        if config.window is None or index in global_layers or (every and not (index + 1) % every)
        else WINDOWED
        for index in range(config.layers)
    ]
    return {"sliding_window": config.window, "layer_types": kinds}


def _read_llama(hf: ConfigDict) -> ConfigDict:
    return {**read_settings(hf), "bias": BIASES[hf["attention_bias"], hf["mlp_bias"]]}


def _write_llama(config: Any) -> ConfigDict:
    names = {bias: name for name, bias in BIASES.items()}
    attention, mlp = names.get(config.bias, (False, False))
    return {**write_settings(config), "attention_bias": attention, "mlp_bias": mlp}


def _read_qwen(hf: ConfigDict) -> ConfigDict:
    layers, first_windowed = hf["num_hidden_layers"], hf["max_window_layers"]
    read_layer_types(hf)  # raises for a wrong list even if no layer has a window
    if not hf["use_sliding_window"]:
        return {**read_settings(hf), "window": None}
    kinds = [WINDOWED if index >= first_windowed else FULL for index in range(layers)]
    return {**read_settings(hf), **read_windows(hf, kinds)}


def _write_qwen(config: Any) -> ConfigDict:
    windowed = config.window is not None
    return {
        **write_settings(config),
        **write_windows(config),
        "use_sliding_window": windowed,
        "max_window_layers": 0 if windowed else config.layers,
    }


def _read_qwen3(hf: ConfigDict) -> ConfigDict:
    return {**_read_qwen(hf), "bias": BIASES[hf["attention_bias"], False]}


def _write_qwen3(config: Any) -> ConfigDict:
    return {**_write_qwen(config), "attention_bias": config.bias == "attention"}


COMMON_CONSTANTS: dict[str, Any] = {"norm": "rms", "bias": False}
IGNORED_TENSORS = ("layers.{i}.self_attn.rotary_emb.inv_freq",)

LLAMA = ModelType(
    name="llama",
    prefix="model.",
    heads=heads("Llama"),
    fields=FIELDS,
    constants={"norm": "rms"},
    defaults={**DEFAULTS, "attention_bias": False, "mlp_bias": False},
    ignored_tensors=IGNORED_TENSORS,
    rules=rules(LAYER),
    read_settings=_read_llama,
    write_settings=_write_llama,
)
MISTRAL = ModelType(
    name="mistral",
    prefix="model.",
    heads=heads("Mistral"),
    fields={**FIELDS, "sliding_window": "window"},
    constants=COMMON_CONSTANTS,
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
    },
    ignored_tensors=IGNORED_TENSORS,
    rules=rules(LAYER),
    read_settings=read_settings,
    write_settings=write_settings,
)
QWEN2 = ModelType(
    name="qwen2",
    prefix="model.",
    heads=heads("Qwen2"),
    fields=FIELDS,
    constants={**COMMON_CONSTANTS, "bias": "qkv"},
    defaults={
        **DEFAULTS,
        "vocab_size": 151_936,
        "intermediate_size": 22016,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    ignored_tensors=IGNORED_TENSORS,
    rules=rules(LAYER),
    read_settings=_read_qwen,
    write_settings=_write_qwen,
)
QWEN3 = ModelType(
    name="qwen3",
    prefix="model.",
    heads=heads("Qwen3"),
    fields=FIELDS,
    constants={**COMMON_CONSTANTS, "qk_norm": True},
    defaults={**QWEN2.defaults, "head_dim": 128, "attention_bias": False},
    rules=rules(LAYER),
    read_settings=_read_qwen3,
    write_settings=_write_qwen3,
)


def _read_phi3(hf: ConfigDict) -> ConfigDict:
    return {**read_settings(hf), "window": hf["sliding_window"]}


def _write_phi3(config: Any) -> ConfigDict:
    rotary = write_rope(config.position, partial_rotary_factor_key="partial_rotary_factor")
    scaling = rotary.get("rope_scaling") or {}
    original = {key: scaling[key] for key in (ORIGINAL_CONTEXT,) if key in scaling}
    return {**write_settings(config), **rotary, **original, "sliding_window": config.window}


PHI3 = ModelType(
    name="phi3",
    prefix="model.",
    heads=heads("Phi3"),
    fields={
        **{key: name for key, name in FIELDS.items() if key != "head_dim"},
        "resid_pdrop": "dropout",
    },
    constants=COMMON_CONSTANTS,
    defaults={
        **DEFAULTS,
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "resid_pdrop": 0.0,
        "sliding_window": None,
        ORIGINAL_CONTEXT: 4096,
    },
    rules=rules(PACKED_LAYER),
    read_settings=_read_phi3,
    write_settings=_write_phi3,
)
