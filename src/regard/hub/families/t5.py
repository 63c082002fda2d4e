"""T5 (Raffel et al. 2020): the first, with ReLU and one matrix for both ends, and version 1.1.

Where the output matrix is the embedding's, the last hidden states are scaled; transformers 5
writes down that they are (`scale_decoder_outputs`), others only that the matrix is the same.
"""

from typing import Any

from regard.hub.family import Family, Table, activation, activation_name, gated
from regard.hub.weight_mapping import Rule, renamed
from regard.nn.ffn import GATES

ATTENTION = {"q": "query", "k": "key", "v": "value", "o": "out"}
PLAIN, GATED = {"wi": "up", "wo": "down"}, {"wi_0": "gate", "wi_1": "up", "wo": "down"}
SIDES = {  # the parts of a layer, in order
    "encoder": {"SelfAttention": "attention", "DenseReluDense": "ffn"},
    "decoder": {"SelfAttention": "attention", "EncDecAttention": "cross", "DenseReluDense": "ffn"},
}
ENCODER = "T5EncoderModel"


def _rules(config: Any) -> list[Rule]:
    inside = {
        "attention": ATTENTION,
        "cross": ATTENTION,
        "ffn": GATED if config.ffn in GATES else PLAIN,
    }
    rules = renamed({"shared": "embed.token", "lm_head": "head"})
    for side, parts in SIDES.items():
        table = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias"
        rules += renamed(
            {
                f"{side}.embed_tokens": "embed.token",
                table: f"{side}.position.table",
                f"{side}.final_layer_norm": f"{side}.norm",
            }
        )
        for number, (theirs, ours) in enumerate(parts.items()):
            layer, block = f"{side}.block.{{i}}.layer.{number}.", f"{side}.blocks.{{i}}."
            rules += renamed({"layer_norm": f"{ours}_norm"}, layer, block)
            rules += renamed(inside[ours], f"{layer}{theirs}.", f"{block}{ours}.")
    return rules


def _tied(theirs: Table) -> bool:
    return bool(theirs.get("scale_decoder_outputs", theirs["tie_word_embeddings"]))


def _head(theirs: Table) -> Table:
    return {"kind": "linear", "scaled": _tied(theirs)}


def _read(theirs: Table) -> Table:
    *gate, name = theirs["feed_forward_proj"].split("-")
    name = "gelu_new" if gate and name == "gelu" else name  # what the authors' gate is
    encoder_layers = theirs["num_layers"]
    ours = {
        "ffn": gated(name) if gate else activation(name),
        "position": {
            "kind": "t5",
            "buckets": theirs["relative_attention_num_buckets"],
            "reach": theirs["relative_attention_max_distance"],
        },
        "attention_dropout": theirs["dropout_rate"],
        "ffn_dropout": theirs["dropout_rate"],
        "tied": _tied(theirs),
    }
    if theirs.get("architectures") == [ENCODER]:
        return ours | {"shape": "encoder", "layers": encoder_layers}
    layers = theirs["num_decoder_layers"] or encoder_layers
    return ours | {"shape": "encoder-decoder", "encoder_layers": encoder_layers, "layers": layers}


def _write(config: Any) -> Table:
    encoder_layers, decoder_layers = config.depths
    name = activation_name(config.ffn)
    gate = "gated-gelu" if name == "gelu_new" else f"gated-{name}"
    options = config.position if isinstance(config.position, dict) else {}
    return {
        "feed_forward_proj": gate if config.ffn in GATES else name,
        "num_layers": encoder_layers,
        "num_decoder_layers": decoder_layers or encoder_layers,
        "relative_attention_num_buckets": options.get("buckets", 32),
        "relative_attention_max_distance": options.get("reach", 128),
        "tie_word_embeddings": config.tied,
        "is_encoder_decoder": decoder_layers > 0,
    }


T5 = Family(
    name="t5",
    heads={"T5ForConditionalGeneration": _head, "T5Model": "none", ENCODER: "none"},
    fields={
        "vocab_size": "vocab_size",
        "n_positions": "context",
        "d_model": "dim",
        "d_kv": "head_dim",
        "d_ff": "ffn_dim",
        "num_heads": "heads",
        "layer_norm_epsilon": "norm_eps",
        "dropout_rate": "dropout",
    },
    always={"norm": "rms", "bias": False, "score": "dot"},
    only={"is_decoder": False},
    defaults={
        "vocab_size": 32128,
        "n_positions": 512,
        "d_model": 512,
        "d_kv": 64,
        "d_ff": 2048,
        "num_layers": 6,
        "num_decoder_layers": None,
        "num_heads": 8,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "layer_norm_epsilon": 1e-6,
        "dropout_rate": 0.1,
        "feed_forward_proj": "relu",
        "tie_word_embeddings": True,
    },
    ignored=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
    rules=_rules,
    read=_read,
    write=_write,
)
