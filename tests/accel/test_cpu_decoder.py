import copy

import pytest
import torch

from regard.accel import pack, packed
from regard.accel.cpu_decoder import CpuDecoderState, CpuDecodeStep
from regard.accel.packed import PackedLinear
from regard.accel.packed_decoder import DecodeStep
from regard.models.transformer import Transformer, TransformerConfig

CHOICES = [
    {},
    {"position": "rotary", "kv_heads": 2},
    {
        "position": {"kind": "rotary", "partial_rotary_factor": 0.5, "interleaved": True},
        "norm": "rms",
    },
    {
        "position": {"kind": "rotary", "partial_rotary_factor": 0.5},
        "norm": "rms",
        "qk_norm": True,
        "ffn": "swiglu",
    },
    {"norm_placement": "parallel", "window": 3},
]


def small(choices):
    torch.manual_seed(0)
    config = TransformerConfig(vocab_size=23, dim=32, layers=2, heads=4, context=16, **choices)
    model = Transformer(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("choices", CHOICES)
@torch.inference_mode()
def test_selected_rows_decode_as_by_the_model(choices):
    model = small(choices)
    fast, ids = pack(model), torch.randint(0, 23, (3, 12))
    _, state = fast.step(ids[:, :5], fast.start(3, 12))
    _, state = fast.step(ids[:, 5:6], state)
    rows = torch.tensor([2, 0])
    state = state.select(rows)
    assert isinstance(state, CpuDecoderState)
    for t in range(6, 12):
        logits, state = fast.step(ids[rows, t : t + 1], state)
    expected, _ = model.step(ids[rows], model.start(2, 12))
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)  # sums in another order


@torch.inference_mode()
def test_the_cpu_decoder_runs_only_for_rows_of_equal_length_without_a_mask(monkeypatch):
    taken = []
    attend = CpuDecodeStep.attend
    monkeypatch.setattr(CpuDecodeStep, "attend", lambda *args: taken.append(1) or attend(*args))
    ids = torch.randint(0, 23, (2, 5))
    for choices, counts, layers in (
        ({}, None, 2),
        ({}, torch.tensor([5, 3]), 0),
        ({"window": 3}, None, 0),
        ({"position": "alibi"}, None, 0),
    ):
        taken.clear()
        fast = pack(small(choices))
        _, state = fast.step(ids, fast.start(2, 12), counts=counts)
        fast.step(ids[:, :1], state)
        assert len(taken) == layers


def test_a_step_outside_of_inference_mode_is_possible():
    model = small({})
    fast, ids = pack(model), torch.randint(0, 23, (1, 6))
    _, state = fast.step(ids[:, :5], fast.start(1, 6))
    logits, _ = fast.step(ids[:, 5:], state)
    expected, _ = model.step(ids, model.start(1, 6))
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)  # sums in another order


@pytest.mark.parametrize("choices", CHOICES)
@torch.inference_mode()
def test_rows_of_different_lengths_attend_one_by_one(choices, monkeypatch):
    """With a window, torch's kernel attends."""
    monkeypatch.setattr("regard.accel.packed_decoder.BY_ROW_ELEMENTS", 5)
    alone, attend = [], DecodeStep._attend_by_row
    monkeypatch.setattr(
        DecodeStep, "_attend_by_row", lambda *args: alone.append(1) or attend(*args)
    )
    model = small(choices)
    fast, ids, counts = pack(model), torch.randint(0, 23, (3, 12)), torch.tensor([6, 2, 5])
    _, state = fast.step(ids[:, :6], fast.start(3, 12), counts=counts)
    _, expected_state = model.step(ids[:, :6], model.start(3, 12), counts=counts)
    for t in range(6, 12):
        logits, state = fast.step(ids[:, t : t + 1], state)
        expected, expected_state = model.step(ids[:, t : t + 1], expected_state)
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)  # sums in another order
    assert len(alone) == (0 if "window" in choices else 2 * 6)


def round_weights(model, convert):
    """The model with all weights that a decoder packs rounded, but in float32."""
    rounded = copy.deepcopy(model)
    layers = [module for module in rounded.modules() if isinstance(module, torch.nn.Linear)]
    for weight in (*(layer.weight for layer in layers), rounded.head.weight):
        weight.data = convert(PackedLinear(weight.detach())).dequantize(torch.float32)
    return rounded


@pytest.mark.parametrize("precision", ["float16", "int8"])
@pytest.mark.parametrize("choices", CHOICES)
@torch.inference_mode()
def test_prompts_and_steps_use_the_rounded_weights(choices, precision):
    if not packed.has_exact_int8():
        pytest.skip("torch has no exact FBGEMM here")
    model = small({"tied": False, **choices})
    convert = getattr(PackedLinear, {"float16": "to_float16", "int8": "quantize_int8"}[precision])
    reference, fast = round_weights(model, convert), pack(model, **{precision: True})
    ids, counts = torch.randint(0, 23, (3, 9)), torch.tensor([6, 2, 5])
    expected, expected_state = reference.step(ids, reference.start(3, 12), all_logits=True)
    actual, state = fast.step(ids, fast.start(3, 12), all_logits=True)
    tolerance = {"float16": 1e-5, "int8": 1e-3}[precision]  # activations have 15 bits with int8
    near = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(actual, expected, **near)
    assert not torch.allclose(
        expected, model.step(ids, model.start(3, 12), all_logits=True)[0], **near
    )
    for _ in range(3):
        expected, expected_state = reference.step(ids[:, :1], expected_state)
        actual, state = fast.step(ids[:, :1], state)
        torch.testing.assert_close(actual, expected, **near)
    expected, _ = reference.step(ids, reference.start(3, 12), counts=counts)
    actual, _ = fast.step(ids, fast.start(3, 12), counts=counts)
    torch.testing.assert_close(actual, expected, **near)
    assert all("forward" not in vars(module) for module in model.modules())
