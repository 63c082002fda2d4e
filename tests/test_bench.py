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


@pytest.fixture
def gpu_decoders(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    return importlib.import_module("gpu_decoders")


def test_a_spec_of_gpu_decoders_gives_layers_rows_prompt_and_format(gpu_decoders):
    parse, Spec = gpu_decoders.Spec.parse, gpu_decoders.Spec
    assert parse("gpt2") == Spec("gpt2")
    assert parse("gpt2*16") == Spec("gpt2", rows=16)
    assert parse("llama-2-70b:8*2@4096/int8") == Spec("llama-2-70b", 8, 2, 4096, "int8")
    assert parse("gpt2:2").config().layers == 2
    assert parse("gpt2:2").config(layers=4).layers == 2
    assert parse("gpt2@4096").config().context >= 4096
    for wrong in ("gpt2*", "gpt2*x", "gpt2/int3", "gpt2@64*2", "gpt-2"):
        with pytest.raises(ValueError, match="must be PRESET"):
            parse(wrong)


def test_gpu_decoders_checks_every_preset_that_generates(gpu_decoders):
    names = {spec.name for spec in gpu_decoders.all_specs()}
    assert names >= {"gpt2", "t5-small", "lstm", "bahdanau", "bengio", "tiny-captioner", "glm-130b"}
    assert not names & {"bert-base", "vit-b16", "cbow", "ngram", "hmm", "gpt3"}


def test_greedy_ids_of_a_decoder_are_compared_with_those_of_the_model(gpu_decoders, monkeypatch):
    monkeypatch.setattr(gpu_decoders, "DEVICE", torch.device("cpu"))
    spec = gpu_decoders.Spec("tiny-decoder")
    precision = torch.get_float32_matmul_precision()
    try:
        assert "equal: 1 of 1, 16 of 16" in gpu_decoders.compare_greedy_ids(spec)
        decode = gpu_decoders.CudaGraphDecoder.step

        def wrong_step(self, ids, state, **options):
            logits, state = decode(self, ids, state, **options)
            return -logits, state

        monkeypatch.setattr(gpu_decoders.CudaGraphDecoder, "step", wrong_step)
        assert "equal: 0 of 1, the first at id 0" in gpu_decoders.compare_greedy_ids(spec)
    finally:
        torch.set_float32_matmul_precision(precision)


def test_the_rows_that_gpu_train_times_apart_exist(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    bench = importlib.import_module("gpu_train")
    assert set(bench.APART) <= bench.ROWS.keys()
