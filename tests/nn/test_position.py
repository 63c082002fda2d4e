import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

import reference
from regard.errors import ConfigError, ShapeError
from regard.nn.attention import Attention, AttentionInputs, Mask
from regard.nn.position import (
    POSITIONS,
    ALiBi,
    Learned,
    Rotary,
    Sinusoidal,
    T5Bias,
    alibi_slopes,
    linear,
    llama3,
    ntk,
    rotate_complex,
    rotate_pairs,
)

pytestmark = pytest.mark.usefixtures("float64")


def at(*positions):
    return torch.tensor([positions])


def make(name, **options):
    given = {"dim": 8, "heads": 2, "head_dim": 4, "context": 16, "causal": True}
    wanted = {
        "none": [],
        "sinusoidal": ["dim"],
        "learned": ["dim", "context"],
        "rotary": ["head_dim"],
        "alibi": ["heads"],
        "t5": ["heads", "causal"],
    }
    return POSITIONS[name](**{key: given[key] for key in wanted[name]}, **options)


@pytest.mark.parametrize("name", POSITIONS)
def test_attention_has_the_right_gradient_with_every_position(name):
    position, attention = make(name), Attention(8, 2)
    x = torch.randn(1, 3, 8, requires_grad=True)

    def run(x, *_):
        placed = position.embed(at(0, 1, 5))
        x = x if placed is None else x + placed
        return attention(
            x, inputs=AttentionInputs.of(Mask.causal(), at(0, 1, 5), position=position)
        )

    parameters = (*position.parameters(), attention.query.weight)
    # the fused kernel's own backward differs from run to run in the last bits
    assert gradcheck(run, (x, *parameters), nondet_tol=1e-12)


def test_sinusoids_compute_the_formula():
    placed = Sinusoidal(10, base=100.0).embed(torch.tensor([[0, 1, 7], [3, 900, 2]]))
    expected = [[reference.sinusoid(t, 10, 100.0) for t in row] for row in ([0, 1, 7], [3, 900, 2])]
    torch.testing.assert_close(placed, reference.tensor(expected), rtol=0, atol=1e-12)


@given(st.integers(0, 500), st.integers(0, 500))
def test_a_step_of_k_multiplies_every_sinusoid_by_the_same_matrix(t, k):
    """p_{t+k} = M_k p_t, M_k made of k alone."""
    here, there = Sinusoidal(8).embed(at(t, t + k))[0].tolist()
    moved = []
    for pair in range(4):
        angle = k / 10_000 ** (2 * pair / 8)
        sin, cos = here[2 * pair : 2 * pair + 2]
        moved += [
            math.cos(angle) * sin + math.sin(angle) * cos,
            -math.sin(angle) * sin + math.cos(angle) * cos,
        ]
    # the angle of a product of t is rounded once more than that of a sum: a few in 1e-13
    torch.testing.assert_close(torch.tensor(moved), torch.tensor(there), rtol=0, atol=1e-11)


def test_sinusoids_need_an_even_width():
    with pytest.raises(ShapeError, match=r"even width .* not 7"):
        Sinusoidal(7)


def test_learned_positions_are_rows_of_a_table():
    position = Learned(4, 8)
    assert torch.equal(position.embed(at(3, 0))[0], position.table.weight[[3, 0]])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_rotary_computes_the_formula(fraction, interleaved):
    rotation = Rotary(
        8, base=50.0, partial_rotary_factor=fraction, interleaved=interleaved
    ).rotation(at(0, 3, 40))
    x = torch.randn(2, 3, 3, 8)
    expected = [
        [
            [
                reference.rotary(vector, t, 50.0, fraction, interleaved)
                for t, vector in zip((0, 3, 40), head, strict=True)
            ]
            for head in row
        ]
        for row in x.tolist()
    ]
    torch.testing.assert_close(rotation.apply(x), reference.tensor(expected), rtol=0, atol=1e-12)


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 300))
def test_rotary_scores_depend_only_on_the_distance(i, j, shift):
    q, k = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)
    rotary = Rotary(8)

    def score(i, j):
        return (rotary.rotation(at(i)).apply(q) * rotary.rotation(at(j)).apply(k)).sum()

    # float64 holds an angle of 600 to 1e-13
    torch.testing.assert_close(score(i + shift, j + shift), score(i, j), rtol=0, atol=1e-11)


def test_rotary_keeps_the_length_of_a_vector():
    x = torch.randn(1, 2, 3, 8)
    torch.testing.assert_close(
        Rotary(8).rotation(at(0, 5, 99)).apply(x).norm(dim=-1), x.norm(dim=-1)
    )


@pytest.mark.parametrize(("head_dim", "fraction"), [(5, 1.0), (8, 0.1), (6, 0.5)])
def test_rotary_rotates_pairs(head_dim, fraction):
    with pytest.raises(
        ShapeError, match=f"head_dim={head_dim} times partial_rotary_factor={fraction}"
    ):
        Rotary(head_dim, partial_rotary_factor=fraction)


@pytest.mark.parametrize("fraction", [0.0, 1.5])
def test_the_rotated_fraction_lies_between_0_and_1(fraction):
    with pytest.raises(ShapeError, match=r"partial_rotary_factor=\S+ must lie in \(0, 1\]"):
        Rotary(8, partial_rotary_factor=fraction)


def test_linear_scaling_puts_position_t_where_t_over_factor_was():
    plain, scaled = Rotary(8), Rotary(8, scaling={"kind": "linear", "factor": 4.0})
    x = torch.randn(1, 1, 3, 8)
    torch.testing.assert_close(
        scaled.rotation(at(0, 4, 40)).apply(x),
        plain.rotation(at(0, 1, 10)).apply(x),
        rtol=0,
        atol=1e-12,
    )


def test_ntk_scaling_divides_the_lowest_frequency_by_the_factor():
    width, factor = 8, 4.0
    frequency = 10_000.0 ** (-torch.arange(0, width, 2) / width)
    raised = 10_000.0 * factor ** (width / (width - 2))
    expected = raised ** (-torch.arange(0, width, 2) / width)
    torch.testing.assert_close(ntk(frequency, factor), expected, rtol=1e-12, atol=0)
    assert ntk(frequency, factor)[0] == frequency[0]


def test_llama3_scaling_keeps_high_frequencies_and_divides_low_ones():
    turns = torch.tensor([5.0, 4.0, 2.5, 1.0, 0.5])  # in the original context of 100
    frequency = turns * 2 * math.pi / 100
    scaled = llama3(frequency, factor=8.0, original_context=100)
    smooth = (2.5 - 1) / (4 - 1)
    expected = torch.tensor([1, 1, smooth + (1 - smooth) / 8, 1 / 8, 1 / 8]) * frequency
    torch.testing.assert_close(scaled, expected, rtol=0, atol=1e-12)


def test_linear_scaling_divides_every_frequency():
    frequency = torch.tensor([1.0, 0.5])
    assert torch.equal(linear(frequency, 2.0), torch.tensor([0.5, 0.25]))


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (
            {"kind": "lniear", "factor": 2.0},
            "unknown rotary scaling 'lniear'; did you mean 'linear'",
        ),
        ({"kind": "linear"}, "rotary scaling 'linear': missing a required argument: 'factor'"),
        ({"kind": "linear", "factr": 2.0}, "unknown option 'factr'; did you mean 'factor'"),
    ],
)
def test_a_wrong_scaling_is_refused_when_the_model_is_made(scaling, message):
    with pytest.raises(ConfigError, match=message):
        Rotary(8, scaling=scaling)


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 20])
def test_alibi_slopes_are_those_of_the_paper(heads):
    assert alibi_slopes(heads).tolist() == pytest.approx(reference.alibi_slopes(heads), abs=1e-15)


def test_alibi_computes_the_formula_at_any_positions():
    queries, keys = torch.tensor([[0, 5], [2, 9]]), torch.tensor([[0, 1, 7]])
    bias = ALiBi(3).bias(queries, keys)
    formula = reference.alibi(3)
    for row in range(2):
        for head in range(3):
            for i, query in enumerate(queries[row].tolist()):
                for j, key in enumerate(keys[0].tolist()):
                    expected = formula(head, query, key)
                    assert abs(bias[row, head, i, j].item() - expected) < 1e-12


@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (8, 20)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_t5_buckets_are_those_of_the_paper(causal, buckets, max_distance, dtype):
    torch.set_default_dtype(dtype)  # models run in float32; the buckets must not depend on it
    position = T5Bias(2, causal=causal, buckets=buckets, max_distance=max_distance)
    distance = torch.arange(-300, 301)
    expected = [
        reference.t5_bucket(d, causal=causal, buckets=buckets, max_distance=max_distance)
        for d in distance.tolist()
    ]
    assert position.bucket(distance).tolist() == expected


def test_t5_adds_the_learned_bias_of_the_bucket():
    position = T5Bias(2, causal=False)
    bias = position.bias(at(3, 9), at(0, 4, 60))
    for i, query in enumerate((3, 9)):
        for j, key in enumerate((0, 4, 60)):
            bucket = reference.t5_bucket(key - query, causal=False)
            assert torch.equal(bias[0, :, i, j], position.table.weight[bucket])


def test_a_complex_multiplication_rotates_as_the_formula_does():
    rotation = Rotary(8, interleaved=True).rotation(at(0, 3, 40))
    x = torch.randn(2, 4, 3, 8, requires_grad=True)
    by_complex = rotate_complex(x, rotation.cos, rotation.sin)
    by_formula = rotate_pairs(x, rotation.cos, rotation.sin, interleaved=True)
    torch.testing.assert_close(by_complex, by_formula, rtol=0, atol=1e-6)
    weights = torch.randn_like(x)
    grads = [torch.autograd.grad((y * weights).sum(), x)[0] for y in (by_complex, by_formula)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-6)


def test_sines_may_come_before_cosines():
    mixed, halves = (Sinusoidal(8, interleaved=i).embed(at(0, 3, 9)) for i in (True, False))
    torch.testing.assert_close(halves, torch.cat((mixed[..., ::2], mixed[..., 1::2]), -1))


def test_learned_positions_may_have_an_offset():
    position = Learned(8, context=16, offset=2)
    assert len(position.table.weight) == 18
    assert torch.equal(position.embed(at(0, 15))[0], position.table.weight[[2, 17]])
