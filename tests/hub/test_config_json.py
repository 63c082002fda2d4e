"""config.json: read in every form it is published in, and refused by the setting's name."""

import pytest

from hub.small_encoders import REQUIRED
from regard.errors import ConfigError
from regard.hub import MODEL_TYPES
from regard.hub.config_json import read_config, write_config
from regard.models.build import preset

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}


def read(**table):
    return read_config({**LLAMA, **table})[1]


@pytest.mark.parametrize("name", MODEL_TYPES)
def test_a_config_with_nothing_but_its_type_is_that_of_the_class(name):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoConfig.for_model(name).to_dict()
    theirs["architectures"] = [next(iter(MODEL_TYPES[name].heads))]
    ours, required = {"model_type": name}, REQUIRED.get(name, {})
    assert read_config(ours | required)[1] == read_config(theirs | required)[1]


@pytest.mark.parametrize("name", MODEL_TYPES)
@pytest.mark.parametrize("number", range(4))
def test_what_is_written_reads_as_it_was(name, number):
    for architecture in list(MODEL_TYPES[name].heads)[number : number + 1]:
        table = {"model_type": name, "architectures": [architecture], **REQUIRED.get(name, {})}
        _, config = read_config(table)
        model_type, table = write_config(config, name)
        assert read_config(table) == (model_type, config)


def test_the_published_gpt2_is_our_preset():
    table = {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.0,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "resid_pdrop": 0.0,
        "summary_type": "cls_index",
        "vocab_size": 50257,
    }
    assert read_config(table)[1] == preset("gpt2")


SCALED = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 500000.0}, {"rope_theta": 500000.0, "rope_type": "default"}),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **SCALED}},
            {"rope_theta": 5e5, "rope_type": "llama3", **SCALED},
        ),
        ({"rope_theta": 1e4, "rope_scaling": None}, None),
    ],
)
def test_rotary_settings_of_both_forms_mean_the_same(old, new):
    assert read(**old) == read(rope_parameters=new)


def test_fractions_of_a_turn_have_three_names():
    old = {"model_type": "gpt_neox", "rotary_pct": 0.5, "rotary_emb_base": 500}
    new = {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 500.0}}
    assert read_config(old)[1] == read_config({"model_type": "gpt_neox", **new})[1]
    wanted = {"kind": "rotary", "base": 500.0, "partial_rotary_factor": 0.5}
    assert read_config(old)[1].position == wanted
    phi = {"model_type": "phi", "partial_rotary_factor": 0.25}
    assert read_config(phi)[1].position == {"kind": "rotary", "partial_rotary_factor": 0.25}


def test_an_old_name_of_bloom_that_is_null_is_not_read():
    table = {"model_type": "bloom", "hidden_size": 96, "n_layer": 3}
    _, config = read_config(table | {"n_embed": None, "seq_length": None})
    assert (config.dim, config.layers, config.context) == (96, 3, 2048)
    assert read_config(table | {"n_embed": 128})[1].dim == 128


def test_layer_types_of_which_every_nth_is_full_are_a_window():
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    table = {"model_type": "gemma2", "num_hidden_layers": 6, "layer_types": kinds}
    _, config = read_config(table)
    assert (config.window, config.global_every) == (4096, 3)
    _, config = read_config({**table, "layer_types": kinds[::-1]})
    assert (config.window, config.global_every, config.global_layers) == (4096, None, [0, 3])


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ({}, "has no model_type"),
        ({"model_type": 3}, "model_type=3 in config.json must be a string"),
        ({"model_type": "lama"}, "did you mean 'llama'"),
        ({"model_type": "gemma3"}, "reads images and text"),
        ({"model_type": "mixtral"}, "experts"),
        ({**LLAMA, "quantization_config": {"bits": 4}}, "quantization_config=.*quantized"),
        ({**LLAMA, "hidden_act": "mish"}, "'mish'"),
        ({**LLAMA, "hidden_act": "relu2"}, "gated by activation 'relu2'"),
        ({**LLAMA, "rope_scaling": {"type": "yarn"}}, "rope_type='yarn' needs factor"),
        ({**LLAMA, "rope_scaling": {"type": "proportional"}}, "rope_type='proportional' is not"),
        ({**LLAMA, "rope_scaling": {"type": "linear"}}, "needs factor"),
        ({**LLAMA, "rope_scaling": [1]}, "rope_scaling"),
        ({**LLAMA, "rope_parameters": {"full_attention": {}}}, "same RoPE frequencies"),
        ({**LLAMA, "architectures": ["LlamaForVideo"]}, "class of a llama 'LlamaForVideo'"),
        ({**LLAMA, "architectures": 5}, "architectures=5 is not a list"),
        ({**LLAMA, "hidden_size": "big"}, "model.dim must be an integer"),
        ({**LLAMA, "hidden_size": -64}, "dim=-64"),
        ({**LLAMA, "hidden_size": 65}, "must divide"),
        ({**LLAMA, "hidden_act": ["silu"]}, "does not describe a llama"),
        ({**LLAMA, "rope_theta": "fast"}, "does not describe a llama"),
        (
            {"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx=True is not supported",
        ),
        ({"model_type": "gpt2", "activation_function": None}, "not that of a gpt2|activation"),
        ({"model_type": "opt", "_remove_final_layer_norm": True}, "_remove_final_layer_norm"),
        (
            {"model_type": "bloom", "apply_residual_connection_post_layernorm": True},
            "apply_residual",
        ),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "longrope", "short_factor": []}},
            "longrope",
        ),
        ({"model_type": "gemma", "use_bidirectional_attention": True}, "use_bidirectional"),
    ],
)
def test_what_has_no_place_here_is_refused_by_name(table, why):
    with pytest.raises(ConfigError, match=why):
        read_config(table)


@pytest.mark.parametrize(
    ("name", "fields", "obstacles"),
    [
        ("tiny-decoder", {"qk_norm": True}, ["gpt_neox", "qk_norm = True"]),
        ("tiny-encoder-decoder", {}, ["mbart", "position = 'sinusoidal'"]),
        ("modern", {"position": "alibi"}, ["llama", "position = 'alibi'"]),
        (
            "modern",
            {"position": {"kind": "rotary", "scaling": {"kind": "ntk", "factor": 2.0}}},
            ["ntk"],
        ),
        ("gpt2", {"norm": "rms"}, ["norm = 'rms'"]),
        ("gpt2", {"score": "shaw"}, ["gpt2", "score = 'shaw'"]),
    ],
)
def test_a_model_that_no_family_has_is_refused_with_what_stands_in_the_way(name, fields, obstacles):
    with pytest.raises(ConfigError, match="nearest") as raised:
        write_config(preset(name, **fields))
    for obstacle in obstacles:
        assert obstacle in str(raised.value)


def test_a_family_can_be_asked_for():
    config = preset("modern")
    assert write_config(config)[0].name == "llama"
    assert write_config(config, "mistral")[1]["sliding_window"] is None
    with pytest.raises(
        ConfigError, match=r"(?s)gpt2 does not support all .*; it differs in\n.*norm = 'rms'"
    ):
        write_config(config, "gpt2")
    with pytest.raises(ConfigError, match="unknown model_type 'gtp2'"):
        write_config(config, "gtp2")


def test_what_only_training_uses_does_not_stand_in_the_way():
    config = preset("modern", dropout=0.1, ffn_dropout=0.1, init="xavier")
    assert write_config(config)[0].name == "llama"
