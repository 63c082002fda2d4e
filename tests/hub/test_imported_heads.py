"""Imported classifiers and taggers predict and evaluate, and keep the names of their classes."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file

import regard
from hub import small_encoders
from hub.small import small
from regard.cli import main
from regard.errors import ConfigError
from regard.hub.class_names import read_class_names
from regard.hub.config_json import read_config
from regard.hub.external_checkpoint import open_checkpoint

pytestmark = pytest.mark.parity

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "mat",
    "dog",
    "un",
    "##happi",
    "##ly",
    "runs",
    "in",
    "paris",
    "good",
    "bad",
    "film",
]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
CLASSIFIER, TAGGER = "BertForSequenceClassification", "BertForTokenClassification"
CLASSES = {CLASSIFIER: ["neg", "pos", "meh"], TAGGER: ["O", "B-place", "I-place"]}


@pytest.fixture(autouse=True)
def _no_bars():
    pytest.importorskip("transformers").utils.logging.disable_progress_bar()


def save_bert(folder, architecture, **settings):
    """Save a small random BERT with its tokenizer; returns both, as transformers has them."""
    import transformers

    names = CLASSES.get(architecture, ["a", "b"])
    labels = {"id2label": dict(enumerate(names)), "label2id": {n: i for i, n in enumerate(names)}}
    sizes = small_encoders.ENCODER | {"vocab_size": len(VOCABULARY)}
    config = transformers.BertConfig(**{**sizes, **labels, **settings})
    model = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.4)
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    tokenizer = transformers.BertTokenizerFast.from_pretrained(folder)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def rewrite(folder, *dropped, **settings):
    """Change settings of a config.json, and drop some."""
    table = json.loads((folder / "config.json").read_text()) | settings
    table = {key: value for key, value in table.items() if key not in dropped}
    (folder / "config.json").write_text(json.dumps(table))


@torch.no_grad()
def test_a_classifier_says_the_probabilities_of_transformers(tmp_path):
    theirs, tokenizer = save_bert(tmp_path / "theirs", CLASSIFIER)
    run = regard.import_model(tmp_path / "theirs", tmp_path / "run")
    text = "the unhappily good film"
    (predicted,) = run.predict(text)
    expected = theirs(**tokenizer(text, return_tensors="pt")).logits[0].softmax(-1)
    for name, probability in predicted:
        index = CLASSES[CLASSIFIER].index(name)
        assert probability == pytest.approx(expected[index].item(), abs=1e-6)


@torch.no_grad()
def test_a_tagger_reads_the_first_token_of_each_word(tmp_path):
    theirs, tokenizer = save_bert(tmp_path / "theirs", TAGGER)
    run = regard.import_model(tmp_path / "theirs", tmp_path / "run")
    text = "the unhappily cat runs in paris"
    encoded = tokenizer(text, return_tensors="pt")
    words = encoded.word_ids()
    firsts = [words.index(word) for word in range(6)]
    assert firsts != list(range(1, 7))  # a word has several tokens
    expected = theirs(**encoded).logits[0, firsts].softmax(-1)
    for predicted, row in zip(run.predict(text), expected, strict=True):
        actual = [dict(predicted)[name] for name in CLASSES[TAGGER]]
        assert actual == pytest.approx(row.tolist(), abs=1e-6)


@torch.no_grad()
def test_a_classifier_is_evaluated_on_classes_by_name(tmp_path):
    theirs, tokenizer = save_bert(tmp_path / "theirs", CLASSIFIER)
    run = regard.import_model(tmp_path / "theirs", tmp_path / "run")
    texts = ["good film", "the bad film", "the cat sat on the mat"]
    ids = [theirs(**tokenizer(text, return_tensors="pt")).logits.argmax().item() for text in texts]
    said = [CLASSES[CLASSIFIER][id] for id in ids]
    wrong = next(name for name in CLASSES[CLASSIFIER] if name != said[2])
    rows = [f"{text}\t{name}" for text, name in zip(texts, [*said[:2], wrong], strict=True)]
    (tmp_path / "texts.tsv").write_text("text\tlabel\n" + "\n".join([*rows, rows[0]]))
    assert run.evaluate(str(tmp_path / "texts.tsv"))["accuracy"] == 3 / 4


@torch.no_grad()
def test_a_tagger_is_evaluated_on_tags_by_name(tmp_path):
    theirs, tokenizer = save_bert(tmp_path / "theirs", TAGGER)
    run = regard.import_model(tmp_path / "theirs", tmp_path / "run")
    words = ["the", "unhappily", "cat"]
    ids = theirs(**tokenizer(" ".join(words), return_tensors="pt")).logits[0].argmax(-1)
    said = [CLASSES[TAGGER][ids[position]] for position in (1, 2, 5)]
    other = next(name for name in CLASSES[TAGGER] if name not in said[:1])
    tags = [other, *said[1:]]
    lines = [f"{word} {tag}" for word, tag in zip(words, tags, strict=True)]
    lines += ["", "the O", "cat B-place", "film I-place"]
    (tmp_path / "words.conll").write_text("\n".join(lines) + "\n")
    answers = [max(row, key=lambda pair: pair[1])[0] for row in run.predict("the cat film")]
    right = sum(map(str.__eq__, answers, CLASSES[TAGGER])) + 2
    assert run.evaluate(str(tmp_path / "words.conll"))["accuracy"] == pytest.approx(right / 6)


@pytest.mark.parametrize("architecture", [CLASSIFIER, TAGGER])
def test_class_names_are_exported_as_they_were_imported(architecture, tmp_path):
    save_bert(tmp_path / "theirs", architecture)
    regard.import_model(tmp_path / "theirs", tmp_path / "run").export(tmp_path / "ours")
    before, after = (
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("theirs", "ours")
    )
    for key in ("id2label", "label2id"):
        assert after[key] == before[key]
    assert list(after["label2id"]) == CLASSES[architecture]


def test_class_names_are_read_from_label2id_alone():
    assert read_class_names({"label2id": {"b": 1, "a": 0}}) == ["a", "b"]
    assert read_class_names({"num_labels": 2}) == ["LABEL_0", "LABEL_1"]
    with pytest.raises(ConfigError, match="without gaps"):
        read_class_names({"id2label": {"0": "a", "2": "b"}})
    table = {"model_type": "bert", "architectures": [CLASSIFIER], "label2id": {"a": 0, "b": 1}}
    assert read_config(table)[1].head["classes"] == 2


def test_stale_class_names_give_way_to_num_labels_and_the_output_layer(tmp_path, caplog):
    theirs, _ = save_bert(tmp_path, CLASSIFIER)
    rewrite(tmp_path, id2label={"0": "LABEL_0", "1": "LABEL_1"}, num_labels=3)
    with caplog.at_level(logging.WARNING):
        checkpoint = open_checkpoint(tmp_path)
    assert "names 2 classes in id2label, but num_labels and the output layer have 3" in caplog.text
    assert checkpoint.class_names == ["LABEL_0", "LABEL_1", "LABEL_2"]
    assert torch.equal(checkpoint.load().head.out.weight, theirs.classifier.weight)


def test_num_labels_that_the_output_layer_contradicts_is_not_believed(tmp_path):
    save_bert(tmp_path, CLASSIFIER)
    rewrite(tmp_path, num_labels=7)
    assert open_checkpoint(tmp_path).class_names == CLASSES[CLASSIFIER]


@pytest.mark.parametrize("problem", ["multi_label_classification", "regression"])
def test_a_head_that_does_not_choose_one_class_is_not_given_the_task(problem, tmp_path):
    save_bert(tmp_path / "theirs", CLASSIFIER, problem_type=problem)
    run = regard.import_model(tmp_path / "theirs", tmp_path / "run")
    assert run.config.task == "none"
    with pytest.raises(ConfigError, match="no task supports head"):
        run.predict("good film")


def test_a_config_without_model_type_is_read_by_its_class(tmp_path):
    save_bert(tmp_path, CLASSIFIER)
    expected = open_checkpoint(tmp_path).config
    rewrite(tmp_path, "model_type")
    assert open_checkpoint(tmp_path).config == expected
    assert regard.load(tmp_path).predict("good film")


def test_a_config_with_sizes_only_is_read_by_its_tensors(tmp_path, caplog):
    save_bert(tmp_path, "BertForMaskedLM")
    expected = open_checkpoint(tmp_path).config
    rewrite(tmp_path, "model_type", "architectures")
    with caplog.at_level(logging.WARNING):
        assert open_checkpoint(tmp_path).config == expected
    assert "has no model_type; the tensors are those of a bert" in caplog.text


def test_tensors_of_several_families_do_not_decide(tmp_path):
    small("llama").save_pretrained(tmp_path)
    rewrite(tmp_path, "model_type", "architectures")
    with pytest.raises(ConfigError, match=r"they fit llama, mistral.*\nadd a model_type"):
        open_checkpoint(tmp_path)


def test_a_t5_that_transformers_5_makes_untied_is_tied_and_not_scaled(tmp_path):
    import transformers

    config = transformers.T5Config(**small_encoders.T5, tie_word_embeddings=False)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "theirs")
    assert "lm_head.weight" not in load_file(tmp_path / "theirs" / "model.safetensors")
    model = open_checkpoint(tmp_path / "theirs").config
    assert (model.tied, model.head) == (True, "linear")
    run = regard.import_model(tmp_path / "theirs", tmp_path / "run")
    assert run.export(tmp_path / "ours").difference < 1e-5
    assert open_checkpoint(tmp_path / "ours").config == model


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        (CLASSIFIER, "try: regard predict {run} 'some words'"),
        ("BertForQuestionAnswering", "try: regard predict {run} 'a question' 'a text'"),
        ("BertModel", "fine-tune it on your data:\nregard train data.csv train.start={run}\n"),
    ],
)
def test_the_last_line_of_an_import_says_what_to_do(architecture, expected, tmp_path, capsys):
    save_bert(tmp_path / "theirs", architecture)
    run = tmp_path / "run"
    with pytest.raises(SystemExit):
        main(["import", str(tmp_path / "theirs"), str(run)])
    assert expected.format(run=run) in capsys.readouterr().err
