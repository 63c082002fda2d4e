"""What models of vectors promise: the same as models of ids (`test_models`)."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from regard.models.build import build_model, config_table, load_weights, resolve, weights
from regard.nn.recurrent import CELLS
from regard.nn.state import Source

MODELS = {
    "elman": {"preset": "elman", "dim": 8},
    "gru": {"preset": "gru", "dim": 8},
    "lstm": {"preset": "lstm", "dim": 8},
    "convolution": {"preset": "convolution", "dim": 8, "layers": 3},
    "decoder": {"preset": "tiny-decoder", "dim": 8, "layers": 2, "heads": 2},
    "llama": {"preset": "llama", "dim": 8, "layers": 1, "heads": 2, "kv_heads": 1, "ffn_dim": 12},
    "encoder": {"preset": "tiny-encoder", "dim": 8, "layers": 2, "heads": 2},
}
HEADS = {
    "forecast": {"kind": "forecast", "horizon": 2, "outputs": 3},
    "mixture": {"kind": "mixture", "components": 4},
}
CAUSAL = [name for name in MODELS if name != "encoder"]


def make(name, head="mixture"):
    torch.manual_seed(0)
    facts = {"input_dim": 5, "context": 12, "vocab_size": 1, "head": HEADS[head], "dropout": 0.0}
    model = build_model(resolve({**MODELS[name]}, **facts)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.3)
    return model, torch.randn(3, 9, 5)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", MODELS)
def test_every_weight_gets_a_gradient_and_weights_are_saved(name, head, tmp_path):
    model, x = make(name, head)
    out = model.head(model(x))
    assert out.shape == ((3, 2, 3) if head == "forecast" else (3, 9, 27))
    out.square().sum().backward()
    for weight, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), weight
        assert parameter.grad.any() or weight.endswith("key.bias"), weight
    save_file(weights(model), tmp_path / "w")
    again = build_model(resolve(config_table(model.config))).eval()
    load_weights(again, load_file(tmp_path / "w"), "w")
    assert torch.equal(again.head(again(x)), out)


@pytest.mark.parametrize("name", CAUSAL)
def test_no_leak_and_stepping_equals_one_forward_pass(name):
    model, x = make(name)
    before = model(x)
    changed = x.clone()
    changed[:, 5] += 1
    after = model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5], after[:, 5])
    state, steps = model.start(3, 9), []
    for piece in x.split([1, 1, 3, 4], 1):
        out, state = model.step(piece, state, all_logits=True)
        steps.append(out)
    # float32 sums in another order
    torch.testing.assert_close(torch.cat(steps, 1), model.head(before), rtol=1e-4, atol=1e-4)
    assert state.lengths.tolist() == [9] * 3


@pytest.mark.parametrize("cell", CELLS)
def test_a_soft_window_keeps_the_same_promises(cell, tmp_path):
    torch.manual_seed(0)
    table = {"family": "soft_window", "cell": cell, "dim": 6, "components": 3, "vocab_size": 4}
    model, x = build_model(resolve(table)).eval(), torch.randn(2, 6, 5)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.3)
    source = Source(torch.tensor([[1, 2, 0], [3, 0, 0]]), torch.tensor([3, 1]))
    before = model(x, source=source)
    out = model.head(before)
    out.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name
    changed = x.clone()
    changed[:, 4] += 1
    after = model(changed, source=source)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.equal(before[:, 4], after[:, 4])
    state = model.start(2, 6, source)
    for first, last in ((0, 2), (2, 3), (3, 6)):
        step, state = model.step(x[:, first:last], state)
        torch.testing.assert_close(step[:, 0], out[:, last - 1], rtol=1e-4, atol=1e-4)
    save_file(weights(model), tmp_path / "w")
    again = build_model(resolve(config_table(model.config))).eval()
    load_weights(again, load_file(tmp_path / "w"), "w")
    assert torch.equal(again.head(again(x, source=source)), out)
