"""`minutes=`: steps that fill the time, and a size that is worth it."""

from dataclasses import replace

import pytest
import torch

from regard.config import TrainConfig
from regard.data.batch import ImageBatch, TextBatch
from regard.models.build import config_table, count_parameters, resolve
from regard.pipelines import prepare_training, tokenizer_fingerprint
from regard.tasks import ImageClassification, Masked, Seq2Seq
from regard.training.run import begin
from regard.training.setup import fit_to_minutes as fitting
from regard.training.setup.fit_to_minutes import fit_to_minutes, fit_to_steps, long_warmup_warning
from regard.training.storage.run_folder import RunFolder
from training.objectives import masked_batch, pair_batch
from training.runs import config

MASKED = {
    "task": {"kind": "masked", "label_smoothing": 0.1},
    "data": {"tokenizer": "word"},
    "model": {"preset": "tiny-encoder"},
}


@pytest.fixture
def seconds(monkeypatch):
    """A machine on which a step takes a second, or a quarter where it is compiled."""
    asked = []

    def told(candidate, training_data, device, *, compiled, limit):
        asked.append((candidate.model["dim"], compiled))
        return 0.25 if compiled else 1.0

    monkeypatch.setattr(fitting, "_seconds_per_step", told)
    monkeypatch.setattr(fitting.time, "perf_counter", lambda: 0.0)  # no time passes
    return asked


@pytest.mark.parametrize(("over", "needed"), [({}, 1), (MASKED, 5)], ids=["causal", "masked"])
def test_the_largest_size_that_sees_enough_tokens_is_taken(over, needed, data, seconds):
    given = config(data / "cats.txt", over, batch=4)
    chosen = fit_to_minutes(replace(given, minutes=4000))
    assert chosen.train.steps == 192_000
    widths = [dim for dim, _ in seconds]
    assert chosen.model["dim"] == widths[-1]  # a larger one is not timed
    sizes = {
        dim: count_parameters(
            resolve({**chosen.model, "dim": dim, "layers": n, "heads": dim // 32})
        )
        for dim, n in fitting.SIZES
    }
    larger = list(sizes)[len(widths)]
    assert needed * sizes[widths[-1]] <= 192_000 * 4 * 8 < needed * sizes[larger]


def test_a_model_without_layers_keeps_its_size(data, seconds):
    given = config(data / "cats.txt", batch=4)
    words = replace(given, task="cbow", model={"preset": "cbow", "dim": 16, "context": 8})
    chosen = fit_to_minutes(replace(words, minutes=4000))
    assert (chosen.train.steps, chosen.model["dim"]) == (192_000, 16)
    assert seconds == [(16, False)]


def test_a_recurrent_encoder_decoder_keeps_its_size_and_its_attention(data, seconds):
    given = config(data / "pairs.tsv", {"task": "seq2seq"}, batch=4)
    for preset in ("sutskever", "bahdanau"):
        sizes = {"vocab_size": 9, "source_vocab_size": None, "dim": 16, "layers": 1}
        model = config_table(resolve({"preset": preset, **sizes}))
        chosen = fit_to_minutes(replace(given, minutes=4000, model=model)).model
        assert {**chosen, "vocab_size": 9} == model


@pytest.mark.parametrize(("minutes", "expected"), [(50, (64, 2, 2)), (4000, (256, 8, 4))])
def test_key_and_value_heads_divide_the_heads_of_every_size(minutes, expected, data, seconds):
    over = {"model": {"preset": "modern", "dim": 32, "heads": 4, "context": 8}}
    given = config(data / "cats.txt", over, batch=4)
    chosen = fit_to_minutes(replace(given, minutes=minutes)).model
    assert (chosen["dim"], chosen["heads"], chosen["kv_heads"]) == expected


def test_a_compiled_step_is_timed_for_the_chosen_size_only(data, seconds):
    given = config(data / "cats.txt", batch=4)
    given = replace(given, minutes=4000)
    eager = fit_to_minutes(given)
    seconds.clear()
    chosen = fit_to_minutes(replace(given, train=replace(given.train, compile="on")))
    assert chosen.model == eager.model
    assert [dim for dim, compiled in seconds if compiled] == [chosen.model["dim"]]
    assert chosen.train.steps == 4 * eager.train.steps


def test_only_the_steps_are_chosen_where_the_model_is_given(data, seconds):
    given = config(data / "pairs.tsv")
    chosen = fit_to_minutes(replace(given, minutes=3), choose_model=False)
    assert chosen.train.steps == 144
    assert chosen.model["dim"] == given.model["dim"]


def test_a_larger_size_whose_steps_are_slower_is_timed_and_left(data, seconds, monkeypatch):
    told = fitting._seconds_per_step
    monkeypatch.setattr(
        fitting,
        "_seconds_per_step",
        lambda candidate, *rest, **options: (
            told(candidate, *rest, **options) * (100 if candidate.model["dim"] > 64 else 1)
        ),
    )
    given = config(data / "cats.txt", batch=4)
    assert fit_to_minutes(replace(given, minutes=4000)).model["dim"] == 64
    assert [dim for dim, _ in seconds] == [64, 128]


def test_steps_are_timed_with_the_tokenizer_of_train_start(data, tmp_path, monkeypatch):
    list(begin(config(data / "cats.txt", steps=1), tmp_path / "start"))
    (tmp_path / "other.txt").write_text("0123456789 " * 40)
    given = config(tmp_path / "other.txt", start=str(tmp_path / "start"))
    timed = []

    def told(candidate, training_data, device, **options):
        timed.append(tokenizer_fingerprint(training_data.tokenizers))
        return 1.0

    monkeypatch.setattr(fitting, "_seconds_per_step", told)
    fit_to_minutes(replace(given, minutes=3), choose_model=False)
    folder = RunFolder(tmp_path / "start")
    assert timed == [tokenizer_fingerprint(folder.load_tokenizers(folder.load_config()))]


def test_the_time_counts_from_the_start_of_the_command(data, seconds):
    given = replace(config(data / "cats.txt"), minutes=10)
    assert fit_to_minutes(given, choose_model=False, started=-120.0).train.steps == 0.8 * 480
    assert fit_to_minutes(given, choose_model=False, started=-9999.0).train.steps == 1


def test_warm_up_and_ema_fit_the_steps():
    given = TrainConfig(steps=200, ema=0.999, schedule={"kind": "linear", "warmup": 400})
    fitted = fit_to_steps(given)
    assert fitted.schedule == {"kind": "linear", "warmup": 10}
    assert fitted.ema == 0.95
    assert fit_to_steps(given, ("schedule", "ema")) == given
    short = replace(given, steps=60, schedule={"kind": "linear", "warmup": 50})
    (note,) = long_warmup_warning(short)
    assert "50 steps of 60" in note
    assert note.endswith("train.schedule.warmup=3 is 5 % of the steps")
    (note,) = long_warmup_warning(replace(short, steps=3))
    assert note.endswith("train.schedule.warmup=0 turns it off")
    assert not long_warmup_warning(replace(short, steps=100))
    long = replace(given, steps=100_000)
    assert fit_to_steps(long) == long
    assert fit_to_steps(replace(given, schedule="cosine")).schedule["warmup"] == 0
    assert fit_to_steps(replace(given, schedule="inverse_sqrt")).schedule["warmup"] == 10


def test_tokens_are_those_a_model_learns_from():
    pairs, images = pair_batch(), ImageBatch(torch.zeros(3, 1, 4, 4), torch.zeros(3).long())
    assert Seq2Seq().tokens_read(pairs, 99) == int((pairs.targets != -1).sum())
    assert Masked().tokens_read(masked_batch(), 99) == 3 * 12
    assert ImageClassification().tokens_read(images, 17) == 3 * 17


def test_compiling_is_no_part_of_the_time_of_a_step(data, monkeypatch):
    now, compiled = [0.0], []

    def slow_at_first(objective, **options):
        compiled.append(objective)
        seen = set()

        def loss(batch):
            now[0] += 0.001 if batch.ids.shape in seen else 60.0
            seen.add(batch.ids.shape)
            return objective(batch)

        return loss

    monkeypatch.setattr(torch, "compile", slow_at_first)
    monkeypatch.setattr(fitting.time, "perf_counter", lambda: now[0])
    given = config(data / "cats.txt")
    training_data = prepare_training(given)
    ids = torch.zeros(2, 8).long()
    rows = lambda number: TextBatch(ids[:, : number + 1], ids[:, : number + 1])  # noqa: E731
    training_data = replace(training_data, batch=rows)
    given = replace(given, model=config_table(training_data.model))
    found = fitting._seconds_per_step(given, training_data, torch.device("cpu"), compiled=True)
    assert found == pytest.approx(0.001 * given.train.accumulate)
    assert len(compiled) == 1


@pytest.mark.parametrize(("accumulate", "rows"), [(4, [6]), (3, [2, 2, 2])])
def test_of_several_ranks_each_has_its_share_of_a_step(accumulate, rows, data, monkeypatch):
    for name, value in {"RANK": 0, "WORLD_SIZE": 4, "MASTER_ADDR": "here"}.items():
        monkeypatch.setenv(name, str(value))
    given = config(data / "cats.txt", batch=24, accumulate=accumulate)
    training_data = prepare_training(given)
    given = replace(given, model=config_table(training_data.model))
    train, seen = fitting.train, []

    def watched(objective, batches, *words, **options):
        batches = list(batches)
        seen.extend(len(batch.targets) for batch in batches)
        return train(objective, batches, *words, **options)

    monkeypatch.setattr(fitting, "train", watched)
    fitting._seconds_per_step(given, training_data, torch.device("cpu"), compiled=False)
    assert seen == rows * (1 + fitting.TIMED_STEPS)
