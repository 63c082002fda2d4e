"""Runs on labels and on tags, from a file to predictions, and what is refused."""

import json

import numpy as np
import pytest
import torch

import regard
from regard import api
from regard.api.run_evaluation import validation_data
from regard.config import RunConfig, build, merge
from regard.errors import ConfigError, DataError
from regard.pipelines import default_settings, open_data, prepare_training
from regard.pipelines.encoded_texts import encode, placeholder_id
from regard.pipelines.labels import add_head
from regard.tasks import Tag
from regard.text import train_tokenizer
from regard.training.run import begin, resume
from regard.training.setup.configure import configure
from training.runs import Crash, contents, interrupt

COLOURS = ["red", "green", "blue", "grey"]
MOODS = {"glad": "good", "fine": "good", "sad": "bad", "dull": "bad"}
SHORT = {
    "model": {"dim": 12, "context": 16},
    "train": {"steps": 40, "batch": 16, "lr": 2e-2, "evaluate_every": 20, "ema": 0.0},
}


def reviews(folder, count=300):
    """Texts whose last word but one tells the label."""
    words = [(COLOURS[n % 4], list(MOODS)[n // 4 % 4], "day " * (n % 5)) for n in range(count)]
    rows = [
        {"text": f"{n} {c} {days}{m} it was", "label": MOODS[m]}
        for n, (c, m, days) in enumerate(words)
    ]
    path = folder / "reviews.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tagged(folder, count=200):
    """Colours are tagged, and what follows them is within."""
    lines = []
    for n in range(count):
        lines += [f"word{n % 7}\tO", f"{COLOURS[n % 4]}\tB-thing", "house\tI-thing", "stood\tO", ""]
    path = folder / "houses.conll"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a run on labels and one on tags; not to be changed."""
    folder = tmp_path_factory.mktemp("labels")
    regard.train(str(reviews(folder)), out=folder / "label", **SHORT)
    regard.train(str(tagged(folder)), out=folder / "tag", **SHORT)
    return folder


def test_a_file_of_labels_is_trained_on_without_settings(place):
    run = regard.load(place / "label")
    assert run.config.task == {"kind": "text_classification", "class_names": ["bad", "good"]}
    assert run.config.model["head"] == {"kind": "classification", "pool": "max", "classes": 2}
    found = run.evaluate()
    assert set(found) == {"loss", "accuracy", "f1"}
    assert found["accuracy"] > 0.9
    validation = validation_data(run)
    right = 0
    for (text,), (wanted,) in validation.rows:
        (likely,) = run.predict(text)
        assert sum(share for _, share in likely) == pytest.approx(1)
        right += likely[0][0] == validation.class_names[wanted]
    assert right / len(validation) == found["accuracy"]
    other = place / "other.jsonl"
    other.write_text('{"text": "glad it was", "label": "good"}\n{"text": "sad", "label": 0}\n')
    assert run.evaluate(str(other))["accuracy"] == 1  # 0 is the first of the names


def test_a_file_of_tags_is_trained_on_without_settings(place):
    run = regard.load(place / "tag")
    assert run.config.task["class_names"] == ["B-thing", "I-thing", "O"]
    found = run.evaluate()
    assert found["accuracy"] > 0.9
    assert found["f1"] > 0.9
    said = [likely[0][0] for likely in run.predict("word3 blue house stood", top=1)]
    assert said == ["O", "B-thing", "I-thing", "O"]


def test_a_tagger_has_a_random_field_characters_and_word_dropout_unless_a_model_is_chosen(place):
    path = place / "houses.conll"
    for words in ([], ["task=tag"]):
        config = api.configure(path, *words)
        assert config.task == {"kind": "tag", "word_dropout": 0.25}
        assert (config.model["char_dim"], config.model["head"]) == (64, "crf")
        assert config.train.lr == 5e-3
    assert api.configure(path, "task.word_dropout=0").task == {"kind": "tag", "word_dropout": 0}
    chosen = api.configure(path, "model.preset=tiny-encoder")
    assert (chosen.task, chosen.model, chosen.train.lr) == ("tag", {"preset": "tiny-encoder"}, 2e-3)
    started = api.configure(path, f"train.start={place / 'label'}")
    assert "word_dropout" not in started.task
    with pytest.raises(ConfigError, match=r"'causal' learns from text, and houses holds tags"):
        api.configure(path, "task=causal")


@pytest.fixture(scope="module")
def sequence_tagger(place):
    """A tagger with a conditional random field that also reads characters."""
    over = merge(SHORT, {"model": {"head": "crf", "char_dim": 6}, "task": {"word_dropout": 0.5}})
    return regard.train(str(place / "houses.conll"), out=place / "crf", **over)


def test_words_that_training_did_not_see_are_tagged_by_their_characters(sequence_tagger):
    run = sequence_tagger
    assert run.evaluate()["f1"] > 0.9
    said = [likely[0][0] for likely in run.predict("word9 greyish house stood", top=1)]
    assert said == ["O", "B-thing", "I-thing", "O"]
    same = [likely[0][0] for likely in run.predict("word9 zzzz house stood", top=1)]
    assert same != said  # both are unknown words


def test_the_most_probable_sequence_comes_first_with_the_probability_of_each_tag(sequence_tagger):
    run = sequence_tagger
    text = "word1 blue house stood red"
    with torch.no_grad():
        before = run.model.head.transitions.clone()
        run.model.head.transitions.copy_(torch.tensor([[0.0, 3, 0], [0, 0, 3], [3, 0, 0]]))
        run.model.head.out.weight.mul_(0.01)
    answers = run.predict(text)
    ids = torch.tensor([run.tokenizer.encode(text)])
    from regard.nn.characters import utf8_bytes

    letters = torch.tensor([[utf8_bytes(word) for word in text.split()]], dtype=torch.uint8)
    x = run.model(ids, lengths=torch.tensor([5]), word_bytes=letters)
    tagged = torch.ones(1, 5, dtype=torch.bool)
    names = run.config.task["class_names"]
    best = run.model.head.decode(x, tagged)[0].tolist()
    chances = run.model.head.log_probs(x, tagged)[0].exp()
    assert [answer[0][0] for answer in answers] == [names[tag] for tag in best]
    for answer, row in zip(answers, chances, strict=True):
        assert dict(answer) == pytest.approx(dict(zip(names, row.tolist(), strict=True)), abs=1e-5)
    with torch.no_grad():
        run.model.head.transitions.copy_(before)
        run.model.head.out.weight.mul_(100)


@pytest.mark.parametrize("name", ["label", "tag"])
def test_accuracy_is_reported_by_length(place, name):
    run = regard.load(place / name)
    with torch.no_grad():  # always the first class: right here, wrong there
        run.model.head.out.weight.zero_()
        run.model.head.out.bias.copy_(torch.arange(len(run.model.head.out.bias), 0, -1))
    found, validation = run.evaluate_by_length(), validation_data(run)
    assert found.unit == "words"
    for span in found.ranges:
        shares = []
        for parts, classes in validation.rows:
            if span.shortest <= len(" ".join(parts).split()) <= span.longest:
                said = [likely[0][0] for likely in run.predict(" ".join(parts))]
                wanted = [validation.class_names[each] for each in classes]
                right = sum(a == b for a, b in zip(said, wanted, strict=True))
                shares.append(right / len(wanted))
        assert span.examples == len(shares)
        assert span.metrics["accuracy"] == pytest.approx(sum(shares) / len(shares))


def test_a_word_is_tagged_at_its_last_token(tmp_path):
    data = open_data(str(tagged(tmp_path, 4)))
    tokenizer = train_tokenizer("char", data.texts())
    model = add_head({"preset": "lstm"}, Tag(), classes=3, vocab_size=tokenizer.vocab_size)
    ids, classes, cut, *_ = next(encode(data, tokenizer, model))
    assert tokenizer.decode(ids.tolist()) == "word0 red house stood"
    ends = {4: "O", 8: "B-thing", 14: "I-thing", 20: "O"}  # "word0" is 5 letters, " red" 4, …
    assert {at: data.class_names[each] for at, each in enumerate(classes) if each != -1} == ends
    assert not cut
    encoder = {"preset": "tiny-encoder", "context": 12}
    model = add_head(encoder, Tag(), classes=3, vocab_size=tokenizer.vocab_size)
    ids, classes, cut, *_ = next(encode(data, tokenizer, model))
    assert (ids[0], ids[-1], len(ids)) == (tokenizer.cls_id, tokenizer.sep_id, 12)
    assert np.flatnonzero(classes != -1).tolist() == [5, 9]
    assert cut


def settings(path, **over):
    base = {
        "name": "test",
        "task": {"kind": "text_classification", "label_smoothing": 0.1},
        "data": {"path": str(path), "tokenizer": "word"},
        "model": {"preset": "gru", "dim": 8, "layers": 1, "context": 16, "dropout": 0.1},
        "train": {"steps": 12, "batch": 4, "evaluate_every": 4, "save_every": 3, "ema": 0.9},
        "device": "cpu",
    }
    return build(RunConfig, merge(base, over))


def test_a_run_on_labels_resumes_bit_for_bit(tmp_path, monkeypatch):
    config = settings(reviews(tmp_path), train={"accumulate": 2})
    list(begin(config, tmp_path / "whole"))
    with monkeypatch.context() as patch:
        interrupt(patch, 7)
        with pytest.raises(Crash):
            list(begin(config, tmp_path / "cut"))
    list(resume(tmp_path / "cut"))
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_a_language_model_may_become_a_classifier(tmp_path):
    """Its words and its layers are taken over, its head is not."""
    data = reviews(tmp_path)
    text = tmp_path / "plain.txt"
    text.write_text(
        "".join(json.loads(line)["text"] + "\n" for line in data.read_text().splitlines())
    )
    model = settings(data).model
    words = {"task": "causal", "data": {"path": str(text)}, "model": {**model, "context": 8}}
    list(begin(settings(data, **words), tmp_path / "language"))
    over = {"train": {"start": str(tmp_path / "language"), "steps": 2}}
    run = regard.train(str(data), out=tmp_path / "reader", **over)
    assert run.config.model["head"]["kind"] == "classification"
    assert run.tokenizer.fingerprint() == regard.load(tmp_path / "language").tokenizer.fingerprint()


def test_long_texts_are_truncated_and_counted(tmp_path):
    path = reviews(tmp_path)
    prepared = prepare_training(settings(path, model={"context": 5}))
    (told,) = [line for line in prepared.description if line.startswith("truncated")]
    assert told.endswith("to 5 tokens")
    assert all(batch.ids.shape[1] <= 5 for batch in prepared.validation_batches(None))


def test_names_may_be_given_for_numbered_classes(tmp_path):
    path = tmp_path / "sent.tsv"
    path.write_text("".join(f"text {n}\t{n % 2}\n" for n in range(40)))
    config = settings(path, task={"kind": "text_classification", "class_names": ["bad", "good"]})
    assert prepare_training(config).task.class_names == ["bad", "good"]
    with pytest.raises(
        ConfigError, match=r"task.class_names has 1 names, and the data 2 classes: 0, 1"
    ):
        prepare_training(
            settings(path, task={"kind": "text_classification", "class_names": ["bad"]})
        )


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"model": {"preset": "ngram"}}, "family ngram has no head for classes"),
        (
            {"model": {"preset": "tiny-encoder-decoder", "heads": 2}},
            "architecture 'encoder' or 'decoder'",
        ),
        (
            {"task": "image_classification"},
            "task='image_classification' learns from images, and reviews holds labels",
        ),
        ({"train": {"best_metric": "bleu"}}, "choose among last, loss, accuracy, f1"),
        ({"model": {"preset": "gru", "char_dim": 4}}, r"char_dim=4 reads the .* tagged words"),
        (
            {"task": {"kind": "text_classification", "word_dropout": 1}},
            r"word_dropout=1\.0 must be at least 0",
        ),
    ],
)
def test_what_does_not_read_labels_is_refused(tmp_path, over, message):
    over = {"model": {"dim": 8, "layers": 1, "context": 16, **over.pop("model", {})}, **over}
    config = settings(reviews(tmp_path))
    table = {"name": "test", "data": {"path": config.data.path, "tokenizer": "word"}}
    table |= {"task": "text_classification", "model": {"preset": "gru"}, **over}
    if over["model"].get("preset") == "ngram":
        table["model"] = {"preset": "ngram"}
    with pytest.raises(ConfigError, match=message):
        prepare_training(build(RunConfig, table))


def test_a_bidirectional_network_is_no_language_model(tmp_path):
    path = tmp_path / "plain.txt"
    path.write_text("to be or not to be\n" * 30)
    with pytest.raises(ConfigError, match=r"bidirectional=true also reads a text from its end"):
        prepare_training(settings(path, task="causal", model={"bidirectional": True}))


@pytest.mark.parametrize("inputs", [5, ["good", None], [("good",), 2.5], True])
@pytest.mark.parametrize("name", ["label", "tag"])
def test_a_prediction_needs_strings(place, name, inputs):
    with pytest.raises(DataError, match="a text must be a string, not"):
        regard.load(place / name).predict(inputs)


def test_a_class_that_was_not_learned_is_named(place):
    other = place / "strange.jsonl"
    other.write_text('{"text": "a", "label": "odd"}\n{"text": "b", "label": "good"}\n')
    with pytest.raises(DataError, match="strange has a class 'odd' that the model does not have"):
        regard.load(place / "label").evaluate(str(other))


def test_a_bag_of_words_has_a_learning_rate_of_its_own(tmp_path):
    path = str(reviews(tmp_path))
    rates = [
        configure(path, {"model": model}).train.lr
        for model in ({}, {"preset": "lstm"}, {"preset": "bag"}, {"family": "bag"})
    ]
    assert rates == [2e-3, 2e-3, 1e-2, 1e-2]
    assert configure(path, {"model": {"preset": "bag"}, "train": {"lr": 0.5}}).train.lr == 0.5


def test_defaults_suit_what_is_labelled(tmp_path):
    words = default_settings(open_data(str(reviews(tmp_path))), {"path": "x"}, gpu=False)
    assert words["data"]["tokenizer"] == {"kind": "word", "lower": True}
    symbols = default_settings(
        open_data({"kind": "parentheses", "examples": 50}), {"path": "x"}, gpu=False
    )
    assert (symbols["task"], symbols["data"]["tokenizer"]) == ("text_classification", "char")
    assert symbols["model"]["context"] <= 40


@pytest.mark.parametrize(("ids", "id"), [({"eos": 3, "unk": 4}, 3), ({"unk": 4}, 4)])
def test_a_word_that_encodes_to_nothing_has_an_id_also_without_a_stop_token(ids, id):
    class Special:
        eos_id = 3
        special_id = staticmethod(ids.get)

    assert placeholder_id(Special()) == id


def test_classes_that_a_split_lacks_are_named(tmp_path, capsys):
    path = tmp_path / "rare.csv"
    rows = [f"text number {n} of it,{'rare' if n == 7 else 'usual'}" for n in range(60)]
    path.write_text("\n".join(["text,label", *rows]) + "\n")
    events = []
    regard.train(str(path), out=tmp_path / "run", on_event=events.append, quiet=True, **SHORT)
    warning = "no validation text has the class rare: the metrics do not cover it; add data"
    assert f"warning    {warning}" in events[0].description
    assert api.preview(configure(str(path)), tmp_path / "new").notes["warning"] == warning
    assert "warning" not in api.preview(configure(str(reviews(tmp_path))), tmp_path / "new").notes


def test_more_classes_than_texts_can_teach_get_a_warning(tmp_path):
    path = tmp_path / "many.csv"
    rows = [f"text number {n} of it,class{n % 58}" for n in range(60)]
    path.write_text("\n".join(["text,label", *rows]) + "\n")
    warning = api.preview(configure(str(path)), tmp_path / "new").notes["warning"]
    assert warning.startswith("58 classes for 5")
    assert "training texts, too few to learn most of them; check that the labels are" in warning
    assert "no validation text has 5" in warning
    assert "of 58 classes (class" in warning
    assert "no training text has" in warning
