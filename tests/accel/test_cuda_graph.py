"""Training steps replayed from CUDA graphs; without a GPU a stand-in replays them."""

import pytest
import torch

from regard.accel import cuda_graph
from regard.accel.cuda_graph import WARM_UP_STEPS, CudaGraphTrainingStep
from regard.data.batch import TextBatch
from regard.models.build import build_model
from regard.models.transformer import TransformerConfig
from regard.tasks import Causal
from regard.training.loop import Objective, train
from regard.training.optim import optimizers


class FakeCapture:
    """Capturing runs nothing; a replay runs the work again with the same tensors."""

    def __init__(self):
        self.captured = 0

    def __call__(self, work):
        self.captured += 1
        results = (torch.zeros(()),)

        def replay():
            (result,) = work()
            results[0].copy_(result)

        return replay, results


def batch(value, time=3):
    return TextBatch(torch.full((2, time), value), torch.full((2, time), 10 * value))


def summed(group):
    return (sum((batch.ids + batch.targets).sum() for batch in group).float(),)


@pytest.fixture
def capture():
    return FakeCapture()


def test_every_replay_gives_what_the_step_gives(capture):
    step = CudaGraphTrainingStep(summed, capture)
    for n in range(12):
        group = [batch(n, time=3 + n % 2), batch(n + 1)]
        expected = summed(group)
        assert step(group) == expected
    assert capture.captured == 2


def test_results_of_one_step_outlive_the_next(capture):
    step = CudaGraphTrainingStep(summed, capture)
    results = [step([batch(n)])[0] for n in range(WARM_UP_STEPS + 3)]
    assert [result.item() for result in results] == [66.0 * n for n in range(WARM_UP_STEPS + 3)]


def test_a_shape_is_captured_once_after_it_has_warmed_up(capture):
    step = CudaGraphTrainingStep(summed, capture)
    for n in range(WARM_UP_STEPS):
        step([batch(n)])
    assert capture.captured == 0
    for n in range(4):
        step([batch(n)])
    assert capture.captured == 1


def test_there_are_only_so_many_graphs(capture, monkeypatch):
    monkeypatch.setattr(cuda_graph, "MAX_GRAPHS", 2)
    step = CudaGraphTrainingStep(summed, capture)
    for n in range(5 * (WARM_UP_STEPS + 2)):
        assert step([batch(n, time=n % 5 + 1)]) == summed([batch(n, time=n % 5 + 1)])
    assert capture.captured == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU has graphs")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_captured_run_learns_what_a_plain_one_learns(optimizer):
    """A graph reads learning rates and dropout seeds at each replay."""

    def losses(capture):
        torch.manual_seed(0)
        config = TransformerConfig(vocab_size=50, dim=32, layers=2, heads=2, dropout=0.1)
        with torch.device("cuda"):
            objective = Objective(build_model(config), Causal())
        source = torch.Generator().manual_seed(1)
        batches = (
            TextBatch(*torch.randint(0, 50, (2, 8, 16 + 8 * (n % 2)), generator=source)).to("cuda")
            for n in range(4 * WARM_UP_STEPS)
        )
        steps = train(
            objective,
            batches,
            optimizers(optimizer, objective.model, 1e-3),
            lambda number: 1e-3 * (number + 1),
            capture=capture,
        )
        return torch.stack([step.loss for step in steps])

    # Muon's matmuls are in bfloat16, and may be summed in another order inside a graph
    torch.testing.assert_close(losses(True), losses(False), rtol=1e-3, atol=0)
