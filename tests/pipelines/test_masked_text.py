"""Masked language models on text: packed files, evaluation, resuming, predictions."""

import json
import re
from dataclasses import replace

import pytest
import torch

import regard
from regard.cli import main
from regard.config import RunConfig, build, merge
from regard.errors import ConfigError, DataError, ShapeError
from regard.models.build import resolve
from regard.pipelines import open_split, prepare_training
from regard.pipelines.text import TextPipeline
from regard.tasks import Masked
from regard.tasks.vocab_info import encode_with_masks
from regard.training.run import begin, resume
from regard.training.setup.configure import configure
from training.runs import Crash, contents, interrupt

PAIRED = {"head": {"kind": "masked", "next_sentence": True}, "segments": 2}


def originals(batch):
    """The ids as they were before anything was hidden."""
    ids = batch.ids.clone()
    for row, places, targets in zip(ids, batch.masked_positions, batch.targets, strict=True):
        row[places[targets != -1]] = targets[targets != -1]
    return ids


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of short files."""
    place = tmp_path_factory.mktemp("files")
    for number in range(40):
        text = f"The {number}th cat sat on the mat. So did {number + 1} dogs!\n" * (1 + number % 3)
        (place / f"{number:02}.txt").write_text(f"File {number}. {text}")
    return place


def config(path, over=None, **train) -> RunConfig:
    base = {
        "name": "test",
        "task": {"kind": "masked"},
        "data": {"path": str(path), "tokenizer": {"kind": "wordpiece", "vocab_size": 120}},
        "model": {"preset": "tiny-encoder", "dim": 8, "layers": 1, "heads": 2, "context": 24},
        "train": {"steps": 6, "batch": 4, "evaluate_every": 3, "save_every": 2, **train},
        "device": "cpu",
    }
    return build(RunConfig, merge(base, over or {}))


def test_the_files_of_a_folder_are_packed_without_padding(folder):
    prepared = prepare_training(config(folder))
    cls, sep = prepared.tokenizers.cls_id, prepared.tokenizers.sep_id
    several = 0
    for number in range(20):
        batch = prepared.batch(number)
        assert batch.ids.shape == (4, 24)
        assert (batch.documents > 0).all()
        several += int((batch.documents.max(1).values > 1).sum())
        starts = batch.positions == 0
        assert (batch.ids[starts] == cls).all()
        assert (batch.ids[:, -1] == sep).all()
    assert several > 20
    texts = {
        prepared.tokenizers.decode(ids[1:])
        for row, documents in zip(originals(batch).tolist(), batch.documents.tolist(), strict=True)
        for number in set(documents)
        if (ids := [id for id, each in zip(row, documents, strict=True) if each == number])
    }
    assert not any("File" in text[1:] for text in texts)  # none runs on into the next


def test_blocks_of_one_file_need_no_mask_in_training(folder, tmp_path):
    file = tmp_path / "one.txt"
    file.write_text("".join(path.read_text() for path in sorted(folder.iterdir())))
    prepared = prepare_training(config(file))
    assert all(prepared.batch(number).documents is None for number in range(20))
    *full, last = prepared.all_batches()
    assert all(batch.documents is None for batch in full)
    assert (last.documents == 0).any()  # padding


def test_the_masks_of_an_evaluation_are_the_same_for_every_run(folder):
    runs = [config(folder), config(folder, seed=7), config(folder, batch=32)]
    validation = [
        torch.cat([batch.ids for batch in prepare_training(each).validation_batches(None)])
        for each in runs
    ]
    assert torch.equal(validation[0], validation[1])
    assert torch.equal(validation[0], validation[2])
    prepared = prepare_training(runs[0])
    assert not torch.equal(prepared.batch(0).ids, prepared.batch(1).ids)
    assert torch.equal(prepared.batch(5).ids, prepare_training(runs[0]).batch(5).ids)


def test_a_run_resumes_bit_for_bit(folder, tmp_path, monkeypatch):
    settings = config(folder, {"task": {"next_sentence": True}, "model": PAIRED})
    list(begin(settings, tmp_path / "whole"))
    with monkeypatch.context() as patch:
        interrupt(patch, 5)
        with pytest.raises(Crash):
            list(begin(settings, tmp_path / "broken"))
    list(resume(tmp_path / "broken"))
    assert contents(tmp_path / "broken") == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    ("over", "train", "complaint"),
    [
        ({"model": {"preset": "tiny-decoder"}}, {}, "needs a model of architecture 'encoder'"),
        ({"model": {"head": "linear"}}, {}, "needs model.head='masked', not 'linear'"),
        ({"task": {"next_sentence": True}}, {}, "'next_sentence': True}, not 'masked'"),
        (
            {"task": {"next_sentence": True}, "model": {**PAIRED, "segments": 0}},
            {},
            "needs model.segments=2, not 0",
        ),
        (
            {"task": {"next_sentence": True}, "model": PAIRED},
            {"batch": 1},
            "needs at least 2 rows per micro-batch",
        ),
        ({"model": {"context": 2}}, {}, "context=2 has no position for text"),
        (
            {"model": {"context": 9000}},
            {},
            "tokens, but one block of model.context=9000 needs 8999",
        ),
        ({"task": {"mask_fractions": 0.1}}, {}, "did you mean 'mask_fraction'"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_way_out(folder, over, train, complaint):
    with pytest.raises((ConfigError, DataError), match=re.escape(complaint)):
        prepare_training(config(folder, over, **train))


def test_a_causal_task_does_not_take_an_encoder(folder):
    with pytest.raises(ConfigError, match="needs a model of architecture 'decoder', not 'encoder'"):
        prepare_training(replace(config(folder), task="causal"))


def test_a_text_of_a_megabyte_is_tokenized_into_sub_words_on_a_cpu(tmp_path):
    path = tmp_path / "a.txt"
    found = {}
    for size in (499_999, 500_000, 1_000_000, 10_000_000):
        path.write_bytes(b"a line of text\n" * (size // 15) + b"." * (size % 15))
        text = TextPipeline().open(path)
        for gpu in (False, True):
            settings = TextPipeline().defaults(text, "causal", gpu=gpu)
            found[size, gpu] = (settings["data"]["tokenizer"], settings["model"]["context"])
    assert found == {
        (499_999, False): ("char", 64),
        (500_000, False): ({"kind": "bpe", "vocab_size": 1000}, 64),
        (1_000_000, False): ({"kind": "bpe", "vocab_size": 2000}, 64),
        (10_000_000, False): ({"kind": "bpe", "vocab_size": 20_000}, 128),
        (499_999, True): ("char", 256),
        (500_000, True): ("char", 256),
        (1_000_000, True): ("char", 256),
        (10_000_000, True): ({"kind": "bpe", "vocab_size": 20_000}, 256),
    }


def test_the_vocabulary_does_not_come_from_separate_validation_data(tmp_path):
    """Neither from a file of its own nor from the validation split of a dataset."""
    for name, word in (("train", "abc"), ("validation", "xyz")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": f"{word} {word}"}) + "\n")
    train, validation = (str(tmp_path / f"{name}.jsonl") for name in ("train", "validation"))
    for data, known in (
        ({"path": str(tmp_path)}, "abc "),
        ({"path": train, "validation": [validation]}, "abc "),
        ({"path": validation, "validation_fraction": 0.5}, "xyz "),
    ):
        settings = {"name": "x", "task": "causal", "train": {"steps": 1}}
        settings |= {"model": {"preset": "tiny-decoder"}, "data": {**data, "tokenizer": "char"}}
        config = build(RunConfig, settings)
        tokenizer = TextPipeline().train_tokenizers(config, *open_split(config), None)
        assert [c for c in "abcxyz " if tokenizer.encode(c) != [tokenizer.unk_id]] == [*known]


@pytest.mark.parametrize(
    ("size", "rows", "steps"),
    [
        (3_200, 10, 500),  # 640 words
        (500_000, 128, 500),
        (3_293_492, 411, 500),  # twenty epochs
        (8_200_000, 512, 1000),
    ],
)
def test_word_vectors_get_twenty_epochs_and_500_steps_at_least(tmp_path, size, rows, steps):
    path = tmp_path / "a.txt"
    path.write_bytes(b"a line of text\n" * (size // 15) + b"." * (size % 15))
    train = TextPipeline().defaults(TextPipeline().open(path), "cbow", gpu=False)["train"]
    assert (train["batch"], train["steps"]) == (rows, steps)


def test_own_data_gets_an_encoder_where_masking_is_asked_for(folder):
    plain, pairs = (
        configure(str(folder), {"task": {"kind": "masked", **options}})
        for options in ({}, {"next_sentence": True})
    )
    assert resolve(plain.model, vocab_size=9).architecture == "encoder"
    assert resolve(pairs.model, vocab_size=9).segments == 2
    for settings in (plain, pairs):
        assert isinstance(prepare_training(settings).task, Masked)


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    place = tmp_path_factory.mktemp("runs") / "masked"
    return regard.train(
        config(folder, {"data": {"tokenizer": {"kind": "bpe", "vocab_size": 300}}}), out=place
    )


def test_masks_are_filled_in_by_the_most_probable_tokens(run):
    found = run.fill("The <mask> sat on the <mask>.", top=4)
    assert [len(each) for each in found] == [4, 4]
    ids, places = encode_with_masks(run.tokenizer, "The <mask> sat on the <mask>.")
    assert ids[0] == run.tokenizer.cls_id
    assert ids[-1] == run.tokenizer.sep_id
    around = [run.tokenizer.piece(ids[place]) for place in (places[0] - 1, places[0] + 1)]
    assert " " not in around  # spaces belong to pieces, that of the hidden one to it
    with torch.no_grad():
        chances = run.model.head(run.model(torch.tensor([ids])))[0].softmax(-1)
    for each, place in zip(found, places, strict=True):
        assert ids[place] == run.tokenizer.mask_id
        expected = chances[place].sort(descending=True)
        assert [p for _, p in each] == pytest.approx(expected.values[:4].tolist())
        assert [piece for piece, _ in each] == [
            run.tokenizer.piece(id) for id in expected.indices[:4].tolist()
        ]


def test_a_text_without_a_mask_or_too_long_for_the_model_is_refused(run):
    with pytest.raises(ConfigError, match="write <mask> where a word is missing"):
        run.fill("The cat sat.")
    with pytest.raises(ShapeError, match="exceed context=24"):
        run.fill("The <mask> " * 40)


def test_a_masked_model_does_not_generate(run):
    with pytest.raises(ConfigError, match="use `predict` instead"):
        run.generate("The cat")


def test_the_heads_of_an_encoder_are_shown(run):
    ((name, seen),) = run.explain("The cat").items()
    assert name == "encoder.blocks.0.attention"
    assert seen.rows[0] == "<cls>"
    assert seen.rows[-1] == "<sep>"


def test_a_run_evaluates_later_as_it_did_in_training(run):
    assert run.evaluate() == pytest.approx(run.metrics, rel=1e-6)
    assert {"accuracy", "unigram_accuracy", "unigram_loss"} <= set(run.metrics)


def test_samples_show_a_text_masked_filled_in_and_original(run):
    last = (run.folder.path / "samples.txt").read_text(encoding="utf-8").strip().splitlines()[-3:]
    assert last[1].startswith("→ ")
    assert last[2].startswith("= ")
    assert "___" in last[0]
    assert "___" not in last[1] + last[2]


def test_the_command_line_fills_in(run, capsys):
    text = "The <mask> on <mask>"
    for options, lines, words in ((("-n", "3"), 2, 3), (("-n", "1"), 2, 1)):
        with pytest.raises(SystemExit) as exit:
            main(["predict", str(run.folder.path), text, *options])
        assert not exit.value.code
        shown = capsys.readouterr().out.splitlines()
        assert len(shown) == lines
        assert all(line.count("%") == words for line in shown)
    with pytest.raises(SystemExit):
        main(["predict", str(run.folder.path), text, "--json"])
    ((first, _),) = json.loads(capsys.readouterr().out).values()
    assert first == [list(each) for each in run.fill(text, top=3)[0]]
