"""`regard info`: what a model is made of, drawn, counted and costed."""

import io
import json
from typing import get_args

import pytest

from hub.runs import make_checkpoint
from regard.cli.info import supports_box_characters
from regard.explain.render.diagram import diagram
from regard.models.build import build_model, family_of, preset
from regard.models.presets import PRESETS
from regard.nn.block import NormPlacementKind

KINDS = ["gpt2", "gpt-neox-20b", "palm-540b", "opt-350m", "gemma-2-27b", "qwen3-8b", "gopher-280b"]
KINDS += ["glm-130b", "albert-base", "t5-11b", "marian-en-de", "vit-b16", "lstm", "ngram"]
KINDS += ["gru", "bengio", "convolution"]


def test_info_counts_gpt2(regard):
    output = json.loads(regard("info", "gpt2", "--json").out)
    matrices = 12 * 12 * 768**2
    assert output["parameters"] == sum(output["parts"].values()) == 124_439_808
    assert output["weight_bytes"] == 4 * 124_439_808
    assert output["training_bytes"] == 16 * 124_439_808
    assert output["state_bytes_per_token"] == 2 * 12 * 768 * 4
    assert output["state_bytes"] == 1024 * output["state_bytes_per_token"]
    assert output["flops_per_token"] == 2 * (matrices + 50257 * 768) + 4 * 12 * 1024 * 768
    assert output["decode_flops_per_token"] == output["flops_per_token"]
    assert output["training_flops_per_token"] == 3 * output["flops_per_token"]
    assert "hook points" not in output
    assert "124,439,808" in regard("info", "gpt2").out


@pytest.mark.parametrize("name", KINDS)
def test_info_shows_every_kind_of_model_in_eighty_columns(regard, name):
    completed = regard("info", name, "--hook-points")
    assert completed.code == 0
    assert completed.err == ""
    assert max(map(len, completed.out.splitlines())) <= 80
    assert "\n  factorize_positions " not in completed.out or "\n  embed_dim " in completed.out
    output = json.loads(regard("info", name, "--json", "--hook-points").out)
    assert sum(output["parts"].values()) == output["parameters"]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_diagram_in_unicode_and_in_ascii(name):
    config = preset(name)
    lines = diagram(family_of(config), config)
    plain = diagram(family_of(config), config, ascii=True)
    assert max(map(len, lines)) <= 78  # two more for the margin
    assert "".join(plain).isascii()
    assert [len(line) for line in plain] == [len(line) for line in lines]


def drawn(name, **fields):
    config = preset(name, **fields)
    return [line.strip(" │") for line in diagram(family_of(config), config)]


def test_a_diagram_has_the_modules_in_order():
    lines = drawn("gpt2")
    parts = ["embedding 50,257 × 768", "+ 1,024 learned positions", "attention", "feed-forward"]
    places = [lines.index(part) for part in parts]
    assert places == sorted(places)
    assert sum(line.startswith("⊕◀──") for line in lines) == 2
    assert any("12 ×" in line for line in lines)


def test_a_diagram_shows_the_norm_placement():
    assert drawn("gpt2").count("LayerNorm") == 3
    assert drawn("gpt1").count("◇ LayerNorm") == 2
    assert drawn("gpt2", norm_placement="sandwich").count("LayerNorm") == 5
    assert drawn("gpt2", norm_placement="no_residual").count("LayerNorm") == 3
    assert not any("⊕" in line for line in drawn("gpt2", norm_placement="no_residual"))
    assert all(drawn("gpt2", norm_placement=kind) for kind in get_args(NormPlacementKind))
    assert "LayerNorm             │ LayerNorm" in drawn("gpt-neox")
    assert "attention             │ feed-forward" in drawn("phi-2")


@pytest.mark.parametrize("layers", [1, 6])
def test_the_memory_leads_from_the_encoder_into_cross_attention(layers):
    config = preset("transformer-base", encoder_layers=layers, norm_placement="pre")
    lines = diagram("transformer", config)
    (target,) = (line for line in lines if "──▶│ cross-attention" in line)
    (start,) = (line for line in lines if "memory ──" in line)
    corner = target.index("┌" if "┌──│──│──▶" in target else "└")
    between = lines[min(map(lines.index, (start, target))) + 1 : lines.index(max(start, target))]
    assert start[corner] in "┘┐"
    assert all(line[corner] == "│" for line in between)


class Terminal(io.StringIO):
    """A stream that says it is a terminal, of this encoding."""

    def __init__(self, encoding):
        super().__init__()
        self._encoding = encoding

    encoding = property(lambda self: self._encoding)

    def isatty(self):
        return True


def test_a_terminal_without_box_characters_gets_ascii(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    assert supports_box_characters(Terminal("utf-8"))
    assert not supports_box_characters(Terminal("ascii"))
    assert not supports_box_characters(Terminal("latin-1"))
    monkeypatch.setenv("TERM", "dumb")
    assert not supports_box_characters(Terminal("utf-8"))


def test_info_shows_the_published_count_beside_ours(regard):
    assert "published: 124,439,808, the same" in regard("info", "gpt2").out
    completed = regard("info", "glm-130b").out
    assert "published: 130,000,000,000, ours -1.00%" in completed
    assert "a rounded name" in completed
    output = json.loads(regard("info", "glm-130b", "--json").out)["published"]
    assert output["count"] == 130_000_000_000
    assert output["difference"] == pytest.approx(-0.01, abs=1e-4)
    assert "Zeng" in output["source"]


def test_what_is_changed_has_no_published_count(regard):
    assert "published" not in regard("info", "gpt2", "model.layers=2").out
    assert "published" not in json.loads(regard("info", "gpt2", "model.layers=2", "--json").out)
    assert "published" not in regard("info", "tiny-decoder").out


def test_info_shows_the_kv_cache_within_sliding_windows(regard):
    completed = regard("info", "mistral-7b").out
    assert "in sliding windows" in completed
    assert "in sliding windows" not in regard("info", "gpt2").out


def test_info_changes_a_preset(regard):
    output = json.loads(regard("info", "gpt2", "model.layers=2", "--json").out)
    assert output["config"]["layers"] == 2


def test_info_of_a_run_shows_its_metrics(regard, text_run):
    output = json.loads(regard("info", text_run, "--json").out)
    evaluation = json.loads((text_run / "evaluation.json").read_text())
    assert output["metrics"]["loss"] == evaluation["metrics"]["loss"]
    assert "validation" in regard("info", text_run).out


def test_info_of_a_recipe(regard):
    with open("mine.toml", "w") as file:
        file.write(
            'data = { tokenizer = { kind = "bpe", vocab_size = 300 } }\nmodel = { dim = 64 }\n'
        )
    output = json.loads(regard("info", "mine.toml", "--json").out)
    assert output["kind"] == "recipe"
    assert output["config"]["vocab_size"] == 300


def test_a_name_that_several_presets_begin_with_lists_them(regard):
    completed = regard("info", "qwen")
    assert completed.code == 2
    assert completed.err.startswith("regard: 'qwen' is ambiguous; it could be: qwen2, qwen2-0.5b,")
    assert "did you mean 'gpt2'" in regard("info", "gtp2").err


def test_without_a_name_all_presets_are_listed(regard):
    completed = regard("info")
    assert completed.code == 0
    names = completed.out.replace("\n", " ").replace(",", " ").split()
    assert set(PRESETS) <= set(names)
    assert max(map(len, completed.out.splitlines())) <= 80
    assert json.loads(regard("info", "--json").out)["presets"] == list(PRESETS)


def test_info_of_a_checkpoint_folder_is_like_that_of_a_preset(regard, tmp_path):
    make_checkpoint(tmp_path / "theirs")
    assert "checkpoint, transformer" in regard("info", tmp_path / "theirs").out
    assert regard("diff", "modern", tmp_path / "theirs").code == 0
    completed = regard("info", tmp_path / "theirs", "model.layers=3")
    assert (completed.code, "import it with regard import" in completed.err) == (2, True)


def test_a_sequence_tagger_is_drawn_and_counted():
    tagger = {"bidirectional": True, "dim": 8, "layers": 1, "vocab_size": 11}
    tag, crf = (
        preset("lstm", **tagger, char_dim=6, head={"kind": kind, "classes": 3})
        for kind in ("tag", "crf")
    )
    drawn = "\n".join(diagram("recurrent", crf))
    assert "convolution over characters" in drawn
    assert "LSTM 14 → 8, bidirectional" in drawn
    assert "conditional random field over the tags, 3 classes" in drawn
    sizes = [sum(p.numel() for p in build_model(each).parameters()) for each in (tag, crf)]
    assert sizes[1] - sizes[0] == 3 + 3 * 3 + 3  # first, between, last
