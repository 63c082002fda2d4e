"""`regard import SOURCE RUN key=value …` changes settings that change no tensor."""

import json

import pytest
import torch

import regard
from hub.runs import make_checkpoint, make_run, model_config
from regard.cli import main
from regard.errors import ConfigError
from regard.hub.external_checkpoint import open_checkpoint
from regard.models.build import build_model, load_weights, preset, weights
from regard.training.import_export import export_run, import_run

IDS = torch.arange(1, 9).unsqueeze(0)


def logits(model):
    with torch.no_grad():
        return model.head(model(IDS))


def test_the_imported_model_computes_with_the_changed_settings(tmp_path):
    original = make_checkpoint(tmp_path / "external")
    words = ["model.position.base=500000", "model.context=4096", "model.window=3"]
    run = regard.import_model(tmp_path / "external", tmp_path / "run", *words)
    assert (run.config.model["context"], run.config.model["window"]) == (4096, 3)
    changed = {"position": {"kind": "rotary", "base": 500000}, "context": 4096, "window": 3}
    expected = build_model(model_config(**changed)).eval()
    load_weights(expected, weights(original), "the original")
    actual = logits(run.model.cpu())
    assert torch.equal(actual, logits(expected))
    assert not torch.allclose(actual, logits(original))


def test_settings_as_a_table_are_the_same_as_words(tmp_path):
    make_checkpoint(tmp_path / "external")
    table = {"model": {"position": {"base": 500000}}}
    by_words = import_run(tmp_path / "external", tmp_path / "a", table)
    assert by_words.config.position == {"kind": "rotary", "base": 500000}
    run = regard.import_model(tmp_path / "external", tmp_path / "b", **table)
    assert run.config.model["position"] == {"kind": "rotary", "base": 500000}
    facts = [json.loads((tmp_path / name / "environment.json").read_text()) for name in "ab"]
    assert all(each["imported"]["overrides"] == table["model"] for each in facts)


def test_the_command_takes_settings_after_the_run(tmp_path, capsys):
    make_checkpoint(tmp_path / "external")
    words = ["import", str(tmp_path / "external"), str(tmp_path / "run"), "model.norm_eps=1e-3"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--json"])
    assert not ended.value.code
    assert json.loads(capsys.readouterr().out)["model_type"] == "llama"
    assert regard.load(tmp_path / "run").config.model["norm_eps"] == 1e-3


def test_weights_are_read_in_the_layout_of_the_checkpoint(tmp_path):
    """BLOOM groups query, key and value by head; another number of heads must not regroup them."""
    config = preset(
        "tiny-decoder", vocab_size=61, dim=16, layers=2, heads=4, position="alibi",
        ffn="gelu_tanh", norm="layer", bias=True, embed_norm=True, context=2048,
    )  # fmt: skip
    original = make_checkpoint(tmp_path / "external", config, "bloom")
    run = regard.import_model(tmp_path / "external", tmp_path / "run", "model.heads=2")
    assert all(map(torch.equal, weights(run.model.cpu()).values(), weights(original).values()))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ["model.vocab_size=7"],
            r"embed\.token\.weight has shape \(\d+, 16\), but the model has \(7, 16\)",
        ),
        (["model.layers=1"], r"decoder\.blocks\.1\..* is in the checkpoint, not in the model"),
        (["model.layers=3"], r"decoder\.blocks\.2\..* is missing"),
        (["model.tied=false"], r"head\.weight is missing"),
        (["model.position=learned"], r"decoder\.position\.table\.weight is missing"),
        (["model.contxt=4096"], r"unknown key 'contxt'.*'context'"),
        (["model.position.bse=1"], r"unknown option 'bse'.*'base'"),
        (["model.position.base=fast"], "base must be a number"),
        (["model.context=long"], r"model\.context must be an integer"),
        (["model.family=recurrent"], r"model\.family cannot be changed"),
        (["model.preset=gpt2"], r"model\.preset cannot be changed"),
        (["train.lr=1"], "settings of the model only.*'train'"),
        (["context=4096"], r"unknown key 'context'; did you mean 'model\.context'"),
        (["model=gpt2"], "model is a table"),
        (["model.context"], "is not key=value"),
    ],
)
def test_what_cannot_be_changed_is_refused_before_anything_is_written(words, problem, tmp_path):
    make_checkpoint(tmp_path / "external")
    with pytest.raises(ConfigError, match=problem):
        regard.import_model(tmp_path / "external", tmp_path / "run", *words)
    assert [path.name for path in tmp_path.iterdir()] == ["external"]


def test_a_longer_context_does_not_fit_a_table_of_positions(tmp_path):
    make_checkpoint(tmp_path / "external", model_config("gpt2"))
    table = r"decoder\.position\.table\.weight has shape \(32, 16\), but the model has \(64, 16\)"
    with pytest.raises(ConfigError, match=table):
        regard.import_model(tmp_path / "external", tmp_path / "run", "model.context=64")
    assert not (tmp_path / "run").exists()


def test_a_changed_setting_is_exported_again(tmp_path):
    make_run(tmp_path / "first")
    export_run(tmp_path / "first", tmp_path / "exported")
    import_run(tmp_path / "exported", tmp_path / "run", {"model": {"position": {"base": 7e4}}})
    export_run(tmp_path / "run", tmp_path / "again")
    assert open_checkpoint(tmp_path / "again").config_json["rope_theta"] == 7e4
