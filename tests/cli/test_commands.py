"""Every command that uses a run, once from beginning to end."""

import json
import shutil

import pytest


def test_generate_continues_the_prompt(regard, text_run):
    completed = regard("generate", text_run, "the cat", "-n", 5, "--seed", 3)
    assert completed.code == 0
    assert completed.out.startswith("the cat")
    assert len("the cat\n") < len(completed.out) <= len("the cat\n") + 5
    assert regard("generate", text_run, "the cat", "-n", 5, "--seed", 3).out == completed.out


def test_generate_takes_a_chain_a_beam_or_stdin(regard, text_run, stdin):
    greedy = regard("generate", text_run, "the", "-n", 5, "-s", "greedy").out
    assert regard("generate", text_run, "the", "-n", 5, "--beam", 1).out == greedy
    stdin(b"the")
    assert regard("generate", text_run, "-", "-n", 5, "-s", "top_k=1").out == greedy
    assert regard("generate", text_run, "-n", 3).code == 0


def test_generate_continues_each_line_of_stdin(regard, text_run, stdin):
    words = ["-n", 5, "--seed", 3]
    first = regard("generate", text_run, "the cat", *words).out
    second = regard("generate", text_run, "a dog", "-n", 5, "--seed", 4).out
    stdin(b"the cat\na dog\r\n")
    assert regard("generate", text_run, "-", *words).out == f"{first}\n{second}"
    stdin(b"the cat\na dog\n")
    lines = regard("generate", text_run, "-", *words, "--json").out.splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["prompt"] + row["text"] + "\n" for row in rows] == [first, second]
    stdin(b"the\nthe\n")
    greedy = regard("generate", text_run, "the", "-n", 4, "--beam", 1).out
    stdin(b"the\nthe\n")
    assert regard("generate", text_run, "-", "-n", 4, "--beam", 1).out == f"{greedy}\n{greedy}"
    stdin(b"the\nthe\n")
    completed = regard("generate", text_run, "-", "--trace")
    assert completed.code == 2
    assert "--trace shows one prompt, and stdin has 2; give one" in completed.err


def test_translate_writes_one_line_for_each_in_order(regard, pair_run, stdin):
    one = regard("translate", pair_run, "100 cats", "--beam", 2).out
    other = regard("translate", pair_run, "999 dogs", "--beam", 2).out
    for words in ([], ["-"]):
        stdin(b"100 cats\n\n999 dogs\r\n")
        assert regard("translate", pair_run, *words, "--beam", 2).out == f"{one}\n{other}"
    stdin(b"")
    assert regard("translate", pair_run).out == ""
    assert regard("translate", pair_run, "100 cats", "999 dogs", "--beam", 2).out == one + other


def test_evaluate_prints_the_metrics_of_a_text(regard, text_run, materials):
    completed = regard("evaluate", text_run, "--json")
    metrics = {"loss", "perplexity", "bits_per_byte"}
    assert set(json.loads(completed.out)) == {*metrics, "evaluated_on"}
    printed = regard("evaluate", text_run)
    assert "perplexity" in printed.out
    assert printed.err == "on all 286 tokens, context 8, stride 6:\n"
    (row,) = json.loads(regard("compare", text_run, "--json").out)["runs"]
    assert row["metrics"].items() <= json.loads(completed.out).items()
    assert "context 8, stride 2:" in regard("evaluate", text_run, "--stride", 2).err
    assert "--stride is for" in regard("evaluate", text_run, "--stride", 2, "--by-length").err
    other = json.loads(regard("evaluate", text_run, materials / "cats.txt", "--json").out)
    assert other != json.loads(completed.out)


def test_evaluate_prints_the_metrics_of_pairs_with_their_signatures(regard, pair_run, tmp_path):
    data = tmp_path / "data.tsv"  # the targets of the run have two words, and so no BLEU
    data.write_text("3 cats\t3 chats sur le tapis\n")
    refused = regard("evaluate", pair_run, "--stride", 4)
    assert (refused.code, "task='seq2seq' has none" in refused.err) == (2, True)
    output = json.loads(regard("evaluate", pair_run, data, "--beam", 1, "--json").out)
    assert {"loss", "perplexity", "bleu", "chrf", "exact_match"} <= set(output)
    assert output["signatures"]["bleu"].startswith("nrefs:1")
    completed = regard("evaluate", pair_run, "--beam", 1)
    assert "exact_match" in completed.out
    assert "nrefs:1" in completed.err
    assert "nrefs:1" not in regard("evaluate", pair_run, "--beam", 1, "--quiet").err


def test_explain_shows_all_heads_or_one_with_its_tokens(regard, text_run):
    assert "head 1" in regard("explain", text_run, "the cat").out
    completed = regard("explain", text_run, "the cat", "--head", 1)
    assert "␣" in completed.out
    assert completed.out.startswith("decoder.blocks.0.attention, head 1 of 2\n")
    output = json.loads(regard("explain", text_run, "the cat", "--json").out)
    assert output["columns"] == list("the cat")
    assert sum(output["weights"][0][3]) == pytest.approx(1, abs=1e-4)


def test_explain_shows_the_alignment_of_a_translation(regard, pair_run, tmp_path):
    completed = regard("explain", pair_run, "100 cats")
    assert "decoder.blocks.0.cross, mean of 2 heads\n" in completed.out
    assert "<stop>" in completed.out
    assert "one head: --head N" in completed.err
    assert regard("explain", pair_run, "100 cats", "--out", "a.svg").code == 0
    assert (tmp_path / "a.svg").read_text().count("head ") == 2
    written = regard("explain", pair_run, "100 cats", "--out", "a.html")
    assert "modules with attention: encoder.blocks.0.attention" in written.err


def test_quickstart_trains_evaluates_and_suggests_commands(regard, tmp_path, monkeypatch):
    completed = regard(
        "quickstart",
        "data.path={kind='numbers',examples=300}",
        "model.dim=16",
        "model.layers=1",
        "model.heads=2",
        "train.steps=2",
    )
    assert completed.code == 0, completed.err
    assert "validation numbers are exactly right" in completed.out
    assert completed.out.count("\n  ✗") + completed.out.count("\n  ✓") == 5
    assert "<stop>" in completed.out
    assert "regard translate runs/quickstart" in completed.err


@pytest.mark.parametrize("format", [None, 1, 3, "2"])
@pytest.mark.parametrize(
    "words",
    [
        ("resume", "RUN", "train.steps=9"),
        ("generate", "RUN", "the"),
        ("evaluate", "RUN"),
        ("info", "RUN"),
        ("compare", "RUN", "RUN"),
        ("export", "RUN", "out"),
        ("explain", "RUN", "the cat"),
        ("train", "DATA", "train.start=RUN"),
    ],
    ids=lambda words: words[0],
)
def test_a_run_folder_of_another_format_is_refused_by_every_verb(
    regard, text_run, materials, tmp_path, words, format
):
    run = shutil.copytree(text_run, tmp_path / "old")
    table = json.loads((run / "config.json").read_text())
    assert table.pop("format") == 2
    old = table if format is None else {"format": format, **table}
    (run / "config.json").write_text(json.dumps(old))
    known = {
        "RUN": str(run),
        "DATA": str(materials / "cats.txt"),
        "train.start=RUN": f"train.start={run}",
    }
    completed = regard(*(known.get(word, word) for word in words))
    assert completed.code == 4
    assert "another version of regard wrote it" in completed.err
    assert "train the run again" in completed.err


def test_studio_says_what_is_wrong_before_it_serves(regard, text_run, materials):
    completed = regard("studio", text_run)
    assert completed.code == 2
    assert f"{text_run} is a run; give the folder that it is in" in completed.err
    completed = regard("studio", materials / "cats.txt")
    assert completed.code == 2
    assert "is a file; give a folder of runs" in completed.err
    completed = regard("studio", "--host", "0.0.0.0")
    assert completed.code == 2
    assert "the server needs an API key" in completed.err
