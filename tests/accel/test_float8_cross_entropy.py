"""The loss with 8-bit floats, by the functions that stand in for the GPU's."""

from functools import partial

import pytest
import torch
from torch import Tensor

from regard.accel import cublaslt, float8_cross_entropy
from regard.accel.float8 import E4M3, E5M2
from regard.accel.float8_cross_entropy import (
    attach_float8_loss,
    float8_linear_cross_entropy,
    logit_gradient,
    operands,
)
from regard.models.cbow import NegativeSamplingHead
from regard.nn.head import LMHead
from regard.nn.loss import linear_cross_entropy

VOCAB, PADDED_VOCAB = 1100, 1152


def problem(rows: int = 96, width: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, from which half of the targets can be predicted, weights, and targets."""
    torch.manual_seed(0)
    weight, targets = torch.randn(VOCAB, width), torch.randint(0, VOCAB, (rows,))
    x = torch.randn(rows, width) / 2
    x[::2] += weight[targets[::2]] / 4
    targets[1::8] = -1
    return x.requires_grad_(), weight.requires_grad_(), targets


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).detach().norm() / expected.detach().norm())


@pytest.fixture(params=[16, 64, 128])
def chunk_rows(request, monkeypatch):
    """Rows of a chunk: several chunks, the last of them smaller with 64, and one."""
    monkeypatch.setattr(float8_cross_entropy, "CHUNK_ELEMENTS", request.param * PADDED_VOCAB)
    return request.param


@pytest.mark.parametrize("frozen", [False, True])
def test_loss_and_gradients_are_close_to_the_exact_ones(chunk_rows, frozen):
    x, weight, targets = problem()
    weight.requires_grad_(not frozen)
    inputs = (x,) if frozen else (x, weight)
    exact = linear_cross_entropy(x, weight, None, targets)
    rounded = float8_linear_cross_entropy(x, weight, targets)
    assert relative_error(rounded, exact) < 5e-3  # errors of the logits cancel in part
    expected, actual = (torch.autograd.grad(3 * loss, inputs) for loss in (exact, rounded))
    # operands have 4 bits, gradients 3
    assert 0.01 < relative_error(actual[0], expected[0]) < 0.06
    assert frozen or 0.01 < relative_error(actual[1], expected[1]) < 0.06
    assert not actual[0][targets == -1].any()


def test_the_logits_of_one_chunk_exist_at_a_time(chunk_rows, monkeypatch):
    x, weight, targets = problem()
    rows = []

    def record(x, *args):
        rows.append(len(x[0]))
        return logit_gradient(x, *args)

    monkeypatch.setattr(float8_cross_entropy, "logit_gradient", record)
    float8_linear_cross_entropy(x, weight, targets)
    assert rows == {16: [16] * 6, 64: [64, 32], 128: [96]}[chunk_rows]


def test_rows_without_a_target_and_padding_have_no_gradient():
    x, weight, targets = problem()
    x8, x_scale, w8, w_scale = operands(x.detach(), weight.detach())
    assert len(w8) == PADDED_VOCAB
    losses, gradient = logit_gradient((x8, x_scale), (w8, w_scale), targets, VOCAB)
    assert not gradient[:, VOCAB:].float().any()
    assert not gradient[targets == -1].float().any()
    assert not losses[targets == -1].any()
    scale = float8_cross_entropy.GRADIENT_SCALE
    # exactly 0; the absolute values sum to 2 at most and are rounded by at most an eighth
    assert (gradient.float().sum(1).abs() <= 0.25 * scale).all()


def test_a_probability_of_1_has_the_exact_gradient():
    x = torch.zeros(1, 64)
    x[0, 3] = 40  # the logit of token 3; the others are 0
    scale = torch.tensor(1.0)
    operand, identity = (x.to(E4M3), scale), (torch.eye(64).to(E4M3), scale)
    _, gradient = logit_gradient(operand, identity, torch.tensor([5]), 64)
    expected = float8_cross_entropy.GRADIENT_SCALE
    assert gradient[0, [3, 5]].tolist() == [expected, -expected]


@pytest.fixture
def used(monkeypatch):
    """The calls of the FP8 loss, where every matmul counts as a large one of a compiled graph."""
    calls = []
    monkeypatch.setattr("regard.accel.float8.is_large_in_graph", lambda x, weight: True)
    original = float8_cross_entropy.float8_linear_cross_entropy

    def count(*args):
        calls.append(args)
        return original(*args)

    monkeypatch.setattr(float8_cross_entropy, "float8_linear_cross_entropy", count)
    return calls


def test_a_plain_head_uses_it(used):
    x, weight, targets = problem()
    head = LMHead(32, VOCAB, scaled=True)
    head.weight = torch.nn.Parameter(weight.detach())
    exact = head.loss(x, targets)
    attach_float8_loss(head)
    loss = head.loss(x.unflatten(0, (6, 16)), targets.unflatten(0, (6, 16)))
    assert len(used) == 1
    assert 0 < relative_error(loss, exact) < 5e-3


@pytest.mark.parametrize(
    ("options", "rows", "width", "smoothing"),
    [
        ({"bias": True}, 96, 32, 0.0),
        ({"cap": 5.0}, 96, 32, 0.0),
        ({"vocab_size": 1000}, 96, 32, 0.0),
        ({}, 96, 32, 0.1),
        ({}, 97, 32, 0.0),
        ({}, 96, 24, 0.0),
    ],
)
def test_other_heads_and_sizes_keep_their_loss(used, options, rows, width, smoothing):
    x, _, targets = problem(rows, width)
    head = LMHead(width, **{"vocab_size": VOCAB, **options})
    targets = targets.clamp_max(len(head.matrix) - 1)
    exact = head.loss(x, targets, label_smoothing=smoothing)
    attach_float8_loss(head)
    torch.testing.assert_close(head.loss(x, targets, label_smoothing=smoothing), exact)
    assert not used


def test_a_head_with_a_loss_of_its_own_keeps_it(used):
    x, _, targets = problem()
    head = NegativeSamplingHead(32, VOCAB, negatives=2).train()
    attach_float8_loss(head)
    losses = []
    for loss in (head.loss, partial(NegativeSamplingHead.loss, head)):
        torch.manual_seed(0)
        losses.append(loss(x.unflatten(0, (6, 16)), targets.unflatten(0, (6, 16))))
    assert torch.equal(*losses)
    assert not used


def test_an_evaluation_keeps_its_loss(used):
    x, _, targets = problem()
    head = LMHead(32, VOCAB)
    attach_float8_loss(head)
    with torch.no_grad():
        head.loss(x, targets)
    assert not used


def test_outside_a_compiled_graph_and_for_small_inputs_the_loss_is_exact():
    x, _, targets = problem()
    head = LMHead(32, VOCAB)
    exact = head.loss(x, targets)
    attach_float8_loss(head)
    assert torch.equal(head.loss(x, targets), exact)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_compiled_step_gives_the_same_gradients():
    x, weight, targets = problem()

    def gradients(function):
        return torch.autograd.grad(function(x, weight, targets), (x, weight))

    torch._dynamo.reset()
    compiled = torch.compile(float8_linear_cross_entropy, dynamic=False, fullgraph=True)
    for actual, expected in zip(
        gradients(compiled), gradients(float8_linear_cross_entropy), strict=True
    ):
        assert relative_error(actual, expected) < 1e-3  # the compiler divides by the scales


def test_the_operator_is_what_its_fake_says():
    x, weight, targets = problem()
    arguments = (*operands(x.detach(), weight.detach()), targets, VOCAB, False)
    torch.library.opcheck(
        torch.ops.regard.float8_cross_entropy.default,
        arguments,
        test_utils=("test_faketensor",),
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_matmul_of_cublaslt_multiplies_by_the_scales_and_accumulates():
    a, b = (torch.randn(n, 512, device="cuda") for n in (256, 128))
    a, b = a.to(E5M2), b.to(E4M3)
    scales = torch.tensor(0.5, device="cuda"), torch.tensor(0.25, device="cuda")
    expected = a.double() @ b.double().T / 8
    out = torch.zeros(256, 128, device="cuda")
    for calls in range(1, 5):
        assert cublaslt.float8_matmul(a, b.t(), out, scales, add=True)
        assert relative_error(out.double(), calls * expected) < 1e-3
