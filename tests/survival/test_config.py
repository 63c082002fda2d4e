"""Settings that are wrong in any way: refused at once, in a few lines, with nothing allocated."""

import json
import math
import os
import pty
import resource
import subprocess
import sys
import time
from dataclasses import fields

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cli.conftest import TEXT_WORDS, invoke, shell
from regard.config import DataConfig, RunConfig, TrainConfig, build, to_table
from regard.errors import RegardError
from regard.models.build import config_table, preset
from regard.training import run
from training.runs import config

SECONDS, BYTES = 1.0, 200_000_000  # of the processor; more than before

RECIPE = """
task = "causal"
[data]
path = "{data}"
tokenizer = "char"
[model]
preset = "tiny-decoder"
{model}
[train]
steps = 2
batch = 2
{train}
"""


@pytest.fixture(scope="module", autouse=True)
def _warm(data, tmp_path_factory):
    """What torch imports when it is first used is not ours to be measured."""
    list(run.begin(config(data / "cats.txt", steps=1), tmp_path_factory.mktemp("warm") / "run"))


def refused(capsys, folder, *words):
    """Run a command that must refuse its settings; what it said."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    said = invoke(capsys, *words)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert said.code == 2, said
    assert said.out == ""
    complaint = said.err[said.err.index("regard: ") :]
    assert len(complaint.splitlines()) <= 5
    assert "Traceback" not in said.err
    assert after.ru_utime - before.ru_utime < SECONDS
    assert 1024 * (after.ru_maxrss - before.ru_maxrss) < BYTES
    assert not (folder / "runs").exists()
    return complaint


@pytest.mark.parametrize(
    ("part", "line", "told"),
    [
        ("train", "stepps = 3", "train.stepps: unknown key 'stepps'; did you mean 'steps'?"),
        ("train", "steps = 3", "Cannot overwrite a value"),
        ("train", "lr = 'fast'", "train.lr must be a number, not 'fast'"),
        ("train", "lr = nan", "train.lr=nan must be at least 0"),
        ("train", "seed = 1.5", "train.seed must be an integer"),
        ("train", f"seed = {10**400}", "train.seed must lie between -2^63 and 2^63"),
        ("train", f"keep = {'9' * 5000}", "is not a TOML file"),
        ("train", "keep_checkpoints = 0", "train.keep_checkpoints=0 must be at least 1"),
        ("train", "precision = 'half'", "train.precision: unknown value 'half'"),
        ("train", "start = 3", "train.start must be a string"),
        ("model", "dim = 32\nheads = 5", "heads=5 must divide dim=32"),
        ("model", "layrs = 3", "model.layrs: unknown key 'layrs'; did you mean 'layers'?"),
        ("model", "layers = 1000000000", "model.layers=1000000000 is too large"),
        ("model", "dim = 1000000000", "model.dim=1000000000 is too large"),
        ("model", "head_dim = 1000000000", "model.head_dim=1000000000"),
        ("model", "position = 'rotery'", "unknown position 'rotery'; did you mean 'rotary'?"),
        ("model", "position = { kind = 7 }", "unknown position '7'"),
        ("model", "dropout = inf", "dropout=inf must lie in"),
        ("model", "dim = [", "is not a TOML file"),
        ("model", f"dim = {'[' * 5000}", "is not a TOML file"),
    ],
)
def test_a_wrong_line_of_a_recipe_is_named_with_its_file(
    part, line, told, data, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    parts = {"model": "", "train": "", part: line}
    (tmp_path / "mine.toml").write_text(RECIPE.format(data=data / "cats.txt", **parts))
    said = refused(capsys, tmp_path, "train", "mine.toml")
    assert "mine.toml" in said
    assert told in said


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("model.dim=1000000", "parameters need"),
        ("train.batch=1000000000", "rows of 64 tokens per step need"),
        ("train.tokens=1000000000000000", "per step need"),
        ("train.accumulate=1000000000", "train.accumulate=1000000000"),
        ("train.threads=1000000000", "train.threads=1000000000"),
        ("data.validation_fraction=nan", "data.validation_fraction=nan must lie between 0 and 1"),
        ("data.tokenizer=bpee", "did you mean 'bpe'?"),
        ("data.validation=3", "data.validation must be a list"),
        ("data=3", "data is a table, set as in data.path=…, not 3"),
        ("model=ngram", "model is a table, set as in model.preset=…, not 'ngram'"),
        ("steps=100", "unknown key 'steps'; did you mean 'train.steps'?"),
        ("tokenizer=char", "unknown key 'tokenizer'; did you mean 'data.tokenizer'?"),
        ("dim=64", "unknown key 'dim'; did you mean 'model.dim'?"),
        ("device=3", "unknown value '3'"),
        ("device=cud", "did you mean 'cuda'?"),
        ("model.preset=[]", "unknown preset"),
        ("name=\ud800", "must be UTF-8, and character 6 of"),
        ("minutes=nan", "minutes=nan must be more than 0"),
        ("minutes=-1", "must be more than 0"),
        ("nothing", "'nothing' is not key=value"),
    ],
)
def test_a_wrong_word_is_named(word, told, data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert told in refused(capsys, tmp_path, "train", data / "cats.txt", word)


def test_files_that_are_no_recipe_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\0\0")
    (tmp_path / "empty.toml").write_text("")
    (tmp_path / "json.toml").write_text('{"train": {"steps": 3}}')
    for name in ("folder", "bytes", "json", "none"):
        assert f"{name}.toml" in refused(capsys, tmp_path, "train", f"{name}.toml")
    assert "no data" in refused(capsys, tmp_path, "train", "empty.toml")


# Any key with any value

WRONG = st.one_of(
    st.sampled_from([math.nan, math.inf, -math.inf, -1, 0, 10**9, 10**18, 10**400, 1e308, 1.5]),
    st.sampled_from(["", "x", "\ud800", "\0", "none", "../..", "gpt2", True, None]),
    st.sampled_from([[], {}, [[]], ["x"], {"kind": "x"}, {"kind": 7}, {"a": 1}]),
    st.text(max_size=5),
)
LENGTHY = {("train", "steps"), ("train",), ("model",)}  # of which a large one, or none, is right
KEYS = [
    *(("data", each.name) for each in fields(DataConfig)),
    *(("train", each.name) for each in fields(TrainConfig)),
    *(("model", name) for name in config_table(preset("tiny-decoder", vocab_size=1))),
    *((each.name,) for each in fields(RunConfig)),
]
SEEDED = settings(
    derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
CHANGES = st.lists(
    st.tuples(st.sampled_from([key for key in KEYS if key not in LENGTHY]), WRONG),
    min_size=1,
    max_size=3,
)


def tried(data, folder, changes):
    """Begin a run whose settings were changed, up to where it would train."""
    table = to_table(config(data / "cats.txt", steps=2, evaluate_every=2))
    for key, value in changes:
        inner = table[key[0]] if len(key) == 2 else table
        if isinstance(inner, dict):
            inner[key[-1]] = value
    began, held = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    told = ""
    try:
        list(run.begin(build(RunConfig, table), folder))
    except RegardError as error:
        told = str(error)
    assert len(told.splitlines()) <= 5
    assert folder.exists() == (not told)
    assert time.process_time() - began < SECONDS
    assert 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held) < BYTES


@pytest.fixture
def untrained(tmp_path):
    """Inside, runs are begun but not trained, deep in a folder of their own: paths may lead up."""
    deep = tmp_path / "a" / "b" / "c"
    deep.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "_train", lambda *words, **options: iter(()))
        patch.chdir(deep)
        yield


@settings(SEEDED, max_examples=20)
@given(changes=CHANGES)
def test_any_change_is_right_or_a_clear_error(changes, data, untrained, tmp_path_factory):
    tried(data, tmp_path_factory.mktemp("any") / "run", changes)


@pytest.mark.long
@settings(SEEDED, max_examples=4000)
@given(changes=CHANGES)
def test_any_change_is_right_or_a_clear_error_at_length(changes, data, untrained, tmp_path_factory):
    tried(data, tmp_path_factory.mktemp("any") / "run", changes)


# What the terminal gets


def test_a_slip_of_the_pen_does_not_wait_for_torch(tmp_path):
    (tmp_path / "mine.toml").write_text("[train]\nstepps = 3\n")
    code = (
        "import sys\nfrom regard.cli import main\ntry:\n    main(sys.argv[1:])\n"
        "finally:\n    print('torch' in sys.modules)"
    )
    for words in (["train", "mine.toml"], ["train", "x", "train.stepps=3"], ["resume", "x", "a=3"]):
        command = [sys.executable, "-c", code, *words]
        said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (said.returncode, said.stdout) == (2, "False\n")
        assert "unknown key" in said.stderr


def on_terminal(**environment):
    """What `regard` says to a terminal."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "regard"]
    with subprocess.Popen(
        command, stdout=theirs, stderr=theirs, env={**os.environ, **environment}
    ) as process:
        os.close(theirs)
        said = b""
        try:
            while part := os.read(ours, 4096):
                said += part
        except OSError:  # how Linux ends a terminal
            pass
    os.close(ours)
    return process.returncode, said


def test_no_color_means_none_even_on_a_terminal():
    code, said = on_terminal(TERM="xterm", NO_COLOR="", CI="")
    assert code == 0
    assert b"\x1b[" in said
    code, said = on_terminal(TERM="xterm", NO_COLOR="1")
    assert code == 0
    assert b"\x1b" not in said


def test_a_run_that_nobody_watches_is_plain_lines_and_its_json_is_one_object(
    data, tmp_path, capsys
):
    words = ["train", data / "cats.txt", *TEXT_WORDS, "--out", tmp_path / "run", "--json"]
    said = invoke(capsys, *words)
    assert said.code == 0
    assert "\x1b" not in said.err + said.out
    assert "\r" not in said.err
    found = json.loads(said.out, parse_constant=pytest.fail)
    assert found["step"] == 4
    assert said.out.count("\n") == 1


@pytest.mark.long
def test_a_reader_that_leaves_after_one_line_is_no_error(tmp_path):
    with shell("info", "gpt2", "--hook-points", stdout=subprocess.PIPE) as process:
        first = subprocess.run(["head", "-1"], stdin=process.stdout, capture_output=True, text=True)
        process.stdout.close()
        assert first.stdout.count("\n") == 1
        assert process.stderr.read() == ""
