"""Import, fine-tune and export with default settings, for every shape of model and head."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import regard
from hub import small, small_encoders
from hub.runs import model_config, tokenizer
from hub.test_imported_heads import save_bert
from regard.errors import ConfigError
from regard.hub.config_json import write_config
from regard.models.build import resolve

pytestmark = pytest.mark.parity

STEPS = ("train.steps=2", "train.batch=4", "device=cpu")
WORDS = {"the": "O", "cat": "B-animal", "runs": "O", "in": "O", "paris": "B-place"}


@pytest.fixture(autouse=True)
def _no_bars():
    pytest.importorskip("transformers").utils.logging.disable_progress_bar()


def texts(folder):
    (folder / "data.txt").write_text("the cat sat on the mat in paris\n" * 60)
    return folder / "data.txt"


def labels(folder):
    rows = [
        f"{first} {second} {third}\t{second}"
        for first in ("the", "in")
        for second in ("good", "bad")
        for third in ("cat", "dog", "film")
    ]
    (folder / "data.tsv").write_text("\n".join(["text\tlabel", *rows]))
    return folder / "data.tsv"


def tags(folder):
    words = [f"{word} {tag}" for word, tag in WORDS.items()]
    sentences = ["\n".join(words[start:] + words[:start]) for start in range(5)]
    (folder / "data.conll").write_text("\n\n".join(sentences) + "\n")
    return folder / "data.conll"


def pairs(folder):
    rows = [f"the {a} {b}\t{b} {a} the" for a in ("cat", "dog", "mat") for b in ("sat", "on", "a")]
    (folder / "data.tsv").write_text("\n".join(rows))
    return folder / "data.tsv"


def spans(folder):
    rows = [
        {"question": "the cat ?", "context": f"{a} in {b}", "answer": b}
        for a in ("cat", "dog")
        for b in ("paris", "the film", "a mat")
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "data.jsonl"


def text_pairs(folder):
    rows = [f"the {a}\tin {b}\t{a}" for a in ("cat", "dog") for b in ("paris", "film", "mat")]
    (folder / "data.tsv").write_text("\n".join(["premise\thypothesis\tlabel", *rows]))
    return folder / "data.tsv"


def images(folder):
    pixels = np.random.default_rng(0).integers(0, 255, (30, 24, 24, 3), dtype=np.uint8)
    np.savez(folder / "data.npz", images=pixels, labels=np.arange(30) % 3)
    return folder / "data.npz"


def save(folder, name, architecture):
    """Save a small random model of transformers with a tokenizer that it can read."""
    import transformers

    if name == "vit":
        sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
        sizes |= {"intermediate_size": 32, "image_size": 24, "patch_size": 8}
        getattr(transformers, architecture)(transformers.ViTConfig(**sizes)).save_pretrained(folder)
        return
    settings = (small.SETTINGS | small_encoders.SETTINGS)[name]
    config = transformers.AutoConfig.for_model(settings[0], **settings[1])
    config.vocab_size = tokenizer().vocab_size + 3  # padded, as published ones are
    getattr(transformers, architecture)(config).save_pretrained(folder)
    tokenizer().save(folder / "tokenizer.json")


@pytest.mark.parametrize(
    ("name", "architecture", "data", "exported"),
    [
        ("roberta", "RobertaForMaskedLM", labels, "RobertaForSequenceClassification"),
        ("roberta", "RobertaForMaskedLM", tags, "RobertaForTokenClassification"),
        ("roberta", "RobertaForMaskedLM", spans, "RobertaForQuestionAnswering"),
        ("gpt2", "GPT2LMHeadModel", text_pairs, "GPT2ForSequenceClassification"),
        ("distilbert", "DistilBertModel", labels, "DistilBertForSequenceClassification"),
        ("gpt2", "GPT2LMHeadModel", texts, "GPT2LMHeadModel"),
        ("gpt2", "GPT2LMHeadModel", tags, "GPT2ForTokenClassification"),
        ("llama", "LlamaForCausalLM", labels, "LlamaForSequenceClassification"),
        ("t5", "T5ForConditionalGeneration", pairs, "T5ForConditionalGeneration"),
        ("bart", "BartForConditionalGeneration", pairs, "BartForConditionalGeneration"),
        ("vit", "ViTModel", images, "ViTForImageClassification"),
    ],
)
def test_an_imported_model_is_fine_tuned_and_exported_by_default(
    name, architecture, data, exported, tmp_path
):
    save(tmp_path / "theirs", name, architecture)
    regard.import_model(tmp_path / "theirs", tmp_path / "start")
    start = f"train.start={tmp_path / 'start'}"
    run = regard.train(str(data(tmp_path)), start, *STEPS, out=tmp_path / "run")
    result = run.export(tmp_path / "ours")
    assert (result.model_type, result.architecture) == (name, exported)
    assert result.difference < 1e-5


def test_a_masked_model_is_fine_tuned_and_exported(tmp_path):
    save_bert(tmp_path / "theirs", "BertForMaskedLM")
    regard.import_model(tmp_path / "theirs", tmp_path / "start")
    options = ("task=masked", f"train.start={tmp_path / 'start'}", *STEPS)
    run = regard.train(str(texts(tmp_path)), *options, out=tmp_path / "run")
    assert run.export(tmp_path / "ours").architecture == "BertForMaskedLM"


def fine_tune(folder, *settings):
    """Import the checkpoint `theirs` and train on labels; the weights before and after."""
    regard.import_model(folder / "theirs", folder / "start")
    options = (f"train.start={folder / 'start'}", *STEPS, "train.lr=1e-12", *settings)
    run = regard.train(str(labels(folder)), *options, out=folder / "run")
    return (
        load_file(folder / "start" / "model.safetensors"),
        dict(run.model.named_parameters()),
        run,
    )


def test_a_classifier_keeps_its_head_and_its_names_for_classes_it_knows(tmp_path):
    names = {"id2label": {0: "meh", 1: "good", 2: "bad"}, "label2id": None}
    save_bert(tmp_path / "theirs", "BertForSequenceClassification", **names)
    before, after, run = fine_tune(tmp_path)
    assert run.config.task["class_names"] == ["meh", "good", "bad"]
    assert torch.allclose(before["head.out.weight"], after["head.out.weight"], atol=1e-6)
    run.export(tmp_path / "ours")
    table = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert table["id2label"] == {"0": "meh", "1": "good", "2": "bad"}


def test_a_classifier_gets_a_new_output_layer_for_other_classes(tmp_path):
    save_bert(tmp_path / "theirs", "BertForSequenceClassification")  # neg, pos, meh
    _, after, run = fine_tune(tmp_path)
    assert run.config.task["class_names"] == ["bad", "good"]
    assert after["head.out.weight"].shape == (2, 24)


def test_the_pooler_becomes_the_hidden_layer_of_a_classifier(tmp_path):
    save_bert(tmp_path / "theirs", "BertModel")
    before, after, _ = fine_tune(tmp_path)
    assert torch.allclose(before["head.pool.weight"], after["head.hidden.weight"], atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "change"),
    [
        ({"norm": "rms"}, "train with model.norm=layer"),
        (
            {"head": {"kind": "classification", "classes": 3, "pool": "last"}},
            "model.head.bias=false",
        ),
    ],
)
def test_a_refusal_names_the_smallest_change(fields, change):
    with pytest.raises(ConfigError, match="the smallest change: train with ") as raised:
        write_config(model_config("gpt2", **fields), "gpt2")
    assert change in str(raised.value)


def test_the_change_that_exports_a_small_encoder_keeps_its_positions():
    """DeBERTa without relative positions differs in fewer settings, but has no positions at all."""
    config = resolve({"preset": "tiny-encoder", "vocab_size": 50})
    with pytest.raises(ConfigError, match=r"model\.position=learned") as raised:
        write_config(config)
    changes = str(raised.value).split("train with ")[1].split()
    settings = dict(change.removeprefix("model.").split("=") for change in changes)
    table = {name: {"true": True}.get(value, value) for name, value in settings.items()}
    table["norm_eps"] = float(table["norm_eps"])
    assert write_config(replace(config, **table))[0].name == "distilbert"
