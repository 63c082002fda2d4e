"""DistilBERT (Sanh et al. 2019): BERT without segments and pooler, under names of its own.

In training it drops nothing of what attention gives; here every branch is dropped alike.
"""

from typing import Any

from regard.config import kind_of
from regard.hub.families import bert
from regard.hub.family import Family, Table, activation, activation_name
from regard.hub.weight_mapping import Rule, renamed

TABLES = {
    "embeddings.word_embeddings": "embed.token",
    "embeddings.position_embeddings": "encoder.position.table",
    "embeddings.LayerNorm": "encoder.embed_norm",
}
LAYER = {
    "attention.q_lin": "attention.query",
    "attention.k_lin": "attention.key",
    "attention.v_lin": "attention.value",
    "attention.out_lin": "attention.out",
    "sa_layer_norm": "attention_norm",
    "ffn.lin1": "ffn.up",
    "ffn.lin2": "ffn.down",
    "output_layer_norm": "ffn_norm",
}
HEADS = {
    "masked": {
        "vocab_transform": "head.dense",
        "vocab_layer_norm": "head.norm",
        "vocab_projector": "head",
    },
    "classify": {"pre_classifier": "head.hidden", "classifier": "head.out"},
    "tag": {"classifier": "head.out"},
    "span": {"qa_outputs": "head.out"},
}


def _rules(config: Any) -> list[Rule]:
    return [
        *renamed(TABLES),
        *renamed(LAYER, "transformer.layer.{i}.", "encoder.blocks.{i}."),
        *renamed(HEADS.get(kind_of(config.head)[0], {})),
    ]


def _masked(theirs: Table) -> Table:
    return {"kind": "masked", "activation": activation(theirs["activation"])}


def _read(theirs: Table) -> Table:
    return {"ffn": activation(theirs["activation"])}


def _write(ours: Any) -> Table:
    return {"activation": activation_name(ours.ffn)}


DISTILBERT = Family(
    name="distilbert",
    heads={
        "DistilBertForMaskedLM": _masked,
        "DistilBertModel": "none",
        "DistilBertForSequenceClassification": {"kind": "classify", "hidden": "relu"},
        "DistilBertForTokenClassification": "tag",
        "DistilBertForQuestionAnswering": "span",
    },
    fields={
        "vocab_size": "vocab_size",
        "max_position_embeddings": "context",
        "dim": "dim",
        "n_layers": "layers",
        "n_heads": "heads",
        "hidden_dim": "ffn_dim",
        "dropout": "dropout",
        "attention_dropout": "attention_dropout",
    },
    rules=_rules,
    prefix="distilbert.",
    always=bert.ALWAYS | {"norm_eps": 1e-12},
    only={"tie_word_embeddings": True},
    defaults={
        "vocab_size": 30522,
        "max_position_embeddings": 512,
        "dim": 768,
        "n_layers": 6,
        "n_heads": 12,
        "hidden_dim": 3072,
        "activation": "gelu",
        "dropout": 0.1,
        "attention_dropout": 0.1,
    },
    ignored=("embeddings.position_ids",),
    read=_read,
    write=_write,
)
