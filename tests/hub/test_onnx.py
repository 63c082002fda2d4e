"""ONNX files, run by ONNX Runtime; `write_onnx` compares every output itself."""

import sys
from dataclasses import replace

import pytest
import torch

import regard
from hub.runs import make_run, tokenizer
from regard.errors import CheckpointError, ConfigError, RegardError
from regard.hub import onnx
from regard.models.transformer import Transformer

SMALL = {"dim": 32, "layers": 2, "heads": 4, "vocab_size": 53, "context": 64}


def model(name, **fields):
    torch.manual_seed(0)
    config = replace(regard.preset(name), **SMALL, **fields)
    return Transformer(config).eval()


@pytest.mark.parametrize("context", [4, 6, 8, 9, 64])
@pytest.mark.parametrize("name", ["tiny-decoder", "tiny-encoder", "tiny-encoder-decoder"])
def test_the_inputs_that_are_compared_fit_into_the_context(name, context):
    ours = model(name, position="learned", kv_heads=4, ffn_dim=64)
    ours = Transformer(replace(ours.config, context=context)).eval()
    module, _, _ = onnx._export_module(ours)
    for size in onnx.SIZES:
        with torch.no_grad():
            module(*onnx._random_inputs(ours, *size))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("llama-3.2-1b", {"kv_heads": 2, "ffn_dim": 64, "head_dim": None}),
        ("gemma-2-2b", {"kv_heads": 2, "ffn_dim": 64, "head_dim": 16, "window": 5}),
        ("bloom-560m", {"kv_heads": 4, "ffn_dim": 64}),
        ("bert", {"kv_heads": 4, "ffn_dim": 64, "segments": 2}),
        ("tiny-encoder", {"kv_heads": 4, "ffn_dim": 64, "segments": 0}),
        ("t5-small", {"kv_heads": 4, "ffn_dim": 64}),
    ],
)
def test_onnx_runtime_gives_our_logits(name, fields, tmp_path, monkeypatch):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    ours = model(name, **fields)
    assert onnx.write_onnx(ours, tmp_path / "model.onnx") < 1e-4
    if name != "llama-3.2-1b":
        return
    session = runtime.InferenceSession(str(tmp_path / "model.onnx"))
    ids = torch.randint(53, (1, 1))
    state = ours.start(1, 64)
    past = {i.name: torch.zeros(1, 2, 0, 8).numpy() for i in session.get_inputs()[1:]}
    for _ in range(5):  # the greedy ids of both
        logits, *present = session.run(None, {"input_ids": ids.numpy(), **past})
        past = dict(zip(past, present, strict=True))
        expected, state = ours.step(ids, state)
        assert logits[0, -1].argmax() == expected[0, -1].argmax()
        ids = expected[:, -1].argmax(-1, keepdim=True)
    with torch.no_grad():
        ours.head.matrix.add_(1)
    monkeypatch.setattr(torch.onnx, "export", lambda *_, **__: Unchanged())
    with pytest.raises(CheckpointError, match="differ by"):
        onnx.write_onnx(ours, tmp_path / "model.onnx")


class Unchanged:
    def save(self, path):
        """Keep the file of before, whose weights are not those of the model."""


def test_what_onnx_cannot_have_is_refused(tmp_path, monkeypatch):
    make_run(
        tmp_path / "run", regard.preset("lstm", vocab_size=tokenizer().vocab_size, dim=8, layers=1)
    )
    run = regard.load(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"not model\.family=recurrent"):
        run.export(tmp_path / "out", format="onnx")
    with pytest.raises(ConfigError, match="unknown export format 'tflite'"):
        run.export(tmp_path / "out", format="tflite")
    with pytest.raises(ConfigError, match="not 'onnx'"):
        run.export(tmp_path / "out", format="onnx", model_type="gpt2")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(RegardError, match=r"pip install 'regard\[onnx\]'"):
        onnx.write_onnx(model("gpt2", kv_heads=4, ffn_dim=64), tmp_path / "model.onnx")
    assert not (tmp_path / "out").exists()
