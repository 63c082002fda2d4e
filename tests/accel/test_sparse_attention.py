"""Block masks and scores of sparse attention against the attention layer's own formula."""

import pytest
import torch

from regard.accel import sparse_attention
from regard.accel.compile import attach_fused_layers
from regard.accel.description import inspect_decoder
from regard.models.transformer import Transformer, TransformerConfig
from regard.nn.attention import Attention, AttentionInputs, Mask
from regard.nn.position import ALiBi, Position

TIME, ROWS = 512, 2
DOCUMENTS = torch.tensor([[0] * 100 + [1] * 200 + [2] * 212, [0] * 256 + [1] * 256])
MASKS = {
    "window": Mask.causal() & Mask.window(150),
    "narrow window": Mask.causal() & Mask.window(1),
    "window on both sides": Mask.window(200),
    "documents": Mask.causal() & Mask.documents(DOCUMENTS),
    "prefix": Mask.prefix(torch.tensor([130, 0])),
    "lengths": Mask.window(300) & Mask.lengths(torch.tensor([400, 70])),
    "everything": Mask.causal() & Mask.window(90) & Mask.documents(DOCUMENTS),
}


def positions():
    return torch.arange(TIME).unsqueeze(0)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_blocks_are_skipped_only_where_nothing_is_allowed(mask):
    blocks = sparse_attention.block_mask(mask, positions(), positions())
    dense = mask.dense(positions(), positions())
    rows, size = len(dense), sparse_attention.BLOCK
    tiles = dense.unflatten(-1, (-1, size)).unflatten(-3, (-1, size)).transpose(-3, -2)
    some, every = tiles.flatten(-2).any(-1), tiles.flatten(-2).all(-1)
    index = torch.arange(TIME)
    for row in range(rows):
        exact = blocks.mask_mod(torch.tensor(row), torch.tensor(0), index[:, None], index[None, :])
        assert torch.equal(exact, dense[row, 0])
    assert torch.equal(blocks.to_dense().bool() | some, blocks.to_dense().bool())
    taken = torch.zeros_like(some)
    for row, line in torch.cartesian_prod(torch.arange(rows), torch.arange(TIME // size)).tolist():
        count = blocks.full_kv_num_blocks[row, 0, line]
        taken[row, 0, line, blocks.full_kv_indices[row, 0, line, :count].long()] = True
    assert torch.equal(taken & every, taken)  # no mask is applied in these
    if mask.document_ids is None and mask.key_lengths is None:
        assert torch.equal(blocks.to_dense().bool(), some)
        assert torch.equal(taken, every)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("alibi", [False, True])
def test_the_result_is_that_of_the_formula(cap, alibi):
    torch.manual_seed(0)
    attention = Attention(32, 4, kv_heads=2, score={"kind": "scaled_dot", "cap": cap})
    position = ALiBi(4) if alibi else Position()
    assert sparse_attention.supports(attention, position)
    q, k, v = torch.randn(ROWS, 4, TIME, 8), *torch.randn(2, ROWS, 2, TIME, 8)
    for mask in (MASKS["window"], MASKS["documents"]):
        inputs = AttentionInputs.of(mask, positions(), None, position)
        assert sparse_attention.needs_sparse_attention(inputs, cap is not None)
        slopes = position.slope if alibi else None
        actual = sparse_attention.attend(attention, slopes, q, k, v, inputs)
        expected = attention._explicit(q, k, v, inputs)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_plain_causal_attention_and_odd_lengths_stay_with_the_fused_kernel():
    plain = AttentionInputs.of(Mask.causal(), positions())
    assert not sparse_attention.needs_sparse_attention(plain, capped=False)
    window = Mask.causal() & Mask.window(9)
    assert not sparse_attention.needs_sparse_attention(
        AttentionInputs.of(window, positions()[:, :500]), capped=False
    )
    assert not sparse_attention.supports(Attention(32, 4, dropout=0.1), Position())
    assert not sparse_attention.supports(Attention(32, 4, score="additive"), Position())


def test_an_attached_layer_computes_the_same_without_a_compiler():
    config = TransformerConfig(vocab_size=11, dim=32, layers=2, heads=4, context=128, window=9)
    model, ids = Transformer(config), torch.randint(0, 11, (2, 128))
    expected = model(ids)
    attach_fused_layers(model)
    assert torch.equal(model(ids), expected)
    inspect_decoder(model)  # decoding paths know what is attached


def test_a_window_on_a_cpu_is_computed_in_blocks():
    torch.manual_seed(0)
    config = TransformerConfig(
        vocab_size=11, dim=32, layers=2, heads=4, kv_heads=2, context=50, window=9
    )
    model, ids = Transformer(config), torch.randint(0, 11, (2, 50))
    expected = model(ids)
    gradients = torch.autograd.grad(expected.logsumexp(-1).sum(), list(model.parameters()))
    sparse_attention.attach_window_blocks(model)
    actual = model(ids)
    torch.testing.assert_close(actual, expected)
    actual_gradients = torch.autograd.grad(actual.logsumexp(-1).sum(), list(model.parameters()))
    torch.testing.assert_close(actual_gradients, gradients, rtol=1e-4, atol=1e-5)
    inspect_decoder(model)  # decoding paths know what is attached


def test_blocks_are_for_one_text_with_a_narrow_causal_window():
    window = Mask.causal() & Mask.window(16)
    column = torch.arange(64).unsqueeze(0)
    assert sparse_attention.can_use_blocks(AttentionInputs.of(window, column))
    assert sparse_attention.can_use_blocks(AttentionInputs.of(window, column + 5))
    restarted = torch.cat([column[:, :32], column[:, :32]], dim=1)
    for mask, queries, keys in (
        (window, column[:, :63], None),  # fewer than four windows
        (window, column[:, 32:], column),  # a KV cache
        (window, restarted, None),
        (Mask.window(16), column, None),
        (window & Mask.lengths(torch.tensor([40])), column, None),
    ):
        assert not sparse_attention.can_use_blocks(AttentionInputs.of(mask, queries, keys))
    alibi = AttentionInputs.of(window, column, None, ALiBi(4))
    assert not sparse_attention.can_use_blocks(alibi)
