"""`regard info`: what a model is made of, drawn, counted and costed."""

import io
import json

import pytest

from hub.runs import make_checkpoint
from regard.cli.info import supports_box_characters
from regard.explain.render.diagram import diagram
from regard.models.build import family_of, preset
from regard.models.presets import PRESETS

KINDS = ["gpt2", "gpt-neox-20b", "palm-540b", "opt-350m", "gemma-2-27b", "qwen3-8b", "gopher-280b"]
KINDS += ["glm-130b", "albert-base", "t5-11b", "marian-en-de", "vit-b16", "lstm", "ngram"]
KINDS += ["gru", "bengio", "convolution"]


def test_info_counts_gpt2(regard):
    found = json.loads(regard("info", "gpt2", "--json").out)
    matrices = 12 * 12 * 768**2
    assert found["parameters"] == sum(found["parts"].values()) == 124_439_808
    assert found["weight_bytes"] == 4 * 124_439_808
    assert found["training_bytes"] == 16 * 124_439_808
    assert found["state_bytes_per_token"] == 2 * 12 * 768 * 4
    assert found["state_bytes"] == 1024 * found["state_bytes_per_token"]
    assert found["flops_per_token"] == 2 * (matrices + 50257 * 768) + 4 * 12 * 1024 * 768
    assert found["decode_flops_per_token"] == found["flops_per_token"]
    assert found["training_flops_per_token"] == 3 * found["flops_per_token"]
    assert "taps" not in found
    assert "124,439,808" in regard("info", "gpt2").out


@pytest.mark.parametrize("name", KINDS)
def test_info_shows_every_kind_of_model_in_eighty_columns(regard, name):
    said = regard("info", name, "--taps")
    assert said.code == 0
    assert said.err == ""
    assert max(map(len, said.out.splitlines())) <= 80
    found = json.loads(regard("info", name, "--json", "--taps").out)
    assert sum(found["parts"].values()) == found["parameters"]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_drawn_in_lines_and_in_ascii(name):
    config = preset(name)
    lines = diagram(family_of(config), config)
    plain = diagram(family_of(config), config, ascii=True)
    assert max(map(len, lines)) <= 78  # two more for the margin
    assert "".join(plain).isascii()
    assert [len(line) for line in plain] == [len(line) for line in lines]


def drawn(name, **fields):
    config = preset(name, **fields)
    return [line.strip(" │") for line in diagram(family_of(config), config)]


def test_a_drawing_has_the_parts_in_their_order():
    lines = drawn("gpt2")
    parts = ["embedding 50,257 × 768", "+ 1,024 learned positions", "attention", "feed-forward"]
    places = [lines.index(part) for part in parts]
    assert places == sorted(places)
    assert sum(line.startswith("⊕◀──") for line in lines) == 2
    assert any("12 ×" in line for line in lines)


def test_a_drawing_shows_where_the_norms_stand():
    assert drawn("gpt2").count("LayerNorm") == 3
    assert drawn("gpt1").count("◇ LayerNorm") == 2
    assert drawn("gpt2", norm_order="sandwich").count("LayerNorm") == 5
    assert drawn("gpt2", norm_order="none").count("LayerNorm") == 3
    assert not any("⊕" in line for line in drawn("gpt2", norm_order="none"))
    assert "LayerNorm             │ LayerNorm" in drawn("gpt-neox")
    assert "attention             │ feed-forward" in drawn("phi-2")


@pytest.mark.parametrize("layers", [1, 6])
def test_the_memory_leads_from_the_encoder_into_cross_attention(layers):
    config = preset("transformer-base", encoder_layers=layers, norm_order="pre")
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


def test_a_terminal_that_has_no_lines_gets_ascii(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    assert supports_box_characters(Terminal("utf-8"))
    assert not supports_box_characters(Terminal("ascii"))
    assert not supports_box_characters(Terminal("latin-1"))
    monkeypatch.setenv("TERM", "dumb")
    assert not supports_box_characters(Terminal("utf-8"))


def test_info_shows_the_published_count_beside_ours(regard):
    assert "published: 124,439,808, the same" in regard("info", "gpt2").out
    said = regard("info", "glm-130b").out
    assert "published: 130,000,000,000, ours -1.00%" in said
    assert "a rounded name" in said
    found = json.loads(regard("info", "glm-130b", "--json").out)["published"]
    assert found["count"] == 130_000_000_000
    assert found["difference"] == pytest.approx(-0.01, abs=1e-4)
    assert "Zeng" in found["source"]


def test_what_is_changed_has_no_published_count(regard):
    assert "published" not in regard("info", "gpt2", "model.layers=2").out
    assert "published" not in json.loads(regard("info", "gpt2", "model.layers=2", "--json").out)
    assert "published" not in regard("info", "tiny-decoder").out


def test_info_tells_what_windows_still_see(regard):
    said = regard("info", "mistral-7b").out
    assert "in sliding windows" in said
    assert "in sliding windows" not in regard("info", "gpt2").out


def test_info_changes_a_preset(regard):
    found = json.loads(regard("info", "gpt2", "model.layers=2", "--json").out)
    assert found["config"]["layers"] == 2


def test_info_of_a_run_tells_its_metrics(regard, text_run):
    found = json.loads(regard("info", text_run, "--json").out)
    rows = [json.loads(line) for line in (text_run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["validation"]["loss"] for row in rows if "validation" in row]
    assert found["metrics"]["loss"] == min(losses)
    assert "validation" in regard("info", text_run).out


def test_info_of_a_recipe(regard):
    with open("mine.toml", "w") as file:
        file.write('data = { tokenizer = { kind = "bpe", size = 300 } }\nmodel = { dim = 64 }\n')
    found = json.loads(regard("info", "mine.toml", "--json").out)
    assert found["kind"] == "recipe"
    assert found["config"]["vocab_size"] == 300


def test_a_name_that_several_presets_begin_with_lists_them(regard):
    said = regard("info", "qwen")
    assert said.code == 2
    assert said.err.startswith("regard: 'qwen' could be any of: qwen2, qwen2-0.5b,")
    assert "did you mean 'gpt2'" in regard("info", "gtp2").err


def test_without_a_name_all_presets_are_listed(regard):
    said = regard("info")
    assert said.code == 0
    names = said.out.replace("\n", " ").replace(",", " ").split()
    assert set(PRESETS) <= set(names)
    assert max(map(len, said.out.splitlines())) <= 80
    assert json.loads(regard("info", "--json").out)["presets"] == list(PRESETS)


def test_a_folder_of_weights_is_told_of_like_a_preset(regard, tmp_path):
    make_checkpoint(tmp_path / "theirs")
    assert "checkpoint, transformer" in regard("info", tmp_path / "theirs").out
    assert regard("diff", "modern", tmp_path / "theirs").code == 0
    said = regard("info", tmp_path / "theirs", "model.layers=3")
    assert (said.code, "import it before changing" in said.err) == (2, True)
