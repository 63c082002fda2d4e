"""ALBERT (Lan et al. 2020): masked language model, classifier, tagger, span extraction.

Differs from BERT: all layers share one set of weights, and the embeddings are narrower than the
layers, with a projection between them.
"""

from typing import Any

from regard.config import kind_of
from regard.errors import ConfigError
from regard.hub.model_type import ConfigDict, ModelType
from regard.hub.model_types import bert
from regard.hub.weight_mapping import Rule, module_rules

EMBEDDINGS = {**bert.EMBEDDINGS, "encoder.embedding_hidden_mapping_in": "encoder.project"}
LAYER = {
    "attention.query": "attention.query",
    "attention.key": "attention.key",
    "attention.value": "attention.value",
    "attention.dense": "attention.out",
    "attention.LayerNorm": "attention_norm",
    "ffn": "ffn.up",
    "ffn_output": "ffn.down",
    "full_layer_layer_norm": "ffn_norm",
}
HEADS = {
    "pooled": {"pooler": "head.pool", "albert.pooler": "head.pool"},
    "masked": {
        "predictions.dense": "head.dense",
        "predictions.LayerNorm": "head.norm",
        "predictions": "head",
        "predictions.decoder": "head",
        "albert.pooler": "head.pool",
        "sop_classifier.classifier": "head.seq_relationship",
    },
    "classification": {"albert.pooler": "head.hidden", "classifier": "head.out"},
    "tag": {"classifier": "head.out"},
    "span": {"qa_outputs": "head.out"},
}


def _rules(config: Any) -> list[Rule]:
    return [
        *module_rules(EMBEDDINGS),
        *module_rules(LAYER, "encoder.albert_layer_groups.0.albert_layers.0.", "encoder.blocks.0."),
        *module_rules(HEADS.get(kind_of(config.head)[0], {})),
    ]


def _read(hf: ConfigDict) -> ConfigDict:
    if hf["embedding_size"] == hf["hidden_size"]:
        raise ConfigError(
            f"embedding_size={hf['embedding_size']} equal to hidden_size is not supported: "
            "it would need a projection between equal widths"
        )
    return bert.read_settings(hf)


ALBERT = ModelType(
    name="albert",
    heads={
        "AlbertForMaskedLM": bert.masked,
        "AlbertForPreTraining": bert.pretraining,
        "AlbertModel": "pooled",
        "AlbertForSequenceClassification": {"kind": "classification", "hidden": "tanh"},
        "AlbertForTokenClassification": "tag",
        "AlbertForQuestionAnswering": "span",
    },
    fields=bert.FIELDS | {"embedding_size": "embed_dim"},
    rules=_rules,
    prefix="albert.",
    constants=bert.CONSTANTS | {"shared_layers": True},
    supported_values={
        "num_hidden_groups": 1,
        "inner_group_num": 1,
        "position_embedding_type": "absolute",
        "tie_word_embeddings": True,
    },
    defaults=bert.DEFAULTS
    | {
        "vocab_size": 30000,
        "embedding_size": 128,
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "intermediate_size": 16384,
        "hidden_act": "gelu_new",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
    ignored_tensors=("embeddings.position_ids", "pooler.{p}"),
    read_settings=_read,
    write_settings=bert.write_settings,
)
