"""The loop: one gradient whatever the split, one randomness whatever the beginning."""

from itertools import count, islice

import pytest
import torch

from regard.data.batch import TextBatch
from regard.tasks import Causal
from regard.training.loop import Objective, SingleProcess, count_on_device, train
from regard.training.optim import optimizers, state_tensors
from training.runs import text_batch, tiny


def make_objective(**fields):
    torch.manual_seed(1)
    return Objective(tiny(**fields), Causal())


def plain(objective):
    return [torch.optim.SGD(objective.parameters(), fused=True)]


def weights(objective):
    return {name: value.detach().clone() for name, value in objective.named_parameters()}


def memory(objective, all_optimizers):
    return {name: value.clone() for name, value in state_tensors(objective, all_optimizers)}


def equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def pieces(batch, sizes):
    parts = zip(batch.ids.split(sizes), batch.targets.split(sizes), strict=True)
    return [type(batch)(ids, targets) for ids, targets in parts]


@pytest.mark.parametrize("unscored", [0.0, 0.6], ids=["all scored", "unequally scored"])
@pytest.mark.parametrize("sizes", [[6, 6], [5, 7], [1, 2, 9]])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_micro_batches_give_the_weights_of_the_whole_batch(sizes, unscored, dtype, close):
    batches = [text_batch(12, unscored=unscored, seed=seed) for seed in range(3)]
    results = []
    for accumulate, stream in (
        (1, batches),
        (len(sizes), [part for batch in batches for part in pieces(batch, sizes)]),
    ):
        objective = make_objective().to(dtype)
        steps = list(
            train(objective, stream, plain(objective), lambda step: 0.1, accumulate=accumulate)
        )
        assert len(steps) == 3
        results.append((weights(objective), torch.stack([step.loss for step in steps])))
    (whole, losses), (split, split_losses) = results
    for name in whole:
        torch.testing.assert_close(split[name], whole[name], rtol=0, atol=close)
    torch.testing.assert_close(split_losses, losses, rtol=0, atol=1e-6)


def test_the_loss_is_the_mean_over_the_scored_targets_of_the_step():
    objective = make_objective()
    batches = [text_batch(4, unscored=0.5, seed=1), text_batch(2, seed=2)]
    sums = [float(objective(batch).detach()) for batch in batches]
    counts = [int((batch.targets != -1).sum()) for batch in batches]
    (step,) = train(objective, batches, plain(objective), lambda step: 0.1, accumulate=2)
    assert float(step.num_targets) == sum(counts)
    assert float(step.loss) == pytest.approx(sum(sums) / sum(counts), abs=1e-6)


def not_a_number(objective, batch):
    return objective(batch) * torch.nan


def infinite_gradient(objective, batch):
    """A finite loss, one of whose gradients is not."""
    weight = objective.model.embed.token.weight
    return objective(batch) + (weight[0, 0] - weight[0, 0].detach()).abs().sqrt()


@pytest.mark.parametrize("first", [True, False], ids=["at the first step", "later"])
@pytest.mark.parametrize("fault", [not_a_number, infinite_gradient])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_gradient_that_is_not_finite_changes_nothing(kind, fault, first):
    objective = make_objective()
    ours = optimizers(kind, objective, 0.01)
    bad = text_batch(seed=9)
    batches = [bad] if first else [text_batch(seed=1), text_batch(seed=2), bad]
    wrapped = SingleProcess(objective)
    wrapped.loss = lambda batch: fault(objective, batch) if batch is bad else objective(batch)
    steps = train(objective, batches, ours, lambda step: 0.01, strategy=wrapped)
    good = list(islice(steps, len(batches) - 1))
    before, remembered = weights(objective), memory(objective, ours)
    (step,) = steps
    assert [float(each.skipped) for each in good] == [0.0] * len(good)
    assert float(step.skipped) == 1.0
    assert equal(weights(objective), before)
    after = memory(objective, ours)
    assert equal(after, remembered) if remembered else all(not v.any() for v in after.values())


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_skipped_step_leaves_no_trace_in_the_steps_after_it(kind):
    bad = text_batch(seed=9)
    ends = []
    for batches in (
        [text_batch(seed=1), bad, text_batch(seed=2)],
        [text_batch(seed=s) for s in (1, 2)],
    ):
        objective = make_objective()
        wrapped = SingleProcess(objective)
        wrapped.loss = lambda batch, loss=objective: (
            loss(batch) * (torch.nan if batch is bad else 1)
        )
        ours = optimizers(kind, objective, 0.01)
        steps = train(objective, batches, ours, lambda step: 0.01, strategy=wrapped)
        assert sum(float(step.skipped) for step in steps) == len(batches) - 2
        ends.append(weights(objective))
    assert equal(*ends)


def losses(objective, ours, batches, **options):
    steps = train(objective, batches, ours, lambda step: 0.01, **options)
    return [float(step.loss) for step in steps]


def test_dropout_is_a_function_of_seed_and_step():
    batches = [text_batch(seed=s) for s in range(6)]
    objective = make_objective(dropout=0.5)
    whole = losses(objective, plain(objective), batches, seed=3)
    objective = make_objective(dropout=0.5)
    begun = losses(objective, plain(objective), batches[:2], seed=3)
    torch.rand(7)  # whatever happens between must not matter
    ended = losses(objective, plain(objective), batches[2:], seed=3, start=2)
    assert begun + ended == whole
    other = make_objective(dropout=0.5)
    assert losses(other, plain(other), batches, seed=4)[0] != whole[0]


def test_two_steps_on_one_batch_drop_different_units():
    objective = make_objective(dropout=0.5)
    steps = train(objective, [text_batch()] * 2, plain(objective), lambda step: 0.0)
    first, second = (float(step.loss) for step in steps)
    assert first != second


def test_the_gradient_is_cut_to_the_norm_that_clip_allows():
    moved = {}
    for clip in (0.01, 0.0):
        objective = make_objective()
        before = weights(objective)
        (step,) = train(
            objective, [text_batch()], plain(objective), lambda step: 1.0, max_grad_norm=clip
        )
        change = [(weights(objective)[n] - before[n]).norm() for n in before]
        moved[clip] = float(torch.stack(change).norm()), float(step.grad_norm)
    assert moved[0.01][0] == pytest.approx(0.01, rel=1e-3)
    assert moved[0.0][0] == pytest.approx(moved[0.0][1], rel=1e-3)  # 0: not cut
    assert moved[0.01][1] == moved[0.0][1] > 0.1  # what is told is the norm before the cut


def test_the_rate_is_asked_for_each_step_by_its_number():
    objective = make_objective()
    ours = optimizers("muon", objective, 1.0)
    steps = train(objective, [text_batch()] * 3, ours, lambda step: step / 100, start=5)
    assert [(step.index, step.lr) for step in steps] == [(5, 0.05), (6, 0.06), (7, 0.07)]
    assert {group["lr"] for each in ours for group in each.param_groups} == {0.07}


def test_three_steps_can_be_taken_from_an_endless_stream():
    objective = make_objective()
    drawn = []

    def stream():
        for number in count():
            drawn.append(number)
            yield text_batch(seed=number)

    steps = train(objective, stream(), plain(objective), lambda step: 0.1, accumulate=2)
    assert drawn == []  # nothing happens before it is asked for
    assert [step.index for step in islice(steps, 3)] == [0, 1, 2]
    assert drawn == [0, 1, 2, 3, 4, 5]


def test_training_ends_with_the_batches_and_the_last_step_may_be_smaller():
    objective = make_objective()
    steps = train(objective, [text_batch()] * 5, plain(objective), lambda step: 0.1, accumulate=2)
    assert [float(step.num_targets) for step in steps] == [64, 64, 32]
    assert next(steps, None) is None


def test_a_step_with_nothing_to_score_is_no_division_by_zero():
    objective = make_objective()
    nothing = TextBatch(torch.zeros(2, 4, dtype=torch.long), torch.full((2, 4), -1))
    steps = train(objective, [nothing], optimizers("adamw", objective.model, 0.0), lambda n: 0.0)
    (step,) = list(steps)
    assert step.loss == 0
    assert step.skipped == 0


def test_targets_that_a_task_counts_on_the_host_are_on_the_device_of_the_model():
    counted = torch.tensor(7)
    assert count_on_device(torch.device("cpu"), counted) is counted
    assert count_on_device(torch.device("meta"), counted).device.type == "meta"
