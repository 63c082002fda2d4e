"""The Triton kernels of the loss against plain torch: on a GPU, or interpreted."""

import os

import pytest
import torch

from regard.nn.loss import cross_entropy_with_gradient as plain

pytest.importorskip("triton", reason="Triton comes with torch for CUDA")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no GPU, and TRITON_INTERPRET=1 is not set", allow_module_level=True)

from regard.accel.kernels import cross_entropy as kernels
from regard.accel.kernels.transpose import transpose

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(65, 128), (5000, 5056), (4096, 4096)]  # vocabulary, and columns with padding


def run(vocab, width, dtype, bias=False, cap=None, smoothing=0.0, gradient_dtype=None, scale=1.0):
    """Loss and gradient of some rows: expected, and those of the kernel."""
    torch.manual_seed(0)
    logits = (3 * torch.randn(5, width, device=DEVICE)).to(dtype)
    targets = torch.tensor([3, -1, 0, vocab - 1, 64], device=DEVICE)
    offset = torch.randn(vocab, device=DEVICE).to(dtype) if bias else None
    wide = None if offset is None else offset.double()
    expected = plain(logits.double(), wide, targets, vocab, smoothing, cap)
    losses, gradient = kernels.cross_entropy_with_gradient(
        logits, offset, targets, vocab, smoothing, cap, gradient_dtype, scale
    )
    return expected, (losses, gradient.double() / scale)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab", "width"), SHAPES)
def test_the_gradient_is_that_of_the_formula(vocab, width, dtype, bias, cap, smoothing):
    (loss, gradient), (actual_loss, actual) = run(vocab, width, dtype, bias, cap, smoothing)
    assert (actual_loss - loss).norm() / loss.norm() < 1e-6
    # the gradient is rounded to the type of the logits: 8 bits in bfloat16
    assert (actual - gradient).norm() / gradient.norm() < (1e-6 if dtype == torch.float32 else 4e-3)
    assert not actual[:, vocab:].any()
    assert not actual[1].any()  # not scored


@pytest.mark.parametrize(("vocab", "width"), SHAPES)
def test_the_gradient_in_8_bits_is_that_of_the_formula(vocab, width):
    options = {"gradient_dtype": torch.float8_e5m2, "scale": 2.0**15}
    (loss, gradient), (actual_loss, actual) = run(vocab, width, torch.bfloat16, **options)
    assert (actual_loss - loss).norm() / loss.norm() < 1e-6
    # rounded to 3 bits, so by at most an eighth; below 2^-29, to a multiple of 2^-31
    assert ((actual - gradient).abs() <= 0.126 * gradient.abs() + 2**-32).all()
    assert abs(float(((actual - gradient) / gradient)[gradient > 1e-5].mean())) < 0.01  # nearest
    assert not actual[:, vocab:].any()
    assert not actual[1].any()


@pytest.mark.parametrize(("rows", "columns"), [(4, 16), (132, 144), (256, 128)])
def test_bytes_are_transposed(rows, columns):
    x = torch.randint(-128, 128, (rows, columns), dtype=torch.int8, device=DEVICE)
    assert torch.equal(transpose(x), x.t())
