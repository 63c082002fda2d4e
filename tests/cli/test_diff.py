"""`regard diff`: only what differs."""

import json


def table(said):
    """The rows of the output, by their first word; of two of a name the first is the choice."""
    lines = [line.split("  ") for line in said.out.splitlines() if line.startswith("  ")]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    return {name: values for name, *values in reversed(cells)}


def test_gpt2_and_llama_differ_in_these_choices_only(regard):
    said = regard("diff", "gpt2", "llama")
    assert said.code == 0
    assert said.err == ""
    rows = table(said)
    assert rows["position"] == ["learned", "rotary"]
    assert rows["norm"] == ["layer", "rms"]
    assert rows["ffn"] == ["gelu_tanh", "swiglu"]
    assert rows["bias"] == ["yes", "no"]
    assert rows["head_dim"] == ["64", "128"]
    assert rows["total"] == ["124,439,808", "6,738,415,616"]
    same = {"norm_order", "score", "shape", "init", "family", "dropout", "window"}
    assert not same & set(rows)
    assert max(map(len, said.out.splitlines())) <= 80


def test_sizes_choices_and_parameters_stand_apart(regard):
    lines = regard("diff", "gpt2", "llama").out.splitlines()
    titles = [line for line in lines if line and not line.startswith(" ")]
    assert titles == ["sizes", "choices", "parameters"]
    found = json.loads(regard("diff", "gpt2", "llama", "--json").out)
    assert found["models"] == ["gpt2", "llama"]
    assert found["sizes"]["dim"] == [768, 4096]
    assert found["choices"]["norm"] == ["layer", "rms"]
    assert found["parameters"]["position"] == [786_432, 0]
    assert list(found["parameters"])[-1] == "total"


def test_a_long_choice_goes_on_in_the_next_line(regard):
    said = regard("diff", "gpt2", "llama-3.2-1b").out
    assert "rotary, base 500,000," in said
    assert "llama3" in said
    assert max(map(len, said.splitlines())) <= 80


def test_what_one_family_lacks_and_the_other_has_off_is_no_difference(regard):
    rows = table(regard("diff", "gpt2", "lstm"))
    assert rows["family"] == ["transformer", "recurrent"]
    assert rows["position"] == ["learned", "-"]
    assert "qk_norm" not in rows


def test_equal_models_are_said_to_be_the_same(regard):
    assert regard("diff", "llama", "llama-7b").out == "llama and llama-7b are the same model\n"
    found = json.loads(regard("diff", "gpt2", "gpt2", "--json").out)
    assert found["sizes"] == found["choices"] == found["parameters"] == {}


def test_runs_and_recipes_can_be_compared(regard, text_run):
    assert table(regard("diff", text_run, "tiny-decoder"))["dim"] == ["16", "128"]
    assert regard("diff", "quickstart", "tiny-encoder-decoder").code == 0


def test_an_unknown_name_is_an_error(regard):
    said = regard("diff", "gpt2", "lama-7b")
    assert said.code == 2
    assert "did you mean" in said.err


def test_an_option_that_is_said_and_one_that_is_meant_are_the_same(regard, tmp_path):
    said = 'position = {kind = "rotary", base = 10000.0}'
    for name, line in (("said", said), ("meant", 'position = "rotary"')):
        (tmp_path / f"{name}.toml").write_text(f'[model]\npreset = "gpt2"\n{line}\n')
    found = regard("diff", tmp_path / "said.toml", tmp_path / "meant.toml")
    assert "are the same model" in found.out
