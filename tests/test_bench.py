"""The names that benches and tools import exist; they run too long, or on a GPU, to be run here."""

import ast
import importlib
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted([*ROOT.glob("bench/*.py"), *ROOT.glob("tools/*.py")])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_imported_names_exist(script):
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != "regard":
            continue
        module = importlib.import_module(node.module)
        for alias in node.names:
            known = hasattr(module, alias.name)
            assert known or find_spec(f"{node.module}.{alias.name}"), f"{node.module}.{alias.name}"
