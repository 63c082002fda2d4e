"""One class for a text, one for each of its words: the loss, the metrics, and what is refused."""

import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import reference
from regard.data.labels import from_conll
from regard.models.build import build_model, preset, resolve
from regard.pipelines.labels import add_head
from regard.tasks import TASKS, Tag, TextClassification
from regard.tasks.tag import spans
from regard.tasks.text_classification import macro_f1

CHANCE = torch.Generator()
SMALL = {"vocab_size": 11, "dim": 8, "layers": 2, "context": 12}
READERS = {  # every family that reads whole texts
    "lstm": {"preset": "lstm", **SMALL},
    "gated": {"preset": "update-gate", **SMALL},
    "both ways": {"preset": "gru", **SMALL, "bidirectional": True},
    "convolution": {"preset": "convolution", **SMALL, "layers": 4},  # sees 16 ids
    "encoder": {"preset": "tiny-encoder", **SMALL, "heads": 2},
    "decoder": {"preset": "tiny-decoder", **SMALL, "heads": 2},
}
LENGTHS = [5, 12, 1, 7]


def build(name, task, **head):
    table = {**READERS[name], **({"head": head} if head else {})}
    return build_model(add_head(table, task, classes=3, vocab_size=11)).double().eval()


def batch_of(task, width=12):
    """Texts of several lengths, and their classes: of all, or of every second token."""
    drawn = np.random.default_rng(0)
    texts = [drawn.integers(0, 11, length) for length in LENGTHS]
    classes = [np.array([n % 3]) for n in range(len(texts))]
    if isinstance(task, Tag):
        classes = [np.where(np.arange(n) % 2, -1, np.arange(n) % 3) for n in LENGTHS]
    return task.collate((texts, classes, width), CHANCE), texts, classes


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("kind", ["text_classification", "tag"])
def test_padding_changes_nothing_and_the_loss_is_a_sum(name, kind):
    task = TASKS[kind]()
    model = build(name, task)
    batch, texts, classes = batch_of(task)
    expected = 0.0
    for text, wanted in zip(texts, classes, strict=True):
        alone = task.collate(([text], [wanted], len(text)), CHANCE)
        logits = task.logits(model, alone).flatten(0, -2)
        expected += reference.cross_entropy(logits.detach(), torch.tensor(wanted))
    assert task.loss(model, batch).item() == pytest.approx(expected, rel=1e-9)
    assert task.count(batch) == sum((each != -1).sum() for each in classes)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("pool", ["mean", "max"])
def test_every_state_counts_where_all_are_pooled(name, pool):
    task = TextClassification()
    model = build(name, task, pool=pool)
    batch, *_ = batch_of(task)
    x = model(batch.ids, lengths=batch.lengths)
    for row, length in enumerate(LENGTHS):
        real = x[row, :length]
        pooled = sum(real) / length if pool == "mean" else real.max(0).values
        expected = model.head.out(pooled)
        torch.testing.assert_close(task.logits(model, batch)[row], expected)


def test_the_read_out_has_seen_the_whole_text():
    """Whatever the first or the last id is, the answer depends on it."""
    for name in READERS:
        task = TextClassification()
        model = build(name, task)
        batch, texts, classes = batch_of(task)
        before = task.logits(model, batch)
        for place in (0, -1):
            others = [text.copy() for text in texts]
            for text in others:
                text[place] = (text[place] + 1) % 11
            after = task.logits(model, task.collate((others, classes, 12), CHANCE))
            changed = (before - after).abs().amax(1) > 1e-9
            assert changed.all(), (name, place)


def test_the_lectures_head_applies_an_activation_to_the_last_state():
    task = TextClassification()
    model = build("lstm", task, relu=True)
    batch, *_ = batch_of(task)
    x = model(batch.ids)
    last = torch.stack([x[row, length - 1] for row, length in enumerate(LENGTHS)])
    expected = last.clamp_min(0) @ model.head.out.weight.T + model.head.out.bias
    torch.testing.assert_close(task.logits(model, batch), expected)


def test_metrics_equal_those_counted_by_hand():
    task = TextClassification(class_names=["a", "b", "c"])
    model = build("lstm", task)
    batch, *_ = batch_of(task)
    with torch.no_grad():
        model.head.out.weight.zero_()
        model.head.out.bias.copy_(torch.tensor([0.0, 1.0, 0.5]))  # always says b
    found = task.metrics(model, [batch, batch])
    logp = torch.tensor([0.0, 1.0, 0.5]).double().log_softmax(0)
    expected = -(2 * logp[0] + logp[1] + logp[2]) / 4  # of a, b, c, a
    assert found["loss"] == pytest.approx(expected.item())
    assert found["accuracy"] == 0.25
    assert found["f1"] == pytest.approx((0 + 2 * 1 / (4 + 1) + 0) / 3)
    assert task.accuracy_per_text(model, batch).tolist() == [0, 1, 0, 0]


def test_accuracy_per_text_is_that_of_its_tags():
    task = Tag(class_names=["O", "B-x", "I-x"])
    model = build("lstm", task)
    batch, _, classes = batch_of(task)
    said = task.logits(model, batch).argmax(-1)
    for row, wanted in enumerate(classes):
        asked = wanted != -1
        share = (said[row, : len(wanted)].numpy() == wanted)[asked].mean()
        assert task.accuracy_per_text(model, batch)[row].item() == pytest.approx(share)


def test_macro_f1_is_the_mean_of_what_each_class_gets():
    drawn = np.random.default_rng(1)
    said, wanted = drawn.integers(0, 4, 200), drawn.integers(0, 4, 200)
    scores = []
    for each in range(4):
        precision = (wanted[said == each] == each).mean()
        recall = (said[wanted == each] == each).mean()
        scores.append(2 * precision * recall / (precision + recall))
    assert macro_f1(said, wanted) == pytest.approx(np.mean(scores))


def test_spans_begin_and_end_as_in_conll():
    assert spans(["O", "O"]) == set()
    assert spans(["B-x", "B-x", "I-x"]) == {(0, 1, "x"), (1, 3, "x")}
    assert spans(["I-x", "I-y", "O", "I-y"]) == {(0, 1, "x"), (1, 2, "y"), (3, 4, "y")}
    assert spans(["NOUN", "NOUN", "O"]) == {(0, 1, "NOUN"), (1, 2, "NOUN")}


@pytest.mark.real
def test_span_f1_of_published_outputs_is_as_published():
    """WNUT 2017 (Derczynski et al.): seven systems and the F1 that the organisers found."""
    if "REGARD_DATA" not in os.environ:
        pytest.skip("REGARD_DATA does not say where the datasets are")
    folder = Path(os.environ["REGARD_DATA"], "wnut17")
    published = {
        "uh_ritual": 41.86,
        "spinningbytes.txt": 40.78,
        "sjtu_adapt.txt": 40.42,
        "arcada": 39.98,
        "flytxt": 38.35,
        "mic-cis.txt": 37.06,
        "drexel_cci": 26.30,
    }

    def marked(path):
        data = from_conll(path)
        return [spans([data.class_names[each] for each in classes]) for _, classes in data.rows]

    gold = marked(folder / "emerging.test.annotated")
    for name, expected in published.items():
        found = marked(folder / "submissions" / name)
        right = sum(len(a & b) for a, b in zip(gold, found, strict=True))
        f1 = 200 * right / sum(len(a) + len(b) for a, b in zip(gold, found, strict=True))
        assert round(f1, 2) == expected


def test_a_head_for_something_else_is_replaced_and_options_are_kept():
    task = TextClassification()
    read = {
        name: add_head(table, task, classes=3, vocab_size=11).head
        for name, table in READERS.items()
    }
    pools = {name: head["pool"] for name, head in read.items()}
    assert pools == {
        "lstm": "last",
        "gated": "last",
        "both ways": "ends",
        "convolution": "last",
        "encoder": "first",
        "decoder": "last",
    }
    table = {**READERS["lstm"], "head": {"kind": "classification", "pool": "max", "classes": 9}}
    head = add_head(table, task, classes=3, vocab_size=11).head
    assert head == {"kind": "classification", "pool": "max", "classes": 3}
    assert add_head(table, Tag(), classes=4, vocab_size=11).head == {"kind": "tag", "classes": 4}


def test_what_cannot_be_read_or_written_is_refused():
    from regard.errors import ConfigError

    with pytest.raises(ConfigError, match="family ngram has no head for classes"):
        add_head({"preset": "ngram"}, TextClassification(), classes=3, vocab_size=11)
    with pytest.raises(ConfigError, match="only one direction has read the whole input"):
        preset("lstm", bidirectional=True, head={"kind": "classification", "pool": "last"})
    with pytest.raises(
        ConfigError,
        match=r"unknown head 'masked'; known: classification, crf, forecast, linear, mixture, span",
    ):
        preset("convolution", head="masked")
    for name in ("lstm", "convolution", "decoder"):
        model = build(name, TextClassification())
        with pytest.raises(ConfigError, match="it does not predict the next token"):
            model.start(1, 4)
    both = build_model(resolve({**READERS["both ways"], "tied": False}))
    with pytest.raises(ConfigError, match="a bidirectional model cannot generate"):
        both.start(1, 4)


def test_class_weights_are_numbers_from_0_on():
    from regard.errors import ConfigError

    for weights in ([1.0, -0.5], [math.nan, 1.0], [1.0, math.nan]):
        with pytest.raises(ConfigError, match="must be at least 0"):
            TextClassification(class_weights=weights)
    assert TextClassification(class_weights=[0.0, 2.0]).class_weights == [0.0, 2.0]
