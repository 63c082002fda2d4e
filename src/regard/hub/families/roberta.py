"""RoBERTa (Liu et al. 2019): BERT's layers, other heads, and positions counted from another row.

The first position has the row after the one of pad_token_id. Who pads with another id must count
from another row; a model of ours is written with rows taken away or put before, which changes
nothing that it computes.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.config import kind_of
from regard.hub.families import bert
from regard.hub.family import Change, Family, Table
from regard.hub.weight_mapping import Rule, renamed

POSITIONS = bert.TABLES["embeddings.position_embeddings"] + ".weight"
HEADS = {
    "pooled": {"pooler.dense": "head.pool", "roberta.pooler.dense": "head.pool"},
    "masked": {
        "lm_head.dense": "head.dense",
        "lm_head.layer_norm": "head.norm",
        "lm_head": "head",
        "lm_head.decoder": "head",
    },
    "classify": {"classifier.dense": "head.hidden", "classifier.out_proj": "head.out"},
    "tag": {"classifier": "head.out"},
    "span": {"qa_outputs": "head.out"},
}


def _rules(config: Any) -> list[Rule]:
    return [*bert.BODY, *renamed(HEADS.get(kind_of(config.head)[0], {}))]


def _read(theirs: Table) -> Table:
    offset = theirs["pad_token_id"] + 1  # the rows before are never looked at
    return bert.read(theirs) | {
        "context": theirs["max_position_embeddings"] - offset,
        "position": {"kind": "learned", "offset": offset},
    }


def _write(ours: Any) -> Table:
    offset = kind_of(ours.position)[1].get("offset", 0)
    return bert.write(ours) | {
        "max_position_embeddings": ours.context + offset,
        "pad_token_id": offset - 1,
    }


def shift_positions(ours: Any, pad: int) -> tuple[Any, Change]:
    """The same model for another id of padding, and its tensors: positions count from there.

    The rows up to it are never looked at.
    """
    offset = kind_of(ours.position)[1].get("offset", 0)

    def change(name: str, tensor: Tensor) -> Tensor:
        if name != POSITIONS:
            return tensor
        used = tensor[offset:]
        return torch.cat((used.new_zeros(pad + 1, used.shape[1]), used))

    return replace(ours, position={"kind": "learned", "offset": pad + 1}), change


ROBERTA = Family(
    name="roberta",
    heads={
        "RobertaForMaskedLM": bert.masked,
        "RobertaModel": "pooled",
        "RobertaForSequenceClassification": {"kind": "classify", "hidden": "tanh"},
        "RobertaForTokenClassification": "tag",
        "RobertaForQuestionAnswering": "span",
    },
    fields=bert.FIELDS,
    rules=_rules,
    prefix="roberta.",
    always=bert.ALWAYS,
    only=bert.ONLY,
    defaults=bert.DEFAULTS | {"vocab_size": 50265, "pad_token_id": 1},
    ignored=("embeddings.position_ids", "pooler.dense.{p}"),
    read=_read,
    write=_write,
    shift_positions=shift_positions,
)
