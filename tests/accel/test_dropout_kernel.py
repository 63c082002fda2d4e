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


def philox(seed, counter):
    """Four random words (Salmon et al. 2011, Philox-4x32-10)."""
    words, low, high = [counter, 0, 0, 0], seed % 2**32, seed // 2**32 % 2**32
    for _ in range(10):
        a, b = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [b >> 32 ^ words[1] ^ low, b % 2**32, a >> 32 ^ words[3] ^ high, a % 2**32]
        low, high = (low + 0x9E3779B9) % 2**32, (high + 0xBB67AE85) % 2**32
    return words


@pytest.mark.parametrize("index", range(3))
def test_a_mask_compares_16_bits_of_a_random_word_with_the_probability(index):
    seed, p = int(SEEDS[index]), 0.3
    groups = [philox(seed, counter) for counter in range(40)]
    halves = [
        word >> shift & 0xFFFF
        for a, b, c, d in groups
        for shift in (0, 16)
        for word in (a, c, b, d)
    ]
    expected = torch.tensor(halves, device=DEVICE) >= round(p * 2**16)
    assert torch.equal(dropout_mask(SEEDS, index, (320,), p), expected)
    smallest = (min(halves) + 1) / 2**16  # drops one element, and nothing less does
    assert (~dropout_mask(SEEDS, index, (320,), smallest)).sum() == halves.count(min(halves))
    assert dropout_mask(SEEDS, index, (320,), smallest - 2**-16).all()


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
