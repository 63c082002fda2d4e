"""BERT (Devlin et al. 2018)."""

from typing import Any

from regard.config import kind_of
from regard.errors import ConfigError
from regard.hub.family import Family, Table, activation, activation_name
from regard.hub.weight_mapping import Rule, renamed

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
ALWAYS = {"shape": "encoder", "norm_order": "post", "embed_norm": True}
ONLY = {
    "is_decoder": False,
    "add_cross_attention": False,
    "position_embedding_type": "absolute",
    "tie_word_embeddings": True,
}
TABLES = {
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
BODY = [*renamed(TABLES), *renamed(LAYER, "encoder.layer.{i}.", "encoder.blocks.{i}.")]
HEADS = {
    "pooled": {"pooler.dense": "head.pool", "bert.pooler.dense": "head.pool"},
    "masked": {
        "cls.predictions.transform.dense": "head.dense",
        "cls.predictions.transform.LayerNorm": "head.norm",
        "cls.predictions": "head",
        "cls.predictions.decoder": "head",
        "bert.pooler.dense": "head.pool",
        "cls.seq_relationship": "head.follows",
    },
    "classify": {
        "bert.pooler.dense": "head.hidden",
        "classifier": "head.out",
        "cls.seq_relationship": "head.out",
    },
    "tag": {"classifier": "head.out"},
    "span": {"qa_outputs": "head.out"},
}
OLD = {"gamma": "weight", "beta": "bias"}  # how the first files call the parts of a norm


def _rules(config: Any) -> list[Rule]:
    now = [*BODY, *renamed(HEADS.get(kind_of(config.head)[0], {}))]
    old = [
        Rule(rule.theirs.replace("{p}", was), rule.parts[0].replace("{p}", today))
        for rule in now
        for was, today in OLD.items()
        if rule.theirs.endswith("LayerNorm.{p}")
    ]
    return now + old


def masked(theirs: Table) -> Table:
    """The head for masked tokens: its activation is that of the layers."""
    return {"kind": "masked", "activation": activation(theirs["hidden_act"])}


def pretraining(theirs: Table) -> Table:
    """The same, and a guess whether the second sentence follows the first."""
    return masked(theirs) | {"next_sentence": True}


def read(theirs: Table) -> Table:
    """The feed-forward is named by its activation; there is always a table of segments."""
    if theirs["type_vocab_size"] < 1:
        raise ConfigError("type_vocab_size=0 is not supported: there is a first kind of sentence")
    return {"ffn": activation(theirs["hidden_act"])}


def write(ours: Any) -> Table:
    """The same, back."""
    return {"hidden_act": activation_name(ours.ffn)}


BERT = Family(
    name="bert",
    heads={
        "BertForMaskedLM": masked,
        "BertForPreTraining": pretraining,
        "BertModel": "pooled",
        "BertForSequenceClassification": {"kind": "classify", "hidden": "tanh"},
        "BertForNextSentencePrediction": {"kind": "classify", "hidden": "tanh", "classes": 2},
        "BertForTokenClassification": "tag",
        "BertForQuestionAnswering": "span",
    },
    fields=FIELDS,
    rules=_rules,
    prefix="bert.",
    always=ALWAYS,
    only=ONLY,
    defaults=DEFAULTS,
    ignored=("embeddings.position_ids", "pooler.dense.{p}", "cls.seq_relationship.{p}"),
    read=read,
    write=write,
)
