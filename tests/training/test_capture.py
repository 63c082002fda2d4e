"""Steps replayed from graphs; the graphs themselves need a GPU, all around them does not."""

import pytest
import torch

from regard.data.batch import TextBatch
from regard.training import capture
from regard.training.capture import WARM, Captured


class Recorder:
    """As a graph is: recording does nothing, a replay does it again with the same tensors."""

    def __init__(self):
        self.recorded = 0

    def __call__(self, work):
        self.recorded += 1
        results = (torch.zeros(()),)

        def replay():
            (found,) = work()
            results[0].copy_(found)

        return replay, results


def batch(value, time=3):
    return TextBatch(torch.full((2, time), value), torch.full((2, time), 10 * value))


def summed(group):
    return (sum((each.ids + each.targets).sum() for each in group).float(),)


@pytest.fixture
def recorder():
    return Recorder()


def test_every_step_gives_what_the_update_gives(recorder):
    captured = Captured(summed, recorder)
    for n in range(12):
        group = [batch(n, time=3 + n % 2), batch(n + 1)]
        expected = summed(group)
        assert captured(group) == expected
    assert recorder.recorded == 2


def test_results_of_one_step_outlive_the_next(recorder):
    captured = Captured(summed, recorder)
    found = [captured([batch(n)])[0] for n in range(WARM + 3)]
    assert [each.item() for each in found] == [66.0 * n for n in range(WARM + 3)]


def test_a_shape_is_recorded_once_after_it_has_warmed_up(recorder):
    captured = Captured(summed, recorder)
    for n in range(WARM):
        captured([batch(n)])
    assert recorder.recorded == 0
    for n in range(4):
        captured([batch(n)])
    assert recorder.recorded == 1


def test_there_are_only_so_many_graphs(recorder, monkeypatch):
    monkeypatch.setattr(capture, "MOST", 2)
    captured = Captured(summed, recorder)
    for n in range(5 * (WARM + 2)):
        assert captured([batch(n, time=n % 5 + 1)]) == summed([batch(n, time=n % 5 + 1)])
    assert recorder.recorded == 2
