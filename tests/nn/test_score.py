import math

import pytest
import torch
from torch.autograd import gradcheck

import reference
from regard.config import make
from regard.errors import ConfigError, ShapeError
from regard.nn.score import (
    SCORES,
    Additive,
    Cosine,
    Disentangled,
    Dot,
    General,
    Location,
    ScaledDot,
    Shaw,
    TransformerXL,
)

pytestmark = pytest.mark.usefixtures("float64")


def compare(score, formula, *distances):
    q, k = torch.randn(2, 3, 6, 4), torch.randn(2, 3, 9, 4)
    at = torch.arange(9).unsqueeze(0)
    scores = score(q, score.prepare(k), at[:, :6], at, *distances)
    for row in range(2):
        for head in range(3):
            expected = [
                [formula(a, b, i, j) for j, b in enumerate(k[row, head].tolist())]
                for i, a in enumerate(q[row, head].tolist())
            ]
            torch.testing.assert_close(
                scores[row, head], reference.tensor(expected), rtol=0, atol=1e-12
            )


def test_dot_computes_the_formula():
    compare(Dot(), reference.dot)


def test_scaled_dot_computes_the_formula():
    compare(ScaledDot(4), reference.scaled_dot)


def test_content_computes_the_formula():
    compare(Cosine(), reference.cosine)


def test_additive_computes_the_formula():
    score = Additive(4)
    halves = torch.cat([score.query.weight, score.key.weight], 1).tolist()
    compare(score, reference.additive(score.energy.weight[0].tolist(), halves))


def test_general_computes_the_formula():
    score = General(4)
    compare(score, reference.general(score.key.weight.tolist()))


def test_location_computes_the_formula():
    score = Location(4, context=11)
    compare(score, reference.location(score.location.weight.tolist()))


def test_location_goes_by_positions_and_refuses_those_it_has_not_learned():
    score, q = Location(4, context=5), torch.randn(1, 1, 2, 4)
    at, later = torch.tensor([[0, 1]]), torch.tensor([[3, 4]])
    expected = (q @ score.location.weight.T)[..., 3:5]
    torch.testing.assert_close(score(q, torch.randn(1, 1, 2, 4), at, later), expected)
    with pytest.raises(
        ShapeError, match="context=5 learned positions, but the source has 6; shorten"
    ):
        score(q, torch.randn(1, 1, 6, 4), at, torch.arange(6).unsqueeze(0))


def test_shaw_computes_the_formula_also_beyond_its_reach():
    score = Shaw(4, max_distance=3)
    compare(score, reference.shaw(score.relative.weight.tolist(), 3))


@pytest.mark.parametrize(("max_distance", "buckets"), [(4, None), (9, 4), (12, 8)])
def test_disentangled_computes_the_formula(max_distance, buckets):
    score = Disentangled(4, 1, 4, max_distance, buckets)
    q_r, k_r = torch.randn(2, 2 * score.attention_span, 4)
    formula = reference.disentangled(q_r.tolist(), k_r.tolist(), max_distance, buckets)
    compare(score, formula, *(r.expand(1, 3, -1, -1) for r in (q_r, k_r)))


def test_disentangled_refuses_buckets_that_no_distance_needs():
    with pytest.raises(ConfigError, match=r"buckets=10 must be at least 4 and less than .* = 8"):
        Disentangled(4, 1, 4, max_distance=5, buckets=10)


def test_a_cap_bends_the_scores_and_keeps_them_from_the_fused_kernel():
    assert ScaledDot(4).fused
    assert not ScaledDot(4, cap=0.5).fused
    compare(
        ScaledDot(4, scale_dim=9, cap=0.5),
        lambda a, b, i, j: 0.5 * math.tanh(reference.dot(a, b) / 3 / 0.5),
    )


def test_transformer_xl_computes_the_formula():
    score = TransformerXL(dim=6, heads=3, head_dim=4)
    for parameter in score.parameters():
        torch.nn.init.normal_(parameter)
    q, k = torch.randn(2, 3, 6, 4), torch.randn(2, 3, 9, 4)
    scores = score(q, k, torch.arange(3, 9).unsqueeze(0), torch.arange(9).unsqueeze(0))
    for head in range(3):
        rows = score.distance.weight[4 * head : 4 * head + 4]
        u, v = score.content_bias[head, 0], score.distance_bias[head, 0]
        for i in range(6):
            for j in range(9):
                wave = reference.tensor(reference.sinusoid(i + 3 - j, 6))
                a, b = q[1, head, i], k[1, head, j]
                expected = ((a + u) @ b + (a + v) @ (rows @ wave)) / 2
                assert abs((scores[1, head, i, j] - expected).item()) < 1e-12


def test_shaw_goes_by_positions_not_by_indices():
    score = Shaw(4, max_distance=3)
    q, k = torch.randn(2, 1, 2, 4), torch.randn(2, 1, 3, 4)
    query_positions, key_positions = torch.tensor([[5, 6], [0, 1]]), torch.tensor([[4, 5, 6]])
    formula = reference.shaw(score.relative.weight.tolist(), 3)
    scores = score(q, k, query_positions, key_positions)
    for row in range(2):
        for i in range(2):
            for j in range(3):
                at = int(query_positions[row, i]), int(key_positions[0, j])
                expected = formula(q[row, 0, i].tolist(), k[row, 0, j].tolist(), *at)
                assert abs(scores[row, 0, i, j].item() - expected) < 1e-12


@pytest.mark.parametrize("name", SCORES)
def test_every_score_has_the_right_gradient(name):
    score = make(name, SCORES, "score", dim=8, heads=2, head_dim=4, context=3)
    at = torch.arange(3).unsqueeze(0)
    q = torch.randn(1, 2, 3, 4, requires_grad=True)
    k = torch.randn(1, 2, 3, 4, requires_grad=True)
    parameters = tuple(score.parameters())
    distances = torch.randn(2, 1, 2, 64, 4) if name == "disentangled" else ()

    def run(q, k, *parameters):
        return score(q, score.prepare(k), at, at, *distances)

    assert gradcheck(run, (q, k, *parameters))
