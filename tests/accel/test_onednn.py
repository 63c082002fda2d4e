"""Copies of weights in oneDNN's layout give the logits of the model, in steps and in prefill."""

from dataclasses import replace

import pytest
import torch

from contract.test_models import make
from regard.accel import onednn, pack, select
from regard.accel.onednn import OnednnLinear, attach_onednn_weights, copied_bytes
from regard.accel.packed import PackedLinear
from regard.errors import RegardError
from regard.generate import generate, parse_chain

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN"
)
GREEDY = parse_chain(["greedy"])
CASES = ("gpt2", "modern", "pythia-70m", "qwen2-0.5b", "opt-125m")  # biases, gates, tied heads


@pytest.fixture(autouse=True)
def _copy_small_weights(monkeypatch):
    monkeypatch.setattr(onednn, "MIN_ELEMENTS", 64)


@pytest.mark.parametrize("rows", [1, 2, 8, 33])
@torch.inference_mode()
def test_a_packed_weight_multiplies_as_f_linear_does(rows):
    """Relative to sums of 3,072 products of a size of 1, 1e-5 is float32 rounding."""
    torch.manual_seed(0)
    weight, bias, x = torch.randn(512, 3072) * 0.02, torch.randn(512), torch.randn(rows, 3072)
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    layer = OnednnLinear.of(weight, bias)
    torch.testing.assert_close(layer(x).double(), expected, rtol=0, atol=1e-5)
    assert layer(x.view(rows, 1, -1)).shape == (rows, 1, 512)


@pytest.mark.parametrize("full_width", [False, True])
@torch.inference_mode()
def test_one_and_two_rows_use_blocks_on_a_zen_4(monkeypatch, full_width):
    monkeypatch.setattr(onednn, "has_full_width_avx512", lambda: full_width)
    layer = PackedLinear(torch.randn(1024, 512), torch.randn(1024)).for_cpu()
    copied = onednn._convert(layer)
    calls = []
    copied = replace(copied, onednn=lambda x: calls.append(len(x)) or layer(x))
    for rows in (1, 2, 3, 8):
        x = torch.randn(rows, 512)
        torch.testing.assert_close(copied(x), layer(x))
    assert calls == ([1, 2, 3, 8] if full_width else [3, 8])


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_a_decoder_gives_the_logits_of_its_model(case):
    subject = make(case)
    model, ids = subject.model.float(), subject.ids
    decoder = pack(model)
    size = copied_bytes(model)
    attach_onednn_weights(decoder)
    copies = [layer.onednn for block in decoder.layers for layer in (block.qkv, block.out)]
    assert all(copies)
    assert decoder.head.onednn
    assert size >= sum(p.nbytes for p in model.decoder.parameters() if p.ndim == 2)
    counts = torch.tensor([3, 5, 4])
    _, expected_state = model.step(ids[:, :5], model.start(3, 12), counts=counts)
    expected, _ = model.step(ids[:, :5], model.start(3, 12), counts=counts)
    actual, state = decoder.step(ids[:, :5], decoder.start(3, 12), counts=counts)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    for t in range(5, 8):
        expected, expected_state = model.step(ids[:, t : t + 1], expected_state)
        actual, state = decoder.step(ids[:, t : t + 1], state)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    prompts = [row[:n].tolist() for row, n in zip(ids, (2, 5, 3), strict=True)]
    assert generate(decoder, prompts, GREEDY, max_new_tokens=6) == generate(
        model, prompts, GREEDY, max_new_tokens=6
    )


def test_the_model_itself_stays_as_it_is():
    model = make("gpt2").model.float()
    with torch.no_grad():
        decoder = pack(model)
        attach_onednn_weights(decoder)
    assert decoder.prefill_model is not model
    pairs = zip(decoder.prefill_model.parameters(), model.parameters(), strict=True)
    assert all(copied is own for copied, own in pairs)
    assert all("forward" not in vars(module) for module in model.modules())
    model(torch.tensor([[1, 2, 3]])).sum().backward()
    assert model.decoder.blocks[0].ffn.up.weight.grad is not None


@pytest.mark.parametrize("precision", ["float32", "int8", "float16"])
def test_weights_are_copied_where_that_is_faster_and_the_memory_suffices(monkeypatch, precision):
    monkeypatch.setattr(select, "is_onednn_faster", lambda: True)
    options = {} if precision == "float32" else {precision: True}
    model = make("gpt2").model.float()
    size = copied_bytes(model)

    def copies(**more):
        with torch.no_grad():
            return pack(model, **options, **more).layers[0].qkv.onednn is not None

    assert copies(free_memory=2 * size + 1) == (precision == "float32")
    assert not copies(free_memory=2 * size)
    assert not copies()
    monkeypatch.setattr(select, "is_onednn_faster", lambda: False)
    assert not copies(free_memory=2 * size + 1)


@torch.no_grad()
def test_a_decoder_with_copies_notices_a_write_to_a_large_weight(monkeypatch):
    monkeypatch.setattr(select, "is_onednn_faster", lambda: True)
    model = make("gpt2").model.float()
    decoder = pack(model, free_memory=1 << 40)
    decoder.start(1, 8)
    model.decoder.blocks[1].ffn.up.weight.data[0, 0] += 1
    with pytest.raises(RegardError, match=r"ffn\.up\.weight has changed since"):
        decoder.start(1, 8)
