"""Searching, guessing ahead and contrasting on the command line, as in Python."""

import json

import pytest

from cli.conftest import TEXT_WORDS, trained
from regard.api import load
from regard.generate import PromptLookup


@pytest.fixture(scope="session")
def other_run(materials, tmp_path_factory):
    """The same text counted: another model of the same ids."""
    words = ["model.preset=ngram", "model.order=2"]
    return trained(tmp_path_factory.mktemp("runs") / "other", materials / "cats.txt", words)


@pytest.fixture(scope="session")
def foreign_run(materials, tmp_path_factory):
    """Another model of other ids."""
    words = [*TEXT_WORDS, "data.tokenizer=word"]
    return trained(tmp_path_factory.mktemp("runs") / "words", materials / "cats.txt", words)


@pytest.mark.parametrize("word", ["beam={width=6, groups=3}", "contrastive=3", "beam=2"])
def test_a_search_prints_what_it_finds_in_python(regard, text_run, word):
    output = load(text_run).search("the", max_new_tokens=5, search=word)
    completed = json.loads(
        regard("generate", text_run, "the", "-n", 5, "--search", word, "--json").out
    )
    assert completed["text"] == output[0][0]
    assert [(each["text"], each["score"]) for each in completed["hypotheses"]] == output
    plain = regard("generate", text_run, "the", "-n", 5, "--search", word).out
    for text, score in output:
        assert f"the{text}" in plain
        assert len(output) == 1 or f"{score:.4f}" in plain


def test_several_prompts_have_all_that_one_has(regard, text_run, stdin):
    run, search = load(text_run), "beam={width=3, n_best=2}"
    outputs = [run.search(each, max_new_tokens=5, search=search) for each in ("the", "cat")]
    words = ["-n", 5, "--search", search]
    stdin(b"the\ncat\n")
    printed = regard("generate", text_run, "-", *words).out
    for prompt, output in zip(("the", "cat"), outputs, strict=True):
        assert len(output) == 2
        assert all(f"{score:.4f}  {prompt}{text}" in printed for text, score in output)
    stdin(b"the\ncat\n")
    objects = regard("generate", text_run, "-", *words, "--json").out.splitlines()
    for prompt, line in zip(("the", "cat"), objects, strict=True):
        single = regard("generate", text_run, prompt, *words, "--json").out
        assert json.loads(line) == json.loads(single)
    stdin(b"the\ncat\n")
    sampled = ["-n", 2, "-s", "top_k=3", "--json"]
    lines = regard("generate", text_run, "-", *sampled).out.splitlines()
    assert [json.loads(line)["chain"] for line in lines] == [["top_k=3"]] * 2


def test_a_draft_changes_nothing_that_is_greedy(regard, text_run, other_run):
    greedy = regard("generate", text_run, "the", "-n", 20, "-s", "greedy").out
    for draft in (other_run, text_run, "prompt-lookup"):
        words = ("-n", 20, "-s", "greedy", "--draft", draft)
        assert regard("generate", text_run, "the", *words).out == greedy
    run = load(text_run)
    drawn = [
        run.generate("the", max_new_tokens=20, seed=seed, draft=PromptLookup())
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_an_amateur_changes_sampling_and_search(regard, text_run, other_run):
    words = ("generate", text_run, "the", "-n", 20)
    alone, against = (
        regard(*words, "-s", "greedy", *more).out for more in ([], ["--amateur", other_run])
    )
    assert alone != against
    run, amateur = load(text_run), load(other_run)
    alone, against = (run.search("the", max_new_tokens=9, amateur=each) for each in (None, amateur))
    assert alone[0][1] != against[0][1]


def test_a_translation_is_searched_too(regard, pair_run):
    beam = regard("translate", pair_run, "100 cats", "--beam", 3).out
    assert regard("translate", pair_run, "100 cats", "--search", "beam=3").out == beam
    word = "beam={width=3, normalization='gnmt', length_penalty=0.6, early_stopping='heuristic'}"
    assert regard("translate", pair_run, "100 cats", "--search", word).code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--beam", 999], "width=999 of a beam search must be at most vocab_size="),
        (["--search", "bem=3"], "unknown search 'bem'; did you mean 'beam'?"),
        (["--search", "beam=wide"], "beam.width must be an integer"),
        (["--search", "contrastive={k=0}"], "k=0 of contrastive search"),
        (["--search", "beam=3", "--beam", 3], "--beam or --search"),
        (["--search", "beam=3", "--draft", "prompt-lookup"], "--draft"),
        (["--search", "beam=3", "--seed", 1], "--seed"),
        (["--beam", 3, "--stop", "a"], "do not sample; leave out --stop"),
    ],
)
def test_a_search_that_cannot_be_is_named(regard, text_run, words, message):
    completed = regard("generate", text_run, "the", *words)
    assert completed.code == 2
    assert message in completed.err
    assert completed.err.count("\n") <= 5


def test_a_search_that_ends_with_the_context_says_so(regard, text_run):
    completed = regard("generate", text_run, "the", "--beam", 2, "-n", 900)
    assert completed.code == 0
    assert "a search ends at the model's context of" in completed.err
    assert "context" not in regard("generate", text_run, "the", "--beam", 2, "-n", 3).err


def test_a_model_of_other_ids_is_refused(regard, text_run, foreign_run):
    for option in ("--draft", "--amateur"):
        completed = regard("generate", text_run, "the", option, foreign_run)
        assert completed.code == 2
        assert f"the tokenizer of the {option[2:]} {foreign_run} differs" in completed.err
