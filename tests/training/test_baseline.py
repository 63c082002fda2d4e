"""What counting gets: the same text, the same held-out targets, by the book."""

import math
import statistics
from dataclasses import replace

import pytest

import count_reference as reference
from regard.api.event_lines import baseline_line
from regard.api.training import summarize
from regard.cli.report import compare_with_baselines
from regard.errors import DataError, TrainingStopped
from regard.pipelines import prepare_training
from regard.training import baseline
from regard.training.baseline import evaluate_baselines, read_baselines, read_ngram_baseline
from regard.training.events import NGramBaselineEvaluated
from regard.training.parallel.ranks import Ranks
from regard.training.run import begin, resume
from regard.training.storage.run_folder import RunFolder
from training.runs import config, interrupt


def run(*words, **options):
    return [each for each in begin(*words, **options) if isinstance(each, NGramBaselineEvaluated)]


@pytest.mark.parametrize("most", [100, 10**6])
def test_what_is_to_beat_is_the_formulas_loss_on_the_same_targets(
    data, tmp_path, monkeypatch, most
):
    monkeypatch.setattr(baseline, "ORDER", 3)
    monkeypatch.setattr(baseline, "MAX_TOKENS", most)
    settings = config(data / "cats.txt", steps=1)
    (counted,) = run(settings, tmp_path / "run")
    training_data = prepare_training(settings)

    def rows(batches):
        return [
            (ids.tolist(), targets.tolist())
            for batch in batches
            for ids, targets in zip(batch.ids, batch.targets, strict=True)
        ]

    learned = rows(training_data.all_batches())[
        : 16 if most == 100 else None
    ]  # a batch has 16 rows
    slow = reference.KneserNey(learned, training_data.tokenizers.vocab_size, 3)
    surprises = [
        -math.log(slow.table(ids)[place, target])
        for ids, targets in rows(training_data.validation_batches(None))
        for place, target in enumerate(targets, len(ids) - len(targets))
        if target != -1
    ]
    assert counted.tokens == sum(target != -1 for _, targets in learned for target in targets)
    assert counted.metrics["loss"] == pytest.approx(statistics.fmean(surprises), abs=1e-9)
    assert read_ngram_baseline(RunFolder(tmp_path / "run")) == counted


def test_the_baseline_is_named_with_its_smoothing_everywhere(data, tmp_path):
    name = "6-grams, modified Kneser–Ney"
    (event,) = run(config(data / "cats.txt", steps=1), tmp_path / "run")
    assert f" bits per byte: {name}, fitted to " in baseline_line(event)
    assert list(read_baselines(RunFolder(tmp_path / "run"))) == [name]
    told = compare_with_baselines({"bits_per_byte": 50.0}, summarize(tmp_path / "run"))
    assert told[0].endswith(f" bits per byte worse than the baseline: {name};")
    assert told[1].endswith(" model.family=ngram model.order=6 model.smoothing=kneser_ney")


def test_an_error_of_a_baseline_reaches_all_ranks(data, tmp_path):
    class Reported(Exception):
        """Raised by `all_or_fail` on all ranks."""

    class TwoRanks(Ranks):
        def all_or_fail(self, work):
            try:
                return work()
            except DataError as error:
                raise Reported from error

    def fail():
        raise DataError("the series is constant")

    settings = config(data / "cats.txt", steps=1)
    settings = replace(settings, model={"family": "transformer"})
    training_data = replace(prepare_training(settings), baselines=fail)
    with pytest.raises(Reported):
        list(evaluate_baselines(settings, training_data, RunFolder(tmp_path), TwoRanks(0, 2)))
    assert list(evaluate_baselines(settings, training_data, RunFolder(tmp_path), Ranks(1, 1))) == []


def test_counting_changes_nothing_of_what_is_learned(data, tmp_path):
    assert run(config(data / "cats.txt", steps=3), tmp_path / "with")
    assert not run(config(data / "cats.txt", steps=3, baseline=False), tmp_path / "without")
    both = [tmp_path / name / "model.safetensors" for name in ("with", "without")]
    assert both[0].read_bytes() == both[1].read_bytes()
    assert not RunFolder(tmp_path / "without").baseline.exists()


def test_a_run_that_goes_on_keeps_what_it_has_counted(data, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt(patch, 4, asked=15)
        with pytest.raises(TrainingStopped):
            run(config(data / "cats.txt"), tmp_path / "run")
    before = RunFolder(tmp_path / "run").baseline.read_bytes()
    assert not [
        each for each in resume(tmp_path / "run") if isinstance(each, NGramBaselineEvaluated)
    ]
    assert RunFolder(tmp_path / "run").baseline.read_bytes() == before


def test_pairs_are_not_counted(data, tmp_path):
    assert not run(config(data / "pairs.tsv", steps=1), tmp_path / "pairs")


@pytest.mark.parametrize(
    "text", ["", "[]", '{"order": 6}', '{"order": 1, "tokens": 1, "metrics": {}}']
)
def test_what_was_corrupted_is_as_good_as_not_there(tmp_path, text):
    folder = RunFolder(tmp_path)
    folder.baseline.write_text(text)
    assert read_ngram_baseline(folder) is None
