"""Budgets: fixed steps, and minutes, whose steps are planned again while a run trains."""

import time
from dataclasses import replace
from itertools import count

import pytest

from regard.config import RunConfig, TrainConfig
from regard.errors import ConfigError
from regard.training import budget
from regard.training.budget import StepBudget, TimeBudget, TimePlan
from regard.training.evaluation_plan import EvaluationPlan
from regard.training.events import RunFinished
from regard.training.optim import schedule
from regard.training.parallel.ranks import SINGLE
from regard.training.run import begin, resume
from regard.training.storage import checkpoint
from regard.training.storage.run_folder import RunFolder
from training.runs import Crash, config, interrupt

SETTINGS = TrainConfig(steps=100, lr=2.0, ema=0.99, schedule={"kind": "linear", "warmup": 10})
CONFIG = RunConfig(name="x", train=SETTINGS, minutes=10)


def every(steps, cost=1.0):
    return EvaluationPlan(steps, True, None, cost)


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the test moves."""
    now = [0.0]
    monkeypatch.setattr(budget.time, "perf_counter", lambda: now[0])
    return now


def run(made, clock, seconds, evaluation=0.0, start=0, flush=1):
    """Take steps of `seconds(step)` each; returns the steps of the evaluations and the rates."""
    evaluations, rates = [], []
    made.start_clock(start)
    for step in range(start, made.max_steps):
        rates.append(2.0 * made.lr_factor(step))
        clock[0] += seconds(step)
        done = step + 1
        if done % flush and done < made.next_pause:
            assert not made.should_evaluate(done)
            assert not made.should_save(done)
            continue
        made.replan(done)
        last, evaluating, saving = (
            made.is_last(done),
            made.should_evaluate(done),
            made.should_save(done),
        )
        if evaluating:
            evaluations.append(done)
            clock[0] += evaluation
            made.mark_evaluated(done)
        if saving:
            made.mark_saved(done)
        if last:
            return evaluations, rates
        if evaluating:
            made.time_evaluation()
            made.start_clock(done)
    raise AssertionError("no last step")


def test_a_step_budget_is_the_schedule_and_the_intervals():
    made = StepBudget(replace(CONFIG, minutes=None), every(25), 50)
    factor = schedule(SETTINGS.schedule, 100)
    assert [made.lr_factor(step) for step in range(100)] == [factor(step) for step in range(100)]
    assert [done for done in range(1, 101) if made.should_evaluate(done)] == [25, 50, 75, 100]
    assert [done for done in range(1, 101) if made.should_save(done)] == [50, 100]
    assert (made.ema, made.state(), made.summary_lines()) == (0.99, {}, [])


@pytest.mark.parametrize(
    ("seconds", "evaluation"),
    [
        (lambda step: 6.0, 0.0),  # as estimated
        (lambda step: 30.0, 0.0),  # five times as slow
        (lambda step: 0.5, 1.0),  # twelve times as fast
        (lambda step: 3.0, 45.0),  # with slow evaluations
        (lambda step: 2.0 if step < 60 else 20.0, 5.0),  # others begin to use the machine
        (lambda step: 20.0 if step < 10 else 2.0, 5.0),  # or stop
    ],
)
@pytest.mark.parametrize("flush", [1, 4])
def test_a_time_budget_ends_in_time_with_the_whole_schedule(seconds, evaluation, flush, clock):
    made = TimeBudget(CONFIG, every(10), 10, SINGLE, started=0.0)
    clock[0] = 40.0  # to import torch and prepare the data
    evaluations, rates = run(made, clock, seconds, evaluation, flush=flush)
    assert clock[0] == pytest.approx(600, rel=0.06)
    assert max(rates) == pytest.approx(2.0, rel=0.2)
    assert rates[-1] < 0.25
    peak = rates.index(max(rates))
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert evaluation * len(evaluations) <= 0.25 * 600
    assert 2 <= len(evaluations) <= 11
    assert evaluations[-1] == made.steps == len(rates)


def test_a_resumed_run_has_the_rest_of_the_time_and_the_plan(clock):
    made = TimeBudget(CONFIG, every(10), 10, SINGLE, started=0.0)
    for done in range(1, 41):
        clock[0] += 6.0
        made.replan(done)
    state = made.state()["time_plan"]
    assert state["seconds"] == 240
    clock[0] = 10_000.0
    resumed = TimeBudget(CONFIG, every(10), 10, SINGLE, started=9990.0, saved=state)
    assert resumed.plan == replace(made.plan, seconds=240.0)
    steps = range(40, made.steps)
    assert [resumed.lr_factor(step) for step in steps] == [made.lr_factor(step) for step in steps]
    run(resumed, clock, lambda step: 6.0, start=40)
    assert clock[0] == pytest.approx(9990 + 360, rel=0.001)


def test_the_decay_of_the_ema_fits_the_steps(clock):
    made = TimeBudget(CONFIG, every(10), 10, SINGLE, started=0.0)
    made.plan, made.steps = TimePlan(50), 50
    assert made.ema == pytest.approx(0.8)
    made.steps = 5
    assert made.ema == 0.5
    made.steps = 10_000
    assert made.ema == 0.99
    without = TimeBudget(
        replace(CONFIG, train=replace(SETTINGS, ema=0.0)), every(9), 9, SINGLE, 0.0
    )
    assert without.ema == 0.0


def test_the_heading_tells_what_follows_from_the_time(clock):
    made = TimeBudget(CONFIG, every(20), 20, SINGLE, started=0.0)
    assert made.summary_lines() == [
        "minutes    10: about 100 steps, warm-up 10, EMA 0.9, an evaluation every 20 steps; "
        "adapted during training"
    ]


def test_an_evaluation_at_the_start_is_for_runs_that_can_afford_it():
    assert TimeBudget(CONFIG, every(10, cost=5.0), 10, SINGLE, 0.0).evaluates_at_start
    assert not TimeBudget(CONFIG, every(10, cost=6.0), 10, SINGLE, 0.0).evaluates_at_start


def test_intervals_that_are_set_are_kept(clock):
    settings = replace(SETTINGS, evaluate_every=7, save_every=9)
    made = TimeBudget(replace(CONFIG, train=settings), every(7), 9, SINGLE, started=0.0)
    evaluations, _ = run(made, clock, lambda step: 20.0, flush=1)
    assert evaluations[:-1] == list(range(7, evaluations[-1], 7))
    assert not made.should_save(16)
    assert made.should_save(18)


def finish(events):
    *_, last = events
    assert isinstance(last, RunFinished)
    return last


@pytest.fixture
def ticking(monkeypatch):
    """A clock that goes on by ten milliseconds whenever it is read."""
    ticks = count()
    monkeypatch.setattr(budget.time, "perf_counter", lambda: 0.01 * next(ticks))


def test_a_run_of_minutes_ends_in_time_and_is_resumed_with_the_rest(data, tmp_path, ticking):
    given = replace(config(data / "cats.txt", steps=10**6, evaluate_every=None), minutes=0.03)
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, 4)
        with pytest.raises(Crash):
            list(begin(given, tmp_path / "run", started=0.0))
    folder = RunFolder(tmp_path / "run")
    saved = checkpoint.latest(folder.checkpoints)
    used = saved.state()["time_plan"]["seconds"]
    assert 0 < used < time.perf_counter()
    resumed = time.perf_counter()
    last = finish(resume(tmp_path / "run"))
    assert time.perf_counter() - resumed == pytest.approx(1.8 - used, rel=0.1)
    assert saved.step < last.step == folder.load_config().train.steps < 1000
    rates = [row["lr"] for row in folder.rows() if "lr" in row]
    assert len(rates) == last.step
    assert rates[-1] < 0.2 * max(rates)
    with pytest.raises(ConfigError, match="minutes cannot change"):
        list(resume(tmp_path / "run", {"minutes": 9}))
    with pytest.raises(ConfigError, match=f"is at step {last.step} already"):
        list(resume(tmp_path / "run"))
    longer = finish(resume(tmp_path / "run", {"train": {"steps": last.step + 3}}))
    assert longer.step == last.step + 3
    assert folder.load_config().minutes is None


def test_time_that_is_used_up_ends_a_run_at_once(data, tmp_path):
    given = replace(config(data / "cats.txt"), minutes=0.02)
    last = finish(begin(given, tmp_path / "run", started=time.perf_counter() - 60))
    assert last.step < 12
    assert last.metrics
