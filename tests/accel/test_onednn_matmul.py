"""Matmuls by oneDNN: the results of torch's, wherever oneDNN runs; used where MKL is slow."""

import copy
import pickle
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from contract.test_models import make
from regard.accel import attach_onednn_linear, onednn_matmul, pack
from regard.nn import loss
from regard.training.optim import orthogonalize

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN"
)


@pytest.fixture
def onednn(monkeypatch):
    """oneDNN for matmuls of any size, on any processor; counts its calls."""
    calls = []
    matmul = onednn_matmul._matmul
    monkeypatch.setattr(onednn_matmul, "is_onednn_faster", lambda: True)
    monkeypatch.setattr(onednn_matmul, "MIN_MULTIPLY_ADDS", 1)
    monkeypatch.setattr(onednn_matmul, "_matmul", lambda *args: calls.append(args) or matmul(*args))
    return calls


def rand(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [(5,), (2, 3), (1, 1, 1)])
def test_linear_and_its_gradients_equal_torch(onednn, rows, bias):
    tensors = [rand(*rows, 7), rand(4, 7), rand(4) if bias else None]

    def results(linear):
        x, weight, b = (t if t is None else t.clone().requires_grad_() for t in tensors)
        y = linear(x, weight, b)
        return y, *torch.autograd.grad(y.sin().sum(), [t for t in (x, weight, b) if t is not None])

    for ours, expected in zip(results(onednn_matmul.linear), results(F.linear), strict=True):
        torch.testing.assert_close(ours, expected)
    assert len(onednn) == 3  # of y, dx and dW


def test_second_derivatives_and_frozen_weights(onednn):
    x, weight = rand(3, 4).requires_grad_(), rand(5, 4).requires_grad_()

    def second(linear):
        (gradient,) = torch.autograd.grad(linear(x, weight).sin().sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), (x, weight))

    for ours, expected in zip(second(onednn_matmul.linear), second(F.linear), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    onednn.clear()
    onednn_matmul.linear(x, weight.detach()).sum().backward()
    assert len(onednn) == 2  # no gradient of the weight


def test_transposed_and_strided_matrices(onednn):
    a, b = rand(6, 8), rand(6, 10)
    torch.testing.assert_close(onednn_matmul.matmul(a.t(), b), a.t() @ b)
    strided = rand(4, 16)[:, ::2]
    torch.testing.assert_close(onednn_matmul.matmul(strided, a.t()), strided @ a.t())
    torch.testing.assert_close(onednn_matmul.linear(a.t(), b.t()), F.linear(a.t(), b.t()))
    assert len(onednn) == 3


def test_a_matmul_is_written_or_added_to_a_tensor(onednn):
    a, b, out = rand(3, 4), rand(4, 5), rand(3, 5)
    expected = out + a @ b
    assert onednn_matmul.matmul(a, b, out=out, add=True) is out
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(onednn_matmul.matmul(a, b, out=out), a @ b)


def test_muon_orthogonalizes_as_by_torch(onednn, monkeypatch):
    matrices = rand(3, 12, 8)
    ours = orthogonalize(matrices)
    assert len(onednn) == 3 * 3 * 5
    monkeypatch.undo()
    torch.testing.assert_close(ours, orthogonalize(matrices), rtol=1e-4, atol=1e-5)


def test_the_chunked_loss_has_the_same_gradients(onednn, monkeypatch):
    monkeypatch.setattr(loss, "UNCHUNKED_ELEMENTS", 1)
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", 40)
    targets = torch.tensor([1, 2, 3, loss.IGNORE_INDEX, 5, 6, 7])

    def results():
        x, weight = rand(7, 4).requires_grad_(), rand(10, 4).requires_grad_()
        value = loss.linear_cross_entropy(x, weight, None, targets)
        return value, *torch.autograd.grad(value, (x, weight))

    ours = results()
    assert len(onednn) == 2 * 3  # chunks of four rows
    monkeypatch.setattr(onednn_matmul, "is_onednn_faster", lambda: False)
    for value, expected in zip(ours, results(), strict=True):
        torch.testing.assert_close(value, expected)


@pytest.mark.parametrize("name", ["tiny-decoder", "bert-base", "t5-small", "gru"])
def test_an_attached_model_computes_the_same(onednn, name):
    """In training and evaluation, and after it was copied."""
    subject = make(name)
    model = subject.model.train()
    plain = copy.deepcopy(model)
    attach_onednn_linear(model)
    copied = copy.deepcopy(model)
    for each in (plain, model, copied):
        subject.model = each
        subject.model.head.loss(subject.hidden(), subject.ids.flip(1)).backward()
    assert onednn
    for other in (model, copied):
        for (key, a), b in zip(plain.named_parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-3, msg=key)
    assert copied.state_dict().keys() == plain.state_dict().keys()
    module = next(m for m in copied.modules() if type(m) is nn.Linear)
    assert module.forward.args == (module,)


def test_an_attached_model_is_pickled_and_packed(onednn):
    model = make("tiny-decoder").model.eval()
    attach_onednn_linear(model)
    ids = torch.tensor([[1, 2, 3]])
    again = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(again(ids), model(ids))
    assert pack(model) is not model


def test_an_attached_model_is_compiled_without_graph_breaks(monkeypatch):
    monkeypatch.setattr(
        onednn_matmul, "is_onednn_faster", cache(torch.backends.mkldnn.is_available)
    )
    monkeypatch.setattr(onednn_matmul, "MIN_MULTIPLY_ADDS", 1)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    attach_onednn_linear(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(rand(2, 4)), model(rand(2, 4)))


def test_other_precisions_and_processors_use_torch(onednn, monkeypatch):
    x, weight = rand(3, 4), rand(5, 4)
    onednn_matmul.linear(x.double(), weight.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        onednn_matmul.linear(x, weight)
    monkeypatch.setattr(onednn_matmul, "MIN_MULTIPLY_ADDS", 61)
    onednn_matmul.linear(x, weight)
    monkeypatch.setattr(onednn_matmul, "MIN_MULTIPLY_ADDS", 1)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    onednn_matmul.linear(x, weight)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", True)
    monkeypatch.setattr(onednn_matmul, "is_onednn_faster", lambda: False)
    onednn_matmul.linear(x, weight)
    assert not onednn
    monkeypatch.setattr(onednn_matmul, "is_onednn_faster", lambda: True)
    onednn_matmul.linear(x, weight)
    assert onednn


@pytest.mark.parametrize(
    ("processor", "capability", "expected"),
    [
        ("vendor_id : AuthenticAMD", "AVX512", True),
        ("vendor_id : AuthenticAMD", "AVX2", False),
        ("vendor_id : GenuineIntel", "AVX512", False),
    ],
)
def test_the_processor_decides(monkeypatch, processor, capability, expected):
    monkeypatch.setattr(onednn_matmul, "_cpu_info", lambda: processor)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert onednn_matmul.is_onednn_faster.__wrapped__() is expected


@pytest.mark.parametrize(
    ("cpu_info", "expected"),
    [
        ("vendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 2\n", True),
        ("vendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\n", False),
        ("AMD64 Family 26 Model 68 Stepping 0, AuthenticAMD", True),
        ("AuthenticAMD", False),
    ],
)
def test_a_zen_5_is_recognized_by_its_family(onednn, monkeypatch, cpu_info, expected):
    monkeypatch.setattr(onednn_matmul, "_cpu_info", lambda: cpu_info)
    assert onednn_matmul.has_full_width_avx512.__wrapped__() is expected
