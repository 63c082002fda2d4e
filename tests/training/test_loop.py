"""The loop: one gradient whatever the split, one randomness whatever the beginning."""

from itertools import count, islice

import pytest
import torch

from regard.data.batch import TextBatch
from regard.tasks import Causal, Objective
from regard.training.loop import train
from regard.training.optim import optimizers, state_tensors
from regard.training.parallel.wrappers import Learner
from training.runs import text_batch, tiny


def objective(**fields):
    torch.manual_seed(1)
    return Objective(tiny(**fields), Causal())


def plain(learner):
    return [torch.optim.SGD(learner.parameters(), fused=True)]


def weights(learner):
    return {name: value.detach().clone() for name, value in learner.named_parameters()}


def memory(learner, all_optimizers):
    return {name: value.clone() for name, value in state_tensors(learner, all_optimizers)}


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
        learner = objective().to(dtype)
        steps = list(
            train(learner, stream, plain(learner), lambda step: 0.1, accumulate=accumulate)
        )
        assert len(steps) == 3
        results.append((weights(learner), torch.stack([step.loss for step in steps])))
    (whole, losses), (split, split_losses) = results
    for name in whole:
        torch.testing.assert_close(split[name], whole[name], rtol=0, atol=close)
    torch.testing.assert_close(split_losses, losses, rtol=0, atol=1e-6)


def test_the_loss_is_the_mean_over_the_scored_targets_of_the_step():
    learner = objective()
    batches = [text_batch(4, unscored=0.5, seed=1), text_batch(2, seed=2)]
    sums = [float(learner(batch).detach()) for batch in batches]
    counts = [int((batch.targets != -1).sum()) for batch in batches]
    (step,) = train(learner, batches, plain(learner), lambda step: 0.1, accumulate=2)
    assert float(step.targets) == sum(counts)
    assert float(step.loss) == pytest.approx(sum(sums) / sum(counts), abs=1e-6)


def not_a_number(learner, batch):
    return learner(batch) * torch.nan


def infinite_gradient(learner, batch):
    """A finite loss, one of whose gradients is not."""
    weight = learner.model.embed.token.weight
    return learner(batch) + (weight[0, 0] - weight[0, 0].detach()).abs().sqrt()


@pytest.mark.parametrize("first", [True, False], ids=["at the first step", "later"])
@pytest.mark.parametrize("fault", [not_a_number, infinite_gradient])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_gradient_that_is_not_finite_changes_nothing(kind, fault, first):
    learner = objective()
    ours = optimizers(kind, learner, 0.01)
    bad = text_batch(seed=9)
    batches = [bad] if first else [text_batch(seed=1), text_batch(seed=2), bad]
    wrapped = Learner(learner)
    wrapped.loss = lambda batch: fault(learner, batch) if batch is bad else learner(batch)
    steps = train(learner, batches, ours, lambda step: 0.01, learner=wrapped)
    good = list(islice(steps, len(batches) - 1))
    before, remembered = weights(learner), memory(learner, ours)
    (step,) = steps
    assert [float(each.skipped) for each in good] == [0.0] * len(good)
    assert float(step.skipped) == 1.0
    assert equal(weights(learner), before)
    after = memory(learner, ours)
    assert equal(after, remembered) if remembered else all(not v.any() for v in after.values())


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_skipped_step_leaves_no_trace_in_the_steps_after_it(kind):
    bad = text_batch(seed=9)
    ends = []
    for batches in (
        [text_batch(seed=1), bad, text_batch(seed=2)],
        [text_batch(seed=s) for s in (1, 2)],
    ):
        learner = objective()
        wrapped = Learner(learner)
        wrapped.loss = lambda batch, loss=learner: loss(batch) * (torch.nan if batch is bad else 1)
        ours = optimizers(kind, learner, 0.01)
        steps = train(learner, batches, ours, lambda step: 0.01, learner=wrapped)
        assert sum(float(step.skipped) for step in steps) == len(batches) - 2
        ends.append(weights(learner))
    assert equal(*ends)


def losses(learner, ours, batches, **options):
    steps = train(learner, batches, ours, lambda step: 0.01, **options)
    return [float(step.loss) for step in steps]


def test_dropout_is_a_function_of_seed_and_step():
    batches = [text_batch(seed=s) for s in range(6)]
    learner = objective(dropout=0.5)
    whole = losses(learner, plain(learner), batches, seed=3)
    learner = objective(dropout=0.5)
    begun = losses(learner, plain(learner), batches[:2], seed=3)
    torch.rand(7)  # whatever happens between must not matter
    ended = losses(learner, plain(learner), batches[2:], seed=3, start=2)
    assert begun + ended == whole
    other = objective(dropout=0.5)
    assert losses(other, plain(other), batches, seed=4)[0] != whole[0]


def test_two_steps_on_one_batch_drop_different_units():
    learner = objective(dropout=0.5)
    steps = train(learner, [text_batch()] * 2, plain(learner), lambda step: 0.0)
    first, second = (float(step.loss) for step in steps)
    assert first != second


def test_the_gradient_is_cut_to_the_norm_that_clip_allows():
    moved = {}
    for clip in (0.01, 0.0):
        learner = objective()
        before = weights(learner)
        (step,) = train(learner, [text_batch()], plain(learner), lambda step: 1.0, clip=clip)
        change = [(weights(learner)[n] - before[n]).norm() for n in before]
        moved[clip] = float(torch.stack(change).norm()), float(step.grad_norm)
    assert moved[0.01][0] == pytest.approx(0.01, rel=1e-3)
    assert moved[0.0][0] == pytest.approx(moved[0.0][1], rel=1e-3)  # 0: not cut
    assert moved[0.01][1] == moved[0.0][1] > 0.1  # what is told is the norm before the cut


def test_the_rate_is_asked_for_each_step_by_its_number():
    learner = objective()
    ours = optimizers("muon", learner, 1.0)
    steps = train(learner, [text_batch()] * 3, ours, lambda step: step / 100, start=5)
    assert [(step.number, step.rate) for step in steps] == [(5, 0.05), (6, 0.06), (7, 0.07)]
    assert {group["lr"] for each in ours for group in each.param_groups} == {0.07}


def test_three_steps_can_be_taken_from_an_endless_stream():
    learner = objective()
    drawn = []

    def stream():
        for number in count():
            drawn.append(number)
            yield text_batch(seed=number)

    steps = train(learner, stream(), plain(learner), lambda step: 0.1, accumulate=2)
    assert drawn == []  # nothing happens before it is asked for
    assert [step.number for step in islice(steps, 3)] == [0, 1, 2]
    assert drawn == [0, 1, 2, 3, 4, 5]


def test_training_ends_with_the_batches_and_the_last_step_may_be_smaller():
    learner = objective()
    steps = train(learner, [text_batch()] * 5, plain(learner), lambda step: 0.1, accumulate=2)
    assert [float(step.targets) for step in steps] == [64, 64, 32]
    assert next(steps, None) is None


def test_a_step_with_nothing_to_score_is_no_division_by_zero():
    learner = objective()
    nothing = TextBatch(torch.zeros(2, 4, dtype=torch.long), torch.full((2, 4), -1))
    steps = train(learner, [nothing], optimizers("adamw", learner.model, 0.0), lambda n: 0.0)
    (step,) = list(steps)
    assert step.loss == 0
    assert step.skipped == 0
