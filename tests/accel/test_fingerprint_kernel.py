"""The Triton kernel that hashes tensors against integers of Python: on a GPU, or interpreted."""

import importlib
import os

import pytest
import torch

from regard.accel import fingerprint

pytest.importorskip("triton", reason="Triton comes with torch for CUDA")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no GPU, and TRITON_INTERPRET=1 is not set", allow_module_level=True)

from regard.accel.kernels.fingerprint import ALIGNMENT, BLOCK, CHUNK_BYTES, ContentHashes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODULUS = 1 << 64
RADIX = 0x94D049BB133111EB


def multiplier(n):
    mixed = (n + 1) * 0x9E3779B97F4A7C15 % MODULUS
    mixed = (mixed ^ mixed >> 32) * 0xBF58476D1CE4E5B9 % MODULUS
    return (mixed ^ mixed >> 29) | 1


def expected_hash(data):
    """The formula of `ContentHashes` for the bytes of a chunk."""
    end = len(data) // ALIGNMENT * ALIGNMENT
    words = [int.from_bytes(data[start : start + 4], "little") for start in range(0, end, 4)]
    words += [0] * (-len(words) % BLOCK)
    rows = len(words) // BLOCK
    total = 0
    for lane in range(BLOCK):
        terms = (words[t * BLOCK + lane] * pow(RADIX, rows - 1 - t, MODULUS) for t in range(rows))
        sum_of_lane = sum(terms) % MODULUS
        total += multiplier(lane) * (sum_of_lane ^ sum_of_lane >> 32)
    total += sum(multiplier(BLOCK + index) * byte for index, byte in enumerate(data[end:]))
    return (total + MODULUS // 2) % MODULUS - MODULUS // 2  # as a signed number


def random_bytes(size, offset=0):
    """Bytes that begin `offset` bytes after an aligned address."""
    data = torch.randint(0, 256, (size + 2 * ALIGNMENT,), dtype=torch.uint8, device=DEVICE)
    start = (offset - data.data_ptr()) % ALIGNMENT
    return data[start : start + size]


@pytest.mark.parametrize("offset", [0, 1, 8, 15])
@pytest.mark.parametrize("size", [1, 16, 31, 4 * BLOCK + 3, CHUNK_BYTES, 2 * CHUNK_BYTES + 12_345])
def test_the_kernel_computes_the_hash_of_its_docstring(size, offset):
    data = random_bytes(size, offset)
    hashes = ContentHashes([data])
    head = min(-offset % ALIGNMENT, size)
    starts = ([0] if head else []) + list(range(head, size, CHUNK_BYTES))
    chunks = [bytes(data[a:b].tolist()) for a, b in zip(starts, [*starts[1:], size], strict=True)]
    assert hashes.sizes == [len(chunks)]
    assert hashes().tolist() == [expected_hash(chunk) for chunk in chunks]


def test_the_hashes_of_several_tensors_are_in_their_order():
    tensors = [torch.randn(size, device=DEVICE) for size in (70_000, 3, 0, 32_768)]
    both = ContentHashes(tensors)
    assert both.sizes == [3, 1, 0, 1]
    assert both().tolist() == [h for t in tensors if len(t) for h in ContentHashes([t])().tolist()]


def test_multipliers_are_odd_and_differ():
    multipliers = [multiplier(n) for n in range(BLOCK + ALIGNMENT)]
    assert len(set(multipliers)) == len(multipliers)
    assert all(m % 2 for m in [*multipliers, RADIX])


@pytest.mark.parametrize("offset", [0, 3])
def test_every_bit_of_a_word_counts(offset):
    data = random_bytes(CHUNK_BYTES + 4 * BLOCK + 7, offset)
    hashes = ContentHashes([data])
    before = hashes()
    places = [0, 1, ALIGNMENT, 4 * BLOCK, CHUNK_BYTES - 1, CHUNK_BYTES + 20, len(data) - 1]
    for place in places:
        for bit in range(8):
            data[place] ^= 1 << bit
            assert (hashes() != before).sum() == 1
            data[place] ^= 1 << bit
    assert torch.equal(hashes(), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_changes_of_signs_and_permutations_are_found(dtype):
    """With 8-byte words an even number of changes of their highest bit would be missed."""
    weight = torch.randn(128, 512, device=DEVICE).to(dtype)
    hashes = ContentHashes([weight])
    before = hashes()
    for change in (
        lambda w: w.neg(),
        lambda w: w.flip(0),
        lambda w: w.flip(1),
        lambda w: w.roll(1, 1),
        lambda w: torch.cat((w[:, :1], -w[:, 1:2], w[:, 2:]), 1),
        lambda w: torch.cat((w[:3], -w[3:4], w[4:]), 0),
        lambda w: torch.cat((w[1:2], w[:1], w[2:]), 0),
    ):
        original = weight.clone()
        weight.copy_(change(original))
        assert not torch.equal(hashes(), before)
        weight.copy_(original)
    assert torch.equal(hashes(), before)


def test_the_fingerprint_uses_the_kernel_and_finds_the_same_changes(monkeypatch):
    tests = importlib.import_module("accel.test_fingerprint")
    monkeypatch.setattr(fingerprint, "can_run_kernels", lambda x: True)
    model = tests.Model(DEVICE)
    hashed = [
        c.names for c in tests.fingerprint(model).contents if isinstance(c.read, ContentHashes)
    ]
    assert hashed == [["large", "halves", "shifted"]]
    tests.check_that_changes_are_found(model)
