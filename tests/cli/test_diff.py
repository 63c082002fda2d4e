"""`regard diff`: only what differs."""

import json


def table(completed):
    """The rows of the output, by their first word; of two of a name the first is the choice."""
    lines = [line.split("  ") for line in completed.out.splitlines() if line.startswith("  ")]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    return {name: values for name, *values in reversed(cells)}


def test_gpt2_and_llama_differ_in_these_choices_only(regard):
    completed = regard("diff", "gpt2", "llama")
    assert completed.code == 0
    assert completed.err == ""
    rows = table(completed)
    assert rows["position"] == ["learned", "rotary"]
    assert rows["norm"] == ["layer", "rms"]
    assert rows["ffn"] == ["gelu_tanh", "swiglu"]
    assert rows["bias"] == ["yes", "no"]
    assert rows["head_dim"] == ["64", "128"]
    assert rows["total"] == ["124,439,808", "6,738,415,616"]
    same = {"norm_placement", "score", "architecture", "init", "family", "dropout", "window"}
    assert not same & set(rows)
    assert max(map(len, completed.out.splitlines())) <= 80


def test_sizes_choices_and_parameters_stand_apart(regard):
    lines = regard("diff", "gpt2", "llama").out.splitlines()
    titles = [line for line in lines if line and not line.startswith(" ")]
    assert titles == ["sizes", "settings", "parameters"]
    output = json.loads(regard("diff", "gpt2", "llama", "--json").out)
    assert output["models"] == ["gpt2", "llama"]
    assert output["sizes"]["dim"] == [768, 4096]
    assert output["settings"]["norm"] == ["layer", "rms"]
    assert output["parameters"]["position"] == [786_432, 0]
    assert list(output["parameters"])[-1] == "total"


def test_a_long_choice_goes_on_in_the_next_line(regard):
    completed = regard("diff", "gpt2", "llama-3.2-1b").out
    assert "rotary, base 500,000," in completed
    assert "llama3" in completed
    assert max(map(len, completed.splitlines())) <= 80


def test_what_one_family_lacks_and_the_other_has_off_is_no_difference(regard):
    rows = table(regard("diff", "gpt2", "lstm"))
    assert rows["family"] == ["transformer", "recurrent"]
    assert rows["position"] == ["learned", "-"]
    assert "qk_norm" not in rows


def test_equal_models_are_said_to_be_the_same(regard):
    assert regard("diff", "llama", "llama-7b").out == "llama and llama-7b are the same model\n"
    output = json.loads(regard("diff", "gpt2", "gpt2", "--json").out)
    assert output["sizes"] == output["settings"] == output["parameters"] == {}


def test_runs_and_recipes_can_be_compared(regard, text_run):
    assert table(regard("diff", text_run, "tiny-decoder"))["dim"] == ["16", "128"]
    assert regard("diff", "quickstart", "tiny-encoder-decoder").code == 0


def test_an_unknown_name_is_an_error(regard):
    completed = regard("diff", "gpt2", "lama-7b")
    assert completed.code == 2
    assert "did you mean" in completed.err


def test_an_explicit_default_and_an_implicit_one_are_equal(regard, tmp_path):
    explicit = 'position = {kind = "rotary", base = 10000.0}'
    for name, line in (("explicit", explicit), ("implicit", 'position = "rotary"')):
        (tmp_path / f"{name}.toml").write_text(f'[model]\npreset = "gpt2"\n{line}\n')
    output = regard("diff", tmp_path / "explicit.toml", tmp_path / "implicit.toml")
    assert "are the same model" in output.out
