"""Products by cuBLASLt, and GELU inside them, against torch's own."""

import itertools

import pytest
import torch
from torch import Tensor

from regard.accel import cublaslt
from regard.accel.matmul import (
    bent_feed_forward,
    bent_product,
    parted,
    product,
    product_by_slope,
    put_product,
)
from regard.nn.ffn import FeedForward, gelu_tanh

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
BOTH = (False, True)


def numbers(*shape: int, turned: bool = False, device: str = "cpu") -> Tensor:
    """bfloat16, column by column if turned."""
    x = torch.randn(shape[::-1] if turned else shape, device=device).bfloat16()
    return x.T if turned else x


def near(found: Tensor, wanted: Tensor) -> bool:
    """As near as bfloat16 lets it be, where sums may round on the way."""
    return bool(((found.double() - wanted).abs() <= 0.01 * wanted.abs() + 0.02).all())


def test_the_fastest_is_that_with_the_shortest_of_its_times() -> None:
    times = {"steady": iter([3.0, 3.0, 3.0]), "noisy": iter([9.0, 2.0, 9.0])}
    assert cublaslt.fastest(list(times), lambda way: next(times[way])) == "noisy"


class Told:
    """What a product of the library does, without the library."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ways: dict[str, float]) -> None:
        self.ran: list[str] = []
        self.capturing = False
        kind = cublaslt._Product
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(cublaslt, "_call", lambda *given: None)
        monkeypatch.setattr(cublaslt, "_handle", lambda device: None)
        names, found = list(ways), [cublaslt._Found(workspace=at) for at in range(len(ways))]
        of = lambda way: names[way.workspace]  # noqa: E731
        monkeypatch.setattr(kind, "_ways", lambda product: found)
        monkeypatch.setattr(kind, "_time", lambda product, way, *given: ways[of(way)])
        monkeypatch.setattr(kind, "_run", lambda product, way, *given: self.ran.append(of(way)))
        layouts, dtypes = ((False, 8), (False, 8)), (torch.bfloat16, torch.bfloat16)
        self.product = kind(*layouts, (8, 8, 8), dtypes, cublaslt.Epilogue.PLAIN, False, 0)

    def __call__(self) -> bool:
        x = torch.zeros(8, 8)
        return self.product(x, x, x, None, None)


def test_a_product_that_is_met_often_goes_the_fastest_way(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch, {"first": 3.0, "fast": 1.0, "slow": 9.0})
    told.capturing = True  # when nothing can be timed
    assert all(told() for _ in range(4))
    told.capturing = False
    assert told()
    told.capturing = True
    assert told()
    assert told.ran == ["first"] * 4 + ["fast"] * 2


def test_a_product_whose_bits_must_stay_goes_the_first_way(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch, {"first": 3.0, "fast": 1.0})
    torch.use_deterministic_algorithms(True)
    try:
        assert all(told() for _ in range(5))
    finally:
        torch.use_deterministic_algorithms(False)
    assert told.ran == ["first"] * 5


def test_a_product_without_a_way_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch, {})
    assert not told()
    assert told.ran == []


@pytest.mark.parametrize("biased", BOTH)
def test_gelu_inside_the_products_has_the_right_slopes(biased: bool) -> None:
    x, up, down = (
        torch.randn(shape, dtype=torch.double, requires_grad=True)
        for shape in [(2, 3, 4), (6, 4), (4, 6)]
    )
    b, c = (torch.randn(n, dtype=torch.double, requires_grad=True) for n in (6, 4))
    assert torch.autograd.gradcheck(
        lambda x, up, b, down, c: bent_feed_forward(
            x, up, b if biased else None, down, c if biased else None
        ),
        (x, up, b, down, c),
    )
    layer = FeedForward(4, 6, gelu_tanh).double()
    weights = (layer.up.weight, layer.up.bias, layer.down.weight, layer.down.bias)
    torch.testing.assert_close(bent_feed_forward(x, *weights), layer(x))


@pytest.mark.parametrize("biased", BOTH)
def test_parts_of_a_product_have_the_right_slopes(biased: bool) -> None:
    x = torch.randn(2, 3, 4, dtype=torch.double, requires_grad=True)
    weights, biases = (
        [torch.randn(n, *rest, dtype=torch.double, requires_grad=True) for n in (4, 2, 6)]
        for rest in ((4,), ())
    )

    def ours(x: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        return parted(x, given[:3], torch.cat(given[3:]) if biased else None)

    assert torch.autograd.gradcheck(ours, (x, *weights, *biases))
    every = zip(weights, biases if biased else [None] * 3, strict=True)
    plain = [torch.nn.functional.linear(x, *given) for given in every]
    torch.testing.assert_close(ours(x, *weights, *biases), tuple(plain))


@on_gpu
@pytest.mark.parametrize(("left", "right"), [*itertools.product(BOTH, BOTH)])
@pytest.mark.parametrize("sizes", [(64, 32, 48), (1024, 768, 2304), (520, 1032, 264)])
def test_products_equal_torchs_own(left: bool, right: bool, sizes: tuple[int, int, int]) -> None:
    rows, inner, columns = sizes
    a, b = (
        numbers(rows, inner, turned=left, device="cuda"),
        numbers(inner, columns, turned=right, device="cuda"),
    )
    bias = numbers(1, columns, device="cuda")[0]
    for _ in range(cublaslt.OFTEN):  # until its ways are timed
        assert cublaslt.multiply(a, b, a.new_empty(rows, columns))
    whole = a.double() @ b.double()
    scale = inner**0.5
    assert near(product(a, b) / scale, whole / scale)
    assert near(product(a, b, bias) / scale, (whole + bias.double()) / scale)
    to = torch.randn(rows, columns, device="cuda")
    for times in range(1, cublaslt.OFTEN + 1):
        before = to.double()
        put_product(to, a, b, add=True)
        assert near(to / scale, (before + whole) / scale), times


@on_gpu
@pytest.mark.parametrize("biased", BOTH)
def test_bent_products_equal_the_plain_ones(biased: bool) -> None:
    a, b = numbers(512, 96, device="cuda"), numbers(96, 640, turned=True, device="cuda") / 8
    bias = numbers(1, 640, device="cuda")[0] if biased else None
    bent, before = bent_product(a, b, bias)
    whole = a.double() @ b.double() + (0 if bias is None else bias.double())
    assert near(before, whole)
    assert near(bent, torch.nn.functional.gelu(whole, approximate="tanh"))
    x, slope = before.double().requires_grad_(), numbers(512, 96, device="cuda")
    torch.nn.functional.gelu(x, approximate="tanh").backward(slope.double() @ b.double())
    assert x.grad is not None
    assert near(product_by_slope(slope, b, before), x.grad)


@on_gpu
def test_what_the_library_does_not_take_goes_torchs_way() -> None:
    a, b = torch.randn(33, 7, device="cuda").bfloat16(), torch.randn(7, 5, device="cuda").bfloat16()
    assert not cublaslt.multiply(a, b, a.new_empty(33, 5))
    torch.testing.assert_close(product(a, b), a @ b)
