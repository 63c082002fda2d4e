"""A checkpoint of one model, settings of another: what differs is told, nothing is loaded."""

import json
import shutil

import pytest
import torch

import regard
from hub.runs import make_checkpoint
from regard.errors import CheckpointError, ConfigError
from regard.models.build import build_model, load_weights, preset, weights
from regard.training.run import begin
from training.runs import SMALL, config

OTHERS = {
    "wider": {"dim": 16},
    "another vocabulary": {"vocab_size": 12},
    "untied": {"tied": False},
    "deeper": {"layers": 4},
    "with biases": {"bias": True},
    "with learned positions": {"position": "learned"},
    "another feed-forward": {"ffn": "gelu", "ffn_dim": 24},
}


def model(**fields):
    torch.manual_seed(3)
    settings = {**SMALL, "layers": 2, "vocab_size": 11, "context": 8, **fields}
    return build_model(preset("tiny-decoder", **settings))


def of_another_kind():
    settings = {**SMALL, "vocab_size": 11, "context": 8}
    return build_model(preset("tiny-encoder-decoder", **settings))


def differences(ours, theirs):
    """What differs between two tables of weights, by name."""
    own, other = weights(ours), weights(theirs)
    names = own.keys() ^ other.keys()
    return names | {n for n in own.keys() & other.keys() if own[n].shape != other[n].shape}


@pytest.mark.parametrize("other", [*OTHERS, "an encoder-decoder", "an LSTM"])
def test_the_first_five_differences_are_listed_and_nothing_is_loaded(other):
    if other == "an LSTM":
        theirs = build_model(preset("lstm", dim=8, layers=1, vocab_size=11))
    else:
        theirs = of_another_kind() if other not in OTHERS else model(**OTHERS[other])
    ours = model()
    before = {name: tensor.clone() for name, tensor in weights(ours).items()}
    wrong = differences(ours, theirs)
    with pytest.raises(CheckpointError, match="in somewhere do not fit the model") as raised:
        load_weights(ours, weights(theirs), "somewhere")
    assert raised.value.exit_code == 4
    _, *listed = str(raised.value).splitlines()
    told = listed[:5]
    assert len(told) == min(5, len(wrong))
    for line in told:
        name, *_ = line.split()
        assert name in wrong
        own, theirs_too = weights(ours).get(name), weights(theirs).get(name)
        if own is not None and theirs_too is not None:
            assert str(tuple(own.shape)) in line
            assert str(tuple(theirs_too.shape)) in line
    assert listed[5:] == ([f"  … and {len(wrong) - 5} more"] if len(wrong) > 5 else [])
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(ours).items())


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    list(begin(config(data / "cats.txt", steps=3, evaluate_every=3), folder))
    return folder


def edited(trained, tmp_path, **fields):
    folder = shutil.copytree(trained, tmp_path / "copy")
    table = json.loads((folder / "config.json").read_text())
    table["model"] |= fields
    (folder / "config.json").write_text(json.dumps(table))
    return folder


@pytest.mark.parametrize("fields", [{"dim": 16}, {"tied": False}, {"vocab_size": 99}])
def test_a_run_whose_settings_are_of_another_model_is_not_opened(fields, trained, tmp_path):
    folder = edited(trained, tmp_path, **fields)
    with pytest.raises(CheckpointError, match=r"config\.json was changed after the weights"):
        regard.load(folder, device="cpu")


def test_weights_to_begin_from_must_fit_and_leave_no_folder(trained, data, tmp_path):
    over = {"model": {"dim": 16}}
    with pytest.raises(ConfigError, match=r"model\.dim=16 does not fit .* has model\.dim=8;"):
        list(begin(config(data / "cats.txt", over, start=str(trained)), tmp_path / "new"))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_size", 48), ("vocab_size", 99), ("num_hidden_layers", 3), ("intermediate_size", 7)],
)
def test_a_foreign_folder_whose_config_is_of_another_model_is_not_imported(key, value, tmp_path):
    make_checkpoint(tmp_path / "theirs", **{key: value})
    with pytest.raises(CheckpointError) as raised:
        regard.import_model(tmp_path / "theirs", tmp_path / "run")
    assert len(str(raised.value).splitlines()) <= 8
    assert "shape" in str(raised.value) or "missing" in str(raised.value)
    assert not (tmp_path / "run").exists()
