"""Micro-batches are the whole batch, whatever is learned."""

from dataclasses import fields, is_dataclass
from itertools import pairwise

import pytest
import torch

from regard.tasks import TASKS, CBOWTask, Forecast
from regard.tasks.contrastive import Contrastive
from regard.training.loop import train
from training.objectives import OBJECTIVES, make_objective


def rows(batch, start, stop):
    """Some rows of a batch of any kind."""
    if batch is None or isinstance(batch, torch.Tensor):
        return None if batch is None else batch[start:stop]
    assert is_dataclass(batch)
    parts = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return type(batch)(**{name: rows(part, start, stop) for name, part in parts.items()})


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.usefixtures("float64")
def test_micro_batches_of_every_task_give_the_weights_of_the_whole_batch(name):
    found = []
    for bounds in ([0, 3], [0, 2, 3]):
        objective, batch = make_objective(name, dropout=0.0)
        parts = [rows(batch, *pair) for pair in pairwise(bounds)]
        plain = torch.optim.SGD(objective.parameters(), fused=True)
        (step,) = train(objective, parts, [plain], lambda step: 0.1, accumulate=len(parts))
        found.append((step.loss, step.num_targets, objective.state_dict()))
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)
    before = make_objective(name, dropout=0.0)[0].state_dict()
    assert any(not torch.equal(before[each], value) for each, value in found[0][2].items())


def test_every_task_is_among_them():
    # no layers: tests/tasks/test_cbow.py; no steps: tests/tasks/test_forecast.py; and the loss of
    # a contrastive batch is not a sum over its rows, which are each other's negatives
    apart = {CBOWTask, Forecast, Contrastive}
    assert {type(task) for _, _, task, _ in OBJECTIVES.values()} == set(TASKS.values()) - apart
