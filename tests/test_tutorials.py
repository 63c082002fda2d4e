"""The tutorials: all nine as notebooks in one kernel, with few steps and small data."""

import os
import re
import shlex
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_notebook

from regard.cli import main

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import tutorials  # noqa: E402 -- a script beside the package

# Commands run inside the kernel: a process of its own would import torch for each of them.
FIRST = """
import torch

torch.set_num_threads(1)

def system(command):
    import glob, shlex
    from regard.cli import main

    words = [each for word in shlex.split(command) for each in sorted(glob.glob(word)) or [word]]
    if words[0] == "torchrun":  # tests/training/test_torchrun.py starts it
        words = words[words.index("-m") + 1 :]
    assert words[0] == "regard", command
    try:
        main(words[1:])
    except SystemExit as exit:
        assert not exit.code, command

get_ipython().system = system
"""
SHORTER = [
    (r"(regard resume .*train\.steps=)\d+", r"\g<1>3"),
    (r"train\.steps=\d\d+", "train.steps=2 train.evaluate_targets=300"),
    (r"\bsteps=\d{3,}", "steps=2, evaluate_targets=300"),
    (r"^steps = \d+$", "steps = 2"),
    (r"^evaluate_targets = \d+$", "evaluate_targets = 300"),
    (r'"train\.evaluate_targets=\d+",', ""),
    (r"^ROWS = \d+$", "ROWS = 300"),
    (r"data\.path=python-docs", "data.path=short.txt"),
    (r'"python-docs"', '"short.txt"'),
    (r"topics\.values\(\)", "list(topics.values())[:3]"),
]


def shortened(source):
    """A cell with few steps and little data."""
    for pattern, replacement in SHORTER:
        source = re.sub(pattern, replacement, source, flags=re.MULTILINE)
    return source


def test_the_nine_tutorials_run_as_notebooks(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "92")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    names = tutorials.names()
    assert len(names) == 9
    client = NotebookClient(new_notebook(), timeout=120, kernel_name="python3")
    with client.setup_kernel(env=dict(os.environ)):
        execute(client, FIRST, "the first cell")
        for name in names:
            folder = tmp_path / name
            folder.mkdir()
            (folder / "short.txt").write_text("a short text of some words\n" * 80)
            execute(client, f"%reset -f\n%cd {folder}", name)
            same = True  # until the first cell that was shortened
            for cell in tutorials.read_cells(name):
                if cell.kind == "prose":
                    continue
                code = cell.to_notebook().source
                same = same and shortened(code) == code and "my.txt" not in code
                printed = execute(client, shortened(code), f"{name}: {code}")
                if same and cell.kind == "python":
                    assert printed == cell.output, f"{name}: run `make tutorials`"


def execute(client, source, place):
    cell = new_code_cell(source)
    client.nb.cells.append(cell)
    try:
        client.execute_cell(cell, len(client.nb.cells) - 1)
    except CellExecutionError as error:
        pytest.fail(f"{place}\n{error}", pytrace=False)
    return tutorials.text_output(cell)


def test_every_notebook_has_the_cells_of_its_page():
    for name in tutorials.names():
        made = tutorials.notebook(tutorials.read_cells(name))
        stored = nbformat.read(tutorials.PAGES / f"{name}.ipynb", as_version=4)
        assert [(c.cell_type, c.source) for c in stored.cells] == [
            (c.cell_type, c.source) for c in made.cells
        ], f"run `make tutorials`, or python tools/tutorials.py {name}"
        assert not any(
            output.output_type == "error" for c in stored.cells for output in c.get("outputs", [])
        )


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # open(…).read()
@pytest.mark.parametrize("name", ["csv-classifier", "series"])
def test_a_dry_run_prints_what_the_page_shows(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cells = [cell for cell in tutorials.read_cells(name) if cell.kind != "prose"]
    data, dry_run = cells[:2]
    exec(data.source, {})
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit:
        main(shlex.split(dry_run.source)[1:])
    assert not exit.value.code
    assert capsys.readouterr().out.strip() == dry_run.output.strip(), "run `make tutorials`"
