"""Language modelling: what a batch looks like, and how it is scored."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from regard.data.batch import TextBatch
from regard.errors import ConfigError
from regard.tasks import TASKS, Causal
from regard.training.loop import Objective
from training.runs import text_batch, tiny


def generator():
    return torch.Generator().manual_seed(1)


def by_hand(model, batch, smoothing=0.0):
    """The loss of every scored target, from the logits, one after the other."""
    logits = model.head(model(batch.ids)).flatten(0, 1).double()
    total = 0.0
    for row, target in zip(logits, batch.targets.flatten(), strict=True):
        if target != -1:
            logp = row.log_softmax(-1)
            total += -(1 - smoothing) * logp[target] - smoothing * logp.mean()
    return float(total.detach())


def test_a_batch_is_blocks_of_ids_and_what_follows_each():
    block = np.array([[5, 6, 7, 8], [1, 2, 3, 4]])
    batch = Causal().collate((block[:, :-1], block[:, 1:]), generator())
    assert batch.ids.tolist() == [[5, 6, 7], [1, 2, 3]]
    assert batch.targets.tolist() == [[6, 7, 8], [2, 3, 4]]
    assert batch.ids.dtype == batch.targets.dtype == torch.int64


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("unscored", [0.0, 0.5])
def test_the_loss_is_the_sum_over_the_scored_targets(smoothing, unscored):
    model, batch = tiny().train(), text_batch(unscored=unscored)
    task = Causal(label_smoothing=smoothing)
    with torch.no_grad():
        loss = float(task.loss(model, batch))
    assert loss == pytest.approx(by_hand(model, batch, smoothing), 1e-5)
    assert int(task.count(batch)) == int((batch.targets != -1).sum())
    assert task.count(batch).dtype == torch.int64


def test_label_smoothing_is_for_training_and_not_for_evaluation():
    model, batch = tiny(), text_batch()
    plain, smooth = Causal(), Causal(label_smoothing=0.3)
    with torch.no_grad():
        learning = [task.loss(model.train(), batch).item() for task in (plain, smooth)]
        judging = [task.loss(model.eval(), batch).item() for task in (plain, smooth)]
    assert learning[0] != pytest.approx(learning[1], 1e-4)
    assert judging[0] == judging[1]
    assert smooth.metrics(model, [batch]) == plain.metrics(model, [batch])


def test_metrics_are_of_all_targets_and_not_of_the_mean_of_batches():
    model = tiny()
    batches = [text_batch(1, unscored=0.8, seed=1), text_batch(6, seed=2)]
    metrics = Causal(bytes_per_token=2.5).metrics(model, batches)
    model.eval()
    loss = sum(by_hand(model, batch) for batch in batches)
    count = sum(int((batch.targets != -1).sum()) for batch in batches)
    assert metrics["loss"] == pytest.approx(loss / count, 1e-6)
    assert metrics["perplexity"] == pytest.approx(math.exp(loss / count), 1e-6)
    assert metrics["bits_per_byte"] == pytest.approx(loss / count / math.log(2) / 2.5, 1e-6)
    assert "bits_per_byte" not in Causal().metrics(model, batches)


def test_evaluation_is_without_dropout_and_leaves_the_model_in_training_mode():
    model, batch = tiny(dropout=0.5).train(), text_batch()
    first, second = (Causal().metrics(model, [batch]) for _ in range(2))
    assert first == second
    assert model.training


def test_the_objective_is_the_loss_of_the_task():
    model, batch = tiny(), text_batch()
    objective = Objective(model, Causal())
    assert torch.equal(objective(batch), Causal().loss(model, batch))
    assert {name for name, _ in objective.named_parameters()} == {
        f"model.{name}" for name, _ in model.named_parameters()
    }


def test_the_gradient_is_that_of_cross_entropy():
    torch.manual_seed(1)
    model, batch = tiny().double(), text_batch(unscored=0.3)
    Causal(label_smoothing=0.1).loss(model, batch).backward()
    ours = {name: param.grad.clone() for name, param in model.named_parameters()}
    model.zero_grad()
    F.cross_entropy(
        model.head(model(batch.ids)).flatten(0, 1),
        batch.targets.flatten(),
        ignore_index=-1,
        reduction="sum",
        label_smoothing=0.1,
    ).backward()
    for name, param in model.named_parameters():
        torch.testing.assert_close(ours[name], param.grad, rtol=0, atol=1e-10)


def test_a_batch_moves_to_another_device_whole():
    moved = text_batch().to("meta")
    assert isinstance(moved, TextBatch)
    assert moved.ids.device.type == moved.targets.device.type == "meta"


@pytest.mark.parametrize(
    "name", [each for each in TASKS if hasattr(TASKS[each], "label_smoothing")]
)
@pytest.mark.parametrize("smoothing", [-0.1, 1.0, math.nan])
def test_label_smoothing_that_leaves_nothing_to_learn_is_refused(name, smoothing):
    with pytest.raises(ConfigError, match="must be at least 0 and below 1"):
        TASKS[name](label_smoothing=smoothing)
