"""DistilBERT (Sanh et al. 2019): masked language model, classifier, tagger, span extraction.

Differs from BERT: no segment embeddings, no pooler, and other names of settings and tensors. In
transformers it has no dropout after attention; trained here, it has dropout after every sublayer.
"""

from typing import Any

from regard.config import kind_of
from regard.hub.model_type import ConfigDict, ModelType, read_activation, write_activation
from regard.hub.model_types import bert
from regard.hub.weight_mapping import Rule, module_rules

EMBEDDINGS = {
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
    "classification": {"pre_classifier": "head.hidden", "classifier": "head.out"},
    "tag": {"classifier": "head.out"},
    "span": {"qa_outputs": "head.out"},
}


def _rules(config: Any) -> list[Rule]:
    return [
        *module_rules(EMBEDDINGS),
        *module_rules(LAYER, "transformer.layer.{i}.", "encoder.blocks.{i}."),
        *module_rules(HEADS.get(kind_of(config.head)[0], {})),
    ]


def _masked(hf: ConfigDict) -> ConfigDict:
    return {"kind": "masked", "activation": read_activation(hf["activation"])}


def _read(hf: ConfigDict) -> ConfigDict:
    return {"ffn": read_activation(hf["activation"])}


def _write(config: Any) -> ConfigDict:
    return {"activation": write_activation(config.ffn)}


DISTILBERT = ModelType(
    name="distilbert",
    heads={
        "DistilBertForMaskedLM": _masked,
        "DistilBertModel": "none",
        "DistilBertForSequenceClassification": {"kind": "classification", "hidden": "relu"},
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
    constants=bert.CONSTANTS | {"norm_eps": 1e-12},
    supported_values={"tie_word_embeddings": True},
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
    ignored_tensors=("embeddings.position_ids",),
    read_settings=_read,
    write_settings=_write,
)
