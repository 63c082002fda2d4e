import pytest
import torch
from torch.autograd import gradcheck

import reference
from regard.errors import ShapeError
from regard.nn.attention import Attention, AttentionInputs, Mask
from regard.nn.position import ALiBi, Position, Rotary
from regard.nn.score import SCORES

pytestmark = pytest.mark.usefixtures("float64")

AT = torch.arange(5).unsqueeze(0)
LENGTHS = torch.tensor([4, 0])  # the second row's queries may look at nothing
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 1, 2, 2]])
MASKS = {
    "none": (Mask.none(), reference.everything),
    "causal": (Mask.causal(), reference.causal),
    "prefix": (Mask.prefix(torch.tensor([3, 1])), reference.prefix([3, 1])),
    "window": (Mask.window(2), reference.window(2)),
    "lengths": (Mask.lengths(LENGTHS), reference.lengths([4, 0])),
    "documents": (Mask.documents(DOCUMENTS), reference.documents(DOCUMENTS.tolist())),
    "causal-window-lengths": (
        Mask.causal() & Mask.window(2) & Mask.lengths(torch.tensor([4, 1])),
        reference.both(reference.causal, reference.window(2), reference.lengths([4, 1])),
    ),  # some queries of the second row may look at nothing
}


def opened(attention):
    """The same attention, made to take the open path."""
    attention.score.fused = False
    return attention


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("mask", MASKS)
def test_attention_computes_the_formula_in_the_docstring(mask, kv_heads):
    attention = Attention(16, 4, kv_heads=kv_heads, bias=True)
    x = torch.randn(2, 5, 16)
    rule, allowed = MASKS[mask]
    torch.testing.assert_close(
        attention(x, inputs=AttentionInputs.of(rule, AT)),
        reference.multi_head(attention, x, x, allowed=allowed),
        rtol=0,
        atol=1e-12,
    )


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("mask", MASKS)
def test_the_fused_kernel_equals_the_explicit_path_and_so_do_its_gradients(mask, kv_heads, biased):
    attention = Attention(16, 4, kv_heads=kv_heads)
    x = torch.randn(2, 5, 16, requires_grad=True)
    inputs = AttentionInputs.of(MASKS[mask][0], AT, position=ALiBi(4) if biased else None)
    results = []
    for path in (attention, opened(attention)):
        y = path(x, inputs=inputs)
        y.square().sum().backward()
        results.append((y.detach(), x.grad, *(p.grad for p in attention.parameters())))
        x.grad = None
        attention.zero_grad()
    for fused, slow in zip(*results, strict=True):
        assert fused.isfinite().all()
        torch.testing.assert_close(fused, slow, rtol=0, atol=1e-12)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("path", [lambda a: a, opened], ids=["fused", "open"])
def test_a_query_without_allowed_keys_gets_zeros(path, biased):
    attention = path(Attention(16, 4))
    x = torch.randn(2, 5, 16, requires_grad=True)
    inputs = AttentionInputs.of(Mask.lengths(LENGTHS), AT, position=ALiBi(4) if biased else None)
    y = attention(x, inputs=inputs)
    assert (y[1] == 0).all()
    assert (y[0] != 0).any()
    y.sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_attention_over_a_memory_computes_the_formula(kv_heads):
    attention = Attention(12, 4, kv_heads=kv_heads, head_dim=5, value_dim=2, bias=True)
    x, memory = torch.randn(2, 3, 12), torch.randn(2, 6, 12)
    inputs = AttentionInputs.of(
        Mask.lengths(torch.tensor([6, 2])), AT[:, :3], torch.arange(6).unsqueeze(0)
    )
    torch.testing.assert_close(
        attention(x, memory, inputs=inputs),
        reference.multi_head(attention, x, memory, allowed=reference.lengths([6, 2])),
        rtol=0,
        atol=1e-12,
    )


def test_attention_with_alibi_computes_the_formula():
    attention = Attention(12, 3)
    x = torch.randn(2, 5, 12)
    torch.testing.assert_close(
        attention(x, inputs=AttentionInputs.of(Mask.causal(), AT, position=ALiBi(3))),
        reference.multi_head(attention, x, x, allowed=reference.causal, bias=reference.alibi(3)),
        rtol=0,
        atol=1e-12,
    )


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_attention_with_rotary_positions_computes_the_formula(kv_heads):
    attention = Attention(16, 4, kv_heads=kv_heads)
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(
        attention(x, inputs=AttentionInputs.of(Mask.causal(), AT, position=Rotary(4))),
        reference.multi_head(attention, x, x, allowed=reference.causal, turn=reference.rotary),
        rtol=0,
        atol=1e-12,
    )


def test_attention_with_shaw_scores_computes_the_formula():
    attention = Attention(16, 4, kv_heads=2, score={"kind": "shaw", "max_distance": 2})
    score = reference.shaw(attention.score.relative.weight.tolist(), 2)
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(
        attention(x, inputs=AttentionInputs.of(Mask.causal(), AT)),
        reference.multi_head(attention, x, x, score=score, allowed=reference.causal),
        rtol=0,
        atol=1e-12,
    )


@pytest.mark.parametrize("score", [name for name in SCORES if name != "location"])
def test_attention_has_the_right_gradient_with_every_score(score):
    attention = Attention(4, 2, score=score)
    x = torch.randn(2, 3, 4, requires_grad=True)
    distances = torch.randn(64, 4, requires_grad=True) if score == "disentangled" else None
    mask = Mask.causal() & Mask.lengths(torch.tensor([3, 0]))
    inputs = AttentionInputs.of(mask, torch.arange(3)[None], relative_embeddings=distances)
    # the fused kernel's own backward differs from run to run in the last bits
    assert gradcheck(
        lambda x, *_: attention(x, inputs=inputs), (x, *attention.parameters()), nondet_tol=1e-12
    )


def test_weights_made_from_the_recorded_queries_and_keys_give_the_fused_result():
    attention = Attention(16, 4, kv_heads=2)
    seen = {}
    for name in ("q_hook", "k_hook"):
        hook_point = getattr(attention, name)
        hook_point.register_forward_hook(lambda _, __, out, name=name: seen.update({name: out}))
    x = torch.randn(2, 5, 16)
    inputs = AttentionInputs.of(Mask.causal(), AT, position=Rotary(4))
    y = attention(x, inputs=inputs)
    weights = attention.weights(seen["q_hook"], seen["k_hook"], inputs)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 5), rtol=0, atol=1e-12)
    assert (weights.triu(1) == 0).all()
    value = attention.value(x).unflatten(-1, (2, 4)).transpose(1, 2).repeat_interleave(2, 1)
    torch.testing.assert_close(
        attention.out((weights @ value).transpose(1, 2).flatten(-2)), y, rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("path", [lambda a: a, opened], ids=["fused", "open"])
def test_attention_drops_weights_only_in_training(path):
    attention = path(Attention(16, 4, dropout=0.5))
    x, inputs = torch.randn(2, 5, 16), AttentionInputs.of(Mask.causal(), AT)
    assert not torch.equal(attention(x, inputs=inputs), attention(x, inputs=inputs))
    attention.eval()
    assert torch.equal(attention(x, inputs=inputs), attention(x, inputs=inputs))


def test_plain_causal_attention_needs_no_dense_mask():
    assert AttentionInputs.of(Mask.causal(), AT).causal
    assert AttentionInputs.of(Mask.causal(), AT).allowed is None
    assert not AttentionInputs.of(Mask.causal(), AT, AT).causal, (
        "keys of a state may be more than the queries"
    )
    assert not AttentionInputs.of(Mask.causal(), AT, position=ALiBi(4)).causal
    assert not AttentionInputs.of(Mask.causal() & Mask.window(2), AT).causal
    assert AttentionInputs.of(Mask.none(), AT, position=Position()).allowed is None


def test_attention_inputs_give_the_dense_mask_also_if_causal():
    expected = reference.dense(reference.causal, 1, 5, 5)
    assert torch.equal(AttentionInputs.of(Mask.causal(), AT).dense(), expected)
    assert torch.equal(AttentionInputs.of(Mask.causal(), AT, AT).dense(), expected)
    assert AttentionInputs.of(Mask.none(), AT).dense() is None


def test_heads_must_divide_the_width():
    with pytest.raises(ShapeError, match="heads=5 must divide dim=32, or give head_dim"):
        Attention(32, 5)


def test_key_heads_must_divide_the_heads():
    with pytest.raises(ShapeError, match="kv_heads=3 must divide heads=4"):
        Attention(32, 4, kv_heads=3)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_fused_qkv_in_training_gives_what_three_matmuls_give(kv_heads, bias):
    attention = Attention(16, 4, kv_heads=kv_heads, bias=bias)
    x, inputs = (
        torch.randn(2, 5, 16),
        AttentionInputs.of(Mask.causal(), torch.arange(5).unsqueeze(0)),
    )
    together = attention.train()(x, inputs=inputs)
    torch.testing.assert_close(together, attention.eval()(x, inputs=inputs), rtol=0, atol=1e-6)
