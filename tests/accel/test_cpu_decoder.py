import pytest
import torch

from regard.accel import pack
from regard.accel.cpu_decoder import CpuDecoder, CpuDecoderState
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
    attend = CpuDecoder.attend
    monkeypatch.setattr(CpuDecoder, "attend", lambda *args: taken.append(1) or attend(*args))
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
