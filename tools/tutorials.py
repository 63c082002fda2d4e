"""Tutorial pages as notebooks: `make tutorials` runs them and writes their outputs.

A page of docs/tutorials is the only source. A `python` block is a code cell, and the `text` block
after it is the output of the cell; each `$` line of a `console` block is a cell `!command`, and the
lines below it are its output; an image of the page is displayed by a cell. Running a page writes
the outputs into it, and the images and the executed notebook `NAME.ipynb` into the same folder.

    python tools/tutorials.py            all pages
    python tools/tutorials.py own-text   one of them
    python tools/tutorials.py --text     run no page: update the text of the notebooks
"""

import os
import re
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "tutorials"
FENCE = re.compile(r"^```(python|console)\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.M | re.S)
COMMAND = re.compile(r"^\$ (.*(?:\\\n.*)*)\n((?:(?!\$ ).*\n)*)", re.M)
IMAGE = re.compile(r"^!\[[^\]]*\]\(([\w-]+\.svg)\)$", re.M)
LINES = 40  # longer outputs are shortened in the page
END = 13  # lines kept at the end of a longer output: the metrics of a run and the next commands


@dataclass
class Cell:
    """A piece of a page: prose, code, a command or an image, and its output."""

    kind: str  # "prose", "python", "command", "image"
    source: str
    output: str = ""  # as the page shows it

    def to_notebook(self) -> Any:
        """The notebook cell, without outputs."""
        if self.kind == "prose":
            return new_markdown_cell(self.source.strip())
        code = {
            "python": self.source.rstrip("\n"),
            "command": f"!{self.source}",
            "image": f'from IPython.display import SVG\n\nSVG("{self.source}")',
        }[self.kind]
        return new_code_cell(code)


def names() -> list[str]:
    """The tutorials in the order of the index page."""
    index = (PAGES / "index.md").read_text(encoding="utf-8")
    return list(dict.fromkeys(re.findall(r"\(([\w-]+)\.md\)", index)))


def read_cells(name: str) -> list[Cell]:
    """The cells of a page, in order."""
    text, cells, end = (PAGES / f"{name}.md").read_text(encoding="utf-8"), [], 0
    for fence in FENCE.finditer(text):
        cells += _prose(text[end : fence.start()])
        if fence[1] == "python":
            cells.append(Cell("python", fence[2], fence[3] or ""))
        else:
            commands = COMMAND.finditer(fence[2])
            cells += [Cell("command", match[1], match[2]) for match in commands]
        end = fence.end()
    return cells + _prose(text[end:])


def _prose(text: str) -> list[Cell]:
    cells, end = [], 0
    for image in IMAGE.finditer(text):
        cells += [Cell("prose", text[end : image.start()]), Cell("image", image[1])]
        end = image.end()
    return [c for c in [*cells, Cell("prose", text[end:])] if c.source.strip()]


def notebook(cells: list[Cell]) -> Any:
    """A notebook without outputs; its commands print plain text."""
    first = new_code_cell("%env NO_COLOR=1")
    result = new_notebook(cells=[first, *(cell.to_notebook() for cell in cells)])
    for number, cell in enumerate(result.cells):
        cell.id = f"cell-{number}"
    result.metadata["kernelspec"] = {
        "name": "python3",
        "display_name": "Python 3",
        "language": "python",
    }
    return result


def text_output(cell: Any) -> str:
    """The text output of an executed cell: stdout and the last value, without stderr."""
    parts = []
    for output in cell.get("outputs", []):
        if output.output_type == "stream" and output.name == "stdout":
            parts.append(output.text)
        elif output.output_type == "execute_result" and "text/plain" in output.data:
            parts.append(output.data["text/plain"] + "\n")
    text = "".join(parts).replace("\r\n", "\n")
    return "\n".join(line.rstrip() for line in text.strip("\n").split("\n")) + "\n" if text else ""


def run(name: str) -> None:
    """Execute a page in an empty folder; write its outputs, images and notebook."""
    cells = read_cells(name)
    executed = notebook(cells)
    environment = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "COLUMNS": "92",
        "NO_COLOR": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            executed, timeout=3600, resources={"metadata": {"path": folder}}, kernel_name="python3"
        )
        with client.setup_kernel(env={**os.environ, **environment}):
            for number, cell in enumerate(executed.cells):
                client.execute_cell(cell, number)
                if cell.cell_type == "code" and cell.source.startswith("!"):
                    _check_exit_code(client, cell)
        for cell in cells:
            if cell.kind == "image":
                shutil.copy(Path(folder, cell.source), PAGES / cell.source)
    for cell in executed.cells:
        cell.metadata.pop("execution", None)  # times of day
    for cell, result in zip(cells, executed.cells[1:], strict=True):
        cell.output = "" if cell.kind in ("prose", "image") else _shorten(text_output(result))
    path = PAGES / f"{name}.md"
    path.write_text(with_outputs(path.read_text(encoding="utf-8"), cells), encoding="utf-8")
    nbformat.validate(executed)
    nbformat.write(executed, PAGES / f"{name}.ipynb")


def _check_exit_code(client: NotebookClient, cell: Any) -> None:
    try:
        first = client.nb.cells[0]
        client.execute_cell(new_code_cell("assert not _exit_code"), 0)
        client.nb.cells[0] = first  # execute_cell stores the cell
    except CellExecutionError:
        sys.exit(f"{cell.source}\n{text_output(cell)}")


def refresh(name: str) -> None:
    """Update the notebook after an edit of the page's text; the outputs are kept."""
    path = PAGES / f"{name}.ipynb"
    new, stored = notebook(read_cells(name)), nbformat.read(path, as_version=4)
    new_code, old_code = ([c for c in n.cells if c.cell_type == "code"] for n in (new, stored))
    for cell, executed in zip(new_code, old_code, strict=True):
        cell.outputs, cell.execution_count = executed.outputs, executed.execution_count
    new.metadata = stored.metadata
    nbformat.write(new, path)


def _shorten(text: str) -> str:
    lines = text.splitlines(keepends=True)
    if len(lines) <= LINES:
        return text
    return "".join([*lines[: LINES - END - 1], "…\n", *lines[-END:]])


def with_outputs(page: str, cells: list[Cell]) -> str:
    """The text of a page with the outputs of its cells in place of those it shows."""
    outputs = iter([cell.output for cell in cells if cell.kind in ("python", "command")])

    def replace(fence: re.Match[str]) -> str:
        if fence[1] == "python":
            output = next(outputs)
            return f"```python\n{fence[2]}```\n" + (f"\n```text\n{output}```\n" if output else "")
        block = COMMAND.sub(lambda match: f"$ {match[1]}\n{next(outputs)}", fence[2])
        return f"```console\n{block}```\n"

    return FENCE.sub(replace, page)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[:1] == ["--text"]:
        for name in names():
            refresh(name)
        sys.exit()
    for name in arguments or names():
        start = time.perf_counter()
        run(name)
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
