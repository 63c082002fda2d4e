"""Steps replayed from graphs; the graphs themselves need a GPU, all around them does not."""

import pytest
import torch

from regard.accel import cuda_graph as capture
from regard.accel.cuda_graph import WARM, Captured
from regard.data.batch import TextBatch
from regard.models.build import build_model
from regard.models.transformer import TransformerConfig
from regard.tasks import Causal, Objective
from regard.training.loop import train
from regard.training.optim import optimizers


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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU has graphs")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_captured_run_learns_what_a_plain_one_learns(optimizer):
    """Rates, seeds of dropout and skipped steps reach a graph that was recorded before them."""

    def losses(captured):
        torch.manual_seed(0)
        config = TransformerConfig(vocab_size=50, dim=32, layers=2, heads=2, dropout=0.1)
        with torch.device("cuda"):
            objective = Objective(build_model(config), Causal())
        source = torch.Generator().manual_seed(1)
        batches = (
            TextBatch(*torch.randint(0, 50, (2, 8, 16 + 8 * (n % 2)), generator=source)).to("cuda")
            for n in range(4 * WARM)
        )
        steps = train(
            objective,
            batches,
            optimizers(optimizer, objective.model, 1e-3),
            lambda number: 1e-3 * (number + 1),
            capture=captured,
        )
        return torch.stack([step.loss for step in steps])

    # Muon's products are in bfloat16, and may be summed in another order inside a graph
    torch.testing.assert_close(losses(True), losses(False), rtol=1e-3, atol=0)
