"""LLaMA and those built like it: Mistral, Qwen 2 and 3, Phi-3 (Touvron et al. 2023 and after)."""

from collections.abc import Callable, Mapping
from typing import Any

from regard.config import Choice
from regard.errors import ConfigError
from regard.files.untrusted import quote
from regard.hub.family import Family, Table, gate_name, gated
from regard.hub.rope_config import read_rotary, write_rotary
from regard.hub.weight_mapping import Rule, renamed

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
JOINED: dict[str, str | tuple[str, ...]] = {  # Phi-3 multiplies by several matrices at once
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
BIASES = {(False, False): False, (True, True): True}  # of attention and of the feed-forward
WINDOWED, FULL = "sliding_attention", "full_attention"


def rules(
    layer: Mapping[str, str | tuple[str, ...]], norm: str = "norm"
) -> Callable[[Any], list[Rule]]:
    """The names of a decoder whose layers hold these parts, `norm` being that of its end."""
    table = [
        Rule("embed_tokens.weight", "embed.token.weight"),
        *renamed(layer, "layers.{i}.", "decoder.blocks.{i}."),
        *renamed({norm: "decoder.norm"}),
        *renamed({"lm_head": "head", "score": "head.out"}),
    ]
    return lambda config: table


def heads(stem: str) -> dict[str, Choice]:
    """The classes of a decoder, by the beginning of their names."""
    return {
        f"{stem}ForCausalLM": "linear",
        f"{stem}Model": "none",
        f"{stem}ForSequenceClassification": {"kind": "classify", "pool": "last", "bias": False},
        f"{stem}ForTokenClassification": "tag",
    }


def read(theirs: Table) -> Table:
    """What all LLaMAs compute alike."""
    return {"ffn": gated(theirs["hidden_act"]), "position": read_rotary(theirs)}


def write(config: Any) -> Table:
    """The same, backwards."""
    return {"hidden_act": gate_name(config.ffn), **write_rotary(config.position)}


def read_windows(theirs: Table, kinds: list[str]) -> Table:
    """How far the layers see, from `layer_types` or, where it is not given, from `kinds`."""
    kinds, window = check_kinds(theirs) or kinds, theirs.get("sliding_window")
    full = [number for number, kind in enumerate(kinds) if kind == FULL]
    if window is None or len(full) == len(kinds):
        return {"window": None}
    if not full:
        return {"window": window}
    every = full[0] + 1
    if full != list(range(every - 1, len(kinds), every)):
        raise ConfigError(
            f"layer_types={quote(kinds)} is not supported: every n-th layer may see everything"
        )
    return {"window": window, "global_every": every}


def check_kinds(theirs: Table) -> list[str] | None:
    """`layer_types`, where they are given: a kind for every layer."""
    kinds, layers = theirs.get("layer_types"), theirs["num_hidden_layers"]
    if kinds is None:
        return None
    known = isinstance(kinds, list) and all(kind in (WINDOWED, FULL) for kind in kinds)
    if not known or len(kinds) != layers:
        raise ConfigError(
            f"layer_types={quote(kinds)} is not supported: a list of {WINDOWED!r} or {FULL!r} "
            f"for each of the {layers} layers"
        )
    return kinds


def write_windows(config: Any) -> Table:
    """The same, backwards."""
    every = config.global_every
    kinds = [
        FULL if config.window is None or (every and not (number + 1) % every) else WINDOWED
        for number in range(config.layers)
    ]
    return {"sliding_window": config.window, "layer_types": kinds}


def _read_llama(theirs: Table) -> Table:
    biases = theirs["attention_bias"], theirs["mlp_bias"]
    if biases not in BIASES:
        raise ConfigError(
            f"attention_bias={biases[0]!r} with mlp_bias={biases[1]!r} is not supported: "
            "both have a bias, or none"
        )
    return {**read(theirs), "bias": BIASES[biases]}


def _write_llama(config: Any) -> Table:
    both = config.bias is True
    return {**write(config), "attention_bias": both, "mlp_bias": both}


def _read_qwen(theirs: Table) -> Table:
    layers, first = theirs["num_hidden_layers"], theirs["max_window_layers"]
    check_kinds(theirs)
    if not theirs["use_sliding_window"]:
        return {**read(theirs), "window": None}
    kinds = [WINDOWED if number >= first else FULL for number in range(layers)]
    return {**read(theirs), **read_windows(theirs, kinds)}


def _write_qwen(config: Any) -> Table:
    windowed = config.window is not None
    return {
        **write(config),
        **write_windows(config),
        "use_sliding_window": windowed,
        "max_window_layers": 0 if windowed else config.layers,
    }


SHARED: dict[str, Any] = {"norm": "rms", "bias": False}
IGNORED = ("layers.{i}.self_attn.rotary_emb.inv_freq",)

LLAMA = Family(
    name="llama",
    prefix="model.",
    heads=heads("Llama"),
    fields=FIELDS,
    always={"norm": "rms"},
    defaults={**DEFAULTS, "attention_bias": False, "mlp_bias": False},
    ignored=IGNORED,
    rules=rules(LAYER),
    read=_read_llama,
    write=_write_llama,
)
MISTRAL = Family(
    name="mistral",
    prefix="model.",
    heads=heads("Mistral"),
    fields={**FIELDS, "sliding_window": "window"},
    always=SHARED,
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
    },
    ignored=IGNORED,
    rules=rules(LAYER),
    read=read,
    write=write,
)
QWEN2 = Family(
    name="qwen2",
    prefix="model.",
    heads=heads("Qwen2"),
    fields=FIELDS,
    always={**SHARED, "bias": "qkv"},
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
    ignored=IGNORED,
    rules=rules(LAYER),
    read=_read_qwen,
    write=_write_qwen,
)
QWEN3 = Family(
    name="qwen3",
    prefix="model.",
    heads=heads("Qwen3"),
    fields=FIELDS,
    always={**SHARED, "qk_norm": True},
    only={"attention_bias": False},
    defaults={**QWEN2.defaults, "head_dim": 128},
    rules=rules(LAYER),
    read=_read_qwen,
    write=_write_qwen,
)


def _read_phi3(theirs: Table) -> Table:
    return {**read(theirs), "window": theirs["sliding_window"]}


def _write_phi3(config: Any) -> Table:
    rotary = write_rotary(config.position, fraction_key="partial_rotary_factor")
    return {**write(config), **rotary, "sliding_window": config.window}


PHI3 = Family(
    name="phi3",
    prefix="model.",
    heads=heads("Phi3"),
    fields={
        **{key: name for key, name in FIELDS.items() if key != "head_dim"},
        "resid_pdrop": "dropout",
    },
    always=SHARED,
    defaults={
        **DEFAULTS,
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "resid_pdrop": 0.0,
        "sliding_window": None,
    },
    rules=rules(JOINED),
    read=_read_phi3,
    write=_write_phi3,
)
