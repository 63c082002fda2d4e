"""Large products of matrices in training, each by the fastest way that is known for it.

To a compiler each is a single thing; `accel.inductor_pass` puts them in the place of torch's own.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.accel.cublaslt import Epilogue, multiply

LARGE = 2e10  # operations of a product from which the best way is worth a call from Python
aten: Any = torch.ops.aten


@torch.library.custom_op("regard::product", mutates_args=())
def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a b, plus a bias in each row."""
    out = a.new_empty(len(a), b.shape[1])
    kind = Epilogue.PLAIN if bias is None else Epilogue.BIAS
    return out if multiply(a, b, out, epilogue=kind, bias=bias) else _plain(a, b, bias)


@product.register_fake
def _(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


@torch.library.custom_op("regard::bent_product", mutates_args=())
def bent_product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """GELU(a b + bias) in its tanh form, and what was bent."""
    out, before = (a.new_empty(len(a), b.shape[1]) for _ in range(2))
    kind = Epilogue.GELU_AUX if bias is None else Epilogue.GELU_AUX_BIAS
    if multiply(a, b, out, epilogue=kind, bias=bias, aux=before):
        return out, before
    before = _plain(a, b, bias)
    return F.gelu(before, approximate="tanh"), before


@bent_product.register_fake
def _(a: Tensor, b: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    out = a.new_empty(a.shape[0], b.shape[1])
    return out, torch.empty_like(out)


@torch.library.custom_op("regard::product_by_slope", mutates_args=())
def product_by_slope(a: Tensor, b: Tensor, before: Tensor) -> Tensor:
    """a b, times the slope of GELU's tanh form at `before`."""
    out = torch.empty_like(before)
    if not multiply(a, b, out, epilogue=Epilogue.DGELU, aux=before):
        out = aten.gelu_backward(a @ b, before, approximate="tanh")
    return out


@product_by_slope.register_fake
def _(a: Tensor, b: Tensor, before: Tensor) -> Tensor:
    return torch.empty_like(before)


@torch.library.custom_op("regard::sum_of_products", mutates_args=())
def sum_of_products(a: list[Tensor], b: list[Tensor]) -> Tensor:
    """The first of a times the first of b, and so on, each added to the sum in its type."""
    out = a[0].new_empty(len(a[0]), b[0].shape[1])
    for at, (left, right) in enumerate(zip(a, b, strict=True)):
        put_product(out, left, right, add=at > 0)
    return out


@sum_of_products.register_fake
def _(a: list[Tensor], b: list[Tensor]) -> Tensor:
    return a[0].new_empty(a[0].shape[0], b[0].shape[1])


def _plain(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return a @ b if bias is None else torch.addmm(bias, a, b)


def put_product(
    to: Float[Tensor, "rows outputs"],
    a: Float[Tensor, "rows inputs"],
    b: Float[Tensor, "inputs outputs"],
    *,
    add: bool = False,
) -> None:
    """Write a b to where it belongs, or add it to what stands there, summed in that type."""
    if multiply(a, b, to, add=add):
        return
    if not add:
        torch.mm(a, b, out=to)
    elif to.dtype == a.dtype:
        to.addmm_(a, b)
    elif to.is_cuda:
        torch.addmm(to, a, b, out_dtype=to.dtype, out=to)
    else:
        to += a @ b


def compiling_large(
    x: Float[Tensor, "*rows inputs"], weight: Float[Tensor, "outputs inputs"]
) -> bool:
    """Whether a large product of the two is being compiled, for a GPU and in half precision."""
    return (
        torch.compiler.is_compiling()
        and x.is_cuda
        and torch.is_autocast_enabled("cuda")
        and 2 * x.numel() * len(weight) >= LARGE
    )


class _BentTwice(torch.autograd.Function):
    """Up, bent by GELU, and down, with GELU and its slope inside the products."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        up: Tensor,
        up_bias: Tensor | None,
        down: Tensor,
        down_bias: Tensor | None,
    ) -> Tensor:
        wide, before = bent_product(x, up.T, up_bias)
        ctx.save_for_backward(x, up, down, wide, before)
        ctx.biased = up_bias is not None, down_bias is not None
        return product(wide, down.T, down_bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        x, up, down, wide, before = ctx.saved_tensors
        (slope,) = outer
        steep = product_by_slope(slope, down, before)
        sums = [
            each.sum(0) if has else None
            for each, has in zip((steep, slope), ctx.biased, strict=True)
        ]
        return steep @ up, steep.T @ x, sums[0], slope.T @ wide, sums[1]


def bent_feed_forward(
    x: Float[Tensor, "*rows dim"],
    up: Float[Tensor, "inner dim"],
    up_bias: Float[Tensor, " inner"] | None,
    down: Float[Tensor, "dim inner"],
    down_bias: Float[Tensor, " dim"] | None,
) -> Float[Tensor, "*rows dim"]:
    """GELU(x up' + b) down' + c, in the type of autocast."""
    given = _halved(x.flatten(0, -2), up, up_bias, down, down_bias)
    result: Tensor = _BentTwice.apply(*given)  # type: ignore[no-untyped-call]
    return result.unflatten(0, x.shape[:-1])


class _Parted(torch.autograd.Function):
    """One product with several matrices, whose slopes are not put together again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        ctx.biased = bias is not None
        together = product(x, torch.cat(weights).T, bias)
        return together.split([len(weight) for weight in weights], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        bias = torch.cat([slope.sum(0) for slope in slopes]) if ctx.biased else None
        dx = sum_of_products([*slopes], weights)
        return dx, bias, *(slope.T @ x for slope in slopes)


def parted(
    x: Float[Tensor, "*rows dim"], weights: Sequence[Tensor], bias: Float[Tensor, " width"] | None
) -> tuple[Tensor, ...]:
    """x times each of some matrices, with the biases of all in a row, in the type of autocast.

    For slopes that come apart: putting them together would be one more pass over memory.
    """
    given = _halved(x.flatten(0, -2), bias, *weights)
    results: tuple[Tensor, ...] = _Parted.apply(*given)  # type: ignore[no-untyped-call]
    return tuple(each.unflatten(0, x.shape[:-1]) for each in results)


def _halved(*given: Tensor | None) -> list[Tensor | None]:
    """In the type of autocast, where there is one."""
    (kind,) = {each.device.type for each in given if each is not None}
    if not torch.is_autocast_enabled(kind):
        return [*given]
    return [each if each is None else each.to(torch.get_autocast_dtype(kind)) for each in given]
