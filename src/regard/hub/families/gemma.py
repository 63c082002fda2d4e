"""Gemma and Gemma 2 (Gemma Team 2024)."""

from typing import Any

from regard.config import Choice, kind_of
from regard.hub.families.llama import (
    DEFAULTS,
    FIELDS,
    FULL,
    LAYER,
    WINDOWED,
    heads,
    read_windows,
    rules,
    write_windows,
)
from regard.hub.family import Family, Table, gate_name, gated
from regard.hub.rope_config import read_rotary, write_rotary

ALWAYS = {"norm": "rms_plus_one", "bias": False, "embed_scaled": True}
SANDWICH = {
    **LAYER,
    "post_attention_layernorm": "attention_after",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "ffn_after",
}


def _read(theirs: Table) -> Table:
    name = theirs.get("hidden_activation") or theirs["hidden_act"]
    # The first files said "gelu" and meant its tanh form.
    ffn = gated("gelu_pytorch_tanh" if name == "gelu" else name)
    return {"ffn": ffn, "position": read_rotary(theirs)}


def _write(config: Any) -> Table:
    name = gate_name(config.ffn).replace("gelu_new", "gelu_pytorch_tanh")  # as they call it
    return {"hidden_act": name, "hidden_activation": name, **write_rotary(config.position)}


def _linear(theirs: Table) -> Choice:
    return {"kind": "linear", "cap": theirs["final_logit_softcapping"]}


def _read_second(theirs: Table) -> Table:
    kinds = [FULL if number % 2 else WINDOWED for number in range(theirs["num_hidden_layers"])]
    score = {
        "kind": "scaled_dot",
        "width": theirs["query_pre_attn_scalar"],
        "cap": theirs["attn_logit_softcapping"],
    }
    if score["width"] == theirs["head_dim"]:
        score["width"] = None
    return {**_read(theirs), **read_windows(theirs, kinds), "score": score}


def _write_second(config: Any) -> Table:
    score, head = kind_of(config.score)[1], kind_of(config.head)[1]
    return {
        **_write(config),
        **write_windows(config),
        "query_pre_attn_scalar": score.get("width")
        or config.head_dim
        or config.dim // config.heads,
        "attn_logit_softcapping": score.get("cap"),
        "final_logit_softcapping": head.get("cap"),
    }


GEMMA = Family(
    name="gemma",
    prefix="model.",
    heads=heads("Gemma"),
    fields=FIELDS,
    always=ALWAYS,
    only={"attention_bias": False, "use_bidirectional_attention": (None, False)},
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
    read=_read,
    write=_write,
)
GEMMA2 = Family(
    name="gemma2",
    prefix="model.",
    heads={**heads("Gemma2"), "Gemma2ForCausalLM": _linear},
    fields=FIELDS,
    always={**ALWAYS, "norm_order": "sandwich"},
    only=GEMMA.only,
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
    read=_read_second,
    write=_write_second,
)
