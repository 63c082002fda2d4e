"""GPT-2 (Radford et al. 2019)."""

from typing import Any

from regard.hub.family import Family, Table, activation, activation_name
from regard.hub.weight_mapping import TRANSPOSED, Rule, renamed

LAYER = {"ln_1": "attention_norm", "ln_2": "ffn_norm"}
PRODUCTS: dict[str, str | tuple[str, ...]] = {  # matrices that multiply from the right
    "attn.c_attn": ("attention.query", "attention.key", "attention.value"),
    "attn.c_proj": "attention.out",
    "mlp.c_fc": "ffn.up",
    "mlp.c_proj": "ffn.down",
}


def _rules(config: Any) -> list[Rule]:
    return [
        Rule("wte.weight", "embed.token.weight"),
        Rule("wpe.weight", "decoder.position.table.weight"),
        *renamed(LAYER, "h.{i}.", "decoder.blocks.{i}."),
        *renamed(PRODUCTS, "h.{i}.", "decoder.blocks.{i}.", TRANSPOSED),
        *renamed({"ln_f": "decoder.norm"}),
        Rule("lm_head.weight", "head.weight"),
        Rule("score.weight", "head.out.weight"),
    ]


def _read(theirs: Table) -> Table:
    return {"ffn": activation(theirs["activation_function"])}


def _write(config: Any) -> Table:
    return {"activation_function": activation_name(config.ffn)}


GPT2 = Family(
    name="gpt2",
    prefix="transformer.",
    heads={
        "GPT2LMHeadModel": "linear",
        "GPT2Model": "none",
        "GPT2ForSequenceClassification": {"kind": "classify", "pool": "last", "bias": False},
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
    only={
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
    ignored=("h.{i}.attn.bias", "h.{i}.attn.masked_bias"),  # the causal mask, in old files
    rules=_rules,
    read=_read,
    write=_write,
)
