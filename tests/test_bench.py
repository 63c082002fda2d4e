"""The names that benches and tools use exist; they run too long, or on a GPU, to be run here."""

import ast
import importlib
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

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


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_attributes_of_imported_modules_exist(script):
    tree = ast.parse(script.read_text(encoding="utf-8"))
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "regard":
                    name = alias.name if alias.asname else "regard"
                    modules[alias.asname or "regard"] = importlib.import_module(name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "regard":
            for alias in node.names:
                if find_spec(node.module).submodule_search_locations is not None and find_spec(
                    f"{node.module}.{alias.name}"
                ):
                    module = importlib.import_module(f"{node.module}.{alias.name}")
                    modules[alias.asname or alias.name] = module
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = modules.get(node.value.id)
            assert module is None or hasattr(module, node.attr), f"{module.__name__}.{node.attr}"


@pytest.mark.parametrize("model", ["same", "default"])
def test_regard_is_evaluated_on_consecutive_blocks_as_nanogpt_is(model, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    bench = importlib.import_module("shakespeare_cpu")
    text = tmp_path / "input.txt"
    text.write_text("to be, or not to be, that is the question\n" * 50)
    run = bench.Regard(model, str(text), *(bench.SAME if model == "same" else []))
    assert run.data.stride == run.data.model.context


def test_on_a_gpu_regard_is_evaluated_on_consecutive_blocks_too(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    bench = importlib.import_module("shakespeare_gpu")
    text = tmp_path / "input.txt"
    text.write_text("to be, or not to be, that is the question\n" * 50)
    sizes = ["model.dim=8", "model.layers=1", "model.heads=1", "model.context=16", "train.steps=1"]
    run = bench.Regard("regard", str(text), torch.device("cpu"), [*bench.OURS, *sizes])
    assert run.data.stride == run.data.model.context == 16
