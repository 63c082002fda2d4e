"""Structured output: whatever is sampled among the allowed tokens matches the schema."""

import json
import string

import pytest
import torch

from regard.errors import ConfigError
from regard.serve.constraint import JsonSchemas
from regard.text import train_tokenizer
from regard.text.pretrained import load_pretrained
from text import files

pytest.importorskip("llguidance")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["small", "old"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TEXT = json.dumps({"name": "Tom é", "age": 12, "tags": ["small", "old"]}) * 9
FORM = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}


def sentencepiece(folder):
    """The tokenizer of a LLaMA: a space before every text, and bytes for unknown characters."""
    (folder / "tokenizer.model").write_bytes(files.sentencepiece(files.BPE, model=2, fallback=True))
    return load_pretrained(folder, {})


@pytest.mark.parametrize("kind", ["char", "bpe", "unigram", "sentencepiece"])
def test_every_walk_through_the_allowed_tokens_is_json_of_the_schema(kind, tmp_path):
    if kind == "sentencepiece":
        tokenizer = sentencepiece(tmp_path)
        assert tokenizer.encode("{") != tokenizer.encode("x{")[1:]
    else:
        tokenizer = train_tokenizer({"kind": kind}, [TEXT, string.printable])
    schemas = JsonSchemas(tokenizer)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        constraint, ids = schemas.constraint(FORM), []
        while len(ids) < 300:
            logits = torch.randn(tokenizer.vocab_size, generator=generator)
            token = int(constraint.mask(logits).argmax())
            if token == tokenizer.eos_id:
                break
            constraint.append(token)
            ids.append(token)
        text = b"".join(map(tokenizer.token_bytes, ids))
        value = json.loads(text)
        assert set(value) == {"name", "age", "tags"}
        assert len(value["name"]) <= 8
        assert 0 <= value["age"] <= 150
        assert {*value["tags"]} <= {"small", "old"}


def test_no_token_is_left_where_the_vocabulary_lacks_a_character():
    tokenizer = train_tokenizer({"kind": "char"}, ['{"name:'])  # no comma
    constraint = JsonSchemas(tokenizer).constraint(FORM)
    for token in tokenizer.encode('{"name":""'):
        assert constraint.mask(torch.zeros(tokenizer.vocab_size))[token] == 0
        constraint.append(token)
    assert constraint.mask(torch.zeros(tokenizer.vocab_size)).max() == -torch.inf


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"type": "yaml"}, "must be text, json_object or json_schema"),
        ({"type": "json_schema"}, "needs an object `schema`"),
        ({"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}, "response_format: "),
        (
            {"type": "json_schema", "json_schema": {"schema": {"const": "a" * 70_000}}},
            "more than 65536 characters",
        ),
        (  # 6 seconds and 400 MB to compile
            {"type": "json_schema", "json_schema": {"schema": {"items": [{"multipleOf": 999983}]}}},
            "the product of all multipleOf, or of 1 / multipleOf where it is below 1, is more",
        ),
        (  # an integer that no float can hold
            {
                "type": "json_schema",
                "json_schema": {
                    "schema": {"allOf": [{"multipleOf": 0.5}, {"multipleOf": 10**400}]}
                },
            },
            "the product of all multipleOf, or of 1 / multipleOf where it is below 1, is more",
        ),
    ],
)
def test_a_wrong_response_format_is_refused_by_name(form, message):
    schemas = JsonSchemas(train_tokenizer({"kind": "char"}, [TEXT]))
    with pytest.raises(ConfigError, match=message):
        schemas.constraint(form)
