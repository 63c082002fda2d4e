"""RoBERTa (Liu et al. 2019), CamemBERT (Martin et al. 2020): masked LM, classifier, tagger, span.

Differs from BERT: other tensor names in the heads, and the first position is row pad_token_id + 1
of the position table. Export adds or removes unused rows before it to match the tokenizer's padding
id, which changes no output.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.config import kind_of
from regard.hub.model_type import ConfigDict, ModelType, TensorTransform
from regard.hub.model_types import bert
from regard.hub.weight_mapping import Rule, module_rules

POSITION_TABLE = bert.EMBEDDINGS["embeddings.position_embeddings"] + ".weight"
HEADS = {
    "pooled": {"pooler.dense": "head.pool", "roberta.pooler.dense": "head.pool"},
    "masked": {
        "lm_head.dense": "head.dense",
        "lm_head.layer_norm": "head.norm",
        "lm_head": "head",
        "lm_head.decoder": "head",
    },
    "classification": {"classifier.dense": "head.hidden", "classifier.out_proj": "head.out"},
    "tag": {"classifier": "head.out"},
    "span": {"qa_outputs": "head.out"},
}


def _rules(config: Any) -> list[Rule]:
    return [*bert.BODY_RULES, *module_rules(HEADS.get(kind_of(config.head)[0], {}))]


def _read(hf: ConfigDict) -> ConfigDict:
    offset = hf["pad_token_id"] + 1  # the rows before it are unused
    return bert.read_settings(hf) | {
        "context": hf["max_position_embeddings"] - offset,
        "position": {"kind": "learned", "offset": offset},
    }


def _write(config: Any) -> ConfigDict:
    offset = kind_of(config.position)[1].get("offset", 0)
    return bert.write_settings(config) | {
        "max_position_embeddings": config.context + offset,
        "pad_token_id": offset - 1,
    }


def shift_positions(config: Any, pad_id: int) -> tuple[Any, TensorTransform]:
    """The configuration for another padding id, and the transform of the position table.

    The rows up to the padding id are unused and written as zeros.
    """
    offset = kind_of(config.position)[1].get("offset", 0)

    def transform(name: str, tensor: Tensor) -> Tensor:
        if name != POSITION_TABLE:
            return tensor
        used = tensor[offset:]
        return torch.cat((used.new_zeros(pad_id + 1, used.shape[1]), used))

    return replace(config, position={"kind": "learned", "offset": pad_id + 1}), transform


ROBERTA = ModelType(
    name="roberta",
    heads={
        "RobertaForMaskedLM": bert.masked,
        "RobertaModel": "pooled",
        "RobertaForSequenceClassification": {"kind": "classification", "hidden": "tanh"},
        "RobertaForTokenClassification": "tag",
        "RobertaForQuestionAnswering": "span",
    },
    fields=bert.FIELDS,
    rules=_rules,
    prefix="roberta.",
    constants=bert.CONSTANTS,
    supported_values=bert.SUPPORTED_VALUES,
    defaults=bert.DEFAULTS | {"vocab_size": 50265, "pad_token_id": 1},
    ignored_tensors=("embeddings.position_ids", "pooler.dense.{p}"),
    read_settings=_read,
    write_settings=_write,
    shift_positions=shift_positions,
)
CAMEMBERT = replace(
    ROBERTA,
    name="camembert",
    heads={name.replace("Roberta", "Camembert"): head for name, head in ROBERTA.heads.items()},
    defaults={**ROBERTA.defaults, "vocab_size": 30522},
)
