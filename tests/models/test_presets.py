"""Presets against what their authors published: parameters, tables, configuration files."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from regard.config import kind_of
from regard.hub.config_json import canonicalize, read_config
from regard.models.build import count_parameters, preset
from regard.models.presets import ALIASES, PRESETS, PUBLISHED

OURS = {"modern", "tiny-decoder", "tiny-encoder", "tiny-encoder-decoder", "tiny-vit"}
OURS |= {"bahdanau", "luong", "show-attend-tell", "tiny-captioner"}  # their papers give no count
OURS |= {
    "bag",
    "bengio",
    "cbow",
    "convolution",
    "elman",
    "gru",
    "hmm",
    "lstm",
    "ngram",
    "update-gate",
}
ALL = [name for name in PRESETS if name not in ALIASES]
DOCUMENT = Path(__file__).parents[2] / "docs" / "presets.md"


@cache
def count(name):
    return count_parameters(PRESETS[name]())


def test_every_preset_that_is_not_ours_has_a_published_count():
    assert set(PRESETS) - set(PUBLISHED) == OURS


@pytest.mark.parametrize("name", [name for name in ALL if name not in OURS])
def test_a_preset_has_the_published_number_of_parameters(name):
    published, ours = PUBLISHED[name], count(name)
    near = published.exact or abs(ours / published.count - 1) <= 0.01
    same = ours == published.count if published.exact else near
    assert same != bool(published.reason), f"{ours:,} beside {published.count:,}"
    assert ours == pytest.approx(published.count, rel=0.01 if published.exact else 0.03)


def test_the_document_lists_every_preset_with_its_counts_and_its_source():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| `(.+?)` \|", text, re.MULTILINE)) == sorted(ALL)
    rows = re.findall(r"^\| `(.+?)` \| ([\d,]+) \| (.*) \| (.*) \|$", text, re.MULTILINE)
    assert {name for name, *_ in rows} == set(ALL) - OURS
    for name, counted, said, source in rows:
        published, ours = PUBLISHED[name], count(name)
        differs = f"{published.count:,}, {ours / published.count - 1:+.2%}"
        assert counted == f"{ours:,}"
        assert said == ("the same" if ours == published.count else differs)
        assert source == "; ".join(filter(None, (published.source, published.reason)))


@pytest.mark.parametrize(
    ("name", "head", "expected"),
    [  # as the same weights are counted with another head
        ("bert-base", "pooled", 109_482_240),
        ("bert-base", {"kind": "masked", "next_sentence": True}, 110_106_428),
        ("bert-large", "pooled", 335_141_888),
        ("roberta-base", "pooled", 124_645_632),
        ("distilbert", "none", 66_362_880),
        ("albert-base", "pooled", 11_683_584),
        ("albert-xxlarge", "pooled", 222_595_584),
        ("bart-large", "linear", 406_291_456),
    ],
)
def test_the_count_with_another_head(name, head, expected):
    assert count_parameters(preset(name, head=head)) == expected


def test_the_base_transformer_has_the_parameters_of_its_sizes():
    # The paper's table says 65 million. Its sizes with its 37,000 shared subwords are
    #   embedding       37,000 * 512
    #   6 encoder layers of   4 (512^2 + 512) + (2 * 512 * 2048 + 2048 + 512) + 2 * 1024
    #   6 decoder layers of   8 (512^2 + 512) + (2 * 512 * 2048 + 2048 + 512) + 3 * 1024
    # which is 3 % less; the big model's 213 million do agree.
    square, wide, norm = 512**2 + 512, 2 * 512 * 2048 + 2048 + 512, 2 * 512
    expected = (
        37_000 * 512 + 6 * (4 * square + wide + 2 * norm) + 6 * (8 * square + wide + 3 * norm)
    )
    assert expected == 63_082_496
    assert count("transformer-base") == expected


# The survey's table: order and norm, positions, feed-forward, bias, layers, heads, width, context.
# None where it says nothing. What a paper has otherwise stands in OTHERWISE, with the reason.
LARGE_DECODERS = {
    "gpt3-175b": ("pre layer", "learned", "gelu", True, 96, 96, 12288, 2048),
    "pangu-alpha-207b": ("pre layer", "learned", "gelu", True, 64, 128, 16384, 1024),
    "opt-175b": ("pre layer", "learned", "relu", True, 96, 96, 12288, 2048),
    "palm-540b": ("pre layer", "rotary", "swiglu", False, 118, 48, 18432, 2048),
    "bloom-176b": ("pre layer", "alibi", "gelu", True, 70, 112, 14336, 2048),
    "mt-nlg-530b": (None, None, None, None, 105, 128, 20480, 2048),
    "gopher-280b": ("pre rms", "relative", None, None, 80, 128, 16384, None),
    "chinchilla-70b": ("pre rms", "relative", None, None, 80, 64, 8192, None),
    "galactica-120b": ("pre layer", "learned", "gelu", False, 96, 80, 10240, 2048),
    "lamda-137b": (None, "relative", "geglu", None, 64, 128, 8192, None),
    "jurassic-1-178b": ("pre layer", "learned", "gelu", True, 76, 96, 13824, 2048),
    "llama-65b": ("pre rms", "rotary", "swiglu", True, 80, 64, 8192, 2048),
    "glm-130b": ("deepnorm layer", "rotary", "geglu", True, 70, 96, 12288, 2048),
    "t5-11b": ("pre rms", "relative", "relu", False, 24, 128, 1024, None),
}
OTHERWISE = {
    ("palm-540b", 0): "parallel layer",  # Chowdhery et al. 2022, section 2
    ("llama-65b", 3): False,  # Touvron et al. 2023 have no biases
}


@pytest.mark.parametrize("name", LARGE_DECODERS)
def test_the_survey_says_the_same_or_its_paper_differs(name):
    config = PRESETS[name]()
    position = kind_of(config.position)[0]
    relative = position == "t5" or config.score == "transformer_xl"
    row = (
        f"{config.norm_placement} {config.norm}",
        "relative" if relative else position,
        config.ffn.removesuffix("_tanh"),
        config.bias,
        config.layers,
        config.heads,
        config.dim,
        config.context,
    )
    for place, (ours, theirs) in enumerate(zip(row, LARGE_DECODERS[name], strict=True)):
        assert ours == OTHERWISE.get((name, place), ours if theirs is None else theirs)


def test_a_short_name_is_the_beginning_of_what_it_means():
    assert all(name.startswith(short) for short, name in ALIASES.items())
    assert PRESETS["llama"]() == PRESETS["llama-7b"]()


# What decides in the config.json of the released weights; the rest are the defaults of its kind.
LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5}
LLAMA3 = {**LLAMA, "vocab_size": 128256, "rope_theta": 5e5, "num_key_value_heads": 8}
SCALED = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED |= {"original_max_position_embeddings": 8192}
QWEN = {"rope_theta": 1e6, "rms_norm_eps": 1e-6}
GEMMA = {"vocab_size": 256000, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh"}
RELEASED = {
    "gpt2": {"model_type": "gpt2"},
    "gpt2-xl": {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25},
    "bert-base": {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
    "bert-large": {
        "model_type": "bert",
        "architectures": ["BertForMaskedLM"],
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
    "roberta-base": {
        "model_type": "roberta",
        "architectures": ["RobertaForMaskedLM"],
        "vocab_size": 50265,
        "max_position_embeddings": 514,
        "layer_norm_eps": 1e-5,
        "type_vocab_size": 1,
    },
    "distilbert": {"model_type": "distilbert", "architectures": ["DistilBertForMaskedLM"]},
    "albert-base": {
        "model_type": "albert",
        "architectures": ["AlbertForMaskedLM"],
        "hidden_size": 768,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_act": "gelu_new",
    },
    "t5-small": {"model_type": "t5"},
    "t5-11b": {
        "model_type": "t5",
        "d_model": 1024,
        "d_kv": 128,
        "d_ff": 65536,
        "num_layers": 24,
        "num_heads": 128,
    },
    "t5-v1.1-base": {
        "model_type": "t5",
        "d_model": 768,
        "d_ff": 2048,
        "num_layers": 12,
        "num_decoder_layers": 12,
        "num_heads": 12,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    },
    "bart-large": {"model_type": "bart"},
    "marian-en-de": {
        "model_type": "marian",
        "vocab_size": 58101,
        "d_model": 512,
        "encoder_layers": 6,
        "decoder_layers": 6,
        "encoder_attention_heads": 8,
        "decoder_attention_heads": 8,
        "encoder_ffn_dim": 2048,
        "decoder_ffn_dim": 2048,
        "max_position_embeddings": 512,
        "activation_function": "swish",
        "scale_embedding": True,
    },
    "gpt-neox-20b": {"model_type": "gpt_neox", "hidden_act": "gelu_fast"},
    "pythia-160m": {
        "model_type": "gpt_neox",
        "vocab_size": 50304,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_act": "gelu",
    },
    "opt-125m": {"model_type": "opt"},
    "opt-350m": {
        "model_type": "opt",
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "ffn_dim": 4096,
        "word_embed_proj_dim": 512,
        "do_layer_norm_before": False,
    },
    "bloom-560m": {"model_type": "bloom", "hidden_size": 1024, "n_layer": 24, "n_head": 16},
    "llama-7b": {"model_type": "llama", "rms_norm_eps": 1e-6},
    "llama-2-70b": {
        **LLAMA,
        "max_position_embeddings": 4096,
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
    },
    "llama-3-8b": {**LLAMA3, "max_position_embeddings": 8192, "intermediate_size": 14336},
    "llama-3.2-1b": {
        **LLAMA3,
        "max_position_embeddings": 131072,
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "intermediate_size": 8192,
        "tie_word_embeddings": True,
        "rope_scaling": {**SCALED, "factor": 32.0},
    },
    "tinyllama": {
        **LLAMA,
        "hidden_size": 2048,
        "num_hidden_layers": 22,
        "num_key_value_heads": 4,
        "intermediate_size": 5632,
    },
    "mistral-7b": {
        "model_type": "mistral",
        "max_position_embeddings": 32768,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "sliding_window": 4096,
        "rms_norm_eps": 1e-5,
    },
    "qwen2-7b": {
        **QWEN,
        "model_type": "qwen2",
        "vocab_size": 152064,
        "max_position_embeddings": 131072,
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "use_sliding_window": False,
        "sliding_window": 131072,
    },
    "qwen3-8b": {
        **QWEN,
        "model_type": "qwen3",
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
    },
    "gemma-2b": {
        **GEMMA,
        "model_type": "gemma",
        "max_position_embeddings": 8192,
        "hidden_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "intermediate_size": 16384,
    },
    "gemma-2-27b": {
        **GEMMA,
        "model_type": "gemma2",
        "max_position_embeddings": 8192,
        "hidden_size": 4608,
        "num_hidden_layers": 46,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "intermediate_size": 36864,
        "query_pre_attn_scalar": 144,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "phi-2": {
        "model_type": "phi",
        "hidden_size": 2560,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 10240,
        "partial_rotary_factor": 0.4,
    },
    "phi-3-mini": {
        "model_type": "phi3",
        "max_position_embeddings": 4096,
        "sliding_window": 2047,
        "rms_norm_eps": 1e-5,
    },
}


@pytest.mark.parametrize("name", RELEASED)
def test_a_preset_is_what_its_configuration_file_describes(name):
    _, read = read_config(RELEASED[name])
    told = {"dropout": 0.0, "attention_dropout": 0.0, "ffn_dropout": 0.0, "init": "normal"}
    assert canonicalize(replace(read, **told)) == canonicalize(replace(PRESETS[name](), **told))
