"""What is refused is refused before there is a model, with the reason.

What does not go together is listed in `choices.py` and tried in `contract/test_combinations.py`.
"""

import pytest

from choices import LLAMA3, SIZES
from regard.errors import ConfigError
from regard.models.build import build_model
from regard.models.transformer import TransformerConfig

NONSENSE = [
    (
        {"norm_placement": "prelude"},
        "unknown value of norm_placement 'prelude'; known: deepnorm, ",
    ),
    (
        {"architecture": "encoder_decoder"},
        "unknown value of architecture .* did you mean 'encoder-decoder'",
    ),
    ({"bias": "kv"}, "unknown value of bias 'kv'; did you mean 'qkv'"),
    ({"global_layers": [1]}, r"global_layers=\[1\] needs a window and cannot be combined"),
    ({"window": 3, "global_layers": [0, 99]}, r"global_layers=\[0, 99\] must be distinct indices"),
    ({"window": 3, "global_every": 1}, "global_every=1 makes every layer global, so window=3"),
    (
        {"factorize_positions": False},
        "factorize_positions=false needs embed_dim, .* or leave out factorize_positions",
    ),
    ({"segments": -1}, "segments=-1 must be at least 0"),
    ({"norm_eps": 0.0}, "norm_eps=0.0 must be more than 0"),
    (
        {"norm_placement": "deepnorm", "residual_scale": -1.0},
        "residual_scale=-1.0 must be more than 0",
    ),
    ({"embed_dim": 5, "position": "sinusoidal"}, r"even width \(dim, .* or head_dim\), not 5"),
    (
        {"head_dim": 5, "position": "rotary"},
        "head_dim=5 times partial_rotary_factor=1.0 must be even",
    ),
    ({"score": "location"}, "score='location' does not depend on the keys, .* no gradient"),
    (
        {"score": {"kind": "shaw", "cap": 5.0}},
        "score 'shaw': unknown option 'cap'; known: max_distance",
    ),
    (
        {"score": {"kind": "shaw", "max_distance": 0}},
        "score 'shaw': max_distance=0 must be more than 0",
    ),
    (
        {"score": {"kind": "scaled_dot", "scale_dim": 0}},
        "'scaled_dot': scale_dim=0 must be more than 0",
    ),
    (
        {"score": {"kind": "scaled_dot", "cap": -1.0}},
        "score 'scaled_dot': cap=-1.0 must be more than 0",
    ),
    ({"score": {"kind": "cosine", "cap": 5.0}}, "'cosine': unknown option 'cap'; there are none"),
    ({"score": {"kind": "dot", "cap": 0.0}}, "score 'dot': cap=0.0 must be more than 0"),
    ({"position": {"kind": "learned", "offset": -1}}, "offset=-1 must be at least 0"),
    ({"position": {"kind": "rotary", "base": 0.0}}, "'rotary': base=0.0 must be more than 0"),
    (
        {"position": {"kind": "rotary", "window_base": 0.0}},
        "'rotary': window_base=0.0 must be more than 0",
    ),
    ({"position": {"kind": "sinusoidal", "base": -1.0}}, "base=-1.0 must be more than 0"),
    (
        {"position": {"kind": "rotary", "scaling": {"kind": "linear", "factor": 0.0}}},
        "rotary scaling 'linear': factor=0.0 must be more than 0",
    ),
    (
        {"position": {"kind": "rotary", "scaling": {"kind": "ntk", "factor": -2.0}}},
        "rotary scaling 'ntk': factor=-2.0 must be more than 0",
    ),
    (
        {"position": {"kind": "rotary", "scaling": {**LLAMA3, "original_context": 0}}},
        "rotary scaling 'llama3': original_context=0 must be more than 0",
    ),
    (
        {"position": {"kind": "rotary", "scaling": {**LLAMA3, "low_freq_factor": 2.0}}},
        "rotary scaling 'llama3': low_freq_factor=2.0 must be less than high_freq_factor=2.0",
    ),
    ({"init": {"kind": "normal", "std": 0.0}}, "init 'normal': std=0.0 must be more than 0"),
    ({"head": {"kind": "linear", "cap": 0.0}}, "head 'linear': cap=0.0 must be more than 0"),
    ({"head": {"kind": "tag", "classes": 1}}, "head 'tag': classes=1 must be at least 2"),
    ({"head": "tag"}, "head 'tag': missing a required argument: 'classes'"),
]


@pytest.mark.parametrize(
    ("fields", "reason"), NONSENSE, ids=[str(fields) for fields, _ in NONSENSE]
)
def test_a_value_that_makes_no_sense_is_refused_before_there_is_a_model(fields, reason):
    with pytest.raises(ConfigError, match=reason):
        build_model(TransformerConfig(**SIZES, **fields))
