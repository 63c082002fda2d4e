import json
import re

WORDS = ["-s", "repetition=1.3", "-s", "top_k=6", "-s", "temperature=0.5"]


def test_a_trace_tells_what_every_sampler_did(regard, text_run):
    said = regard("generate", text_run, "the cat", "-n", 3, "--seed", 3, *WORDS, "--trace")
    first, *rest = said.out.splitlines()
    assert first == "repetition=1.3 → top_k=6 → temperature=0.5 → draw"
    blocks = "\n".join(rest).strip().split("\n\n")
    assert len(blocks) == 3
    for number, block in enumerate(blocks, 1):
        head, model, *stages = block.splitlines()
        assert re.fullmatch(rf"{number}  '.*'   model [\d.]+ %   sampled [\d.]+ %", head)
        assert re.fullmatch(r" +model +[\d.]+ bits", model)
        assert [line.split()[0] for line in stages] == [
            "repetition=1.3",
            "top_k=6",
            "temperature=0.5",
        ]
        assert re.search(r"top_k=6 +6 left +[\d.]+ % +[\d.]+ bits  - \d+: '", block)
        assert re.search(r"temperature=0.5 +6 left +[\d.]+ bits  '.*' [\d.]+ → [\d.]+", block)


def test_a_trace_for_programs_has_the_same_numbers(regard, text_run):
    words = ["generate", text_run, "the cat", "-n", 3, "--seed", 3, *WORDS]
    plain, traced = (json.loads(regard(*words, *more, "--json").out) for more in ([], ["--trace"]))
    assert plain == {name: traced[name] for name in ("prompt", "text", "chain")}
    assert traced["chain"] == ["repetition=1.3", "top_k=6", "temperature=0.5"]
    assert regard(*words).out == f"the cat{plain['text']}\n"
    assert "".join(token["piece"] for token in traced["tokens"]) == plain["text"]
    for token in traced["tokens"]:
        assert [step["remaining"] for step in token["stages"]][1:] == [6, 6]
        assert {"id", "piece", "before", "after"} == set(token["stages"][1]["top_removed"][0])
        assert 0 < token["model_prob"] < token["final_prob"] <= 1


def test_what_a_run_cannot_read_is_told(regard, text_run):
    said = regard("generate", text_run, "the ø\x1b cat", "-n", 1)
    assert "not in the run's vocabulary, read as unknown tokens: 'ø', '\\x1b'" in said.err
    assert "unknown" not in regard("generate", text_run, "the cat", "-n", 1).err


def test_an_order_is_that_of_another_system(regard, text_run):
    said = regard("generate", text_run, "the", "-n", 2, "--order", "llama.cpp", "--json")
    expected = ["top_k={k=40, exact=true}", "top_p=0.95", "min_p=0.05", "temperature=0.8"]
    assert json.loads(said.out)["chain"] == expected
    said = regard("generate", text_run, "the", "--order", "lama.cpp")
    assert said.code == 2
    assert "unknown order 'lama.cpp'; did you mean 'llama.cpp'" in said.err


def test_settings_that_leave_nothing_are_named(regard, text_run):
    said = regard("generate", text_run, "the", "-s", "ban=[0, 1]", "-s", "allow=[0, 1]")
    assert said.code == 1
    assert "row 0 has nothing to draw from: nothing is left by allow=[0, 1]" in said.err
    said = regard("generate", text_run, "the", "-s", "ban=[100000]")
    assert said.code == 2
    assert "ban: token 100000 is not in the vocabulary of" in said.err


def test_a_token_can_be_named_by_its_text(regard, text_run):
    words = ["generate", text_run, "the", "-n", 30, "--seed", 1, "-s", "temperature=2"]
    plain = regard(*words).out
    said = json.loads(regard(*words, "-s", "ban=['a', 't']", "--json").out)
    assert "a" in plain
    assert not set("at") & set(said["text"])
    assert re.fullmatch(r"ban=\[\d+(, \d+)+\]", said["chain"][1])
    said = regard(*words, "-s", "ban=['never was']")
    assert said.code == 2
    assert "ban: no token of this model reads 'never was'" in said.err


def test_a_beam_draws_nothing_that_could_be_traced(regard, text_run):
    for words in (["--trace"], ["--order", "hf"], ["--seed", 0], ["-s", "greedy"]):
        said = regard("generate", text_run, "the", "--beam", 2, *words)
        assert said.code == 2
        assert "--beam and --search do not sample" in said.err
    said = regard("generate", text_run, "the", "--beam", 2, "-n", 3, "--json")
    assert "chain" not in json.loads(said.out)


def test_a_run_writes_with_weights_of_eight_bits(regard, text_run, materials):
    words = ["generate", text_run, "the", "-n", 5, "-s", "greedy"]
    assert len(regard(*words, "--int8").out) > len("the\n")
    said = regard("generate", text_run, "the", "--int8", "--beam", 2)
    assert said.code == 2
    assert "do not sample; leave out --int8" in said.err
    counting = regard("train", materials / "cats.txt", "model.preset=ngram", "--out", "counted")
    assert counting.code == 0
    said = regard("generate", "counted", "the", "--int8")
    assert said.code == 2
    assert "int8 is not supported by this kind of model" in said.err


def test_what_is_wrong_is_told_before_anything_is_written(regard, text_run):
    for words in (["-s", "ban=[9999]"], ["--until", ""]):
        said = regard("generate", text_run, "the", *words)
        assert said.code == 2
        assert said.out == ""


def test_a_text_that_cannot_be_written_is_not_forced(regard, text_run):
    said = regard("generate", text_run, "the", "-s", 'force=["a€"]')
    assert said.code == 2
    assert "force='a€': '€' is not in the vocabulary" in said.err
