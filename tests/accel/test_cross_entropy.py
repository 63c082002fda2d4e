"""The CUDA implementation of the chunked loss, whose parts fall back to torch on a CPU."""

import pytest
import torch

from regard.accel import cross_entropy
from regard.nn import loss


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("vocab", [64, 70])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_padded_logits_give_the_same_loss_and_gradients(vocab, bias, cap, needs_grad):
    torch.manual_seed(0)
    x, weight = torch.randn(9, 8).double(), torch.randn(vocab, 8).double()
    offset = torch.randn(vocab).double() if bias else None
    targets = torch.randint(-1, vocab, (9,))
    given = (x, weight, offset, targets, 0.1, cap, needs_grad)
    for actual, expected in zip(
        cross_entropy.linear_cross_entropy(*given), loss._linear_cross_entropy(*given), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_the_operator_has_a_kernel_for_cuda():
    name = "regard::linear_cross_entropy"
    assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
