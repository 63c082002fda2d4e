"""BERT (Devlin et al. 2018): masked language model, next sentence, classifier, tagger, span.

Post-norm encoder with learned positions, segment embeddings and a tanh pooler. RoBERTa,
DistilBERT and ALBERT reuse parts of this module.
"""

from typing import Any

from regard.config import kind_of
from regard.errors import ConfigError
from regard.hub.model_type import ConfigDict, ModelType, read_activation, write_activation
from regard.hub.weight_mapping import Rule, module_rules

FIELDS = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "context",
    "hidden_size": "dim",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "intermediate_size": "ffn_dim",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "type_vocab_size": "segments",
    "layer_norm_eps": "norm_eps",
}
DEFAULTS = {
    "vocab_size": 30522,
    "max_position_embeddings": 512,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
}
CONSTANTS = {"architecture": "encoder", "norm_placement": "post", "embed_norm": True}
SUPPORTED_VALUES = {
    "is_decoder": False,
    "add_cross_attention": False,
    "position_embedding_type": "absolute",
    "tie_word_embeddings": True,
}
EMBEDDINGS = {
    "embeddings.word_embeddings": "embed.token",
    "embeddings.token_type_embeddings": "embed.segment",
    "embeddings.position_embeddings": "encoder.position.table",
    "embeddings.LayerNorm": "encoder.embed_norm",
}
LAYER = {
    "attention.self.query": "attention.query",
    "attention.self.key": "attention.key",
    "attention.self.value": "attention.value",
    "attention.output.dense": "attention.out",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "ffn.up",
    "output.dense": "ffn.down",
    "output.LayerNorm": "ffn_norm",
}
BODY_RULES = [
    *module_rules(EMBEDDINGS),
    *module_rules(LAYER, "encoder.layer.{i}.", "encoder.blocks.{i}."),
]
HEADS = {
    "pooled": {"pooler.dense": "head.pool", "bert.pooler.dense": "head.pool"},
    "masked": {
        "cls.predictions.transform.dense": "head.dense",
        "cls.predictions.transform.LayerNorm": "head.norm",
        "cls.predictions": "head",
        "cls.predictions.decoder": "head",
        "bert.pooler.dense": "head.pool",
        "cls.seq_relationship": "head.seq_relationship",
    },
    "classification": {
        "bert.pooler.dense": "head.hidden",
        "classifier": "head.out",
        "cls.seq_relationship": "head.out",
    },
    "tag": {"classifier": "head.out"},
    "span": {"qa_outputs": "head.out"},
}
OLD_NORM_NAMES = {"gamma": "weight", "beta": "bias"}  # in checkpoints converted from TensorFlow


def _rules(config: Any) -> list[Rule]:
    rules = [*BODY_RULES, *module_rules(HEADS.get(kind_of(config.head)[0], {}))]
    old_rules = [
        Rule(rule.external.replace("{p}", old_name), rule.internal_names[0].replace("{p}", name))
        for rule in rules
        for old_name, name in OLD_NORM_NAMES.items()
        if rule.external.endswith("LayerNorm.{p}")
    ]
    return rules + old_rules


def masked(hf: ConfigDict) -> ConfigDict:
    """The masked language model head; it has the activation of the layers."""
    return {"kind": "masked", "activation": read_activation(hf["hidden_act"])}


def pretraining(hf: ConfigDict) -> ConfigDict:
    """The masked language model head with next-sentence prediction."""
    return masked(hf) | {"next_sentence": True}


def read_settings(hf: ConfigDict) -> ConfigDict:
    """Read the activation; raises for a model without segment embeddings."""
    if hf["type_vocab_size"] < 1:
        raise ConfigError(
            f"type_vocab_size={hf['type_vocab_size']} is not supported: at least one segment is "
            "needed"
        )
    return {"ffn": read_activation(hf["hidden_act"])}


def write_settings(config: Any) -> ConfigDict:
    """The reverse of `read_settings`."""
    return {"hidden_act": write_activation(config.ffn)}


BERT = ModelType(
    name="bert",
    heads={
        "BertForMaskedLM": masked,
        "BertForPreTraining": pretraining,
        "BertModel": "pooled",
        "BertForSequenceClassification": {"kind": "classification", "hidden": "tanh"},
        "BertForNextSentencePrediction": {"kind": "classification", "hidden": "tanh", "classes": 2},
        "BertForTokenClassification": "tag",
        "BertForQuestionAnswering": "span",
    },
    fields=FIELDS,
    rules=_rules,
    prefix="bert.",
    constants=CONSTANTS,
    supported_values=SUPPORTED_VALUES,
    defaults=DEFAULTS,
    ignored_tensors=("embeddings.position_ids", "pooler.dense.{p}", "cls.seq_relationship.{p}"),
    read_settings=read_settings,
    write_settings=write_settings,
)
