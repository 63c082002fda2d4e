"""Rules rename in both directions, and layouts lose nothing on the way."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hub.small_encoders import REQUIRED
from regard.hub import MODEL_TYPES
from regard.hub.config_json import read_config
from regard.hub.external_checkpoint import prefixed_rules
from regard.hub.weight_mapping import (
    CONCATENATED,
    TRANSPOSED,
    Concatenated,
    GroupedByHead,
    Rule,
    matches,
    module_rules,
    plan_export,
    plan_import,
)
from regard.models.build import build_on_meta, weights

RULES = [
    Rule("wte.weight", "embed.weight"),
    *module_rules({"attn": ("query", "key")}, "h.{i}.", "blocks.{i}."),
    Rule("out.weight", "head.weight"),
]


def test_names_go_in_and_come_out_again():
    ours = ["embed.weight", *(f"blocks.{i}.{p}.weight" for i in (0, 11) for p in ("query", "key"))]
    plan = plan_export(RULES, ours)
    assert [mapping.external for mapping in plan.mappings] == [
        "wte.weight",
        "h.0.attn.weight",
        "h.11.attn.weight",
    ]
    back = plan_import(RULES, [mapping.external for mapping in plan.mappings], ours)
    assert back.mappings == plan.mappings
    assert not back.unexpected
    assert not back.missing
    assert not plan.missing


def test_what_has_no_place_is_named():
    plan = plan_import(
        RULES, ["wte.weight", "h.0.mlp.weight"], ["embed.weight", "blocks.0.key.weight"]
    )
    assert plan.unexpected == ["h.0.mlp.weight"]
    assert plan.missing == ["blocks.0.key.weight"]
    assert plan_export(RULES, ["blocks.0.query.weight"]).missing == ["blocks.0.query.weight"]


def test_a_second_tensor_for_the_same_place_is_a_copy():
    aliases = {"head.weight": "embed.weight"}
    plan = plan_import(RULES, ["wte.weight", "out.weight"], ["embed.weight"], aliases)
    assert [mapping.external for mapping in plan.mappings] == ["wte.weight"]
    assert plan.duplicates == {"out.weight": "wte.weight"}


def test_a_dot_in_a_rule_is_a_dot():
    assert matches("h.{i}.bias", "h.3.bias")
    assert not matches("h.{i}.bias", "hx3.bias")
    assert not matches("h.{i}.bias", "h.3.bias.x")


@pytest.mark.parametrize("layout", [CONCATENATED, TRANSPOSED, Concatenated(), GroupedByHead(2)])
@pytest.mark.parametrize("shape", [(4, 3), (4,)])
@given(count=st.integers(1, 3))
def test_layouts_join_what_they_split(layout, shape, count):
    parts = [torch.rand(shape) for _ in range(count)]
    back = layout.split(layout.join(parts), [part.shape for part in parts])
    assert all(torch.equal(one, two) for one, two in zip(parts, back, strict=True))


def test_parts_of_one_head_lie_together():
    q, k, v = (torch.tensor([10 * n + r for r in range(4)]) for n in (1, 2, 3))
    assert GroupedByHead(2).join([q, k, v]).tolist() == [
        10,
        11,
        20,
        21,
        30,
        31,
        12,
        13,
        22,
        23,
        32,
        33,
    ]


@pytest.mark.parametrize("model_type", MODEL_TYPES.values(), ids=lambda model_type: model_type.name)
def test_every_head_of_every_family_has_a_rule_for_every_tensor(model_type):
    for architecture in model_type.heads:
        table = {"model_type": model_type.name, "architectures": [architecture]}
        table |= REQUIRED.get(model_type.name, {})
        config = replace(read_config(table)[1], layers=2)
        names = weights(build_on_meta(config))
        plan = plan_export(prefixed_rules(model_type, config), names)
        assert not plan.missing, architecture
        theirs = [mapping.external for mapping in plan.mappings]
        assert len(set(theirs)) == len(theirs)
        back = plan_import(prefixed_rules(model_type, config), theirs, names)
        assert not back.missing
        assert not back.unexpected
        assert not back.duplicates
