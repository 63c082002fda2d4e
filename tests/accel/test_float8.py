"""Linear layers of 8-bit floats, by the matmul that stands in for the GPU's."""

import pytest
import torch
from torch import nn

from regard.accel import float8
from regard.accel.compile import attach_fused_layers
from regard.config import TrainConfig
from regard.errors import ConfigError
from regard.models.build import build_model, preset
from regard.training.setup.device import require_float8


@pytest.mark.parametrize(("dtype", "error"), [(float8.E4M3, 2**-4), (float8.E5M2, 2**-3)])
def test_the_largest_value_is_exact_and_others_are_rounded(dtype, error):
    x = 1e-3 * torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    x8, scale = float8.quantize(x, dtype)
    assert x8.dtype == dtype
    back = x8.float() * scale
    torch.testing.assert_close(back.abs().max(), x.abs().max())
    large = x.abs() > 1e-2 * x.abs().max()  # smaller ones may be subnormal
    assert float(((back - x).abs() / x.abs())[large].max()) <= error
    zeros, _ = float8.quantize(torch.zeros(4), dtype)
    assert not zeros.float().any()


def test_a_layer_and_its_gradients_are_close_to_the_exact_ones():
    torch.manual_seed(0)
    layer, x = nn.Linear(96, 48), torch.randn(4, 32, 96, requires_grad=True)
    tensors = (x, layer.weight, layer.bias)
    results = []
    for y in (layer(x), float8.float8_linear(x, layer.weight, layer.bias)):
        gradients = torch.autograd.grad(y.square().sum(), tensors)
        results.append([y.detach(), *gradients])
    for exact, rounded in zip(*results, strict=True):
        error = float((exact - rounded).norm() / exact.norm())
        assert 0 < error < 0.08


def test_layers_of_blocks_are_float8_and_others_are_not(monkeypatch):
    monkeypatch.setattr(float8, "MIN_WIDTH", 64)
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "dim": 64, "layers": 1, "heads": 4, "context": 16}
    model = build_model(preset("tiny-decoder", **sizes)).train()
    ids, used = torch.randint(0, 64, (2, 16)), []
    exact = model(ids)
    float8.attach_float8(model)
    torch.testing.assert_close(model(ids), exact)  # not in a compiled graph
    monkeypatch.setattr(float8, "is_large_in_graph", lambda x, weight: used.append(weight) or True)
    error = float((model(ids) - exact).detach().norm() / exact.detach().norm())
    assert 0 < error < 0.1
    gated = hasattr(model.decoder.layers[0].ffn, "gate")
    assert len(used) == (5 if gated else 4)  # q, k and v are one matmul


def test_narrow_layers_stay_in_bfloat16_with_their_fused_activations(monkeypatch):
    sizes = {"vocab_size": 64, "layers": 1, "context": 16, "bias": False}
    for dim, is_float8 in ((256, False), (512, True)):
        monkeypatch.setattr(float8, "MIN_WIDTH", 512)
        model = build_model(preset("gpt2", dim=dim, heads=4, ffn_dim=4 * dim, **sizes))
        attach_fused_layers(model)
        float8.attach_float8(model)
        (block,) = model.decoder.layers
        attached = [block.attention._fused_qkv, block.attention.out.forward, block.ffn.up.forward]
        assert [method.__func__ in float8.ATTACHED for method in attached] == 3 * [is_float8]
        assert ("forward" in vars(block.ffn)) != is_float8


def test_it_is_refused_without_such_a_gpu(monkeypatch):
    with pytest.raises(ConfigError, match="needs a CUDA GPU, not cpu"):
        require_float8(TrainConfig(precision="float8"), torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(ConfigError, match=r"capability 8\.9, and A100 has 8\.0"):
        require_float8(TrainConfig(precision="float8"), torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(ConfigError, match=r"it needs train\.compile=auto"):
        require_float8(TrainConfig(precision="float8", compile="off"), torch.device("cuda"))
    require_float8(TrainConfig(precision="float8"), torch.device("cuda"))
