"""Every choice of a Transformer, and which do not go together.

The choices are read from the configuration and from the tables, so that a new one is tried
with every other as soon as it has a name.
"""

from dataclasses import fields
from typing import Literal, get_args, get_origin, get_type_hints

from regard.config import kind_of
from regard.models.transformer import TransformerConfig
from regard.nn.block import FFNS
from regard.nn.head import HEADS
from regard.nn.init import INITS
from regard.nn.norm import NORMS
from regard.nn.position import POSITIONS
from regard.nn.score import RELATIVE_SCORES, SCORES, SCORES_WITH_MATRIX

VOCAB = 23
SIZES = {"vocab_size": VOCAB, "dim": 16, "layers": 2, "heads": 4, "context": 8}
COMPANIONS = {"factorize_positions", "global_layers"}  # fields that are tried beside another only
# vectors in place of ids; a mask of prompts (test_prefix.py); bytes of words (test_characters.py)
COMPANIONS |= {"input_dim", "prefix", "char_dim"}
OTHERWISE = {  # what to try beside the default, where a type does not tell
    "kv_heads": [2, 1],
    "head_dim": [8],
    "ffn_dim": [20],
    "window": [3],
    "global_every": [2],
    "norm_eps": [1e-3],
    "residual_scale": [1.5],
    "source_vocab_size": [VOCAB + 2],
    "encoder_layers": [1],
    "encoder_heads": [2],
    "encoder_ffn_dim": [12],
    "embed_dim": [{"embed_dim": 6, "factorize_positions": value} for value in (True, False)],
    "segments": [2],
    "dropout": [0.1],
    "attention_dropout": [0.1],
    "ffn_dropout": [0.1],
}
TABLES = {
    "score": {name: score for name, score in SCORES.items() if name != "location"},
    "position": POSITIONS,
    "norm": NORMS,
    "ffn": FFNS,
    "init": INITS,
    "head": HEADS,
}
LLAMA3 = {
    "kind": "llama3",
    "factor": 2.0,
    "original_context": 4,
    "low_freq_factor": 0.5,
    "high_freq_factor": 2.0,
}
OPTIONS = {  # of an entry of a table; without any it is taken as it is
    "scaled_dot": [{}, {"scale_dim": 9, "cap": 5.0}],
    "dot": [{}, {"scale": 0.3, "cap": 5.0}],
    "shaw": [{"max_distance": 2}],
    "disentangled": [
        {"max_distance": 3},
        {
            "max_distance": 9,
            "buckets": 4,
            "norm_relative_embeddings": True,
            "position_projections": True,
        },
    ],
    "sinusoidal": [
        {},
        {"each_layer": True},
        {"interleaved": False, "base": 100.0, "each_layer": True, "after_projection": True},
    ],
    "learned": [{}, {"offset": 2, "each_layer": True, "after_projection": True}],
    "rotary": [
        {},
        {"partial_rotary_factor": 0.5, "scaling": {"kind": "linear", "factor": 2.0}},
        {
            "partial_rotary_factor": 0.5,
            "interleaved": True,
            "scaling": {"kind": "ntk", "factor": 2.0},
        },
        {"interleaved": True, "base": 100.0, "window_base": 10.0, "scaling": LLAMA3},
    ],
    "t5": [{"buckets": 8, "max_distance": 9}],
    "normal": [{}, {"std": 0.1}],
    "zero_init_residual": [{"std": 0.1}],
    "linear": [{}, {"bias": True, "scaled": True, "cap": 5.0}],
    "masked": [{}, {"bias": False, "activation": "relu", "next_sentence": True}],
    "classification": [
        {"classes": 3},
        {"classes": 3, "pool": "last", "hidden": "tanh"},
        {"classes": 3, "pool": "mean", "hidden": "relu", "bias": False},
        {"classes": 3, "pool": "max", "relu": True},
    ],
    "tag": [{"classes": 3}],
    "crf": [{"classes": 3}],
    "mixture": [{"components": 2}],
    "forecast": [{"horizon": 2, "outputs": 3, "pool": "last"}],
}
FACTS = {"dim", "vocab_size", "embed_dim", "tied", "norm", "heads", "head_dim", "context", "causal"}
FACTS |= {"model", "layers", "frequency", "positions"}  # known to the builder; the rest are options


def _values(field, hint):
    """Every value that one field is tried with."""
    if field.name in TABLES:
        values = [
            {"kind": kind, **options} if options else kind
            for kind in TABLES[field.name]
            for options in OPTIONS.get(kind, [{}])
        ]
        return [*values, None] if type(None) in get_args(hint) else values
    if field.name in OTHERWISE:
        return [field.default, *OTHERWISE[field.name]]
    parts = (hint, *get_args(hint))
    named = [word for part in parts if get_origin(part) is Literal for word in get_args(part)]
    return [*named, *([False, True] if bool in parts else [])]


def said(value):
    """A value in words: the label it goes by."""
    if not isinstance(value, dict):
        return str(value)
    return " ".join(said(v) if k == "kind" else f"{k}={said(v)}" for k, v in value.items())


HINTS = get_type_hints(TransformerConfig)
VALUES = {
    field.name: {said(value): value for value in _values(field, HINTS[field.name])}
    for field in fields(TransformerConfig)
    if field.name not in SIZES and field.name not in COMPANIONS
}


def kind(value):
    return kind_of(value)[0]


def given(value):
    return value is not None


READS_FIRST = [
    "pooled",
    "classification classes=3",
    said({"kind": "masked", **OPTIONS["masked"][1]}),
]
REFUSED = [  # two fields, the values that do not go together, and what is said then
    (
        ("global_every", given),
        ("window", lambda width: width is None),
        "global_every=2 needs a window: without one every layer is global;\n"
        "set window, or leave out global_every",
    ),
    (
        ("residual_scale", given),
        ("norm_placement", lambda placement: placement != "deepnorm"),
        r"residual_scale=1.5 belongs to norm_placement='deepnorm', not '\w+'; leave it out",
    ),
    (
        ("norm", lambda norm: norm == "batch"),
        ("architecture", lambda value: value != "encoder"),
        r"norm='batch' normalizes by the mean over all positions, so that in training a decoder "
        r"would see the tokens that it predicts;\nset norm='layer', or architecture='encoder'",
    ),
    (
        ("ffn", lambda ffn: ffn is None),
        ("norm_placement", lambda placement: placement.startswith("parallel")),
        r"norm_placement='parallel\w*' computes attention and .* ffn=none .*; choose another",
    ),
    *(
        (
            ("ffn", lambda ffn: ffn is None),
            (name, bool),
            "ffn=none has no feed-forward network; leave out ffn_dim, encoder_ffn_dim and ffn_drop",
        )
        for name in ("ffn_dim", "encoder_ffn_dim", "ffn_dropout")
    ),
    (
        ("score", lambda score: kind(score) in RELATIVE_SCORES),
        ("position", lambda position: kind(position) == "rotary"),
        r"score=.* compares queries with distances, but position=.*rotary.* rotates them first.*"
        r"\nset position='none', or score='scaled_dot'",
    ),
    (
        ("score", lambda score: kind(score) in SCORES_WITH_MATRIX),
        ("position", lambda position: kind(position) == "rotary"),
        r"score=.* has a matrix between query and key, but position=.*rotary.* rotates both first.*"
        r"\nchoose a position without rotation, or score='scaled_dot'",
    ),
    (
        ("init", lambda init: kind(init) == "zero_init_residual"),
        ("norm_placement", lambda placement: placement in ("no_residual", "deepnorm")),
        r"init='zero_init_residual' cannot be combined with norm_placement='\w+': .*;\n"
        r"set norm_placement='pre', or init='normal'",
    ),
    (
        ("segments", lambda segments: segments > 0),
        ("architecture", lambda value: value != "encoder"),
        r"segments=2 belong to an encoder, not to architecture='[\w-]+'; leave them out",
    ),
    (
        ("source_vocab_size", given),
        ("architecture", lambda value: value != "encoder-decoder"),
        r"source_vocab_size .* belong to an encoder-decoder, not to architecture='\w+'; vocab_size",
    ),
    *(
        (
            (name, given),
            ("architecture", lambda value: value != "encoder-decoder"),
            r"encoder_heads and encoder_ffn_dim belong to an encoder-decoder, not to architecture=",
        )
        for name in ("encoder_heads", "encoder_ffn_dim")
    ),
    (
        ("encoder_heads", given),
        ("kv_heads", given),
        r"encoder_heads=2 must divide dim=16, and cannot be combined with kv_heads=",
    ),
    (
        ("encoder_layers", given),
        ("architecture", lambda value: value != "encoder-decoder"),
        r"encoder_layers belong to an encoder-decoder, not to architecture='\w+'; .* layers are",
    ),
    (
        ("norm_placement", lambda placement: placement.startswith("parallel")),
        ("architecture", lambda value: value == "encoder-decoder"),
        r"norm_placement='parallel\w*' has no cross-attention; "
        r"architecture='encoder-decoder' needs pre",
    ),
    (
        ("head", lambda head: said(head) in READS_FIRST),
        ("architecture", lambda value: value != "encoder"),
        r"head=.* reads the first position, which in a causal model "
        r"\(architecture='[\w-]+'\) depends on the first token only;\n"
        r"set architecture='encoder', or pool='last' of head 'classification'",
    ),
]


def reason(*pair):
    """What is said when two values do not go together; nothing where they do."""
    values = {name: VALUES[name][label] for name, label in pair}
    for (one, these), (two, those), reason in REFUSED:
        if {one, two} == set(values) and these(values[one]) and those(values[two]):
            return reason
    return None


def config_of(row):
    """The small model that a row describes; what it leaves out keeps its default."""
    fields = dict(SIZES)
    for name, label in row.items():
        value = VALUES[name][label]
        fields |= value if isinstance(value, dict) and "kind" not in value else {name: value}
    return TransformerConfig(**fields)
