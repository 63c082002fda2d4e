"""Learning word vectors: what a batch looks like, what is learned, and what can be asked then."""

import itertools
import math

import numpy as np
import pytest
import torch

import regard
from regard.config import RunConfig, build
from regard.errors import ConfigError
from regard.models.cbow import CBOW, CBOWConfig
from regard.tasks import CBOWTask
from regard.training.loop import Objective, train
from training.runs import Crash, contents, interrupt

ROYAL = {"king": ("he", "crown"), "queen": ("she", "crown")}
COMMON = {"man": ("he", "field"), "woman": ("she", "field")}


def planted():
    """A text in which who stands where says what each word means, and nothing else does."""
    lines = []
    for n, (noun, (pronoun, place)) in itertools.product(range(60), (ROYAL | COMMON).items()):
        verb = ["has", "wants", "sees"][n % 3]
        lines.append(f"{pronoun} is the {noun} who {verb} the {place}\n")
    order = np.random.default_rng(1).permutation(len(lines))
    return "".join(lines[i] for i in order)


def settings(path, negatives):
    return {
        "name": "planted",
        "task": "cbow",
        "data": {"path": str(path), "tokenizer": "word"},
        "model": {"preset": "cbow", "dim": 8, "window": 5, "context": 9, "negatives": negatives},
        "train": {
            "steps": 150,
            "batch": 32,
            "lr": 3e-2,
            "optimizer": {"kind": "adamw", "weight_decay": 0},
        },
        "device": "cpu",
    }


@pytest.fixture(scope="module", params=[0, 5], ids=["whole softmax", "negative sampling"])
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cbow")
    (folder / "planted.txt").write_text(planted())
    config = build(RunConfig, settings(folder / "planted.txt", request.param))
    return regard.train(config, out=folder / "run")


def generator():
    return torch.Generator().manual_seed(1)


def test_every_word_of_a_block_is_its_own_target_and_padding_is_none():
    ids = np.array([[5, 6, 7], [1, 0, 0]])
    following = np.array([[6, 7, 8], [4, -1, -1]])
    batch = CBOWTask().collate((ids, following), generator())
    assert batch.ids.tolist() == ids.tolist()
    assert batch.targets.tolist() == [[5, 6, 7], [1, -1, -1]]
    assert int(CBOWTask().count(batch)) == 4


def test_words_that_stand_in_the_same_places_become_neighbours(run):
    near = run.neighbours("king crown", top=3)
    assert list(near) == ["king", "crown"]
    assert near["king"][0][0] in ("queen", "man")
    assert near["crown"][0][0] == "field"
    assert all(1 >= cosine >= -1 for _, cosine in near["king"])


def test_man_is_to_king_as_woman_is_to_queen(run):
    found = run.neighbours("king - man + woman", top=1)
    assert found["king - man + woman"][0][0] == "queen"


def test_both_losses_have_the_same_metrics_and_beat_unigram_frequencies(run):
    metrics = run.metrics
    assert set(CBOWTask.metric_names) <= set(metrics)
    assert metrics["loss"] < metrics["unigram_loss"] - 0.2
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["loss"]))
    assert metrics["accuracy"] > metrics["unigram_accuracy"] + 0.1


def test_a_run_evaluates_later_as_it_did_in_training(run):
    assert run.evaluate() == pytest.approx(run.metrics, rel=1e-5)
    assert "king" in (run.folder.path / "samples.txt").read_text()


def test_a_word_has_one_vector_whatever_stands_around_it(run):
    alike = run.compare_occurrences("the", "the king sees the field")
    assert alike["positions"] == [1, 4]
    assert alike["embedding"] == pytest.approx(np.ones((2, 2)), abs=1e-6)
    assert set(alike) == {"positions", "embedding"}


def test_one_occurrence_is_nothing_to_compare(run):
    with pytest.raises(ConfigError, match="'king' occurs 1 time in the text"):
        run.compare_occurrences("king", "the king")


def test_it_does_not_generate(run):
    with pytest.raises(ConfigError, match="cannot generate; use `neighbours` instead"):
        run.generate("the king")


def test_another_model_is_refused(tmp_path):
    (tmp_path / "planted.txt").write_text(planted())
    table = settings(tmp_path / "planted.txt", 0)
    config = build(RunConfig, {**table, "model": {"preset": "tiny-decoder"}})
    with pytest.raises(ConfigError, match="task='cbow': needs a model of architecture 'cbow'"):
        regard.train(config, out=tmp_path / "run")


def test_an_interrupted_run_goes_on_as_if_nothing_had_been(tmp_path, monkeypatch):
    (tmp_path / "planted.txt").write_text(planted())
    table = settings(tmp_path / "planted.txt", 5)
    table["train"] |= {"steps": 6, "evaluate_every": 3}
    config = build(RunConfig, table)
    regard.train(config, out=tmp_path / "whole")
    with monkeypatch.context() as patch:
        interrupt(patch, 4)
        with pytest.raises(Crash):
            regard.train(config, out=tmp_path / "halves")
    regard.resume(tmp_path / "halves")
    assert contents(tmp_path / "halves") == contents(tmp_path / "whole")


@pytest.mark.usefixtures("float64")
def test_micro_batches_give_the_weights_of_the_whole_batch():
    ids = torch.randint(23, (4, 12), generator=generator()).numpy()
    batch = [
        CBOWTask().collate((ids[rows], ids[rows]), generator())
        for rows in (range(4), [0, 1], [2, 3])
    ]
    found = []
    for parts in (batch[:1], batch[1:]):
        torch.manual_seed(1)
        model = CBOW(CBOWConfig(vocab_size=23, dim=6, context=12, negatives=0))
        objective = Objective(model, CBOWTask(label_smoothing=0.1)).train()
        plain = torch.optim.SGD(objective.parameters(), fused=True)
        (step,) = train(objective, parts, [plain], lambda step: 0.1, accumulate=len(parts))
        found.append((step.loss, step.num_targets, model.state_dict()))
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)
