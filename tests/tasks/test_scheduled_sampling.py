"""Scheduled sampling: how often, what is read then, and that a run of it goes on bit for bit."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from regard.data.batch import PairBatch, TextBatch
from regard.errors import ConfigError
from regard.models.build import build_model, resolve
from regard.nn.state import Source
from regard.pipelines import prepare_training
from regard.pipelines.pairs import free_running_loss
from regard.tasks import Causal, Seq2Seq
from regard.tasks.scheduled_sampling import (
    SAMPLING_SCHEDULES,
    _sample_ids,
    mix_predictions,
    sampling_schedule,
)
from regard.training.run import begin, resume
from training.runs import Crash, config, contents, interrupt, write_data

VOCAB, ROWS, TIME = 13, 3, 6
LANGUAGES = {
    "elman": {"family": "recurrent", "cell": "elman", "layers": 2},
    "lstm": {"family": "recurrent", "cell": "lstm", "layers": 1},
    "convolution": {"family": "convolution", "layers": 2},
    "bengio": {"family": "feedforward", "order": 4},
    "transformer": {"heads": 2, "layers": 2},
}
READERS = {
    "lstm": {"family": "seq2seq", "bidirectional": False},
    "attention": {"family": "seq2seq", "score": "additive", "attention_placement": "bahdanau"},
    "transformer": {"architecture": "encoder-decoder", "heads": 2, "layers": 1},
}


def build(table, certain=False):
    """A model; one that is certain of what it would write, so that a draw is no matter of luck."""
    torch.manual_seed(6)
    model = build_model(resolve({**table, "vocab_size": VOCAB, "dim": 8, "context": 16}))
    if certain:
        for weight in (each for each in model.parameters() if each.ndim > 1):
            nn.init.normal_(weight)  # so large that everything matters
        head = model.head
        head.forward = lambda x, plain=head.forward: 1e6 * plain(x)
    return model.train()


def ids(rows=ROWS, seed=7):
    return torch.randint(VOCAB, (rows, TIME), generator=torch.Generator().manual_seed(seed))


def marks_at(share, seed=8):
    return torch.rand(ROWS, TIME, generator=torch.Generator().manual_seed(seed)) < share


def read_source():
    return Source(ids(seed=9), torch.tensor([6, 4, 2]))


@pytest.mark.parametrize(
    ("choice", "truth"),
    [
        (0.25, lambda s: 0.75),
        (
            {"kind": "linear", "max_probability": 0.5, "ramp_fraction": 0.8},
            lambda s: max(0.5, 1 - 0.5 * s / 80),
        ),
        ({"kind": "exponential", "k": 0.98}, lambda s: 0.98**s),
        ({"kind": "sigmoid", "k": 20.0}, lambda s: 20 / (20 + math.exp(s / 20))),
    ],
    ids=["constant", *SAMPLING_SCHEDULES],
)
def test_the_share_of_the_truth_falls_as_in_the_paper(choice, truth):
    share = sampling_schedule(choice, 100)
    assert [1 - share(s) for s in range(0, 101, 7)] == pytest.approx(
        [truth(s) for s in range(0, 101, 7)], abs=1e-12
    )


def test_a_share_stays_a_share_for_ever():
    for name in SAMPLING_SCHEDULES:
        share = sampling_schedule(name, 10)
        assert 0 <= share(0) <= share(5) <= share(10**6) <= 1


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (1.5, "must be at least 0 and at most 1"),
        ("linaer", "did you mean 'linear'"),
        ({"kind": "linear", "max_probability": 2.0}, "must lie between 0 and 1"),
        ({"kind": "exponential", "k": 1.0}, "must lie between 0 and 1"),
        ({"kind": "sigmoid", "k": 0.5}, "must be at least 1"),
        ({"kind": "sigmoid", "k": math.nan}, "must be at least 1"),
        ({"kind": "sigmoid", "k": math.inf}, "must be at least 1"),
    ],
)
def test_a_share_that_is_none_is_refused(choice, said):
    for task in (Causal, Seq2Seq):
        with pytest.raises(ConfigError, match=said):
            task(scheduled_sampling=choice)


@pytest.mark.parametrize("name", LANGUAGES)
def test_without_marks_it_reads_the_true_tokens_to_the_bit(name):
    model, truth = build(LANGUAGES[name]), ids()
    batch = TextBatch(truth, truth.roll(-1, 1))
    forced = Causal().loss(model, batch)
    sampled = Causal().loss(model, replace(batch, use_prediction=marks_at(0.0)))
    assert torch.equal(forced, sampled)
    assert torch.equal(mix_predictions(model, truth, marks_at(0.0)), truth)


def by_torch(model, truth, marks):
    """A loop around torch's cell, which writes the most probable id and reads it where due."""
    cell, layer = nn.LSTMCell(8, 8), model.layers[0]
    with torch.no_grad():
        cell.weight_ih.copy_(layer.input.weight)
        cell.weight_hh.copy_(layer.hidden.weight)
        cell.bias_ih.copy_(layer.input.bias)
        cell.bias_hh.zero_()
        read, state = [truth[:, 0]], (torch.zeros(ROWS, 8), torch.zeros(ROWS, 8))
        for t in range(1, TIME):
            state = cell(model.embed.weight[read[-1]], state)
            wrote = (state[0] @ model.embed.weight.T).argmax(-1)
            read.append(torch.where(marks[:, t], wrote, truth[:, t]))
    return torch.stack(read, 1)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_recurrent_model_reads_what_it_would_have_written(share):
    model, truth, marks = build(LANGUAGES["lstm"], certain=True), ids(), marks_at(share)
    expected = by_torch(model, truth, marks)
    assert torch.equal(mix_predictions(model, truth, marks), expected)
    assert not torch.equal(expected, truth)


@pytest.mark.parametrize("name", [name for name in LANGUAGES if name != "transformer"])
def test_from_step_to_step_is_what_reading_it_all_again_gives(name):
    model, truth = build(LANGUAGES[name], certain=True).eval(), ids()
    read = mix_predictions(model, truth, marks_at(1.0))
    wrote = model.head(model(read)).argmax(-1)
    assert torch.equal(read[:, 0], truth[:, 0])
    assert torch.equal(read[:, 1:], wrote[:, :-1])


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_transformer_mixes_samples_of_one_pass_over_the_true_tokens(share):
    model, truth, marks = build(LANGUAGES["transformer"], certain=True), ids(), marks_at(share)
    read = mix_predictions(model, truth, marks)
    for row in range(ROWS):
        for t in range(TIME):
            expected = truth[row, t]
            if t and marks[row, t]:
                expected = model.head(model(truth[row : row + 1, :t]))[0, -1].argmax()
            assert read[row, t] == expected
    assert not torch.equal(read, truth)


@pytest.mark.parametrize("name", READERS)
def test_a_model_that_reads_a_source_predicts_from_it(name):
    model, truth, source = build(READERS[name], certain=True).eval(), ids(), read_source()
    marks = marks_at(1.0)
    if name == "transformer":  # whose draws are from the truth: all but the second word
        marks[:, 2:] = False
    read = mix_predictions(model, truth, marks, source)
    wrote = model.head(model(read, source=source)).argmax(-1)
    assert torch.equal(read[:, 1:][marks[:, 1:]], wrote[:, :-1][marks[:, 1:]])
    sources = source, Source(source.ids.roll(1, 0), source.lengths.roll(1, 0))
    one, other = (mix_predictions(model, truth, marks_at(1.0), each) for each in sources)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("name", ["lstm", "transformer"])
def test_the_loss_and_its_gradient_are_those_of_what_was_read(name):
    model, truth = build(LANGUAGES[name]), ids()
    batch = TextBatch(truth, truth.roll(-1, 1), marks_at(0.6))

    def learned(loss):
        return loss, *torch.autograd.grad(loss, list(model.parameters()))

    torch.manual_seed(1)
    read = mix_predictions(model, truth, batch.use_prediction)
    expected = learned(Causal().loss(model, TextBatch(read, batch.targets)))
    torch.manual_seed(1)
    found = learned(Causal().loss(model, batch))
    assert not torch.equal(read, truth)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", READERS)
def test_pairs_are_trained_on_in_the_same_way(name):
    model, source, truth = build(READERS[name]), read_source(), ids()
    batch = PairBatch(source, truth, truth.roll(-1, 1), marks_at(0.6))
    torch.manual_seed(1)
    read = mix_predictions(model, truth, batch.use_prediction, source)
    torch.manual_seed(1)
    loss = Seq2Seq().loss(model, batch)
    assert torch.equal(loss, Seq2Seq().loss(model, PairBatch(source, read, batch.targets)))
    assert loss != Seq2Seq().loss(model, replace(batch, use_prediction=None))


@pytest.mark.parametrize("name", READERS)
def test_the_free_running_loss_is_that_of_reading_its_own_predictions(name):
    model, truth, source = build(READERS[name], certain=True).eval(), ids(), read_source()
    batch = PairBatch(source, truth, truth.roll(-1, 1))
    read = truth[:, :1]
    while read.shape[1] < TIME:
        wrote = model.head(model(read, source=source))[:, -1:].argmax(-1)
        read = torch.cat([read, wrote], 1)
    expected = Seq2Seq().metrics(model, [replace(batch, ids=read)])["loss"]
    eval_data = SimpleNamespace(task=Seq2Seq(), validation_batches=lambda _: [batch])
    before = torch.get_rng_state()
    found = free_running_loss(eval_data, model, torch.device("cpu"))
    assert found == pytest.approx(expected, rel=1e-5)
    assert found != pytest.approx(Seq2Seq().metrics(model, [batch])["loss"], rel=1e-2)
    assert torch.equal(torch.get_rng_state(), before)


def test_ids_are_drawn_as_likely_as_the_model_says():
    torch.manual_seed(2)
    logits = torch.tensor([1.0, 0.0, -1.0, -torch.inf]).log_softmax(-1)
    drawn = _sample_ids(logits.expand(40_000, 4)).bincount(minlength=4) / 40_000
    assert drawn[3] == 0
    # five standard deviations of a share of 40 000
    assert torch.allclose(drawn, logits.exp(), rtol=0, atol=5 * 0.5 / 200)


# In a run


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


GROWING = {"kind": "linear", "max_probability": 1.0}
TASKS = {
    "cats.txt": {"kind": "causal", "scheduled_sampling": GROWING},
    "pairs.tsv": {"kind": "seq2seq", "scheduled_sampling": GROWING},
}
LSTM = {"family": "recurrent", "dim": 8, "layers": 1, "context": 8, "dropout": 0.1}


@pytest.mark.parametrize("kind", TASKS)
def test_the_marks_of_a_batch_are_a_function_of_seed_and_step(kind, data):
    settings = config(data / kind, {"task": TASKS[kind]}, steps=100)
    one, other = prepare_training(settings), prepare_training(settings)
    for number in (0, 7, 199):  # two to a step
        assert torch.equal(one.batch(number).use_prediction, other.batch(number).use_prediction)
    assert not one.batch(0).use_prediction.any()
    share = np.mean([one.batch(number).use_prediction.float().mean() for number in range(90, 110)])
    assert share == pytest.approx(0.5, abs=0.1)
    assert one.batch(199).use_prediction.float().mean() > 0.9
    assert all(batch.use_prediction is None for batch in one.validation_batches(100))


@pytest.mark.parametrize(
    ("kind", "model"),
    [("cats.txt", {}), ("cats.txt", LSTM), ("pairs.tsv", {})],
    ids=["transformer", "lstm", "pairs"],
)
def test_a_run_with_it_resumes_bit_for_bit(kind, model, data, tmp_path, monkeypatch):
    settings = config(data / kind, {"task": TASKS[kind]}, steps=6)
    settings = replace(settings, model=model or settings.model)
    list(begin(settings, tmp_path / "whole"))
    with monkeypatch.context() as patch:
        interrupt(patch, 4)
        with pytest.raises(Crash):
            list(begin(settings, tmp_path / "cut"))
    list(resume(tmp_path / "cut"))
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_a_share_of_nothing_is_a_run_without_it(data, tmp_path):
    for name, task in {
        "plain": "causal",
        "zero": {"kind": "causal", "scheduled_sampling": 0.0},
    }.items():
        settings = replace(config(data / "cats.txt", steps=2), task=task)
        list(begin(settings, tmp_path / name))
    assert contents(tmp_path / "plain") == contents(tmp_path / "zero")


@pytest.mark.parametrize(
    ("task", "model", "said"),
    [
        (
            {"kind": "causal", "scheduled_sampling": 0.5},
            {"preset": "ngram"},
            "'ngram' is fitted without gradients",
        ),
        (
            {"kind": "masked", "scheduled_sampling": 0.5},
            {"preset": "tiny-encoder"},
            "option 'scheduled_sampling'",
        ),
    ],
)
def test_scheduled_sampling_without_training_steps_is_refused(task, model, said, data, tmp_path):
    settings = replace(config(data / "cats.txt"), task=task, model=model)
    with pytest.raises(ConfigError, match=said):
        list(begin(settings, tmp_path / "run"))
    assert not (tmp_path / "run").exists()
