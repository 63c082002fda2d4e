"""Help, usage and the first words, none of which may wait for torch."""

import io
import json
import re
import subprocess
import sys

import pytest
import typer

from cli.conftest import shell
from regard.cli import app

COMMANDS = list(typer.main.get_command(app).commands)
LOADED = """
import json, sys
from regard.cli import main
for words in json.loads(sys.argv[1]):
    try:
        main(words)
    except SystemExit as exit:
        assert not exit.code, words
print(json.dumps([name for name in ("torch", "numpy", "tokenizers") if name in sys.modules]))
"""


def test_help_and_the_overview_need_no_torch():
    asked = [["--help"], [], *([command, "--help"] for command in COMMANDS)]
    output = subprocess.run(
        [sys.executable, "-c", LOADED, json.dumps(asked)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(output.stdout.splitlines()[-1]) == []
    assert output.stderr == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_listed_and_explains_itself(regard, command):
    assert command in regard("--help").out
    completed = regard(command, "--help")
    assert completed.code == 0
    for option in ("--quiet", "--debug"):
        assert option in completed.out
    assert re.search(rf"^ +regard {command}( .*)?$", completed.out, re.MULTILINE), "no example"


def test_the_list_of_commands_truncates_no_sentence(regard):
    listed = regard("--help").out.partition("Commands:")[2].splitlines()
    assert [line for line in listed if line.endswith("...")] == []
    assert len(listed) > len(COMMANDS)


def test_without_arguments_it_prints_an_overview(regard):
    completed = regard()
    assert completed.code == 0
    assert "core" in completed.out
    assert "regard quickstart" in completed.out
    assert completed.err == ""


def test_an_unknown_verb_gets_a_suggestion(regard):
    completed = regard("trian")
    assert completed.code == 2
    assert completed.err.startswith("regard: no such command 'trian'")
    assert "'train'" in completed.err


@pytest.mark.parametrize(
    "words", [["train"], ["generate"], ["train", "x", "--outt", "y"], ["generate", "x", "-n", "no"]]
)
def test_wrong_words_are_a_usage_error_of_two_lines(regard, words):
    completed = regard(*words)
    assert completed.code == 2
    assert completed.out == ""
    assert completed.err.startswith("regard: ")
    assert completed.err.splitlines()[1] == f"try: regard {words[0]} --help"


def test_a_mistake_keeps_its_traceback_only_with_debug(regard):
    assert "Traceback" not in regard("info", "gtp2").err
    completed = regard("info", "gtp2", "--debug")
    assert "Traceback" in completed.err
    assert completed.err.splitlines()[-1].startswith("regard: unknown preset, run or recipe 'gtp2'")


def test_an_unexpected_error_keeps_its_traceback(monkeypatch):
    from regard.cli import main

    monkeypatch.setattr("regard.api.model_info.resolve", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["info", "gpt2"])


def test_ctrl_c_outside_training_exits_130_and_says_nothing(regard, text_run, monkeypatch):
    class Interrupted(io.BytesIO):
        def __next__(self):
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(Interrupted()))
    completed = regard("generate", text_run, "-")
    assert completed.code == 130
    assert "Traceback" not in completed.err


@pytest.mark.parametrize("unbuffered", [pytest.param("", marks=pytest.mark.long), "1"])
def test_a_closed_pipe_is_silent(monkeypatch, unbuffered):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    process = shell("info", "gpt2", "--hook-points", stdout=subprocess.PIPE)
    process.stdout.close()
    with process:
        assert process.stderr.read() == ""
    assert process.returncode == 1
