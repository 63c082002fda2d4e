"""Matmuls of compiled training steps, with activations inside them, against those of torch."""

import itertools
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from regard.accel import cublaslt, kernels
from regard.accel.matmul import (
    Activation,
    autotuned_matmul,
    fused_mlp,
    matmul,
    matmul_derivative,
    matmul_exact_gelu,
    matmul_gelu,
    matmul_gelu_backward,
    matmul_relu,
    qkv_linear,
)
from regard.nn.block import ACTIVATIONS, FeedForward

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
BOTH = (False, True)


def matrix(*shape: int, transposed: bool = False, device: str = "cpu") -> Tensor:
    """A random matrix in bfloat16, column-major if transposed."""
    x = torch.randn(shape[::-1] if transposed else shape, device=device).bfloat16()
    return x.T if transposed else x


def near(actual: Tensor, expected: Tensor) -> bool:
    """As near as bfloat16 allows, where sums may round in between."""
    return bool(((actual.double() - expected).abs() <= 0.01 * expected.abs() + 0.02).all())


def test_the_fastest_is_the_one_with_the_shortest_time() -> None:
    times = {"steady": iter([3.0, 3.0, 3.0]), "noisy": iter([9.0, 2.0, 9.0])}
    assert cublaslt.fastest(list(times), lambda name: next(times[name])) == "noisy"


class FakeMatmul:
    """A matmul of the library without the library: it notes which algorithm runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: dict[str, float]) -> None:
        self.ran: list[str] = []
        self.capturing = False
        cls = cublaslt._Matmul
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(cublaslt, "_call", lambda *args: None)
        monkeypatch.setattr(cublaslt, "_handle", lambda device: None)
        names = list(times)
        algorithms = [cublaslt._Algorithm(workspace=number) for number in range(len(times))]
        for number, algorithm in enumerate(algorithms):
            algorithm.algo[0] = number
        monkeypatch.setattr(cublaslt, "_choices", {})
        name_of = lambda algorithm: names[algorithm.workspace]  # noqa: E731
        within = dict.fromkeys(cublaslt.WORKSPACE_LIMITS, algorithms)
        monkeypatch.setattr(cls, "_algorithms_within", lambda self, limit: within[limit])
        monkeypatch.setattr(cls, "_time", lambda self, one, *args: times[name_of(one)])
        monkeypatch.setattr(cls, "_run", lambda this, one, *args: self.ran.append(name_of(one)))
        layouts, dtypes = ((False, 8), (False, 8)), (torch.bfloat16,) * 3
        self.matmul = cls(*layouts, (8, 8, 8), dtypes, cublaslt.Epilogue.PLAIN, False, 0)

    def __call__(self) -> bool:
        x = torch.zeros(8, 8)
        return self.matmul(x, x, x)


def test_a_matmul_that_runs_often_uses_the_fastest_algorithm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeMatmul(monkeypatch, {"first": 3.0, "fast": 1.0, "slow": 9.0})
    fake.capturing = True  # when nothing can be timed
    assert all(fake() for _ in range(4))
    fake.capturing = False
    assert fake()
    fake.capturing = True
    assert fake()
    assert fake.ran == ["first"] * 4 + ["fast"] * 2


def test_a_matmul_uses_the_algorithm_of_before_and_says_so_where_it_cannot(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeMatmul(monkeypatch, {"first": 3.0, "fast": 1.0, "slow": 9.0})
    assert all(fake() for _ in range(3))
    ((name, fast),) = cublaslt.chosen_algorithms().items()
    assert name == "(8, 8, 8) bfloat16→bfloat16 (False, 8) (False, 8) PLAIN"
    slow = fast.replace("01", "02", 1)
    monkeypatch.setattr(cublaslt, "_preferred", {})
    cublaslt.prefer_algorithms({name: slow})
    fake = FakeMatmul(monkeypatch, {"first": 3.0, "fast": 1.0, "slow": 9.0})
    assert all(fake() for _ in range(4))
    assert fake.ran == ["slow"] * 4  # from the first call on, as in a run that was not interrupted
    assert cublaslt.chosen_algorithms() == {name: slow}
    assert caplog.text == ""
    fake = FakeMatmul(monkeypatch, {"first": 3.0, "fast": 1.0})
    assert all(fake() for _ in range(4))
    assert fake.ran == ["first", "first", "fast", "fast"]
    assert caplog.text.count("cuBLASLt no longer offers the algorithm of the checkpoint") == 1


def test_algorithms_with_and_without_a_workspace_are_candidates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeMatmul(monkeypatch, {"first": 3.0, "both": 2.0, "without": 1.0})
    first, both, without = fake.matmul._algorithms_within(0)
    within = {cublaslt.WORKSPACE_LIMITS[0]: [first, both], 0: [both, without]}
    monkeypatch.setattr(cublaslt._Matmul, "_algorithms_within", lambda self, limit: within[limit])
    assert fake.matmul._find_algorithms() == [first, both, without]
    assert all(fake() for _ in range(4))
    assert fake.ran == ["first", "first", "without", "without"]


@pytest.mark.parametrize(
    ("shape", "capability", "runs"),
    [
        ((256, 72), (9, 0), True),
        ((192, 72), (9, 0), False),
        ((256, 68), (9, 0), False),
        ((256, 72), (10, 0), False),
        ((256, 72), (8, 0), False),
    ],
)
def test_the_activation_kernels_run_on_hopper_for_whole_tiles(
    shape: tuple[int, int], capability: tuple[int, int], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(kernels, "can_run_triton", lambda device: True)
    with FakeTensorMode():
        weight = torch.empty(shape, device="cuda")
    assert kernels.can_run_activation_matmul(weight) == runs


def test_the_activation_kernels_read_contiguous_matrices_in_half_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from regard.accel import matmul as matmuls

    monkeypatch.setattr(matmuls, "can_run_kernels", lambda x: True)
    monkeypatch.setattr(matmuls, "can_run_activation_matmul", lambda weight: len(weight) == 256)
    a, weight = matrix(3, 72), matrix(256, 72)
    assert matmuls._runs_activation_kernels(weight, a, weight)
    assert not matmuls._runs_activation_kernels(weight.T, a, weight)
    assert not matmuls._runs_activation_kernels(weight, a, weight.T)
    assert not matmuls._runs_activation_kernels(weight, a.float(), weight)
    assert not matmuls._runs_activation_kernels(weight, a.flatten()[1:73].view(1, 72), weight)


def test_a_deterministic_matmul_uses_the_first_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeMatmul(monkeypatch, {"first": 3.0, "fast": 1.0})
    torch.use_deterministic_algorithms(True)
    try:
        assert all(fake() for _ in range(5))
    finally:
        torch.use_deterministic_algorithms(False)
    assert fake.ran == ["first"] * 5


def test_a_matmul_without_an_algorithm_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeMatmul(monkeypatch, {})
    assert not fake()
    assert fake.ran == []


@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.parametrize("biased", BOTH)
def test_activations_inside_the_matmuls_have_the_right_gradients(
    biased: bool, activation: Activation
) -> None:
    x, up, down = (
        torch.randn(shape, dtype=torch.double, requires_grad=True)
        for shape in [(2, 3, 4), (6, 4), (4, 6)]
    )
    b, c = (torch.randn(n, dtype=torch.double, requires_grad=True) for n in (6, 4))
    assert torch.autograd.gradcheck(
        lambda x, up, b, down, c: fused_mlp(
            x, up, b if biased else None, down, c if biased else None, activation
        ),
        (x, up, b, down, c),
    )
    layer = FeedForward(4, 6, ACTIVATIONS[activation]).double()
    weights = (layer.up.weight, layer.up.bias, layer.down.weight, layer.down.bias)
    torch.testing.assert_close(fused_mlp(x, *weights, activation), layer(x))


@pytest.mark.parametrize("biased", BOTH)
def test_a_matmul_of_several_weights_has_the_right_gradients(biased: bool) -> None:
    x = torch.randn(2, 3, 4, dtype=torch.double, requires_grad=True)
    weights, biases = (
        [torch.randn(n, *rest, dtype=torch.double, requires_grad=True) for n in (4, 2, 6)]
        for rest in ((4,), ())
    )

    def ours(x: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        return qkv_linear(x, given[:3], torch.cat(given[3:]) if biased else None)

    assert torch.autograd.gradcheck(ours, (x, *weights, *biases))
    every = zip(weights, biases if biased else [None] * 3, strict=True)
    plain = [F.linear(x, *given) for given in every]
    torch.testing.assert_close(ours(x, *weights, *biases), tuple(plain))


@on_gpu
@pytest.mark.parametrize(("left", "right"), [*itertools.product(BOTH, BOTH)])
@pytest.mark.parametrize("sizes", [(64, 32, 48), (1024, 768, 2304), (520, 1032, 264)])
def test_tuned_matmuls_equal_those_of_torch(
    left: bool, right: bool, sizes: tuple[int, int, int]
) -> None:
    rows, inner, columns = sizes
    a, b = (
        matrix(rows, inner, transposed=left, device="cuda"),
        matrix(inner, columns, transposed=right, device="cuda"),
    )
    bias = matrix(1, columns, device="cuda")[0]
    for _ in range(cublaslt.AUTOTUNE_AT_CALL):  # until its algorithms are timed
        assert cublaslt.matmul(a, b, a.new_empty(rows, columns))
    expected = a.double() @ b.double()
    scale = inner**0.5
    assert near(autotuned_matmul(a, b) / scale, expected / scale)
    assert near(autotuned_matmul(a, b, bias) / scale, (expected + bias.double()) / scale)
    out = torch.randn(rows, columns, device="cuda")
    for times in range(1, cublaslt.AUTOTUNE_AT_CALL + 1):
        before = out.double()
        matmul(a, b, out=out, add=True)
        assert near(out / scale, (before + expected) / scale), times


@on_gpu
@pytest.mark.parametrize("biased", BOTH)
def test_matmuls_with_gelu_equal_the_plain_ones(biased: bool) -> None:
    a, b = matrix(512, 96, device="cuda"), matrix(96, 640, transposed=True, device="cuda") / 8
    bias = matrix(1, 640, device="cuda")[0] if biased else None
    activated, before = matmul_gelu(a, b, bias)
    expected = a.double() @ b.double() + (0 if bias is None else bias.double())
    assert near(before, expected)
    assert near(activated, F.gelu(expected, approximate="tanh"))
    x, gradient = before.double().requires_grad_(), matrix(512, 96, device="cuda")
    F.gelu(x, approximate="tanh").backward(gradient.double() @ b.double())
    assert x.grad is not None
    assert near(matmul_gelu_backward(gradient, b, before), x.grad)


@on_gpu
@pytest.mark.parametrize("biased", BOTH)
def test_matmuls_with_the_exact_gelu_equal_the_plain_ones(biased: bool) -> None:
    a, b = matrix(500, 96, device="cuda"), matrix(96, 640, transposed=True, device="cuda") / 8
    bias = matrix(1, 640, device="cuda")[0] if biased else None
    x = (a.double() @ b.double() + (0 if bias is None else bias.double())).requires_grad_()
    y = F.gelu(x)
    (exact_derivative,) = torch.autograd.grad(y.sum(), x)
    activated, derivative = matmul_exact_gelu(a, b, bias)
    assert near(activated, y)
    assert near(derivative, exact_derivative)
    gradient, down = matrix(500, 96, device="cuda"), matrix(96, 640, device="cuda") / 8
    dhidden, sums = matmul_derivative(gradient, down, derivative, biased, False)
    expected = (gradient.double() @ down.double()) * derivative.double()
    assert near(dhidden, expected)
    assert near(sums, expected.sum(0)) if biased else not sums.numel()


@on_gpu
@pytest.mark.parametrize("biased", BOTH)
def test_matmuls_with_relu_equal_the_plain_ones(biased: bool) -> None:
    a, b = matrix(500, 96, device="cuda"), matrix(96, 640, transposed=True, device="cuda") / 8
    bias = matrix(1, 640, device="cuda")[0] if biased else None
    x = a.double() @ b.double() + (0 if bias is None else bias.double())
    activated = matmul_relu(a, b, bias)
    assert near(activated, x.relu())
    gradient, down = matrix(500, 96, device="cuda"), matrix(96, 640, device="cuda") / 8
    dhidden, sums = matmul_derivative(gradient, down, activated, biased, True)
    expected = (gradient.double() @ down.double()) * (activated > 0)
    assert near(dhidden, expected)
    assert near(sums, expected.sum(0)) if biased else not sums.numel()


@on_gpu
def test_unsupported_operands_are_left_to_torch() -> None:
    a, b = torch.randn(33, 7, device="cuda").bfloat16(), torch.randn(7, 5, device="cuda").bfloat16()
    assert not cublaslt.matmul(a, b, a.new_empty(33, 5))
    torch.testing.assert_close(autotuned_matmul(a, b), a @ b)
