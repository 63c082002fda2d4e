"""Matmuls of compiled training steps: custom operators with plain torch fallbacks.

They run cuBLASLt, and Triton kernels for activations that cuBLASLt does not have or has slowly.

`accel.compile` substitutes them for torch's matmuls; the compiler treats each as one operator.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.accel import cublaslt
from regard.accel.cublaslt import Epilogue
from regard.accel.kernels import can_run_activation_matmul, can_run_kernels
from regard.nn import loss

MIN_AUTOTUNED_FLOPS = 2e10  # from this size on, autotuning gains more than a Python call costs
aten: Any = torch.ops.aten


@torch.library.custom_op("regard::autotuned_matmul", mutates_args=())
def autotuned_matmul(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a b + bias"""
    out = a.new_empty(len(a), b.shape[1])
    epilogue = Epilogue.PLAIN if bias is None else Epilogue.BIAS
    if cublaslt.matmul(a, b, out, epilogue=epilogue, bias=bias):
        return out
    return _plain_matmul(a, b, bias)


@autotuned_matmul.register_fake
def _(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


@torch.library.custom_op("regard::matmul_relu", mutates_args=())
def matmul_relu(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """max(a b + bias, 0)"""
    out = a.new_empty(len(a), b.shape[1])
    epilogue = Epilogue.RELU if bias is None else Epilogue.RELU_BIAS
    if cublaslt.matmul(a, b, out, epilogue=epilogue, bias=bias):
        return out
    return _plain_matmul(a, b, bias).relu()


@matmul_relu.register_fake
def _(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


@torch.library.custom_op("regard::matmul_gelu", mutates_args=())
def matmul_gelu(a: Tensor, b: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The tanh approximation of GELU(a b + bias), and its input a b + bias."""
    out, pre_activation = (a.new_empty(len(a), b.shape[1]) for _ in range(2))
    epilogue = Epilogue.GELU_AUX if bias is None else Epilogue.GELU_AUX_BIAS
    if cublaslt.matmul(a, b, out, epilogue=epilogue, bias=bias, aux=pre_activation):
        return out, pre_activation
    pre_activation = _plain_matmul(a, b, bias)
    return F.gelu(pre_activation, approximate="tanh"), pre_activation


@matmul_gelu.register_fake
def _(a: Tensor, b: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    out = a.new_empty(a.shape[0], b.shape[1])
    return out, torch.empty_like(out)


@torch.library.custom_op("regard::matmul_gelu_backward", mutates_args=())
def matmul_gelu_backward(a: Tensor, b: Tensor, pre_activation: Tensor) -> Tensor:
    """a b times the derivative of the tanh approximation of GELU at `pre_activation`."""
    out = torch.empty_like(pre_activation)
    if not cublaslt.matmul(a, b, out, epilogue=Epilogue.DGELU, aux=pre_activation):
        out = aten.gelu_backward(a @ b, pre_activation, approximate="tanh")
    return out


@matmul_gelu_backward.register_fake
def _(a: Tensor, b: Tensor, pre_activation: Tensor) -> Tensor:
    return torch.empty_like(pre_activation)


@torch.library.custom_op("regard::matmul_exact_gelu", mutates_args=())
def matmul_exact_gelu(a: Tensor, b: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """GELU(a b + bias), and the derivative of GELU there."""
    if _runs_activation_kernels(b.T, a, b.T):
        from regard.accel.kernels import activation_matmul

        return activation_matmul.matmul_gelu(a, b.T, None if bias is None else bias.contiguous())
    x = _plain_matmul(a, b, bias)
    return F.gelu(x), aten.gelu_backward(torch.ones_like(x), x)


@matmul_exact_gelu.register_fake
def _(a: Tensor, b: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    out = a.new_empty(a.shape[0], b.shape[1])
    return out, torch.empty_like(out)


@torch.library.custom_op("regard::matmul_derivative", mutates_args=())
def matmul_derivative(
    a: Tensor, b: Tensor, saved: Tensor, has_bias: bool, relu: bool
) -> tuple[Tensor, Tensor]:
    """(a b) ⊙ the derivative of an activation, and its sums over the rows if `has_bias`.

    `saved` is this derivative; with `relu` it is the output of ReLU, whose derivative is 0 where it
    is 0, else 1.
    """
    if _runs_activation_kernels(b.T, a, b, saved):
        from regard.accel.kernels import activation_matmul

        out, sums = activation_matmul.matmul_derivative(a, b, saved, has_bias, relu)
    else:
        out = (a @ b) * (~(saved <= 0) if relu else saved)
        sums = out.sum(0) if has_bias else None
    return out, a.new_empty(0) if sums is None else sums.to(a.dtype)


@matmul_derivative.register_fake
def _(a: Tensor, b: Tensor, saved: Tensor, has_bias: bool, relu: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(saved), a.new_empty(b.shape[1] if has_bias else 0)


@torch.library.custom_op("regard::sum_of_matmuls", mutates_args=())
def sum_of_matmuls(a: list[Tensor], b: list[Tensor]) -> Tensor:
    """a_1 b_1 + a_2 b_2 + ...; the sum is rounded to the dtype of the operands after each."""
    out = a[0].new_empty(len(a[0]), b[0].shape[1])
    for index, (left, right) in enumerate(zip(a, b, strict=True)):
        matmul(left, right, out=out, add=index > 0)
    return out


@sum_of_matmuls.register_fake
def _(a: list[Tensor], b: list[Tensor]) -> Tensor:
    return a[0].new_empty(a[0].shape[0], b[0].shape[1])


def is_large_in_graph(x: Tensor, weight: Tensor) -> bool:
    """Whether a matmul belongs to a compiled graph of mixed precision on a GPU, and is large."""
    return (
        torch.compiler.is_compiling()
        and x.is_cuda
        and torch.is_autocast_enabled("cuda")
        and 2 * x.numel() * len(weight) >= MIN_AUTOTUNED_FLOPS
    )


def _runs_activation_kernels(weight: Tensor, *matrices: Tensor) -> bool:
    """Whether the kernels run for a weight (outputs, inputs) and the matrices that they read."""
    return can_run_activation_matmul(weight) and all(
        x.dtype in (torch.bfloat16, torch.float16)
        and x.is_contiguous()
        and x.data_ptr() % cublaslt.ALIGNMENT == 0
        and can_run_kernels(x)
        for x in matrices
    )


def _plain_matmul(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return a @ b if bias is None else torch.addmm(bias, a, b)


def matmul(
    a: Float[Tensor, "rows inputs"],
    b: Float[Tensor, "inputs outputs"],
    *,
    out: Float[Tensor, "rows outputs"] | None = None,
    add: bool = False,
) -> Float[Tensor, "rows outputs"]:
    """As `nn.loss.matmul`, autotuned where possible."""
    target = a.new_empty(len(a), b.shape[1]) if out is None else out
    if cublaslt.matmul(a, b, target, add=add):
        return target
    return loss.matmul(a, b, out=out, add=add)


Activation = Literal["relu", "gelu", "gelu_tanh"]


class _FusedMLP(torch.autograd.Function):
    """Two linear layers; the activation between them and its gradient are matmul epilogues."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        up: Tensor,
        up_bias: Tensor | None,
        down: Tensor,
        down_bias: Tensor | None,
        activation: Activation,
    ) -> Tensor:
        # `saved` gives the derivative of the activation: for GELU it is the derivative itself, for
        # its tanh form the activation's input, for ReLU its output
        if activation == "relu":
            hidden = saved = matmul_relu(x, up.T, up_bias)
        elif activation == "gelu":
            hidden, saved = matmul_exact_gelu(x, up.T, up_bias)
        else:
            hidden, saved = matmul_gelu(x, up.T, up_bias)
        ctx.save_for_backward(x, up, down, hidden, saved)
        ctx.has_bias, ctx.activation = (up_bias is not None, down_bias is not None), activation
        return autotuned_matmul(hidden, down.T, down_bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, up, down, hidden, saved = ctx.saved_tensors
        has_up_bias, has_down_bias = ctx.has_bias
        (dy,) = grad_outputs
        if ctx.activation == "gelu_tanh":
            dhidden = matmul_gelu_backward(dy, down, saved)
            sums = dhidden.sum(0) if has_up_bias else None
        else:
            is_relu = ctx.activation == "relu"
            dhidden, sums = matmul_derivative(dy, down, saved, has_up_bias, is_relu)
        dup_bias = sums if has_up_bias else None
        ddown_bias = dy.sum(0) if has_down_bias else None
        return dhidden @ up, dhidden.T @ x, dup_bias, dy.T @ hidden, ddown_bias, None


def fused_mlp(
    x: Float[Tensor, "*rows dim"],
    up: Float[Tensor, "ffn_dim dim"],
    up_bias: Float[Tensor, " ffn_dim"] | None,
    down: Float[Tensor, "dim ffn_dim"],
    down_bias: Float[Tensor, " dim"] | None,
    activation: Activation,
) -> Float[Tensor, "*rows dim"]:
    """f(x upᵀ + b) downᵀ + c with an activation f, in the dtype of autocast."""
    operands = _autocast(x.flatten(0, -2), up, up_bias, down, down_bias)
    result: Tensor = _FusedMLP.apply(*operands, activation)  # type: ignore[no-untyped-call]
    return result.unflatten(0, x.shape[:-1])


class _QKVLinear(torch.autograd.Function):
    """One matmul with several weights, whose output gradients are not concatenated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        ctx.has_bias = bias is not None
        qkv = autotuned_matmul(x, torch.cat(weights).T, bias)
        return qkv.split([len(weight) for weight in weights], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        dbias = torch.cat([gradient.sum(0) for gradient in grad_outputs]) if ctx.has_bias else None
        dx = sum_of_matmuls([*grad_outputs], weights)
        return dx, dbias, *(gradient.T @ x for gradient in grad_outputs)


def qkv_linear(
    x: Float[Tensor, "*rows dim"], weights: Sequence[Tensor], bias: Float[Tensor, " width"] | None
) -> tuple[Tensor, ...]:
    """x times each of `weights`, with their concatenated biases, in the dtype of autocast.

    For gradients of q, k and v that the attention kernel writes as three tensors: concatenating
    them would be one more pass over memory.
    """
    operands = _autocast(x.flatten(0, -2), bias, *weights)
    results: tuple[Tensor, ...] = _QKVLinear.apply(*operands)  # type: ignore[no-untyped-call]
    return tuple(result.unflatten(0, x.shape[:-1]) for result in results)


def _autocast(*tensors: Tensor | None) -> list[Tensor | None]:
    """The tensors in the dtype of autocast, where it is enabled."""
    (device,) = {x.device.type for x in tensors if x is not None}
    if not torch.is_autocast_enabled(device):
        return [*tensors]
    return [x if x is None else x.to(torch.get_autocast_dtype(device)) for x in tensors]
