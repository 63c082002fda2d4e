"""The Triton kernel of the loss against plain torch: on a GPU, or interpreted."""

import os

import pytest
import torch

from regard.nn.loss import cross_entropy_with_gradient as plain

pytest.importorskip("triton", reason="Triton comes with torch for CUDA")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no GPU, and TRITON_INTERPRET=1 is not set", allow_module_level=True)

from regard.accel.kernels import cross_entropy as kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab", "width"), [(65, 128), (5000, 5056), (4096, 4096)])
def test_the_gradient_is_that_of_the_formula(vocab, width, dtype, bias, cap, smoothing):
    torch.manual_seed(0)
    logits = (3 * torch.randn(5, width, device=DEVICE)).to(dtype)
    targets = torch.tensor([3, -1, 0, vocab - 1, 64], device=DEVICE)
    offset = torch.randn(vocab, device=DEVICE).to(dtype) if bias else None
    wide = None if offset is None else offset.double()
    loss, gradient = plain(logits.double(), wide, targets, vocab, smoothing, cap)
    actual_loss, actual = kernels.cross_entropy_with_gradient(
        logits.clone(), offset, targets, vocab, smoothing, cap
    )
    assert (actual_loss - loss).norm() / loss.norm() < 1e-6
    # the gradient is rounded to the type of the logits: 8 bits in bfloat16
    assert (actual - gradient).norm() / gradient.norm() < (1e-6 if dtype == torch.float32 else 4e-3)
    assert not actual[:, vocab:].any()
