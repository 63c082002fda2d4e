"""Checkpoints whose manifest is consistent but whose state is not: refused, nothing changed."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import regard
from hub.runs import make_checkpoint, model_config
from regard.errors import CheckpointError
from regard.files.directory import Directory
from regard.training.import_export import import_run
from regard.training.run import begin, resume
from regard.training.storage import checkpoint
from training.runs import config

UP = "decoder.blocks.0.ffn.up.weight"


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A run of two checkpoints, of steps 2 and 4; not to be changed."""
    run = tmp_path_factory.mktemp("trained") / "run"
    list(begin(config(data / "cats.txt", steps=4, save_every=2, evaluate_every=2), run))
    return run


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def sign(step):
    """Make the manifest agree with the files."""
    path = step / "MANIFEST.json"
    manifest = json.loads(path.read_text())
    for name, facts in manifest["files"].items():
        file = step / name
        facts |= {"size": file.stat().st_size, "sha256": checkpoint.sha256(file)}
    path.write_text(json.dumps(manifest))


def contents(run):
    """All files but the lock: a resume that is refused does not count as time either."""
    files = (p for p in run.rglob("*") if p.is_file() and p.name != "lock")
    return {path: path.read_bytes() for path in files}


def refused(run, match):
    sign(run / "checkpoints" / "step-2")
    before = contents(run)
    with pytest.raises(CheckpointError, match=match):
        list(resume(run, step=2))
    assert contents(run) == before


def change(tensors, name, how):
    tensors[name] = how(tensors[name])


TENSORS = {
    "a weight is missing": ("model", lambda t: t.pop(UP), "is missing"),
    "a weight too many": ("model", lambda t: t.update(more=torch.ones(1)), "more is not part"),
    "weights of int8": ("model", lambda t: change(t, UP, lambda w: w.char()), "dtype torch.int8"),
    "weights of float16": ("model", lambda t: change(t, UP, lambda w: w.half()), "dtype torch.flo"),
    "a transposed weight": (
        "model",
        lambda t: change(t, UP, lambda w: w.mT.contiguous()),
        "has shape",
    ),
    "a weight of NaN": ("model", lambda t: t[UP].fill_(torch.nan), "is not finite"),
    "no momentum": ("optimizer", lambda t: t.pop(f"{UP}/momentum"), "momentum is missing"),
    "no first moment": (
        "optimizer",
        lambda t: t.pop(next(n for n in t if n.endswith("exp_avg"))),
        "exp_avg is missing",
    ),
    "no step": ("optimizer", lambda t: t.pop(next(n for n in t if n.endswith("/step"))), "missing"),
    "no state at all": ("optimizer", lambda t: t.clear(), "is missing"),
    "state of another parameter": (
        "optimizer",
        lambda t: t.update({"x/momentum": torch.ones(1)}),
        "x/momentum is not part",
    ),
    "more state": (
        "optimizer",
        lambda t: t.update({f"{UP}/exp_avg": torch.ones(1)}),
        "exp_avg is not part",
    ),
    "momentum of int8": (
        "optimizer",
        lambda t: change(t, f"{UP}/momentum", lambda m: m.char()),
        "dtype torch.int8",
    ),
    "momentum of another shape": (
        "optimizer",
        lambda t: change(t, f"{UP}/momentum", lambda m: m[:1].clone()),
        "has shape",
    ),
    "a negative second moment": (
        "optimizer",
        lambda t: t[next(n for n in t if n.endswith("exp_avg_sq"))].fill_(-1),
        "is negative",
    ),
    "an average is missing": ("ema", lambda t: t.pop(UP), "is missing"),
    "no averages": ("ema", lambda t: t.clear(), "is missing"),
    "averages of another shape": (
        "ema",
        lambda t: change(t, UP, lambda w: w[:1].clone()),
        "has shape",
    ),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_fit_the_model_are_refused(run, case):
    file, how, match = TENSORS[case]
    path = run / "checkpoints" / "step-2" / f"{file}.safetensors"
    tensors = load_file(path)
    how(tensors)
    save_file(tensors, path)
    refused(run, f"{path} does not fit the run:\n.*{match}")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("best", {}),
        ("best", {"more": 1}),
        ("best.step", "two"),
        ("best.step", 3),
        ("best.metrics", [1]),
        ("best.metrics", {"loss": "low"}),
        ("best.num_bad_evaluations", None),
        ("best.sha256", 3),
        ("sizes", {}),
        ("sizes", {"metrics.jsonl": "1", "samples.txt": 1}),
        ("sizes", {"metrics.jsonl": -1, "samples.txt": 1}),
        ("config", {"other": 1}),
        ("evaluation_pending", "no"),
        ("without_state", 1),
        ("matmuls", {"(8, 8, 8)": 1}),
    ],
)
def test_a_state_that_no_run_saves_is_refused(run, key, value):
    path = run / "checkpoints" / "step-2" / "state.json"
    state = json.loads(path.read_text())
    *tables, name = key.split(".")
    (state[tables[0]] if tables else state)[name] = value
    path.write_text(json.dumps(state))
    refused(run, f"{path}: {key} is not valid")


def test_a_best_model_that_does_not_fit_is_refused(run):
    """The best model is that of step 2 and has to be restored from its checkpoint."""
    path = run / "checkpoints" / "step-4" / "state.json"
    state = json.loads(path.read_text())
    state["best"] |= {"step": 2, "sha256": "another"}
    path.write_text(json.dumps(state))
    averages = run / "checkpoints" / "step-2" / "ema.safetensors"
    save_file({"more": torch.ones(1)}, averages)
    for step in (2, 4):
        sign(run / "checkpoints" / f"step-{step}")
    before = contents(run)
    with pytest.raises(CheckpointError, match="step-2 does not fit the run:\n  more is not part"):
        list(resume(run, {"train": {"steps": 6}}))
    assert contents(run) == before


def test_an_unchanged_checkpoint_is_resumed(run):
    sign(run / "checkpoints" / "step-2")
    last = run / "checkpoints" / "step-4" / "model.safetensors"
    before = last.read_bytes()
    list(resume(run, step=2))
    assert last.read_bytes() == before


def test_weights_of_int8_are_not_evaluated(run):
    tensors = load_file(run / "model.safetensors")
    spoiled = tensors | {UP: tensors[UP].char()}
    checkpoint.write_tensors(Directory(run), "model.safetensors", spoiled)
    with pytest.raises(
        CheckpointError, match=r"has dtype torch\.int8, but the model has torch\.float32"
    ):
        regard.load(run)


@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_weights_that_are_not_finite_are_reported_at_import(tmp_path, caplog, bad, dtype, family):
    def spoil(tensors):
        tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        for name in spoiled:
            tensors[name].view(-1)[-1] = bad
        return tensors

    names = {
        "llama": ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"],
        "gpt2": ["transformer.h.0.attn.c_attn.weight"],  # split into three
    }
    settings = model_config("modern" if family == "llama" else "gpt2")
    for spoiled in ([], names[family]):
        caplog.clear()
        folder = tmp_path / f"checkpoint-{len(spoiled)}"
        make_checkpoint(folder, settings, change=spoil)
        import_run(folder, tmp_path / f"run-{len(spoiled)}")
        for name in names[family]:
            assert (name in caplog.text) == (name in spoiled)
    assert f"{len(spoiled)} of the tensors have NaN or infinite values" in caplog.text
