"""GPT-2 (Radford et al. 2019): causal language model, classifier, tagger.

Pre-norm decoder with learned positions. Its Conv1D layers store weights as (in, out), and query,
key and value in one matrix.
"""

from typing import Any

from regard.config import kind_of
from regard.hub.model_type import ConfigDict, ModelType, read_activation, write_activation
from regard.hub.weight_mapping import TRANSPOSED, Rule, module_rules

LAYER = {"ln_1": "attention_norm", "ln_2": "ffn_norm"}
CONV1D: dict[str, str | tuple[str, ...]] = {  # weights stored as (in, out)
    "attn.c_attn": ("attention.query", "attention.key", "attention.value"),
    "attn.c_proj": "attention.out",
    "mlp.c_fc": "ffn.up",
    "mlp.c_proj": "ffn.down",
}
HEADS = {"classification": {"score": "head.out"}, "tag": {"classifier": "head.out"}}


def _rules(config: Any) -> list[Rule]:
    return [
        Rule("wte.weight", "embed.token.weight"),
        Rule("wpe.weight", "decoder.position.table.weight"),
        *module_rules(LAYER, "h.{i}.", "decoder.blocks.{i}."),
        *module_rules(CONV1D, "h.{i}.", "decoder.blocks.{i}.", TRANSPOSED),
        *module_rules({"ln_f": "decoder.norm"}),
        Rule("lm_head.weight", "head.weight"),
        *module_rules(HEADS.get(kind_of(config.head)[0], {})),
    ]


def _read(hf: ConfigDict) -> ConfigDict:
    return {"ffn": read_activation(hf["activation_function"])}


def _write(config: Any) -> ConfigDict:
    return {"activation_function": write_activation(config.ffn)}


GPT2 = ModelType(
    name="gpt2",
    prefix="transformer.",
    heads={
        "GPT2LMHeadModel": "linear",
        "GPT2Model": "none",
        "GPT2ForSequenceClassification": {"kind": "classification", "pool": "last", "bias": False},
        "GPT2ForTokenClassification": "tag",
    },
    fields={
        "vocab_size": "vocab_size",
        "n_positions": "context",
        "n_embd": "dim",
        "n_layer": "layers",
        "n_head": "heads",
        "n_inner": "ffn_dim",
        "layer_norm_epsilon": "norm_eps",
        "resid_pdrop": "dropout",
        "attn_pdrop": "attention_dropout",
        "tie_word_embeddings": "tied",
    },
    supported_values={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    defaults={
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "resid_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "tie_word_embeddings": True,
    },
    ignored_tensors=("h.{i}.attn.bias", "h.{i}.attn.masked_bias"),  # the causal mask, in old files
    rules=_rules,
    read_settings=_read,
    write_settings=_write,
)
