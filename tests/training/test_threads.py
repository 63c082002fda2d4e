"""The number of threads follows the load of the machine, but for numbers that are given."""

import pytest
import torch

from regard.config import TrainConfig
from regard.training import threads
from regard.training.threads import Threads

CPU = torch.device("cpu")


class Machine:
    """A machine with a clock, threads that wait for cores, and a speed per number of threads."""

    def __init__(self, speeds, waiting, others=1.0):
        self.speeds, self.waiting, self.others = speeds, waiting, others
        self.used, self.own = 0.0, 0.0
        self.threads, self.now, self.waited, self.done = max(speeds), 0.0, 0.0, 0

    def train(self, made, seconds):
        """Train for some seconds; returns the numbers of threads that were kept."""
        kept = []
        for _ in range(int(seconds / 2)):
            self.done += int(2 * self.speeds[self.threads])
            self.now += 2.0
            self.waited += 2.0 * self.waiting
            self.own += 2.0
            self.used += 2.0 + 2.0 * self.others
            kept.append(made.adapt(self.done))
        return [number for number in kept if number is not None]


@pytest.fixture
def machine(monkeypatch):
    def make(speeds, waiting, others=1.0):
        made = Machine(speeds, waiting, others)
        monkeypatch.setattr(threads.time, "perf_counter", lambda: made.now)
        monkeypatch.setattr(threads.time, "process_time", lambda: made.own)
        monkeypatch.setattr(threads, "_wait_seconds", lambda: made.waited)
        monkeypatch.setattr(threads, "_cpu_seconds", lambda: made.used)
        monkeypatch.setattr(torch, "get_num_threads", lambda: made.threads)
        monkeypatch.setattr(torch, "set_num_threads", lambda n: setattr(made, "threads", n))
        for name in threads.THREAD_VARIABLES:
            monkeypatch.delenv(name, raising=False)
        return made

    return make


def test_a_busy_machine_gets_fewer_threads_and_a_free_one_all_again(machine):
    made = machine({8: 10, 4: 20, 2: 40, 1: 30}, waiting=5.0)
    adapted = Threads(TrainConfig(), CPU, 1)
    assert made.train(adapted, 60) == [4, 2]
    assert made.threads == 2
    made.speeds, made.waiting = {8: 80, 4: 40, 2: 20, 1: 10}, 0.0
    assert made.train(adapted, 300) == [4, 8]
    assert made.threads == 8


def test_fewer_threads_that_are_not_faster_are_given_up(machine):
    made = machine({2: 20, 1: 19}, waiting=1.0)
    adapted = Threads(TrainConfig(), CPU, 1)
    changes = []
    for _ in range(300):
        assert made.train(adapted, 2) == []
        changes.append(made.threads)
    assert changes[-1] == 2
    assert 3 <= changes.count(1) <= 10  # trials, less and less often


def test_nothing_changes_on_a_free_machine_or_where_the_number_is_given(machine, monkeypatch):
    made = machine({2: 10, 1: 100}, waiting=0.1)
    assert made.train(Threads(TrainConfig(), CPU, 1), 100) == []
    made.waiting = 5.0
    assert not Threads(TrainConfig(threads=2), CPU, 1).adapts
    assert not Threads(TrainConfig(), torch.device("cuda"), 1).adapts
    assert not Threads(TrainConfig(), CPU, 2).adapts
    made.threads = 1
    assert not Threads(TrainConfig(), CPU, 1).adapts
    made.threads = 2
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    given = Threads(TrainConfig(), CPU, 1)
    assert made.train(given, 100) == []
    given.restore(1)
    assert made.threads == 2


def test_nothing_is_tried_where_threads_wait_for_each_other_only(machine):
    """The thread that prefetches batches waits for a core that computes."""
    made = machine({2: 20, 1: 100}, waiting=1.0, others=0.05)
    assert made.train(Threads(TrainConfig(), CPU, 1), 100) == []
    assert made.threads == 2
    made.others = -1.0  # a system that counts nothing for the cores
    assert made.train(Threads(TrainConfig(), CPU, 1), 20) == [1]


def test_a_trial_that_is_slower_ends_early(machine):
    made = machine({2: 20, 1: 10}, waiting=1.0)
    adapted = Threads(TrainConfig(), CPU, 1)
    while made.threads == 2:
        assert made.train(adapted, 2) == []
    made.now, made.done = made.now + 0.6, made.done + 6
    assert adapted.adapt(made.done) is None
    assert made.threads == 2


def test_a_resumed_run_continues_with_the_threads_of_its_checkpoint(machine):
    made = machine({4: 1, 2: 1, 1: 1}, waiting=0.0)
    adapted = Threads(TrainConfig(), CPU, 1)
    adapted.restore(2)
    assert made.threads == 2
    for other in (None, 8, 0):
        adapted.restore(other)
        assert made.threads == 2


def test_a_checkpoint_during_a_trial_has_the_threads_from_before_it(machine):
    made = machine({2: 20, 1: 19}, waiting=1.0)
    adapted = Threads(TrainConfig(), CPU, 1)
    seen = set()
    for _ in range(20):
        made.train(adapted, 2)
        seen.add((made.threads, adapted.current_threads))
    assert seen == {(2, 2), (1, 2)}


def test_the_time_that_threads_wait_is_known_on_linux_only(monkeypatch, tmp_path):
    if threads.THREADS_DIR.exists():
        assert threads._wait_seconds() >= 0
    monkeypatch.setattr(threads, "THREADS_DIR", tmp_path / "nowhere")
    assert threads._wait_seconds() is None
    if threads.CPU_STAT.exists():
        assert threads._cpu_seconds() > 0
    monkeypatch.setattr(threads, "CPU_STAT", tmp_path / "nowhere")
    assert threads._cpu_seconds() is None
