"""A decode step as one CUDA kernel, emulated on a CPU, gives the logits of the model."""

import ctypes
import random
import shutil
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from regard.accel import nvrtc
from regard.accel.description import inspect_decoder
from regard.accel.support import GPUProperties, persistent_unsupported_reason
from regard.models.transformer import Transformer, TransformerConfig
from regard.nn.loss import soft_cap

pytest.importorskip("triton")
from regard.accel.persistent_step import PersistentStep, kernel_source
from regard.accel.triton_decoder import TritonDecoder

FOLDER = Path(__file__).parent
VOCAB, CAPACITY = 50, 64
NUM_BLOCKS, SHARED_BYTES = 6, 100_000
SIZES = {"WARPS": 4, "STAGE_BYTES": 8192, "IN_FLIGHT": 2, "SPLIT_KEYS": 2, "DIRECT_SPLITS": 2}
GXX, NVCC = shutil.which("g++"), shutil.which("nvcc")
BASE = {
    "vocab_size": VOCAB,
    "dim": 64,
    "layers": 2,
    "heads": 4,
    "context": CAPACITY,
    "position": "rotary",
    "norm": "rms",
    "ffn": "swiglu",
    "ffn_dim": 192,
    "bias": False,
    "tied": False,
}
NEOX = {"norm": "layer", "bias": True, "position": {"kind": "rotary", "partial_rotary_factor": 0.5}}
CASES = {
    "llama": {"kv_heads": 2, "layers": 3},
    "qwen3": {"qk_norm": True, "kv_heads": 1, "head_dim": 32, "tied": True, "layers": 1},
    "gpt2": {"norm": "layer", "bias": True, "ffn": "gelu_tanh", "position": "learned"},
    "bloom": {"norm": "layer", "bias": True, "ffn": "gelu", "position": "alibi", "kv_heads": 2},
    "pythia": {**NEOX, "norm_placement": "parallel_norms", "ffn": "gelu", "dim": 192},
    "phi": {
        **NEOX,
        "norm_placement": "parallel",
        "ffn": "gelu_tanh",
        "head": {"kind": "linear", "bias": True},
    },
    "palm": {"norm_placement": "parallel", "kv_heads": 1, "heads": 8, "head_dim": 8},
    "gemma 2": {
        "norm": "rms_plus_one",
        "norm_placement": "sandwich",
        "score": {"kind": "scaled_dot", "cap": 2.0},
        "window": 3,
        "global_every": 2,
        "ffn": "geglu",
        "embed_scaled": True,
        "head": {"kind": "linear", "cap": 3.0},
    },
    "post": {
        "norm_placement": "post",
        "norm": "layer",
        "bias": True,
        "ffn": "relu",
        "position": "sinusoidal",
    },
    "deepnorm": {
        "norm_placement": "deepnorm",
        "residual_scale": 1.5,
        "norm": "layer",
        "ffn": "relu2",
        "position": "none",
    },
    "many queries": {"heads": 12, "kv_heads": 1, "head_dim": 16, "window": 9},
    "wide heads": {
        "heads": 4,
        "kv_heads": 1,
        "head_dim": 80,
        "position": {"kind": "rotary", "interleaved": True},
    },
    "scaled head": {"head": {"kind": "linear", "scaled": True}, "tied": True},
}


class EmulatedKernel:
    """A kernel compiled for a CPU, its threads as coroutines."""

    def __init__(self, folder, constants, sizes):
        (folder / "kernel.cpp").write_text(
            f'{constants}\n#include "emulated_device.h"\n{kernel_source("")}\n'
            '#include "emulate.h"\n'
        )
        library = folder / "kernel.so"
        command = [GXX, "-std=c++17", "-O1", "-shared", "-fPIC", "-I", FOLDER]
        subprocess.run([*command, "-o", library, folder / "kernel.cpp"], check=True)
        self.library, self.sizes = ctypes.CDLL(str(library)), sizes
        self.library.run.restype = ctypes.c_char_p

    def read_constants(self, name, count):
        return list((ctypes.c_uint64 * count).in_dll(self.library, name))

    def launch(self, blocks, threads, arguments):
        assert (blocks, threads) == (NUM_BLOCKS, 32 * (self.sizes["WARPS"] + 1))
        error = self.library.run(ctypes.byref(arguments), random.randrange(1 << 32))
        assert error is None, error.decode()


def build(dtype, **settings):
    """A model whose weights are numbers of a 16-bit type."""
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(**(BASE | settings))).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.to(dtype)


def emulate(decoder, folder, **sizes):
    """Let one-row steps of a decoder run the emulated kernel."""
    sizes = SIZES | sizes
    make_kernel = partial(EmulatedKernel, folder, sizes=sizes)
    decoder.persistent_step = PersistentStep(
        decoder, NUM_BLOCKS, SHARED_BYTES, make_kernel, **sizes
    )


def step(decoder, ids, state):
    """The logits of a step. Triton kernels, which compute some heads, cannot run here."""
    if not decoder.head_needs_preparation:
        return decoder.step(ids, state)
    x = decoder._embed(ids, state.lengths).squeeze(1)
    x = decoder.norm(decoder.persistent_step(x, state).to(x.dtype))
    return soft_cap(decoder.head(decoder.prepare(x)), decoder.cap), state.advance(None, 1)


def largest_difference(decoder, reference, prompt, steps):
    """Between the logits of a decoder and of a model in float32, in standard deviations."""
    torch.manual_seed(1)
    ids = torch.randint(0, VOCAB, (1, prompt + steps))
    _, expected_state = reference.step(ids[:, :prompt], reference.start(1, CAPACITY))
    _, state = decoder.model.step(ids[:, :prompt], decoder.model.start(1, CAPACITY))
    differences = []
    for time in range(prompt, prompt + steps):
        for cache, expected_cache in zip(state.layers, expected_state.layers, strict=True):
            for name in ("keys", "values"):  # 16-bit numbers in both
                getattr(cache, name).copy_(getattr(expected_cache, name))
                getattr(expected_cache, name).copy_(getattr(cache, name))
        token = ids[:, time : time + 1]
        expected, expected_state = reference.step(token, expected_state)
        actual, state = step(decoder, token, state)
        for cache, expected_cache in zip(state.layers, expected_state.layers, strict=True):
            for name in ("keys", "values"):  # the kernel has stored the new ones
                new, expected_new = (getattr(c, name)[:, :, time] for c in (cache, expected_cache))
                torch.testing.assert_close(new.float(), expected_new, rtol=0.05, atol=0.05)
        difference = (actual.view(-1) - expected.view(-1)).abs().max() / expected.std()
        differences.append(float(difference))
    return max(differences)


needs_compiler = pytest.mark.skipif(GXX is None, reason="needs g++")


@needs_compiler
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_a_step_gives_the_logits_of_the_model(tmp_path, case):
    decoder = TritonDecoder(build(torch.float16, **CASES[case]))
    with torch.inference_mode():
        emulate(decoder, tmp_path)
        reference = build(torch.float16, **CASES[case]).float()
        # activations are rounded to float16, with 11 bits, in attention and before the down layer
        assert largest_difference(decoder, reference, prompt=1, steps=9) < 4e-3


@needs_compiler
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 1e-5), (torch.bfloat16, 1e-4)])
@torch.inference_mode()
def test_inputs_of_linear_layers_are_the_sum_of_two_16_bit_numbers(tmp_path, dtype, tolerance):
    decoder, reference = TritonDecoder(build(dtype)), build(dtype).float()
    for model in (decoder.model, reference):
        for block in model.decoder.layers:  # only the head is left, which has no other rounding
            block.attention.out.weight.zero_()
            block.ffn.down.weight.zero_()
    emulate(decoder, tmp_path)
    assert largest_difference(decoder, reference, prompt=1, steps=2) < tolerance


@needs_compiler
@pytest.mark.parametrize(
    ("case", "quantized"),
    [("bloom", "int8"), ("llama", "int4"), ("phi", "int4")],
)
@torch.inference_mode()
def test_quantized_weights(tmp_path, case, quantized):
    width, sizes = {"int8": (256, {}), "int4": (512, {"STAGE_BYTES": 17_408})}[quantized]
    settings = CASES[case] | {"dim": width, "ffn_dim": width, "layers": 1}
    settings |= {"heads": width // 64, "head_dim": 64, "kv_heads": 1}
    decoder = TritonDecoder(build(torch.float16, **settings), **{quantized: True})
    emulate(decoder, tmp_path, **sizes)
    reference = build(torch.float16, **settings).float()
    packed = TritonDecoder(build(torch.float16, **settings), **{quantized: True})
    for layer, block in zip(packed.layers, reference.decoder.layers, strict=True):
        _set_weights(
            layer.qkv, *(getattr(block.attention, name) for name in ("query", "key", "value"))
        )
        _set_weights(layer.out, block.attention.out)
        gate = [block.ffn.gate] if hasattr(block.ffn, "gate") else []
        _set_weights(layer.gate_up, *gate, block.ffn.up)
        _set_weights(layer.down, block.ffn.down)
    reference.head.matrix.copy_(packed.head.dequantize(torch.float32))
    assert largest_difference(decoder, reference, prompt=1, steps=2) < 6e-3


def _set_weights(layer, *linears):
    """Give linear layers the values of packed weights."""
    weights = layer.dequantize(torch.float32).split([len(linear.weight) for linear in linears])
    for linear, weight in zip(linears, weights, strict=True):
        linear.weight.copy_(weight)


@needs_compiler
@torch.inference_mode()
def test_inputs_times_large_gains_do_not_overflow(tmp_path):
    decoder, reference = TritonDecoder(build(torch.float16)), build(torch.float16).float()
    for model in (decoder.model, reference):
        model.embed.token.weight.mul_(20_000)  # near 60,000
        for norm in (*(b.attention_norm for b in model.decoder.layers), model.decoder.norm):
            norm.weight.mul_(10)
    decoder = TritonDecoder(decoder.model)
    emulate(decoder, tmp_path)
    assert largest_difference(decoder, reference, prompt=1, steps=2) < 4e-3


@needs_compiler
@torch.inference_mode()
def test_weights_of_another_type_are_refused(tmp_path):
    model = build(torch.bfloat16)
    model.head.half()
    with pytest.raises(nvrtc.CudaKernelError, match=r"float16, the embedding torch.bfloat16"):
        emulate(TritonDecoder(model), tmp_path)


@needs_compiler
@torch.inference_mode()
def test_bfloat16_differs_by_its_rounding(tmp_path):
    decoder = TritonDecoder(build(torch.bfloat16))
    emulate(decoder, tmp_path)
    reference = build(torch.bfloat16).float()
    assert largest_difference(decoder, reference, prompt=1, steps=4) < 5e-2  # 8 bits


@needs_compiler
@torch.inference_mode()
def test_a_split_with_several_stages_of_keys(tmp_path):
    settings = {"heads": 2, "kv_heads": 1, "head_dim": 128, "position": "alibi"}
    decoder = TritonDecoder(build(torch.float16, **settings))
    emulate(decoder, tmp_path, SPLIT_KEYS=1000)  # 16 keys are a stage
    reference = build(torch.float16, **settings).float()
    assert largest_difference(decoder, reference, prompt=31, steps=4) < 4e-3


@needs_compiler
@torch.inference_mode()
def test_the_result_depends_neither_on_the_schedule_nor_on_earlier_steps(tmp_path):
    decoder = TritonDecoder(build(torch.bfloat16, layers=3))  # tags start with 1, 0, 1, …
    emulate(decoder, tmp_path)
    ids = torch.randint(0, VOCAB, (1, 9))
    _, state = decoder.model.step(ids[:, :8], decoder.model.start(1, CAPACITY))
    state = state.with_static_shapes()
    logits = [decoder.step(ids[:, 8:], replace(state, lengths=state.lengths.clone()))[0]]
    logits += [decoder.step(ids[:, 8:], replace(state, lengths=state.lengths.clone()))[0]]
    assert torch.equal(*logits)


@needs_compiler
@torch.inference_mode()
def test_weights_that_bulk_copies_cannot_read_are_refused(tmp_path):
    model = build(torch.bfloat16)
    weight = model.decoder.blocks[1].ffn.down.weight
    weight.data = torch.empty(weight.numel() + 1, dtype=weight.dtype)[1:].view_as(weight)
    decoder = TritonDecoder(model)
    with pytest.raises(nvrtc.CudaKernelError, match="not aligned to 16 bytes"):
        emulate(decoder, tmp_path)


@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
@pytest.mark.parametrize("case", ["llama", "bloom", "pythia", "gemma 2"])
@torch.inference_mode()
def test_it_compiles_for_hopper_without_spilled_registers(tmp_path, case):
    settings = {"dim": 1024, "ffn_dim": 4096, "heads": 16, "head_dim": 64} | {
        key: value for key, value in CASES[case].items() if key not in ("dim", "kv_heads")
    }
    decoder, texts = TritonDecoder(build(torch.bfloat16, **settings)), []

    def keep(constants):
        texts.append(constants)
        raise NotImplementedError

    with pytest.raises(NotImplementedError):
        PersistentStep(decoder, 132, 232_448, keep)
    operations = Path(nvrtc.__file__).parent.joinpath("cuda", "device.cuh").read_text()
    source = tmp_path / "kernel.cu"
    source.write_text(texts[0] + "\n" + kernel_source(operations))
    target = "-gencode=arch=compute_90a,code=sm_90a"
    command = [NVCC, "-std=c++17", "--use_fast_math", target, "-cubin", "-Xptxas", "-v"]
    result = subprocess.run(
        [*command, "-o", tmp_path / "kernel.cubin", source], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert " 0 bytes spill stores, 0 bytes spill loads" in result.stderr


H200 = GPUProperties((9, 0), multiprocessors=132, shared_bytes=232_448)


def unsupported_reason(settings=(), dtype=torch.bfloat16, gpu=H200, **options):
    description = inspect_decoder(build(dtype, **{"dim": 192, **dict(settings)}))
    return persistent_unsupported_reason(description, gpu, **options)


def test_models_that_it_does_not_support_are_refused_for_a_reason():
    assert unsupported_reason() is None
    assert "older than Hopper" in unsupported_reason(gpu=replace(H200, capability=(8, 9)))
    assert "99 KiB of shared memory" in unsupported_reason(gpu=replace(H200, shared_bytes=101_376))
    assert "too narrow for 132 multiprocessors" in unsupported_reason({"dim": 128})
    narrow = {"norm_placement": "parallel", "kv_heads": 1, "head_dim": 16, "ffn_dim": 256}
    assert "too narrow for 132 multiprocessors" in unsupported_reason(narrow)
    few = replace(H200, multiprocessors=2)
    assert "too wide for 2 multiprocessors" in unsupported_reason(
        {"ffn_dim": 4096, "kv_heads": 2}, gpu=few
    )
    assert "4 KV heads are more than the 2 multiprocessors" in unsupported_reason(gpu=few)
    assert "not a 16-bit type" in unsupported_reason(dtype=torch.float32)
    assert "ffn_dim=100 is not a multiple of 64" in unsupported_reason({"ffn_dim": 100})
    assert "dim=96 is not a multiple of 64" in unsupported_reason({"dim": 96})
    assert "ffn_dim=192 is not a multiple of 128" in unsupported_reason({"dim": 256}, bits=8)
    assert "ffn_dim=192 is not a multiple of 512" in unsupported_reason({"dim": 512}, bits=4)
    assert "more than 160 MiB of 16-bit weights" in unsupported_reason({"ffn_dim": 400_000})
    assert "head_dim=20 is not" in unsupported_reason({"head_dim": 20, "heads": 16})
    queries = {"heads": 32, "kv_heads": 1, "head_dim": 8}
    assert "more than 16 query heads" in unsupported_reason(queries)


def test_without_a_gpu_the_reason_is_stated():
    decoder = TritonDecoder(build(torch.bfloat16))
    assert decoder.persistent_step is None
    assert decoder.persistent_unsupported_reason == "it needs a CUDA GPU"
