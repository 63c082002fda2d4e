"""DeBERTa, versions 1 to 3 (He et al. 2021): masked language model, classifier, tagger, span.

BERT with disentangled attention; all layers share the relative position embeddings. Version 1 has
separate projections for relative positions, keys without bias, and query, key and value rows
grouped by head. Models with a convolution parallel to the first layer (v2 xlarge and xxlarge) are
not supported.
"""

from typing import Any

from regard.config import kind_of
from regard.errors import ConfigError
from regard.hub.model_type import ConfigDict, ModelType, read_activation
from regard.hub.model_types import bert
from regard.hub.weight_mapping import GroupedByHead, Rule, module_rules
from regard.models.compatibility import option
from regard.nn.score import SCORES

BODY = {
    **bert.EMBEDDINGS,
    "encoder.rel_embeddings": "encoder.relative_embedding.vectors",
    "encoder.LayerNorm": "encoder.relative_embedding.norm",
}
PROJECTIONS = ("attention.self.query", "attention.self.key", "attention.self.value")
LAYER = {
    f"{name}_proj" if name in PROJECTIONS else name: internal
    for name, internal in bert.LAYER.items()
}
LAYER_V1 = {name: internal for name, internal in bert.LAYER.items() if name not in PROJECTIONS}
POSITION_PROJECTIONS = {"pos_proj": "positions.key", "pos_q_proj": "positions.query"}
HEADS = {
    "masked": {
        "cls.predictions.transform.dense": "head.dense",
        "cls.predictions.transform.LayerNorm": "head.norm",
        "cls.predictions": "head",
        "cls.predictions.decoder": "head",
    },
    "classification": {"pooler.dense": "head.hidden", "classifier": "head.out"},
    "tag": {"classifier": "head.out"},
    "span": {"qa_outputs": "head.out"},
}
BOTH_TERMS = {"c2p", "p2c"}  # content to position and position to content
RELATIVE = {  # settings of disentangled attention
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "share_att_key": True,
}


def _rules(config: Any) -> list[Rule]:
    return [
        *module_rules(BODY),
        *module_rules(LAYER, "encoder.layer.{i}.", "encoder.blocks.{i}."),
        *module_rules(HEADS.get(kind_of(config.head)[0], {})),
    ]


def _rules_v1(config: Any) -> list[Rule]:
    external, internal = "encoder.layer.{i}.attention.self.", "encoder.blocks.{i}.attention."
    weights = tuple(f"{internal}{name}.weight" for name in ("query", "key", "value"))
    return [
        *module_rules(BODY),
        *module_rules(LAYER_V1, "encoder.layer.{i}.", "encoder.blocks.{i}."),
        Rule(f"{external}in_proj.weight", weights, GroupedByHead(config.heads)),
        Rule(f"{external}q_bias", f"{internal}query.bias"),
        Rule(f"{external}v_bias", f"{internal}value.bias"),
        *module_rules(POSITION_PROJECTIONS, external, f"{internal}score."),
        *module_rules(HEADS.get(kind_of(config.head)[0], {})),
    ]


def _read_v1(hf: ConfigDict) -> ConfigDict:
    v2_settings = {"share_att_key": True, "position_buckets": -1, "norm_rel_ebd": "none"}
    score = _read_score(hf | v2_settings)
    if score == "scaled_dot":
        raise ConfigError("relative_attention=False is not supported: keys have no bias")
    settings = _read({"embedding_size": None} | hf | v2_settings)
    return settings | {"score": score | {"position_projections": True}}


def _write_v1(config: Any) -> ConfigDict:
    v2_settings = ("share_att_key", "position_buckets", "norm_rel_ebd")
    return {key: value for key, value in _write(config).items() if key not in v2_settings}


def _read(hf: ConfigDict) -> ConfigDict:
    if hf["embedding_size"] not in (None, hf["hidden_size"]):
        raise ConfigError(
            f"embedding_size={hf['embedding_size']} is not supported: it must be hidden_size"
        )
    return {
        "ffn": read_activation(hf["hidden_act"]),
        "position": "learned" if hf["position_biased_input"] else "none",
        "score": _read_score(hf),
    }


def _read_score(hf: ConfigDict) -> Any:
    terms = hf["pos_att_type"] or []
    terms = terms.split("|") if isinstance(terms, str) else terms
    if not hf["relative_attention"] and not terms:
        return "scaled_dot"
    if not hf["relative_attention"] or {*terms} != BOTH_TERMS or not hf["share_att_key"]:
        raise ConfigError(
            f"relative_attention={hf['relative_attention']} with pos_att_type="
            f"{'|'.join(terms)} and share_att_key={hf['share_att_key']} is not supported: only "
            "relative_attention=true with p2c|c2p and share_att_key=true"
        )
    max_positions = hf["max_relative_positions"]
    score = {
        "kind": "disentangled",
        "max_distance": max_positions if max_positions > 0 else hf["max_position_embeddings"],
    }
    if hf["position_buckets"] > 0:
        score["buckets"] = hf["position_buckets"]
    if hf["norm_rel_ebd"] == "layer_norm":
        score["norm_relative_embeddings"] = True
    return score


def _write(config: Any) -> ConfigDict:
    settings = bert.write_settings(config) | {
        "position_biased_input": kind_of(config.position)[0] == "learned"
    }
    if kind_of(config.score)[0] != "disentangled":
        return settings
    return settings | {
        **RELATIVE,
        "max_relative_positions": option(config.score, SCORES, "max_distance"),
        "position_buckets": option(config.score, SCORES, "buckets") or -1,
        "norm_rel_ebd": "layer_norm"
        if option(config.score, SCORES, "norm_relative_embeddings")
        else "none",
    }


DEBERTA_V2 = ModelType(
    name="deberta-v2",
    heads={
        "DebertaV2ForMaskedLM": bert.masked,
        "DebertaV2Model": "none",
        "DebertaV2ForSequenceClassification": {"kind": "classification", "hidden": "gelu"},
        "DebertaV2ForTokenClassification": "tag",
        "DebertaV2ForQuestionAnswering": "span",
    },
    fields=bert.FIELDS,
    rules=_rules,
    prefix="deberta.",
    constants=bert.CONSTANTS,
    supported_values={
        "tie_word_embeddings": True,
        "legacy": True,
        "pooler_hidden_act": "gelu",
        "norm_rel_ebd": ("none", "layer_norm"),
        "conv_kernel_size": (0, None),
    },
    defaults=bert.DEFAULTS
    | {
        "vocab_size": 128100,
        "hidden_size": 1536,
        "num_hidden_layers": 24,
        "num_attention_heads": 24,
        "intermediate_size": 6144,
        "type_vocab_size": 0,
        "layer_norm_eps": 1e-7,
        "relative_attention": False,
        "max_relative_positions": -1,
        "position_buckets": -1,
        "position_biased_input": True,
        "pos_att_type": None,
        "share_att_key": False,
        "norm_rel_ebd": "none",
        "embedding_size": None,
    },
    ignored_tensors=("embeddings.position_ids", "embeddings.position_embeddings.weight"),
    read_settings=_read,
    write_settings=_write,
)

DEBERTA = ModelType(
    name="deberta",
    heads={name.replace("V2", ""): head for name, head in DEBERTA_V2.heads.items()},
    fields=bert.FIELDS,
    rules=_rules_v1,
    prefix="deberta.",
    constants=bert.CONSTANTS,
    supported_values={
        "tie_word_embeddings": True,
        "legacy": True,
        "pooler_hidden_act": "gelu",
        "talking_head": (False, None),
    },
    defaults=bert.DEFAULTS
    | {
        "vocab_size": 50265,
        "type_vocab_size": 0,
        "layer_norm_eps": 1e-7,
        "relative_attention": False,
        "max_relative_positions": -1,
        "position_biased_input": True,
        "pos_att_type": None,
    },
    ignored_tensors=DEBERTA_V2.ignored_tensors,
    read_settings=_read_v1,
    write_settings=_write_v1,
)
