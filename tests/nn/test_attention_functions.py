import torch
from torch.autograd import gradcheck

import reference
from regard.nn.attention import masked_softmax, merge_heads, repeat_kv_heads, split_heads


def test_masked_softmax_computes_the_formula():
    scores = torch.randn(4, 6, dtype=torch.float64)
    allowed = torch.rand(4, 6) > 0.4
    allowed[2] = False
    expected = [
        reference.softmax(s, a) for s, a in zip(scores.tolist(), allowed.tolist(), strict=True)
    ]
    torch.testing.assert_close(
        masked_softmax(scores, allowed), reference.tensor(expected), rtol=0, atol=1e-12
    )


def test_masked_softmax_without_a_mask_is_softmax():
    scores = torch.randn(3, 5, dtype=torch.float64)
    torch.testing.assert_close(masked_softmax(scores, None), scores.softmax(-1), rtol=0, atol=0)


def test_masked_softmax_has_the_right_gradient_even_where_all_is_masked():
    allowed = torch.tensor([[True, False, True], [False, False, False]])
    scores = torch.randn(2, 3, dtype=torch.double, requires_grad=True)
    assert gradcheck(lambda s: masked_softmax(s, allowed), scores)
    with torch.autograd.set_detect_anomaly(True):  # nor does a NaN arise on the way
        masked_softmax(scores, allowed).sum().backward()


def test_masked_softmax_sums_half_precision_in_float32():
    scores = torch.zeros(1, 4096, dtype=torch.bfloat16)
    weights = masked_softmax(scores, torch.ones(1, 4096, dtype=torch.bool))
    assert weights.dtype == torch.bfloat16
    assert (weights == 2**-12).all()


def test_merging_undoes_splitting():
    x = torch.randn(2, 3, 12)
    split = split_heads(x, 4)
    assert split.shape == (2, 4, 3, 3)
    assert torch.equal(split[1, 2, 0], x[1, 0, 6:9])
    assert torch.equal(merge_heads(split), x)


def test_neighbouring_query_heads_share_a_key_head():
    x = torch.randn(1, 2, 3, 4)
    shared = repeat_kv_heads(x, 6)
    assert all(torch.equal(shared[0, head], x[0, head // 3]) for head in range(6))
