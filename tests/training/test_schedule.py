"""Schedules against their formulas, at chosen steps."""

import math

import pytest

from regard.errors import ConfigError
from regard.training.optim import SCHEDULES, schedule

STEPS, WARMUP = 100, 10


@pytest.mark.parametrize("kind", SCHEDULES)
def test_every_schedule_stays_between_nothing_and_the_whole_rate(kind):
    factor = schedule({"kind": kind, "warmup": WARMUP}, STEPS)
    values = [factor(step) for step in range(STEPS)]
    assert all(math.isfinite(value) and 0 <= value <= 1 for value in values)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_every_schedule_warms_up_in_a_line_to_the_whole_rate(kind):
    factor = schedule({"kind": kind, "warmup": WARMUP}, STEPS)
    assert [factor(step) for step in range(WARMUP)] == [(s + 1) / WARMUP for s in range(WARMUP)]


@pytest.mark.parametrize("kind", SCHEDULES)
def test_no_schedule_rises_after_its_warm_up(kind):
    factor = schedule({"kind": kind, "warmup": WARMUP}, STEPS)
    values = [factor(step) for step in range(WARMUP, STEPS + 50)]
    assert values == sorted(values, reverse=True)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_every_schedule_begins_with_the_whole_rate_where_nothing_warms_up(kind):
    assert schedule({"kind": kind, "warmup": 0}, STEPS)(0) == 1


@pytest.mark.parametrize("kind", SCHEDULES)
def test_every_schedule_does_for_one_step_and_for_less_steps_than_warm_up(kind):
    assert 0 < schedule({"kind": kind, "warmup": 0}, 1)(0) <= 1
    assert schedule({"kind": kind, "warmup": 5}, 3)(2) == 3 / 5


def test_constant_stays():
    assert schedule("constant", STEPS)(STEPS - 1) == 1


@pytest.mark.parametrize("floor", [0.0, 0.25])
def test_linear_is_a_line(floor):
    factor = schedule({"kind": "linear", "warmup": WARMUP, "min_lr_factor": floor}, STEPS)
    for step in (10, 55, 99):
        assert factor(step) == pytest.approx(1 - (1 - floor) * (step - 10) / 90)
    assert factor(STEPS) == factor(STEPS + 7) == floor


@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_cosine_is_half_a_wave(floor):
    factor = schedule({"kind": "cosine", "warmup": WARMUP, "min_lr_factor": floor}, STEPS)
    assert factor(10) == 1
    assert factor(55) == pytest.approx((1 + floor) / 2)
    angle = math.pi * 89 / 90
    assert factor(99) == pytest.approx(floor + (1 - floor) * (1 + math.cos(angle)) / 2)
    assert factor(STEPS) == factor(STEPS + 7) == pytest.approx(floor)


def test_inverse_sqrt_is_that_of_vaswani_with_its_peak_at_one():
    dim, warmup = 512, 400
    peak = dim**-0.5 * warmup**-0.5
    factor = schedule({"kind": "inverse_sqrt", "warmup": warmup}, STEPS)
    for step in (0, 100, 399, 400, 5000):
        number = step + 1
        paper = dim**-0.5 * min(number**-0.5, number * warmup**-1.5)
        assert factor(step) == pytest.approx(paper / peak)


def test_warmup_stable_decay_stays_and_then_falls():
    factor = schedule(
        {"kind": "warmup_stable_decay", "warmup": 10, "decay_fraction": 0.2, "min_lr_factor": 0.1},
        STEPS,
    )
    assert [factor(step) for step in (10, 50, 80)] == [1, 1, 1]
    assert factor(90) == pytest.approx(0.55)
    assert factor(99) == pytest.approx(1 - 0.9 * 19 / 20)
    assert factor(100) == pytest.approx(0.1)


def test_an_unknown_schedule_or_option_gets_a_suggestion():
    with pytest.raises(ConfigError, match="did you mean 'cosine'"):
        schedule("cosin", STEPS)
    with pytest.raises(ConfigError, match="did you mean 'warmup'"):
        schedule({"kind": "cosine", "warmups": 3}, STEPS)


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        *((kind, {"warmup": -1}) for kind in SCHEDULES),
        *((kind, {"min_lr_factor": -0.1}) for kind in ("linear", "cosine", "warmup_stable_decay")),
        *((kind, {"min_lr_factor": 1.5}) for kind in ("linear", "cosine", "warmup_stable_decay")),
        ("cosine", {"min_lr_factor": math.nan}),
        ("warmup_stable_decay", {"decay_fraction": -0.5}),
        ("warmup_stable_decay", {"decay_fraction": 3.0}),
    ],
)
def test_an_option_out_of_range_is_refused(kind, option):
    (name,) = option
    with pytest.raises(ConfigError, match=rf"schedule: {name}=.* must be at least 0"):
        schedule({"kind": kind, **option}, STEPS)
