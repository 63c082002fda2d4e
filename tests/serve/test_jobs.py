"""The work of the routes other than generation, called without a server."""

import pytest
import torch

import regard
from regard.errors import ConfigError
from regard.serve import jobs
from regard.serve.engine_request import source_ids
from regard.serve.models import ServedModel
from regard.serve.schema import PredictBody
from regard.text.chat_template import CHATML, render
from serve.conftest import TINY, trained


def served(path):
    return ServedModel("model", regard.load(path, device="cpu"), None)


def test_special_tokens_of_a_source_are_added_on_request(pair_run):
    model = served(pair_run)
    plain = jobs.tokenize(model, "7 cats", add_special_tokens=False)
    assert plain == model.run.tokenizers.source.encode("7 cats")
    ids = jobs.tokenize(model, "7 cats", add_special_tokens=True)
    assert ids == [*plain, model.run._pair_task().source_eos_id]
    assert source_ids(model, "7 cats") == source_ids(model, ids) == ids  # none is added twice


def test_a_text_is_lowered_as_the_training_data_was(materials, tmp_path):
    words = [*TINY, "model.context=32", "train.steps=1", "data.lower=true", "data.tokenizer=char"]
    model = served(trained(tmp_path / "lower", materials / "cats.txt", words))
    for text in ("The CAT", "the cat"):
        assert jobs.tokenize(model, text, add_special_tokens=True) == model.run._prompt(text)
    assert jobs.embed(model, ["The CAT"]) == jobs.embed(model, ["the cat"])


def test_embeddings_are_those_of_the_run(tmp_path):
    rows = [f"{n} red cats,{n} dark dogs" for n in range(40)]
    (tmp_path / "pairs.csv").write_text("\n".join(["first,second", *rows]))
    words = [*TINY, "task=contrastive", "model.context=32", "train.steps=1", "train.batch=4"]
    for pool in ("mean", "first"):
        words = [*words, "data.tokenizer=char", f"task.pool={pool}"]
        model = served(trained(tmp_path / pool, tmp_path / "pairs.csv", words))
        (vector,), count = jobs.embed(model, ["3 red cats"])
        torch.testing.assert_close(torch.tensor(vector), model.run.embed("3 red cats"))
        ids = jobs.tokenize(model, "3 red cats", add_special_tokens=True)
        assert count == len(ids)
        assert (ids[0], ids[-1]) == (model.tokenizer.cls_id, model.tokenizer.sep_id)


def test_the_chat_template_is_that_of_the_run(text_run, pair_run, chat_run):
    jinja2 = pytest.importorskip("jinja2")
    template = jinja2.Template(jobs.tokenizer_info(served(chat_run))["chat_template"])
    messages = [("user", "1 cats"), ("assistant", "1 dogs"), ("user", "2 cats")]
    turns = [{"role": role, "content": text} for role, text in messages]
    prompt = template.render(messages=turns, add_generation_prompt=True)  # as lm-eval renders it
    assert prompt == render(CHATML, messages, add_generation_prompt=True)
    for path in (text_run, pair_run):
        assert jobs.tokenizer_info(served(path))["chat_template"] is None


def test_a_series_that_is_too_short_is_refused_by_the_name_of_the_field(tmp_path):
    (tmp_path / "waves.csv").write_text("\n".join(["height", *(str(n % 7) for n in range(300))]))
    model = served(trained(tmp_path / "waves", tmp_path / "waves.csv", []))
    with pytest.raises(ConfigError, match=r"^series: it has 2 rows, but the model needs at least"):
        jobs.predict(model, PredictBody(series=[1.0, 2.0]))
