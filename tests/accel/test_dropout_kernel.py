"""The Triton kernel of dropout masks: on a GPU, or interpreted."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with torch for CUDA")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no GPU, and TRITON_INTERPRET=1 is not set", allow_module_level=True)

from regard.accel.kernels.dropout import BLOCK, dropout_mask

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEEDS = torch.tensor([7, -(2**63), 2**62 + 1], device=DEVICE)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.999])
@pytest.mark.parametrize("shape", [(3,), (40, 8 * BLOCK), (61, 1001)])
def test_elements_are_dropped_with_the_given_probability(shape, p):
    mask = dropout_mask(SEEDS, 1, shape, p)
    assert (mask.dtype, tuple(mask.shape)) == (torch.bool, shape)
    deviation = (p * (1 - p) / mask.numel()) ** 0.5
    assert abs((~mask).double().mean() - p) <= 5 * deviation + 1e-5


def test_elements_are_independent_of_each_other_and_of_other_seeds():
    a, b = (dropout_mask(SEEDS, index, (200_000,), 0.25).double() - 0.75 for index in (0, 2))
    limit = 5 * 0.1875 / 200_000**0.5
    assert abs((a * b).mean()) < limit
    for distance in (1, 2, 3, 4, 7, 8, 16, 8 * BLOCK):  # lanes, halves of words, words, programs
        assert abs((a[distance:] * a[:-distance]).mean()) < limit, distance


def test_a_mask_depends_on_its_seed_only():
    masks = [dropout_mask(SEEDS, index, (4, 1000), 0.5) for index in (0, 1, 1)]
    assert torch.equal(masks[1], masks[2])
    assert not torch.equal(masks[0], masks[1])
