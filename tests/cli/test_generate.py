import json
import re

WORDS = ["-s", "repetition=1.3", "-s", "top_k=6", "-s", "temperature=0.5"]


def test_a_trace_shows_the_effect_of_every_sampler(regard, text_run):
    completed = regard("generate", text_run, "the cat", "-n", 3, "--seed", 3, *WORDS, "--trace")
    first, *rest = completed.out.splitlines()
    assert first == "repetition=1.3 → top_k=6 → temperature=0.5 → sample"
    blocks = "\n".join(rest).strip().split("\n\n")
    assert len(blocks) == 3
    for number, block in enumerate(blocks, 1):
        head, model, *samplers = block.splitlines()
        assert re.fullmatch(rf"{number}  '.*'   model [\d.]+ %   sampled [\d.]+ %", head)
        assert re.fullmatch(r" +model +[\d.]+ bits", model)
        assert [line.split()[0] for line in samplers] == [
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
        assert [step["remaining"] for step in token["samplers"]][1:] == [6, 6]
        assert {"id", "piece", "before", "after"} == set(token["samplers"][1]["top_removed"][0])
        assert 0 < token["model_prob"] < token["final_prob"] <= 1


def test_unknown_characters_are_reported(regard, text_run):
    completed = regard("generate", text_run, "the ø\x1b cat", "-n", 1)
    assert "not in the run's vocabulary, read as unknown tokens: 'ø', '\\x1b'" in completed.err
    assert "unknown" not in regard("generate", text_run, "the cat", "-n", 1).err


def test_an_order_is_that_of_another_library(regard, text_run):
    completed = regard("generate", text_run, "the", "-n", 2, "--order", "llama.cpp", "--json")
    expected = ["top_k={k=40, exact=true}", "top_p=0.95", "min_p=0.05", "temperature=0.8"]
    assert json.loads(completed.out)["chain"] == expected
    completed = regard("generate", text_run, "the", "--order", "lama.cpp")
    assert completed.code == 2
    assert "unknown order 'lama.cpp'; did you mean 'llama.cpp'" in completed.err


def test_settings_that_leave_nothing_are_named(regard, text_run):
    completed = regard("generate", text_run, "the", "-s", "ban=[0, 1]", "-s", "allow=[0, 1]")
    assert completed.code == 1
    assert (
        "row 0 has no token left to sample: allow=[0, 1] removed all remaining tokens"
        in completed.err
    )
    completed = regard("generate", text_run, "the", "-s", "ban=[100000]")
    assert completed.code == 2
    assert "ban: token 100000 is not in the vocabulary (vocab_size=" in completed.err


def test_a_token_can_be_named_by_its_text(regard, text_run):
    words = ["generate", text_run, "the", "-n", 30, "--seed", 1, "-s", "temperature=2"]
    plain = regard(*words).out
    completed = json.loads(regard(*words, "-s", "ban=['a', 't']", "--json").out)
    assert "a" in plain
    assert not set("at") & set(completed["text"])
    assert re.fullmatch(r"ban=\[\d+(, \d+)+\]", completed["chain"][1])
    completed = regard(*words, "-s", "ban=['never was']")
    assert completed.code == 2
    assert "ban: no token in the vocabulary has the text 'never was'" in completed.err


def test_beam_search_has_no_sampling_to_trace(regard, text_run):
    for words in (["--trace"], ["--order", "hf"], ["--seed", 0], ["-s", "greedy"]):
        completed = regard("generate", text_run, "the", "--beam", 2, *words)
        assert completed.code == 2
        assert "--beam and --search do not sample" in completed.err
    completed = regard("generate", text_run, "the", "--beam", 2, "-n", 3, "--json")
    assert "chain" not in json.loads(completed.out)


def test_a_run_generates_with_int8_weights(regard, text_run, materials):
    words = ["generate", text_run, "the", "-n", 5, "-s", "greedy"]
    assert len(regard(*words, "--int8").out) > len("the\n")
    assert regard(*words, "--float16").out == regard(*words).out
    completed = regard("generate", text_run, "the", "--int8", "--beam", 2)
    assert completed.code == 2
    assert "do not sample; leave out --int8" in completed.err
    counting = regard("train", materials / "cats.txt", "model.preset=ngram", "--out", "counted")
    assert counting.code == 0
    completed = regard("generate", "counted", "the", "--int8")
    assert completed.code == 2
    assert "int8 is not supported by this model" in completed.err
    completed = regard("generate", text_run, "the", "--int4")
    assert "int4 is not supported here: Triton kernels need a CUDA GPU, not cpu" in completed.err


def test_errors_come_before_any_output(regard, text_run):
    for words in (["-s", "ban=[9999]"], ["--stop", ""]):
        completed = regard("generate", text_run, "the", *words)
        assert completed.code == 2
        assert completed.out == ""


def test_a_text_outside_the_vocabulary_is_not_forced(regard, text_run):
    completed = regard("generate", text_run, "the", "-s", 'force=["a€"]')
    assert completed.code == 2
    assert "force='a€': '€' is not in the vocabulary" in completed.err
