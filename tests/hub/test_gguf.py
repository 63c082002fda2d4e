"""GGUF files: read again by the gguf package, and run by llama.cpp where it is installed."""

import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import normalizers

import regard
from hub.runs import TEXT, make_run, model_config, tokenizer
from regard.cli import main
from regard.errors import CheckpointError, ConfigError
from regard.generate import generate, parse_chain
from regard.hub.config_json import write_config
from regard.hub.gguf import architecture_of
from regard.hub.gguf_q4_k import quantize_q4_k
from regard.hub.gguf_tokenizer import write_vocabulary
from regard.hub.llama_cpp import compare_llama_cpp
from regard.text import Tokenizer, train_tokenizer
from regard.text.chat_template import CHATML_JINJA, render
from regard.training import import_export

gguf = pytest.importorskip("gguf")

WIDE = {"dim": 32, "heads": 2, "ffn_dim": 64}
CLASSES = {"kind": "classification", "pool": "last", "bias": False, "classes": 2}
GEMMA_3 = WIDE | {
    "kv_heads": 1,
    "head_dim": 24,
    "layers": 6,
    "window": 8,
    "global_every": 6,
    "qk_norm": True,
    "score": "scaled_dot",
    "head": "linear",
    "position": {"kind": "rotary", "base": 1e6, "window_base": 1e4},
}
MODELS = {  # a name of ours: the preset, settings that differ, and the model type
    "llama": ("llama", WIDE, "llama"),
    "llama-3.1": ("llama-3.1-8b", WIDE | {"kv_heads": 1, "head_dim": None}, "llama"),
    "qwen2": ("qwen2-0.5b", WIDE | {"kv_heads": 1}, "qwen2"),
    "qwen3": ("qwen3-0.6b", WIDE | {"kv_heads": 1, "head_dim": 24}, "qwen3"),
    "gemma": ("gemma-2b", WIDE | {"kv_heads": 1, "head_dim": 24}, "gemma"),
    "gemma-2": ("gemma-2-2b", WIDE | {"kv_heads": 1, "head_dim": 24, "window": 8}, "gemma2"),
    "gemma-3": ("gemma-2-2b", GEMMA_3, "gemma3_text"),
    "phi-2": ("phi-2", WIDE, "phi"),
    "phi-3": ("phi-3-mini", WIDE | {"kv_heads": 1, "window": None}, "phi3"),
    "gpt2": ("gpt2", WIDE, "gpt2"),
}
UNCAPPED = MODELS["gemma-2"][1] | {"score": "scaled_dot"}
CAPPED = GEMMA_3 | {"head": {"kind": "linear", "cap": 30.0}}
QUICK = ("llama-3.1", "gemma-2", "gpt2")


def export(tmp_path, name, type="f32", tokenizers=None):
    preset, fields, model_type = MODELS[name]
    tokenizers = tokenizers or tokenizer()
    torch.manual_seed(0)
    config = model_config(preset, **{"vocab_size": tokenizers.vocab_size, **fields})
    make_run(tmp_path / "run", config, tokenizers=tokenizers)
    result = regard.export(
        tmp_path / "run", tmp_path / "out", model_type=model_type, format="gguf", type=type
    )
    assert result.model_type == f"gguf, {model_type}"
    return result


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in MODELS],
)
def test_every_family_is_read_again(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    result = export(tmp_path, name)
    assert result.difference == 0.0
    assert (result.path / "Modelfile").read_text() == "FROM ./model.gguf\n"


def test_the_command_prints_the_rounding_of_weights(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    export(tmp_path, "llama")
    run, out = str(tmp_path / "run"), str(tmp_path / "q")
    with pytest.raises(SystemExit) as exit:
        main(["export", run, out, "--format", "gguf", "--type", "q8_0"])
    assert not exit.value.code
    sentence = (
        r"differs from that of the run by at most (\S+) times the largest weight of its tensor"
    )
    printed = capsys.readouterr().out
    assert "stored" not in printed
    assert 0 < float(re.search(sentence, printed)[1]) < 0.005  # half a step of 1/127


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_gives_our_greedy_ids(name, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    result = export(tmp_path, name)
    assert result.engine == "llama.cpp"
    run, prompt = regard.load(tmp_path / "run"), "the cat sat"
    ids = run._prompt(prompt)
    expected = generate(run.model, [ids], parse_chain("greedy"), max_new_tokens=20, seed=0)[0]
    llama = llama_cpp.Llama(str(result.path / "model.gguf"), n_ctx=32, verbose=False)
    assert llama.tokenize(prompt.encode()) == ids
    assert greedy(llama_cpp, llama, ids, 20) == expected


@pytest.mark.real
@pytest.mark.skipif("REGARD_DATA" not in os.environ, reason="REGARD_DATA is not set")
def test_llama_cpp_tells_the_stories_of_stories260k(tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    regard.import_model(Path(os.environ["REGARD_DATA"], "weights", "stories260k"), tmp_path / "run")
    result = regard.export(tmp_path / "run", tmp_path / "out", format="gguf")
    run = regard.load(tmp_path / "run")
    for prompt in ("Once upon a time", 'Zoë saw 12 cats,\nand "they" ran.  Fast!'):
        ids = run._prompt(prompt)
        expected = generate(run.model, [ids], parse_chain("greedy"), max_new_tokens=200, seed=0)[0]
        llama = llama_cpp.Llama(str(result.path / "model.gguf"), n_ctx=512, verbose=False)
        assert llama.tokenize(prompt.encode()) == ids
        assert greedy(llama_cpp, llama, ids, 200) == expected


def greedy(llama_cpp, llama, ids, count):
    answer = []
    for _ in range(count):
        llama.eval(ids)
        logits = llama_cpp.llama_get_logits_ith(llama._ctx.ctx, -1)
        ids = [int(np.argmax(np.ctypeslib.as_array(logits, shape=(llama.n_vocab(),))))]
        answer += ids
    return answer


@pytest.mark.parametrize(("type", "bound"), [("f16", 1e-3), ("q8_0", 8e-3), ("q4_k", 0.1)])
def test_smaller_types_are_as_exact_as_they_can_be(type, bound, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    monkeypatch.setitem(MODELS, "wide", ("llama", WIDE | {"dim": 256}, "llama"))
    result = export(tmp_path, "wide", type)
    assert 0 < result.difference < bound
    tensors = gguf.GGUFReader(result.path / "model.gguf").tensors
    stored = {tensor.name: tensor.tensor_type.name for tensor in tensors}
    assert stored["blk.0.attn_q.weight"] == type.upper()
    assert stored["blk.0.attn_norm.weight"] == "F32"
    matrices = [kind for kind in stored.values() if kind != "F32"]
    others = sum(kind != type.upper() for kind in matrices)
    note = f"stored {others} of {len(matrices)} matrices as q8_0: the embedding, the output matrix"
    assert (result.unchecked or "").startswith(note if type == "q4_k" else "")
    assert bool(result.unchecked) == bool(others)
    # a row of 64 weights is no block of 256
    assert stored["blk.0.ffn_down.weight"] == ("Q8_0" if type == "q4_k" else type.upper())


def test_q4_k_is_read_by_the_gguf_package():
    weight = np.random.default_rng(0).normal(size=(16, 512)).astype(np.float32)
    weight[3, :64] = 0
    weight[4] = np.abs(weight[4]) + 1
    read = gguf.quants.dequantize(quantize_q4_k(weight), gguf.GGMLQuantizationType.Q4_K)
    assert np.sqrt(np.square(read - weight).mean()) < 0.085
    assert np.abs(read[3, :64]).max() == 0


@pytest.mark.parametrize(
    ("preset", "fields", "kind", "options", "message"),
    [
        ("gpt2", {}, "char", {}, "no tokenizer of the kind 'char'"),
        ("gpt2", {}, "wordpiece", {}, "gpt2 does not use wordpiece"),
        ("gpt2", {"ffn": "relu"}, "bpe", {"model_type": "gpt2"}, "model.ffn='relu'"),
        ("bloom-560m", {}, "bpe", {}, "'bloom' cannot be exported as GGUF; supported: llama"),
        (
            "mistral-7b",
            {"window": 8, "kv_heads": 1},
            "bpe",
            {"model_type": "mistral"},
            "model.window=8",
        ),
        ("gpt2", {}, "bpe", {"type": "q2_k"}, "type='q2_k' must be one of f32, f16, q8_0, q4_k"),
        ("gpt2", {}, "bpe", {"type": "f16", "format": "onnx"}, "type='f16' is for format='gguf'"),
        ("gpt2", {"head": CLASSES}, "bpe", {"model_type": "gpt2"}, "model.head"),
        ("gemma-2-2b", UNCAPPED, "bpe", {"model_type": "gemma2"}, "model.score.cap=None.*Gemma 2"),
        ("gemma-2-2b", CAPPED, "bpe", {"model_type": "gemma3_text"}, "model.head.cap=30.0 cannot"),
    ],
)
def test_what_the_format_cannot_say_is_refused(preset, fields, kind, options, message, tmp_path):
    tokenizers = tokenizer(kind)
    config = model_config(preset, vocab_size=tokenizers.vocab_size, **fields)
    make_run(tmp_path / "run", config, tokenizers=tokenizers)
    with pytest.raises(ConfigError, match=message):
        regard.export(tmp_path / "run", tmp_path / "out", **{"format": "gguf", **options})
    assert not (tmp_path / "out").exists()


def test_the_normalizer_that_llama_cpp_lacks_is_named():
    backend = tokenizer("bpe").backend
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    with pytest.raises(ConfigError, match="has no normalizer Lowercase before BPE"):
        write_vocabulary(None, Tokenizer(backend), 10_000, "gpt2")


@pytest.mark.parametrize(
    ("fields", "model_type", "layers"),
    [
        (WIDE | {"kv_heads": 1, "head_dim": 24, "window": 8}, "gemma2", 46),
        (GEMMA_3, "gemma3_text", 62),
    ],
)
def test_gemma_27b_has_its_own_scale(fields, model_type, layers):
    def settings(layers, width):
        config = model_config("gemma-2-2b", **fields | {"layers": layers})
        return write_config(config, model_type)[1] | {"query_pre_attn_scalar": width}

    # llama.cpp computes these: the root of dim / heads by the number of layers
    for count, width, other in ((layers, 16, 24), (layers - 2, 24, 16)):
        architecture_of(settings(count, width))
        message = f"model.score.scale_dim={other} .* for {count} layers llama.cpp uses {width}"
        with pytest.raises(ConfigError, match=message):
            architecture_of(settings(count, other))


def test_a_smaller_type_is_checked_as_f32(tmp_path, monkeypatch):
    def compare(path, model, type):
        if type == "f32":
            raise CheckpointError(f"the logits of {path.name} differ")
        return 7.0

    monkeypatch.setattr(import_export, "compare_llama_cpp", compare)
    with pytest.raises(CheckpointError, match=r"the logits of f32\.gguf differ"):
        export(tmp_path, "gpt2", "f16")
    assert not (tmp_path / "out").exists()


def test_a_chat_template_is_in_the_file(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    tokenizers = tokenizer()
    make_run(tmp_path / "run", model_config("gpt2"), task="instruct", tokenizers=tokenizers)
    result = regard.export(tmp_path / "run", tmp_path / "out", format="gguf")
    fields = gguf.GGUFReader(result.path / "model.gguf").fields
    assert fields["tokenizer.chat_template"].contents() == CHATML_JINJA
    dialogue = [("user", "Hi\n?"), ("assistant", " Hello "), ("user", "1")]
    for prompt in (False, True):
        chatml = render("chatml", dialogue, add_generation_prompt=prompt)
        assert render(CHATML_JINJA, dialogue, add_generation_prompt=prompt) == chatml


def test_a_tokenizer_without_an_eos_token_is_refused():
    tokenizers = tokenizer()
    tokens = {k: v for k, v in tokenizers.special_tokens.tokens.items() if k != "eos"}
    tokenizers.special_tokens = replace(tokenizers.special_tokens, tokens=tokens)
    writer = gguf.GGUFWriter(None, "gpt2")
    with pytest.raises(ConfigError, match="it has no EOS token"):
        write_vocabulary(writer, tokenizers, tokenizers.vocab_size, "gpt2")


def test_bpe_without_merges_is_refused():
    plain = train_tokenizer({"kind": "bpe", "vocab_size": 300}, ["a cat"])
    with pytest.raises(ConfigError, match="it has no merges"):
        write_vocabulary(gguf.GGUFWriter(None, "gpt2"), plain, plain.vocab_size, "gpt2")


def test_bert_has_its_token_types(tmp_path):
    tokenizers = train_tokenizer({"kind": "wordpiece", "lower": True}, TEXT)
    config = model_config("bert", vocab_size=tokenizers.vocab_size, segments=3)
    make_run(tmp_path / "run", config, task="masked", tokenizers=tokenizers)
    result = regard.export(tmp_path / "run", tmp_path / "out", format="gguf")
    fields = gguf.GGUFReader(result.path / "model.gguf").fields
    assert fields["tokenizer.ggml.token_type_count"].contents() == 3


SAMPLES = ("the cat sat", "  Two  spaces,\nZoë's 12 dogs!", "it's", "")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_llama_cpp_has_our_token_ids(kind, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    texts = [*TEXT, "  Two  spaces,\nZoë's 12 dogs! it's theirs", "12 13 14"]
    options = {"vocab_size": 300 if kind == "bpe" else 60}
    tokenizers = train_tokenizer({"kind": kind, **options}, texts)
    result = export(tmp_path, "llama", tokenizers=tokenizers)
    llama = llama_cpp.Llama(str(result.path / "model.gguf"), n_ctx=32, verbose=False)
    for text in SAMPLES:
        assert llama.tokenize(text.encode()) == tokenizers.encode(text), text


@pytest.mark.long
def test_llama_cpp_embeds_as_our_encoder(tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    tokenizers = train_tokenizer({"kind": "wordpiece", "lower": True}, TEXT)
    config = model_config("bert", **WIDE, vocab_size=tokenizers.vocab_size)
    model = make_run(tmp_path / "run", config, task="masked", tokenizers=tokenizers)
    result = regard.export(tmp_path / "run", tmp_path / "out", format="gguf")
    assert result.engine == "llama.cpp"
    assert result.difference < 1e-2
    path = result.path / "model.gguf"
    assert compare_llama_cpp(path, model, "f32") == result.difference
    model.embed.token.weight.data.neg_()
    with pytest.raises(CheckpointError, match="its embeddings differ by"):
        compare_llama_cpp(path, model, "f32")
    model.embed.token.weight.data.neg_()
    llama = llama_cpp.Llama(
        str(result.path / "model.gguf"), n_ctx=32, embedding=True, verbose=False
    )
    text = "The cat sat on the mat"
    ids = [tokenizers.special_id("cls"), *tokenizers.encode(text), tokenizers.special_id("sep")]
    assert llama.tokenize(text.encode()) == ids
    with torch.no_grad():
        expected = model(torch.tensor([ids]))[0].mean(0)
    actual = torch.tensor(llama.embed(text))
    # llama.cpp's GELU is the tanh approximation
    torch.testing.assert_close(
        actual / actual.norm(), expected / expected.norm(), atol=5e-3, rtol=0
    )
