"""The Triton kernels of matmuls with activations against plain torch: on a GPU, or interpreted."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with torch for CUDA")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no GPU, and TRITON_INTERPRET=1 is not set", allow_module_level=True)

from regard.accel.kernels import activation_matmul as kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ULP = {torch.bfloat16: 2**-7, torch.float16: 2**-10}  # the interpreter does not round to nearest


def random(*shape, scale=1.0, dtype=torch.bfloat16):
    return (scale * torch.randn(*shape, device=DEVICE)).to(dtype)


def check(actual, expected):
    rtol = 1.1 * ULP[actual.dtype]
    torch.testing.assert_close(actual.double(), expected.detach(), rtol=rtol, atol=2e-6)


# rows that do not fill a tile or a group of tiles, inputs that do not fill an iteration
@pytest.mark.parametrize(("rows", "inner"), [(5, 64), (130, 72), (1200, 40)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gelu_and_its_derivative_are_those_of_the_formula(rows, inner, bias, dtype):
    torch.manual_seed(0)
    x, weight = random(rows, inner, dtype=dtype), random(256, inner, scale=0.3, dtype=dtype)
    offset = random(256, dtype=dtype) if bias else None
    before = x.double() @ weight.double().T + (offset.double() if bias else 0)
    before.requires_grad_()
    expected = torch.nn.functional.gelu(before)
    (exact_derivative,) = torch.autograd.grad(expected.sum(), before)
    out, derivative = kernels.matmul_gelu(x, weight, offset)
    check(out, expected)
    check(derivative, exact_derivative)

    gradient, down = random(rows, inner, dtype=dtype), random(inner, 256, scale=0.3, dtype=dtype)
    for relu in (False, True):
        factor = (derivative > 0.5) if relu else derivative
        given = derivative - 0.5 if relu else derivative
        dhidden, sums = kernels.matmul_derivative(gradient, down, given, bias, relu)
        exact = (gradient.double() @ down.double()) * factor.double()
        check(dhidden, exact)
        assert (sums is None) == (not bias)
        if sums is not None:
            torch.testing.assert_close(sums.double(), exact.sum(0), rtol=1e-4, atol=1e-4)


def test_large_and_small_inputs_of_gelu():
    x = torch.zeros(128, 64, device=DEVICE, dtype=torch.bfloat16)
    values = torch.cat([torch.linspace(-12, 12, 127), torch.tensor([1e4])]).to(DEVICE).bfloat16()
    x[:, 0] = values
    weight = torch.zeros(128, 64, device=DEVICE, dtype=torch.bfloat16)
    weight[:, 0] = 1
    exact = values.double().requires_grad_()
    expected = torch.nn.functional.gelu(exact)
    (exact_derivative,) = torch.autograd.grad(expected.sum(), exact)
    out, derivative = kernels.matmul_gelu(x, weight, None)
    check(out[:, 5], expected)
    check(derivative[:, 5], exact_derivative)
