"""T5 (Raffel et al. 2020) and T5 v1.1: encoder-decoder, or the encoder alone.

Differs from BART: RMS norms before each sublayer, no biases, unscaled scores and relative position
biases. T5 has ReLU and tied weights, v1.1 a GELU gate and a separate output matrix. With
tied weights the last hidden states are scaled before the output matrix; transformers 5 stores this
as `scale_decoder_outputs`, older versions only as `tie_word_embeddings`. A T5 that transformers 5
makes with `tie_word_embeddings=False` is tied and not scaled.
"""

from collections.abc import Collection
from typing import Any

from regard.config import kind_of
from regard.hub.model_type import (
    ConfigDict,
    ModelType,
    read_activation,
    read_gated_ffn,
    write_activation,
)
from regard.hub.weight_mapping import Rule, module_rules
from regard.nn.block import GATED_ACTIVATIONS

ATTENTION = {"q": "query", "k": "key", "v": "value", "o": "out"}
FFN, GATED_FFN = {"wi": "up", "wo": "down"}, {"wi_0": "gate", "wi_1": "up", "wo": "down"}
SUBLAYERS = {  # of a layer, in order
    "encoder": {"SelfAttention": "attention", "DenseReluDense": "ffn"},
    "decoder": {"SelfAttention": "attention", "EncDecAttention": "cross", "DenseReluDense": "ffn"},
}
ENCODER_CLASS = "T5EncoderModel"


def _rules(config: Any) -> list[Rule]:
    modules = {
        "attention": ATTENTION,
        "cross": ATTENTION,
        "ffn": GATED_FFN if config.ffn in GATED_ACTIVATIONS else FFN,
    }
    rules = module_rules({"shared": "embed.token", "lm_head": "head"})
    for side, sublayers in SUBLAYERS.items():
        relative_bias = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias"
        rules += module_rules(
            {
                f"{side}.embed_tokens": "embed.token",
                relative_bias: f"{side}.position.table",
                f"{side}.final_layer_norm": f"{side}.norm",
            }
        )
        for index, (external, part) in enumerate(sublayers.items()):
            layer, block = f"{side}.block.{{i}}.layer.{index}.", f"{side}.blocks.{{i}}."
            rules += module_rules({"layer_norm": f"{part}_norm"}, layer, block)
            rules += module_rules(modules[part], f"{layer}{external}.", f"{block}{part}.")
    return rules


def _head(hf: ConfigDict) -> ConfigDict:
    return {"kind": "linear", "scaled": hf.get("scale_decoder_outputs", hf["tie_word_embeddings"])}


def _correct_settings(hf: ConfigDict, names: Collection[str]) -> ConfigDict:
    """transformers 5 writes `tie_word_embeddings: true` even if the output matrix is separate."""
    if hf.get("scale_decoder_outputs") is not False:
        return hf
    return hf | {"tie_word_embeddings": "lm_head.weight" not in names}


def _read(hf: ConfigDict) -> ConfigDict:
    *gate, name = hf["feed_forward_proj"].split("-")
    name = "gelu_new" if gate and name == "gelu" else name  # "gated-gelu" is the tanh approximation
    encoder_layers = hf["num_layers"]
    settings = {
        "ffn": read_gated_ffn(name) if gate else read_activation(name),
        "position": {
            "kind": "t5",
            "buckets": hf["relative_attention_num_buckets"],
            "max_distance": hf["relative_attention_max_distance"],
        },
        "attention_dropout": hf["dropout_rate"],
        "ffn_dropout": hf["dropout_rate"],
        "tied": hf["tie_word_embeddings"],
    }
    if hf.get("architectures") == [ENCODER_CLASS]:
        return settings | {"architecture": "encoder", "layers": encoder_layers}
    layers = hf["num_decoder_layers"] or encoder_layers
    return settings | {
        "architecture": "encoder-decoder",
        "encoder_layers": encoder_layers,
        "layers": layers,
    }


def _write(config: Any) -> ConfigDict:
    encoder_layers, decoder_layers = config.depths
    name = write_activation(config.ffn)
    gate = "gated-gelu" if name == "gelu_new" else f"gated-{name}"
    options = config.position if isinstance(config.position, dict) else {}
    return {
        "feed_forward_proj": gate if config.ffn in GATED_ACTIVATIONS else name,
        "num_layers": encoder_layers,
        "num_decoder_layers": decoder_layers or encoder_layers,
        "relative_attention_num_buckets": options.get("buckets", 32),
        "relative_attention_max_distance": options.get("max_distance", 128),
        "tie_word_embeddings": config.tied,
        "scale_decoder_outputs": kind_of(config.head)[1].get("scaled", False),
        "is_encoder_decoder": decoder_layers > 0,
    }


T5 = ModelType(
    name="t5",
    heads={"T5ForConditionalGeneration": _head, "T5Model": "none", ENCODER_CLASS: "none"},
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
    constants={"norm": "rms", "bias": False, "score": "dot"},
    supported_values={"is_decoder": False},
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
    ignored_tensors=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
    rules=_rules,
    correct_settings=_correct_settings,
    read_settings=_read,
    write_settings=_write,
)
