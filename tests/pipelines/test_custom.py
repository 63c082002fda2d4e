"""Tasks and kinds of data that a user adds from a script."""

from dataclasses import dataclass
from unittest.mock import patch

import pytest

import regard
from regard.data.text import from_strings
from regard.errors import ConfigError, DataError
from regard.pipelines import PIPELINES, open_data
from regard.pipelines.text import TextPipeline
from regard.tasks import TASKS, Causal, Task
from training.runs import config


@dataclass(frozen=True, kw_only=True)
class Doubled(Causal):
    """A causal task whose loss counts twice."""

    def loss(self, model, batch):
        return 2 * super().loss(model, batch)


class Shouted(TextPipeline):
    """Text in capital letters, in files of another suffix."""

    def recognizes(self, path):
        return path.suffix == ".shout"

    def open(self, path):
        return from_strings(path.stem, "text in capitals", [path.read_text().upper()])


@pytest.fixture(autouse=True)
def tables():
    with patch.dict(TASKS), patch.dict(PIPELINES):
        yield


def test_a_task_derived_from_another_trains_evaluates_and_generates(data, tmp_path):
    TASKS["doubled"] = Doubled
    text = config(data / "cats.txt", steps=2)
    plain = regard.train(text, out=tmp_path / "plain")
    run = regard.train(text, out=tmp_path / "doubled", task={"kind": "doubled"})
    assert run.evaluate()["loss"] > plain.evaluate()["loss"]
    assert len(run.generate("the", max_new_tokens=5, seed=1)) > 0
    assert run.methods == Causal.methods


def test_a_pipeline_that_is_added_is_asked_first(tmp_path):
    path = tmp_path / "loud.shout"
    path.write_text("quiet text\n" * 20)
    assert open_data(str(path)).fingerprint() != ""
    PIPELINES["shouted"] = Shouted()
    chunks = [chunk for chunk, _ in open_data(str(path)).chunks()]
    assert "".join(chunks) == "QUIET TEXT\n" * 20


def test_a_path_that_no_pipeline_recognizes_is_refused(tmp_path):
    del PIPELINES["text"]  # it recognizes every path
    (tmp_path / "notes.xyz").write_text("a note")
    with pytest.raises(DataError, match=r"no pipeline recognizes .*notes\.xyz; pipelines: "):
        open_data(str(tmp_path / "notes.xyz"))


def test_a_task_that_learns_from_an_unknown_kind_is_refused(data, tmp_path):
    class Lost(Task):
        data_kind, architectures = "txt", ("decoder",)

    TASKS["lost"] = Lost
    with pytest.raises(ConfigError, match="unknown kind of data 'txt'; did you mean 'text'"):
        regard.train(config(data / "cats.txt"), out=tmp_path / "run", task="lost")


def test_a_method_that_the_task_does_not_have_is_refused(data, tmp_path):
    run = regard.train(config(data / "cats.txt", steps=2), out=tmp_path / "run")
    with pytest.raises(ConfigError, match="is 'causal', which cannot predict; use `generate`"):
        run.predict("the")
