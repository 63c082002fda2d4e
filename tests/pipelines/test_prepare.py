"""From data to batches, and what is refused on the way."""

import math
from dataclasses import replace

import pytest
import torch

from regard.errors import ConfigError, DataError
from regard.models.build import build_model
from regard.pipelines import (
    load_tokenizers,
    open_split,
    open_validation,
    prepare_training,
    validation_metrics,
)
from regard.tasks import Causal, Seq2Seq
from training.runs import config

CPU = torch.device("cpu")


def same(left, right):
    fields = [(batch.ids, batch.targets) for batch in (left, right)]
    if hasattr(left, "source"):
        fields = [
            (*f, b.source.ids, b.source.lengths) for f, b in zip(fields, (left, right), strict=True)
        ]
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(*fields, strict=True))


@pytest.mark.parametrize("kind", ["cats.txt", "pairs.tsv"])
def test_a_batch_is_a_pure_function_of_seed_and_number(kind, data):
    settings = config(data / kind)
    first, again = prepare_training(settings), prepare_training(settings)
    numbers = [7, 0, 3, 7, 1000]
    for number in numbers:
        assert same(first.batch(number), again.batch(number))
    assert same(first.batch(7), first.batch(7))
    assert not same(first.batch(7), first.batch(8))
    assert first.fingerprint == again.fingerprint


def test_another_seed_gives_other_batches(data):
    settings = config(data / "cats.txt")
    other = replace(settings, train=replace(settings.train, seed=2))
    assert not same(prepare_training(settings).batch(0), prepare_training(other).batch(0))


@pytest.mark.parametrize("seed", [0, -5, 2**40, 2**62])
def test_any_whole_number_is_a_seed(data, seed):
    settings = config(data / "pairs.tsv", seed=seed)
    assert prepare_training(settings).batch(3).ids.shape[0] == 1  # of two micro-batches


def test_the_randomness_of_a_batch_depends_on_seed_and_number(data, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        Causal,
        "collate",
        lambda self, examples, generator: drawn.append(torch.rand(3, generator=generator)),
    )
    for seed in (1, 2):
        prepared = prepare_training(config(data / "cats.txt", seed=seed))
        for number in (0, 1, 0):
            prepared.batch(number)
    a, b, again, c, d, _ = drawn
    assert torch.equal(a, again)
    assert all(not torch.equal(left, right) for left, right in ((a, b), (a, c), (b, d)))


def test_text_becomes_blocks_and_all_of_the_validation_split_is_evaluated(data):
    prepared = prepare_training(config(data / "cats.txt"))
    batch = prepared.batch(0)
    assert batch.ids.shape == batch.targets.shape == (1, 8)  # of two micro-batches
    assert torch.equal(batch.ids[:, 1:], batch.targets[:, :-1])
    validation = list(prepared.validation_batches(None))
    text = (data / "cats.txt").read_text()
    count = sum(int(prepared.task.count(each)) for each in validation)
    tail = text[int(len(text) * 0.9) :]
    assert count == len(tail) - 1
    assert prepared.tokenizers.decode(validation[-1].ids[0].tolist()) == tail[:8]
    assert prepared.tokenizers.decode(validation[0].ids[0].tolist()) == tail[6:14]  # stride 6
    assert sum(int(prepared.task.count(each)) for each in prepared.validation_batches(50)) == 50
    learned = sum(int(prepared.task.count(each)) for each in prepared.all_batches())
    assert learned == len(text) - len(tail) - 1


def test_bits_per_byte_is_exact_for_a_text_whose_bytes_are_known(tmp_path):
    text = "äöü 漢字 abc\n" * 40
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    settings = config(tmp_path / "text.txt", {"data": {"validation_fraction": 0.5}})
    prepared = prepare_training(settings)
    torch.manual_seed(1)
    model = build_model(prepared.model).eval()
    metrics = validation_metrics(prepared, model, CPU)
    tail = "".join(piece for piece, _ in prepared.validation_data.chunks())
    ids = prepared.tokenizers.encode(tail)
    assert len(ids) == len(tail)  # characters
    scored = len(tail[1:].encode())  # the first is read and not predicted
    bits = metrics["loss"] * (len(ids) - 1) / math.log(2)
    assert metrics["bits_per_byte"] == pytest.approx(bits / scored, rel=1e-9)


def test_pairs_become_buckets_and_all_of_the_validation_pairs_are_evaluated(data):
    prepared = prepare_training(config(data / "pairs.tsv"))
    validation = list(prepared.validation_batches(None))
    rows = list(prepared.validation_data.rows())
    assert sum(len(batch.ids) for batch in validation) == len(rows)
    targets = sum(len(prepared.tokenizers.target.encode(target)) + 1 for _, target in rows)
    assert sum(int(prepared.task.count(batch)) for batch in validation) == targets
    assert isinstance(prepared.task, Seq2Seq)
    assert prepared.task.eos_id == prepared.tokenizers.target.eos_id
    source, _ = rows[0]
    texts = {
        prepared.tokenizers.source.decode(row[: length - 1].tolist())
        for batch in validation
        for row, length in zip(batch.source.ids, batch.source.lengths, strict=True)
    }
    assert source in texts


def test_the_model_gets_the_size_of_the_vocabulary(data):
    prepared = prepare_training(config(data / "pairs.tsv"))
    assert prepared.model.vocab_size == prepared.tokenizers.target.vocab_size
    apart = {"data": {"tokenizer": {"kind": "char", "shared": False}}}
    prepared = prepare_training(config(data / "pairs.tsv", apart))
    assert prepared.model.source_vocab_size == prepared.tokenizers.source.vocab_size
    assert prepared.model.vocab_size == prepared.tokenizers.target.vocab_size


def test_the_description_says_what_was_read(data):
    lines = prepare_training(config(data / "cats.txt")).description
    assert [line.split()[0] for line in lines] == ["data", "validation", "tokenizer"]
    assert "1 file" in lines[0]
    assert "char" in lines[2]
    assert "for training" in lines[2]
    lines = prepare_training(config(data / "pairs.tsv")).description
    assert "100 rows" in lines[0]
    assert "→" in lines[1]
    assert "joint" in lines[5]


def test_pairs_that_are_too_long_are_counted_on_both_sides(tmp_path):
    rows = [f"{n} cats\t{'x' * 50 if n % 2 else n}\n" for n in range(100, 200)]
    (tmp_path / "pairs.tsv").write_text("".join(rows))
    prepared = prepare_training(config(tmp_path / "pairs.tsv"))
    odd = sum(len(target) == 50 for _, target in prepared.validation_data.rows())
    assert 0 < odd < 50
    message = f"{50 - odd} training pairs and {odd} validation pairs, longer than 31 tokens"
    assert message in prepared.description[-1]


def write_file(tmp_path, content, name="data.txt"):
    (tmp_path / name).write_text(content)
    return tmp_path / name


def test_a_text_shorter_than_a_block_is_refused_with_what_would_fit(tmp_path):
    path = write_file(tmp_path, "abcdefgh")
    with pytest.raises(DataError, match=r"has 5 tokens.*model\.context=8 needs 9(?s:.*)=4 or less"):
        prepare_training(config(path, {"data": {"validation_fraction": 0.3}}))


def test_a_validation_split_of_one_token_is_refused_before_training(tmp_path):
    path = write_file(tmp_path, "abcdefghij" * 10)
    with pytest.raises(
        DataError, match=r"validation text has 1 token(?s:.*)data\.validation_fraction"
    ):
        prepare_training(config(path, {"data": {"validation_fraction": 0.01}}))


@pytest.mark.parametrize("content", ["", "\n", "a"])
def test_next_to_no_text_is_an_error_of_the_data(tmp_path, content):
    with pytest.raises(DataError) as raised:
        prepare_training(config(write_file(tmp_path, content)))
    assert raised.value.exit_code == 3
    assert len(str(raised.value).splitlines()) <= 5


@pytest.mark.parametrize("validation_fraction", [0.0, 1.0, -1.0])
def test_a_share_that_is_none_is_refused(data, validation_fraction):
    for kind in ("cats.txt", "pairs.tsv"):
        with pytest.raises(ConfigError, match="must lie between 0 and 1"):
            prepare_training(
                config(data / kind, {"data": {"validation_fraction": validation_fraction}})
            )


def test_validation_must_be_of_the_same_kind(data):
    with pytest.raises(DataError, match=r"cats\.txt holds text; the run learns from pairs"):
        prepare_training(
            config(data / "pairs.tsv", {"data": {"validation": [str(data / "cats.txt")]}})
        )
    with pytest.raises(DataError, match=r"pairs\.tsv holds pairs; the run learns from text"):
        prepare_training(
            config(data / "cats.txt", {"data": {"validation": [str(data / "pairs.tsv")]}})
        )
    with pytest.raises(ConfigError, match="one path, or a source and a target, not 3"):
        open_validation(["a", "b", "c"], "pairs", lower=False)


def test_validation_of_its_own_leaves_all_data_to_learn_from(data, tmp_path):
    other = write_file(tmp_path, "the cat sat\n" * 5)
    train, validation = open_split(
        config(data / "cats.txt", {"data": {"validation": [str(other)]}})
    )
    assert train.size == (data / "cats.txt").stat().st_size
    assert validation.size == other.stat().st_size


def test_two_files_are_a_validation_of_pairs(data, tmp_path):
    paths = [str(write_file(tmp_path, f"{side}\n" * 3, f"{side}.txt")) for side in ("one", "two")]
    _, validation = open_split(config(data / "pairs.tsv", {"data": {"validation": paths}}))
    assert list(validation.rows()) == [("one", "two")] * 3


@pytest.mark.parametrize(
    ("kind", "task", "complaint"),
    [
        (
            "cats.txt",
            "seq2seq",
            "learns from pairs, and cats holds text;\nit needs a source and a target: two columns "
            r"of a table \(data.source=… data.target=…\), or two files\ntasks for text: causal",
        ),
        ("pairs.tsv", "causal", "learns from text, and pairs holds pairs;\nit needs text files"),
        ("cats.txt", "casual", "did you mean 'causal'"),
    ],
)
def test_a_task_must_fit_the_data(data, kind, task, complaint):
    settings = replace(config(data / kind), task=task)
    with pytest.raises(ConfigError, match=complaint):
        prepare_training(settings)


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        ("cats.txt", {"preset": "tiny-encoder"}),
        ("cats.txt", {"preset": "tiny-encoder-decoder"}),
        ("pairs.tsv", {"preset": "tiny-decoder"}),
        ("pairs.tsv", {"preset": "lstm"}),
        ("pairs.tsv", {"preset": "ngram"}),
    ],
)
def test_a_model_must_fit_the_task(data, kind, model):
    with pytest.raises(ConfigError, match="needs a model of architecture"):
        prepare_training(replace(config(data / kind), model=model))


@pytest.mark.parametrize("kind", ["cats.txt", "pairs.tsv"])
def test_tokenizers_are_loaded_as_they_were_saved(data, kind, tmp_path):
    settings = config(data / kind)
    prepared = prepare_training(settings)
    text = kind == "cats.txt"
    prepared.tokenizers.save(tmp_path / "tokenizer.json" if text else tmp_path)
    loaded = load_tokenizers(tmp_path, settings)
    again = prepare_training(settings, loaded)
    assert same(prepared.batch(5), again.batch(5))
    if text:
        assert loaded.fingerprint() == prepared.tokenizers.fingerprint()


def test_a_step_may_be_counted_in_tokens(data):
    table = {"train": {"batch": "none", "tokens": 80}}
    settings = config(data / "cats.txt", table)
    assert prepare_training(settings).batch(0).ids.shape == (5, 8)  # of two micro-batches
    assert prepare_training(config(data / "pairs.tsv", table)).batch(0).ids.numel() <= 40


def test_the_number_of_validation_targets_of_pairs_is_what_is_scored(data):
    prepared = prepare_training(config(data / "pairs.tsv"))
    scored = sum(prepared.task.count(batch) for batch in prepared.validation_batches(None))
    assert prepared.validation_targets == scored > 0


def test_progress_is_reported_in_bytes(data):
    reported = []
    (data / "fresh.txt").write_text("frisch: größere Wörter, die keiner kennt " * 20, "utf-8")
    prepare_training(config(data / "fresh.txt"), progress=lambda *words: reported.append(words))
    labels = {"reading", "training the tokenizer", "tokenizing", "tokenizing validation text"}
    assert {name for name, _, _ in reported} == labels
    assert all(done <= total for _, done, total in reported)
    assert max(done / total for name, done, total in reported if name == "reading") == 1.0
