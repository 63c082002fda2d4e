"""Every choice of every field of a decoder: a fast path reproduces it, or it is refused."""

import copy
import dataclasses
import os
from importlib.util import find_spec
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import nn

from regard.accel import decoding_path
from regard.accel.description import UnsupportedModelError, inspect_decoder
from regard.accel.packed_decoder import PackedDecoder
from regard.accel.support import packed_unsupported_reason, triton_unsupported_reason
from regard.errors import RegardError
from regard.models.transformer import Transformer, TransformerConfig
from regard.nn.block import FFNS, Block, FeedForward
from regard.nn.head import LMHead
from regard.nn.norm import NORMS, RMSNorm
from regard.nn.position import LENGTH_DEPENDENT_SCALINGS, POSITIONS, Rotary
from regard.nn.score import SCORES, ScaledDot

VOCAB, ROWS, CAPACITY = 23, 3, 16
BASE = {
    "vocab_size": VOCAB,
    "dim": 32,
    "layers": 2,
    "heads": 4,
    "context": CAPACITY,
    "position": "rotary",
    "norm": "rms",
    "ffn": "swiglu",
    "bias": False,
    "tied": False,
}
LENGTH_DEPENDENT = [  # scalings that depend on the length of the sequence
    {"kind": "dynamic", "factor": 2.0, "original_context": 4},
    {
        "kind": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_context": 4,
    },
]
RUNS_TRITON = find_spec("triton") is not None and (
    torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
)


def literals(field):
    """The values of a closed choice."""
    hint = get_type_hints(TransformerConfig)[field]
    parts = [part for part in (hint, *get_args(hint)) if get_origin(part) is Literal]
    return [value for part in parts for value in get_args(part)]


CHOICES = {
    "dim": [16, 48],
    "layers": [1, 3],
    "heads": [1, 2, 8],
    "kv_heads": [1, 2, 4],
    "head_dim": [6, 16],
    "ffn_dim": [8, 100],
    "score": [
        *sorted(SCORES.keys() - {"location"}),  # that one is for recurrent decoders
        {"kind": "scaled_dot", "cap": 2.0},
        {"kind": "scaled_dot", "scale_dim": 3},
        {"kind": "dot", "scale": 0.3},
    ],
    "position": [
        *sorted(POSITIONS),
        {"kind": "rotary", "interleaved": True},
        {"kind": "rotary", "partial_rotary_factor": 0.5},
        {"kind": "rotary", "partial_rotary_factor": 0.5, "interleaved": True},
        {"kind": "rotary", "base": 50.0},
        {"kind": "rotary", "scaling": {"kind": "linear", "factor": 2.0}},
        *({"kind": "rotary", "scaling": scaling} for scaling in LENGTH_DEPENDENT),
        {"kind": "rotary", "window_base": 50.0},
        {"kind": "learned", "each_layer": True},
        {"kind": "sinusoidal", "each_layer": True},
        {"kind": "sinusoidal", "each_layer": True, "after_projection": True},
    ],
    "window": [1, 3, 40],
    "global_every": [2],
    "global_layers": [[0], [1]],
    "norm": sorted(NORMS.keys() - {"batch"}),  # that one is for encoders
    "norm_eps": [1e-2],
    "qk_norm": [True],
    "norm_placement": literals("norm_placement"),
    "residual_scale": [1.5],
    "ffn": [*sorted(FFNS), None],
    "init": [],  # of the weights, which are drawn anew here
    "bias": [True, False, "qkv", "attention", "not_qkv", "not_attention"],
    "shared_layers": [True],
    "embed_norm": [True],
    "dropout": [0.5],
    "attention_dropout": [0.5],
    "ffn_dropout": [0.5],
    "vocab_size": [7, 64],
    "source_vocab_size": [],  # of an encoder-decoder
    "context": [40],
    "architecture": [],  # `test_other_models_are_refused`
    "encoder_layers": [],
    "encoder_heads": [],
    "encoder_ffn_dim": [],
    "embed_dim": [8],
    "factorize_positions": [True, False],
    "embed_scaled": [True],
    "segments": [],  # of an encoder
    "prefix": [True],
    "input_dim": [],  # vectors in place of ids, which have no decode step
    "char_dim": [],  # of an encoder for tagging
    "tied": [True, False],
    "head": [
        "linear",
        {"kind": "linear", "cap": 3.0},
        {"kind": "linear", "bias": True},
        {"kind": "linear", "scaled": True},
    ],
}
TOGETHER = {  # fields that another one needs
    "global_every": {"window": 3},
    "global_layers": {"window": 3},
    "factorize_positions": {"embed_dim": 8},
    "residual_scale": {"norm_placement": "deepnorm"},
    "score": {"position": "none"},  # rotary positions exclude most other scores
}
CASES = [
    pytest.param({**TOGETHER.get(field, {}), field: value}, id=f"{field}={value}")
    for field, values in CHOICES.items()
    for value in values
]
PAIRS = [  # of which one field alone says nothing
    {"head_dim": 5, "position": {"kind": "rotary", "partial_rotary_factor": 0.8}},
    {
        "head_dim": 5,
        "position": {"kind": "rotary", "partial_rotary_factor": 0.8, "interleaved": True},
    },
    {"head_dim": 6, "position": {"kind": "rotary", "interleaved": True}},
    {"norm_placement": "parallel", "norm": "layer", "bias": True, "window": 3},
    {"qk_norm": True, "kv_heads": 2, "norm": "rms_plus_one"},
    {"position": "alibi", "kv_heads": 2, "window": 4},
]
CASES += [pytest.param(change, id=str(change)) for change in PAIRS]

TRITON_FIELDS = {
    "heads",
    "kv_heads",
    "head_dim",
    "position",
    "score",
    "window",
    "norm",
    "norm_placement",
    "residual_scale",
    "qk_norm",
    "embed_norm",
    "embed_dim",
    "factorize_positions",
    "head",
    "ffn",
    "ffn_dim",
    "bias",
    "tied",
}
TRITON_CASES = [case for case in CASES if case.values[0].keys() <= TRITON_FIELDS]


def build(change=None, **more):
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(**{**BASE, **(change or {}), **more})).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def test_every_field_of_a_decoder_has_its_choices_here():
    assert CHOICES.keys() == {field.name for field in dataclasses.fields(TransformerConfig)}


def require_same_logits(model, fast, counts, static):
    """Prefill and several decode steps give the logits of the model."""
    ids = torch.randint(0, model.vocab_size, (ROWS, 9))
    counts = None if counts is None else torch.tensor(counts)
    expected, state = model.step(ids[:, :5], model.start(ROWS, CAPACITY), counts=counts)
    actual, fast_state = fast.step(ids[:, :5], fast.start(ROWS, CAPACITY), counts=counts)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    fast_state = fast_state.with_static_shapes() if static else fast_state
    for time in range(5, 9):
        expected, state = model.step(ids[:, time : time + 1], state)
        actual, fast_state = fast.step(ids[:, time : time + 1], fast_state)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("change", CASES)
@torch.inference_mode()
def test_a_choice_decodes_as_the_model_does_or_is_refused(change):
    model, reference = build(change), build(change)
    path = decoding_path(model)
    if path.name == "plain":
        assert path.language is model
        assert path.unsupported_reasons["packed"]
        return
    for counts in (None, (3, 5, 4)):
        for static in (False, True):
            require_same_logits(reference, path.language, counts, static)


def triton_sizes(change):
    return {"head_dim": 16, "layers": 1} | change


def has_kernels(change):
    try:
        return not triton_unsupported_reason(inspect_decoder(build(triton_sizes(change))))
    except (UnsupportedModelError, RegardError):  # of no fast path, or no model at all
        return False


def fields_of(change):
    """The fields that a change decides, and those that it may leave without effect."""
    return change.keys() | (
        {"norm", "qk_norm", "embed_norm"} if "norm_placement" in change else set()
    )


def merge_independent(changes):
    """Every change that has kernels, in few models: those that share no field stand in one."""
    merged = []
    for change in filter(has_kernels, changes):
        for group in merged:
            if not fields_of(group) & fields_of(change) and has_kernels(group | change):
                group |= change
                break
        else:
            merged.append(dict(change))
    return merged


TRITON_MODELS = merge_independent(case.values[0] for case in TRITON_CASES) if RUNS_TRITON else []


@pytest.mark.skipif(not RUNS_TRITON, reason="needs Triton, and a GPU or TRITON_INTERPRET=1")
@pytest.mark.parametrize("change", TRITON_MODELS, ids=str)
@torch.inference_mode()
def test_choices_without_an_obstacle_decode_by_triton_kernels(change):
    from regard.accel.triton_decoder import TritonDecoder

    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = triton_sizes(change)
    model, reference = build(sizes).to(device), build(sizes).to(device)
    fast, ids = TritonDecoder(model), torch.randint(0, model.vocab_size, (2, 6), device=device)
    _, state = reference.step(ids[:, :4], reference.start(2, CAPACITY))
    _, fast_state = fast.step(ids[:, :4], fast.start(2, CAPACITY))
    for time in (4, 5):
        expected, state = reference.step(ids[:, time : time + 1], state)
        actual, fast_state = fast.step(ids[:, time : time + 1], fast_state)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)  # sums in another order


def test_some_choices_are_fast_and_some_are_refused():
    names = [decoding_path(build(case.values[0])).name for case in CASES]
    assert names.count("packed_cpu") > 40
    assert names.count("packed") >= 2
    assert names.count("plain") >= 12


class OtherNorm(RMSNorm):
    """A norm that no fast path knows."""


class OtherScore(ScaledDot):
    """A score that no fast path knows."""


class OtherPosition(Rotary):
    """A position encoding that no fast path knows."""


class OtherFFN(FeedForward):
    """A feed-forward network that no fast path knows."""


class OtherHead(LMHead):
    """A head that no fast path knows."""


class OtherBlock(Block):
    """A block that no fast path knows."""


def replace_norm(model):
    model.decoder.blocks[1].ffn_norm = OtherNorm(32)


def replace_score(model):
    model.decoder.blocks[0].attention.score = OtherScore(8)


def replace_position(model):
    model.decoder.position = OtherPosition(8)


def replace_ffn(model):
    torch.manual_seed(1)
    model.decoder.blocks[0].ffn = OtherFFN(32, 8, torch.tanh)


def replace_head(model):
    model.head = OtherHead(32, VOCAB)


def replace_block(model):
    model.decoder.blocks[0].__class__ = OtherBlock


def add_parameter(model):
    model.decoder.blocks[0].layer_scale = nn.Parameter(torch.ones(32))


def add_setting(model):
    model.decoder.blocks[0].attention.sink_tokens = 4


def replace_forward(model):
    model.decoder.blocks[0].ffn.forward = lambda x: 0 * x


def add_hook(model):
    model.decoder.blocks[0].register_forward_hook(lambda *args: None)


def change_norm_placement(model):
    block = model.decoder.blocks[0]
    block.norm_placement = copy.copy(block.norm_placement)
    object.__setattr__(block.norm_placement, "kind", "new")  # a kind that its type does not have


@pytest.mark.parametrize(
    "change",
    [
        replace_norm,
        replace_score,
        replace_position,
        replace_ffn,
        replace_head,
        replace_block,
        add_parameter,
        add_setting,
        replace_forward,
        add_hook,
        change_norm_placement,
    ],
)
def test_what_no_description_knows_is_refused(change):
    model = build()
    assert decoding_path(model).name == "packed_cpu"
    change(model)
    path = decoding_path(model)
    assert path.name == "plain"
    assert path.unsupported_reasons["packed"]


@pytest.mark.parametrize("scaling", LENGTH_DEPENDENT, ids=lambda scaling: scaling["kind"])
def test_scalings_by_length_are_refused_for_that_reason(scaling):
    assert {scaling["kind"] for scaling in LENGTH_DEPENDENT} == set(LENGTH_DEPENDENT_SCALINGS)
    description = inspect_decoder(build(position={"kind": "rotary", "scaling": scaling}))
    for unsupported_reason in (packed_unsupported_reason, triton_unsupported_reason):
        assert "depends on the length" in unsupported_reason(description)


def test_a_base_for_layers_with_a_window_is_refused_for_that_reason():
    position = {"kind": "rotary", "window_base": 50.0}
    description = inspect_decoder(build(position=position, window=3, global_every=2))
    for unsupported_reason in (packed_unsupported_reason, triton_unsupported_reason):
        assert "layers with a sliding window have another RoPE base" in unsupported_reason(
            description
        )


@pytest.mark.parametrize("architecture", ["encoder", "encoder-decoder"])
def test_other_models_are_refused(architecture):
    assert decoding_path(build(architecture=architecture)).name == "plain"


def scale_weight(model):
    model.decoder.blocks[1].attention.key.weight.mul_(2)


def replace_weight(model):
    model.decoder.blocks[0].ffn.up.weight = nn.Parameter(torch.zeros(88, 32))


def replace_data(model):
    model.head.weight.data = torch.zeros(VOCAB, 32)


def change_base(model):
    model.decoder.position.base = 50.0


def change_scaling(model):
    model.decoder.position.scaling["factor"] = 4.0


def change_eps(model):
    model.decoder.norm.eps = 0.5


def change_score_scale(model):
    model.decoder.blocks[0].attention.score.scale = 3.0


@pytest.mark.parametrize(
    "change",
    [
        scale_weight,
        replace_weight,
        replace_data,
        change_base,
        change_scaling,
        change_eps,
        change_score_scale,
        replace_ffn,
    ],
)
@pytest.mark.parametrize("int8", [False, True])
@torch.no_grad()
def test_a_packed_model_notices_a_change(change, int8):
    position = {"kind": "rotary", "scaling": {"kind": "linear", "factor": 2.0}}
    model = build(position=position)
    fast = decoding_path(model, int8=int8).language
    ids = torch.randint(0, VOCAB, (1, 4))
    state = fast.start(1, 8)
    _, state = fast.step(ids, state)
    fast.step(ids[:, :1], state)
    change(model)
    with pytest.raises(RegardError, match="has changed since the model was packed"):
        fast.start(1, 8)
    with pytest.raises(RegardError, match="pack it again"):
        fast.step(ids, state)
    again, reference = decoding_path(model).language, build(position=position)
    change(reference)
    expected, state = reference.step(ids, reference.start(1, 8))
    actual, fast_state = again.step(ids, again.start(1, 8))
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(
        again.step(ids[:, :1], fast_state)[0], reference.step(ids[:, :1], state)[0]
    )


@torch.no_grad()
def test_a_write_through_data_is_noticed_where_a_decoder_has_copies():
    for name in ("decoder.blocks.1.attention.key.weight", "decoder.norm.weight"):
        for int8 in (False, True):
            model = build()
            fast = decoding_path(model, int8=int8).language
            model.get_parameter(name).data.mul_(2)
            with pytest.raises(RegardError, match=f"{name} has changed since the model was packed"):
                fast.start(1, 8)
    model, ids = build(vocab_size=9000), torch.randint(0, 9000, (1, 2))  # a large output layer
    fast, rounded = (decoding_path(model, int8=int8).language for int8 in (False, True))
    rows = model.head.weight.data
    rows[:] = rows.flip(0)
    with pytest.raises(RegardError, match=r"head\.weight has changed since the model was packed"):
        rounded.start(1, 8)
    _, state = fast.step(ids, fast.start(1, 8))  # this one shares it with the model
    expected, _ = model.step(ids[:, :1], model.step(ids, model.start(1, 8))[1])
    torch.testing.assert_close(fast.step(ids[:, :1], state)[0], expected)


def test_packing_twice_moves_nothing():
    model = build()
    first = PackedDecoder(model)
    second = PackedDecoder(model)
    assert first.layers[0].qkv.weight.data_ptr() == second.layers[0].qkv.weight.data_ptr()
    first.require_unchanged()
