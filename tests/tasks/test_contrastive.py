"""Sentence embeddings by a contrastive loss."""

import json
import math
import re
from dataclasses import replace

import pytest
import torch

import regard
from regard.cli import main
from regard.data.batch import ContrastiveBatch
from regard.errors import ConfigError, DataError
from regard.models.build import build_model, preset
from regard.nn.state import Source
from regard.pipelines import prepare_training
from regard.pipelines.detect import open_data
from regard.tasks import Contrastive
from regard.training.setup.configure import configure


@torch.no_grad()
def test_the_loss_is_infonce_over_the_batch():
    model = build_model(preset("tiny-encoder", vocab_size=9, dim=8, heads=2, head="none")).eval()
    first = Source(torch.tensor([[1, 2, 0], [3, 4, 5]]), torch.tensor([2, 3]))
    second = Source(torch.tensor([[2, 6, 7], [8, 1, 0]]), torch.tensor([3, 2]))
    task = Contrastive(temperature=0.1)
    vectors = []
    for source in (first, second):
        rows = []
        for ids, length in zip(source.ids, source.lengths, strict=True):
            mean = model(ids[:length].unsqueeze(0))[0].mean(0)
            rows.append(mean / mean.norm())
        vectors.append(rows)
    a, b = vectors
    loss = 0.0
    for i in range(2):
        scores = [math.exp(float(a[i] @ b[j]) / 0.1) for j in range(2)]
        loss -= math.log(scores[i] / sum(scores))
    batch = ContrastiveBatch(first, second)
    assert task.loss(model, batch).item() == pytest.approx(loss, rel=1e-4)
    assert task.count(batch) == 2
    same = ContrastiveBatch(first, first)
    assert task.metrics(model, [same])["accuracy"] == 1.0
    crossed = ContrastiveBatch(first, Source(first.ids.flip(0), first.lengths.flip(0)))
    assert task.metrics(model, [crossed])["accuracy"] == 0.0
    with pytest.raises(ConfigError, match="temperature=0"):
        Contrastive(temperature=0.0)


def test_pairs_are_read_from_tables_and_lines(tmp_path):
    def rows(file, text, **columns):
        (tmp_path / file).write_text(text)
        return open_data(str(tmp_path / file), columns=columns, kind="sentences").rows

    assert rows("pairs.tsv", "a b\tc d\ne f\tg h\n") == [("a b", "c d"), ("e f", "g h")]
    assert rows("lines.txt", "a b\n\nc d\n") == [("a b", "a b"), ("c d", "c d")]
    three = "x,y,z\na b,c d,e f\ng h,i j,k l\n"
    assert rows("three.csv", three, source="z", target="x") == [("e f", "a b"), ("k l", "g h")]
    by_number = rows("three.csv", three, source="3", target="1")  # the first line is no header
    assert by_number == [("z", "x"), ("e f", "a b"), ("k l", "g h")]
    with pytest.raises(
        DataError, match=r"3 hold texts\n.*\nfor example: data.source=1 data.target=2"
    ):
        rows("three.csv", three)
    with pytest.raises(DataError, match="has no rows"):
        rows("header.csv", "source,target\n")


def test_a_single_pair_and_a_context_without_room_are_refused(tmp_path):
    (tmp_path / "pairs.tsv").write_text("a b\tc d\ne f\tg h\n")
    over = {"task": "contrastive", "data": {"validation": [str(tmp_path / "pairs.tsv")]}}
    (tmp_path / "one.tsv").write_text("a b\tc d\n")
    with pytest.raises(DataError, match="one has one training pair"):
        prepare_training(configure(str(tmp_path / "one.tsv"), over))
    over["model"] = {"preset": "tiny-encoder", "head": "none", "dropout": 0.1, "context": 2}
    with pytest.raises(ConfigError, match="context=2 has no room for text"):
        prepare_training(configure(str(tmp_path / "pairs.tsv"), over))


def test_single_lines_need_dropout_and_truncation_is_said(tmp_path):
    lines = [f"{a} {b} x y" for a in "abcdef" for b in "ghijkl"]
    (tmp_path / "lines.txt").write_text("\n".join([*lines, "a " * 30]))
    model = {"preset": "tiny-encoder", "dim": 8, "layers": 1, "heads": 2, "head": "none"}

    def prepared(**options):
        over = {"task": "contrastive", "model": {**model, **options}}
        config = configure(str(tmp_path / "lines.txt"), over | {"data": {"tokenizer": "word"}})
        return prepare_training(config)

    with pytest.raises(ConfigError, match=r"set model\.dropout=0\.1"):
        prepared(dropout=0.0)
    told = prepared(dropout=0.1, context=10).description
    (line,) = [line for line in told if line.startswith("truncated")]
    assert sum(map(int, re.findall(r"\d+", line))) == 1 + 10  # one pair; the context
    assert not any(line.startswith("truncated") for line in prepared(dropout=0.1).description)
    # 64 rows by default, and the training data has fewer
    (rows,) = [line for line in told if line.startswith("data")]
    train = re.search(r"; (\d+) for training", rows)[1]
    assert f"negatives  the {int(train) - 1} other texts of a batch" in told


def test_a_step_is_counted_in_pairs_not_in_tokens(tmp_path):
    path = tmp_path / "s.txt"
    path.write_text("".join(f"sentence {n}\n" for n in range(30)))
    config = configure(str(path), {"task": "contrastive"})
    settings = replace(config.train, batch=8, accumulate=2)
    data = prepare_training(replace(config, train=settings))
    assert len(data.batch(0).first.lengths) == 4
    settings = replace(config.train, batch=None, tokens=64)
    with pytest.raises(ConfigError, match="counts tokens; for pairs of sentences, set"):
        prepare_training(replace(config, train=settings))


def test_sentences_are_trained_evaluated_and_searched(tmp_path, capsys):
    words = ["red", "blue", "green", "cold", "warm", "long", "short", "old"]
    rows = [f"{a} {b}\t{b.upper()} {a.upper()}" for a in words for b in words if a != b]
    (tmp_path / "pairs.tsv").write_text("\n".join(rows))
    run = regard.train(
        tmp_path / "pairs.tsv",
        task={"kind": "contrastive", "temperature": 0.1},
        model={"preset": "tiny-encoder", "dim": 32, "layers": 1, "heads": 2, "head": "none"},
        tokenizer="word",
        steps=60,
        batch=32,
        lr=1e-2,
        quiet=True,
        out=tmp_path / "run",
    )
    assert run.metrics["accuracy"] > 0.5  # chance is about 0.15
    assert run.evaluate() == pytest.approx(run.metrics, abs=1e-5)
    torch.testing.assert_close(run.embed("red old").norm(), torch.tensor(1.0))
    (tmp_path / "lines.txt").write_text("OLD RED\n\nWARM LONG\n")
    with pytest.raises(SystemExit):
        main(
            [
                "neighbours",
                str(tmp_path / "run"),
                "red old",
                "--json",
                "--data",
                str(tmp_path / "lines.txt"),
            ]
        )
    found = json.loads(capsys.readouterr().out)["red old"]
    assert [text for text, _ in found] == ["OLD RED", "WARM LONG"]
    (tmp_path / "image.txt").write_bytes(b"\x89PNG")
    path = tmp_path / "lines.txt"
    assert run.similar("red old", str(path)) == run.similar("red old", path)
    for name, message in (("none", "no file"), ("image.txt", "not UTF-8")):
        with pytest.raises(DataError, match=message):
            run.similar("red old", tmp_path / name)
    for texts in (lambda: run.embed([]), lambda: run.similar("red", []), lambda: run.similar([])):
        with pytest.raises(ConfigError, match="no text to embed"):
            texts()
    with pytest.raises(ConfigError, match="top=0"):
        run.similar("red old", top=0)
    assert run.similar("red old", top=2)["red old"][0][1] <= 1.0001


def test_a_batch_is_not_wider_than_a_context_that_is_no_multiple_of_8(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("".join(f"{' '.join(['word', str(n)] * 20)}\n" for n in range(60)))
    settings = {"path": str(path), "tokenizer": "char"}
    config = configure(None, {"data": settings, "task": "contrastive", "model": {"context": 20}})
    data = prepare_training(config)
    batches = [data.batch(0), *data.validation_batches(None), *data.all_batches()]
    assert {batch.first.ids.shape[1] for batch in batches} == {20}
