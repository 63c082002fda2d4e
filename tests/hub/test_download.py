"""Which files of a hub repository are downloaded, and the error when none is usable."""

import json

import pytest

from hub.runs import make_checkpoint
from regard.errors import CheckpointError
from regard.hub.download import download
from regard.training.import_export import import_run

hub = pytest.importorskip("huggingface_hub")

DOWNLOADED = ["config.json", "model.safetensors", "model-00001-of-00002.safetensors", "merges.txt"]
DOWNLOADED += ["vocab.txt", "source.spm", "tokenizer.model", "model.safetensors.index.json"]
DOWNLOADED += ["chat_template.jinja"]
IGNORED = ["consolidated.safetensors", "onnx/config.json", "original/model.safetensors"]
IGNORED += ["pytorch_model.bin", "modeling.py", "flax_model.msgpack"]


def serve(monkeypatch, folder):
    """A hub whose only repository lies in a folder; the files that were asked for come back."""
    taken = []

    def snapshot_download(name, **patterns):
        files = [*DOWNLOADED, *IGNORED]
        taken.extend(hub.utils.filter_repo_objects(files, **patterns))
        return str(folder)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    return taken


def test_weights_are_fetched_once_and_in_the_form_that_is_read(tmp_path, monkeypatch):
    make_checkpoint(tmp_path / "0fa3c1")
    taken = serve(monkeypatch, tmp_path / "0fa3c1")
    import_run("some/model", tmp_path / "run")
    assert taken == DOWNLOADED
    facts = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert facts["imported"]["from"] == "some/model"  # and not the number of a version


def test_a_repository_of_pickles_is_told_how_to_convert(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"architectures": ["BertForMaskedLM"]}')
    serve(monkeypatch, tmp_path)
    with pytest.raises(CheckpointError, match=r"some/model has no safetensors") as raised:
        download("some/model")
    line = "BertForMaskedLM.from_pretrained('some/model').save_pretrained(\"NEW\")"
    assert line in str(raised.value)
