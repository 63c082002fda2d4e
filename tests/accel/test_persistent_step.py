"""A decode step as one CUDA kernel, emulated on a CPU, gives the logits of the model."""

import ctypes
import functools
import random
import shutil
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from regard.accel import nvrtc
from regard.accel.description import inspect_decoder
from regard.accel.support import GPUProperties, persistent_unsupported_reason
from regard.models.build import build_on_meta
from regard.models.transformer import Transformer, TransformerConfig
from regard.nn.loss import soft_cap

pytest.importorskip("triton")
from regard.accel import persistent_step
from regard.accel.persistent_step import PersistentStep, kernel_source
from regard.accel.triton_decoder import TritonDecoder

FOLDER = Path(__file__).parent
VOCAB, CAPACITY = 50, 64
NUM_BLOCKS, SHARED_BYTES = 6, 100_000
SIZES = {
    "WARPS": 4,
    "STAGE_BYTES": 8192,
    "IN_FLIGHT": 3,
    "LAYER_BYTES_IN_FLIGHT": 4096,
    "SPLIT_KEYS": 2,
    "DIRECT_SPLITS": 2,
}
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
    "large epsilon": {
        "norm_placement": "sandwich",
        "qk_norm": True,
        "norm_eps": 0.3,
        "dim": 512,  # all warps have columns of the residual stream
        "head_dim": 16,
    },
}
# Two vectors of the residual stream, of hidden values and of a head per thread; several batches of
# rows of the head, which has 157 per block; more layers than descriptions in shared memory.
WIDE = {
    "dim": 320,
    "ffn_dim": 576,
    "kv_heads": 1,
    "head_dim": 144,
    "vocab_size": 2500,
    "layers": 6,
}


@functools.cache
def compile_kernel(constants):
    """A library with the emulated kernel."""
    lines = ['#include "emulated_device.h"', kernel_source(""), '#include "emulate.h"']
    source = "\n".join([constants, *lines, ""])
    # 16-bit floats are converted in software without the instructions of this processor; longjmp
    # to another stack is an error with _FORTIFY_SOURCE
    options = ["-std=c++17", "-O1", "-march=native", "-U_FORTIFY_SOURCE", "-shared", "-fPIC"]
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "kernel.so")
        command = [GXX, *options, "-I", FOLDER, "-o", library, "-x", "c++", "-"]
        result = subprocess.run(command, input=source, capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(result.stderr)
        return ctypes.CDLL(str(library))


class EmulatedKernel:
    """A kernel compiled for a CPU, its threads as coroutines."""

    def __init__(self, constants, num_blocks, sizes):
        self.library = compile_kernel(constants)
        self.library.run.restype = ctypes.c_char_p
        self.library.apply_activation.restype = ctypes.c_float
        threads = 32 * (sizes["WARPS"] + persistent_step.OTHER_WARPS)
        self.shape, self.seeds = (num_blocks, threads), random.Random(0)

    def read_constants(self, name, count):
        return list((ctypes.c_uint64 * count).in_dll(self.library, name))

    def launch(self, blocks, threads, arguments):
        assert (blocks, threads) == self.shape
        error = self.library.run(ctypes.byref(arguments), self.seeds.randrange(1 << 32))
        assert error is None, error.decode()

    def activation(self, values):
        return torch.tensor([self.library.apply_activation(ctypes.c_float(x)) for x in values])


def build(dtype, **settings):
    """A model whose weights are numbers of a 16-bit type."""
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(**(BASE | settings))).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.to(dtype)


def emulate(decoder, *, num_blocks=NUM_BLOCKS, shared_bytes=SHARED_BYTES, **sizes):
    """Let one-row steps of a decoder run the emulated kernel."""
    sizes = SIZES | sizes
    make_kernel = functools.partial(EmulatedKernel, num_blocks=num_blocks, sizes=sizes)
    decoder.persistent_step = PersistentStep(
        decoder, num_blocks, shared_bytes, make_kernel, **sizes
    )


def step(decoder, ids, state):
    """The logits of a step. Triton kernels, which compute some heads, cannot run here."""
    if not decoder.head_needs_preparation:
        return decoder.step(ids, state)
    x = decoder._embed(ids, state.lengths).squeeze(1)
    x = decoder.norm(decoder.persistent_step(x, state).to(x.dtype))
    return soft_cap(decoder.head(decoder.prepare(x)), decoder.cap), state.advance(None, 1)


def largest_difference(decoder, reference, prompt, steps, capacity=CAPACITY):
    """Between the logits of a decoder and of a model in float32, in standard deviations."""
    torch.manual_seed(1)
    ids = torch.randint(0, VOCAB, (1, prompt + steps))
    _, expected_state = reference.step(ids[:, :prompt], reference.start(1, capacity))
    _, state = decoder.model.step(ids[:, :prompt], decoder.model.start(1, capacity))
    tolerance = 8 * torch.finfo(state.layers[0].keys.dtype).eps  # of activations, see below
    differences = []
    for time in range(prompt, prompt + steps):
        for cache, expected_cache in zip(state.layers, expected_state.layers, strict=True):
            for name in ("keys", "values"):  # 16-bit numbers in both
                getattr(cache, name).copy_(getattr(expected_cache, name))
                getattr(expected_cache, name).copy_(getattr(cache, name))
                getattr(cache, name)[:, :, time:] = torch.nan  # not read before it is written
        token = ids[:, time : time + 1]
        expected, expected_state = reference.step(token, expected_state)
        actual, state = step(decoder, token, state)
        for cache, expected_cache in zip(state.layers, expected_state.layers, strict=True):
            for name in ("keys", "values"):  # the kernel has stored the new ones
                new, expected_new = (getattr(c, name)[:, :, time] for c in (cache, expected_cache))
                torch.testing.assert_close(
                    new.float(), expected_new, rtol=tolerance, atol=tolerance
                )
        difference = (actual.view(-1) - expected.view(-1)).abs().max() / expected.std()
        differences.append(float(difference))
    return max(differences, key=lambda x: torch.inf if x != x else x)


@torch.inference_mode()
def compare(
    settings, dtype=torch.float16, *, change=None, prompt=1, steps=9, capacity=CAPACITY, **sizes
):
    """The largest difference of a model, after a change of its weights, and its emulated step."""
    model, reference = (build(dtype, context=capacity, **settings) for _ in range(2))
    for weights in (model, reference):
        if change is not None:
            change(weights)
    decoder = TritonDecoder(model)
    emulate(decoder, **sizes)
    return largest_difference(decoder, reference.float(), prompt, steps, capacity)


needs_compiler = pytest.mark.skipif(GXX is None, reason="needs g++")


# Activations and the weights of attention are rounded to float16, with 11 bits.
FLOAT16_TOLERANCE = 4e-3


@needs_compiler
@pytest.mark.parametrize("case", CASES)
def test_a_step_gives_the_logits_of_the_model(case):
    assert compare(CASES[case]) < FLOAT16_TOLERANCE


@needs_compiler
def test_a_model_whose_vectors_are_longer_than_the_threads_of_a_block():
    difference = compare(WIDE, prompt=16, steps=2, num_blocks=16, WARPS=2)
    assert difference < FLOAT16_TOLERANCE


@needs_compiler
def test_a_head_of_many_batches():
    # 5 batches of 256 rows in each block
    settings = {"layers": 1, "kv_heads": 1, "vocab_size": 2500}
    assert compare(settings, steps=9, num_blocks=2) < FLOAT16_TOLERANCE


@needs_compiler
def test_copies_that_are_several_layers_ahead():
    sizes = {"num_blocks": 16, "shared_bytes": 400_000}  # 32 stages, of which a layer needs 5
    assert compare({"layers": 8}, steps=2, **sizes) < FLOAT16_TOLERANCE


@needs_compiler
def test_the_sizes_of_a_gpu():
    settings = {"kv_heads": 1}
    sizes = {"num_blocks": 4, "shared_bytes": 232_448} | persistent_step.SIZES
    assert compare(settings, prompt=260, steps=2, capacity=300, **sizes) < FLOAT16_TOLERANCE


@pytest.mark.parametrize(("dim", "small"), [(64, True), (1280, False)])
def test_fewer_weights_of_small_layers_are_in_flight(dim, small):
    config = TransformerConfig(**BASE | {"dim": dim, "ffn_dim": 4 * dim, "layers": 1})
    decoder = TritonDecoder(Transformer(config).bfloat16().eval())
    sizes = PersistentStep._sizes_of_layer(decoder.triton_layers[0])
    assert sizes == ({"LAYER_BYTES_IN_FLIGHT": 24 << 10} if small else {})


# Layers take turns at 2 splits and 1 to 16, which are combined by every block or before; the mode
# of the latter changes as the keys become more. Tags of splits alternate only where they are used.
@needs_compiler
@pytest.mark.parametrize("direct_splits", [1, 2, 4])
def test_the_number_of_splits_differs_between_layers_and_steps(direct_splits):
    settings = {"kv_heads": 1, "layers": 3, "window": 3, "global_every": 2}
    sizes = {"num_blocks": 16, "WARPS": 2, "DIRECT_SPLITS": direct_splits}
    assert compare(settings, steps=20, **sizes) < FLOAT16_TOLERANCE


# A warp has several tiles of keys, and two warps share the columns of a tile.
@needs_compiler
@pytest.mark.parametrize(("heads", "head_dim", "warps"), [(12, 144, 4), (4, 256, 8), (16, 200, 4)])
def test_wide_heads_with_several_tiles_for_each_warp(heads, head_dim, warps):
    settings = {"heads": heads, "kv_heads": 1, "head_dim": head_dim, "layers": 1}
    sizes = {"num_blocks": 32, "shared_bytes": 300_000, "SPLIT_KEYS": 1000, "WARPS": warps}
    sizes["STAGE_BYTES"] = 1 << 15
    assert compare(settings, prompt=70, steps=3, capacity=80, **sizes) < FLOAT16_TOLERANCE


@needs_compiler
def test_32_splits():
    settings = {"kv_heads": 1, "head_dim": 32}  # 32 vectors of the queries of the KV head
    sizes = {"num_blocks": 32, "WARPS": 2, "SPLIT_KEYS": 1}
    assert compare(settings, prompt=30, steps=4, **sizes) < FLOAT16_TOLERANCE


def add_to_scores(model):
    """Add 256 to the scores of the first KV head, and -256 to those of the second.

    One column of queries and keys is a constant, so that nothing else is less exact.
    """
    for block in model.decoder.layers:
        query, key = block.attention.query, block.attention.key
        query.weight[::16], query.bias[::16] = 0, 32
        key.weight[::16] = 0
        key.bias[::16] = torch.tensor([32, -32])


def spread_scores(model):
    """Make the scores of different keys differ by hundreds."""
    for block in model.decoder.layers:
        query, key = block.attention.query, block.attention.key
        query.weight[::16] = 0
        query.bias[::16] = torch.tensor([128, -128, 128, -128])
        key.weight[::16] *= 32


@needs_compiler
@pytest.mark.parametrize("change", [add_to_scores, spread_scores])
@pytest.mark.parametrize(
    "sizes",
    [
        {"DIRECT_SPLITS": 1},
        {"DIRECT_SPLITS": 4},
        {"SPLIT_KEYS": 1000},
        {"SPLIT_KEYS": 1000, "WARPS": 2},  # a warp has several tiles
    ],
)
def test_powers_of_2_of_scores_do_not_overflow(change, sizes):
    settings = {"position": "none", "bias": True, "kv_heads": 2}
    sizes = {"num_blocks": 8} | sizes
    assert compare(settings, change=change, prompt=56, steps=6, **sizes) < FLOAT16_TOLERANCE


@needs_compiler
@pytest.mark.parametrize("case", ["llama", "gpt2", "bloom", "deepnorm", "post"])
@torch.inference_mode()
def test_activations(case):
    model = build(torch.float16, **CASES[case])
    decoder = TritonDecoder(model)
    emulate(decoder)
    x = torch.linspace(-6, 6, 97)
    actual = decoder.persistent_step.kernel.activation(x.tolist())
    expected = model.decoder.layers[0].ffn.activation(x)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)  # of powers in float32


@needs_compiler
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 1e-5), (torch.bfloat16, 1e-4)])
def test_inputs_of_linear_layers_are_the_sum_of_two_16_bit_numbers(dtype, tolerance):
    def leave_only_the_head(model):  # which has no other rounding
        for block in model.decoder.layers:
            block.attention.out.weight.zero_()
            block.ffn.down.weight.zero_()

    assert compare({}, dtype, change=leave_only_the_head, steps=2) < tolerance


def enlarge_inputs(model):
    model.embed.token.weight.mul_(20_000)  # near 60,000
    for norm in (*(b.attention_norm for b in model.decoder.layers), model.decoder.norm):
        norm.weight.mul_(10)


@needs_compiler
def test_inputs_times_large_gains_do_not_overflow():
    assert compare({}, change=enlarge_inputs, steps=2) < FLOAT16_TOLERANCE


INT4_STAGE = {"STAGE_BYTES": 17_408}  # 32 rows with a unit for each warp, and their scales


@needs_compiler
@pytest.mark.parametrize(
    ("case", "quantized", "dtype", "dim", "ffn_dim", "sizes"),
    [
        ("bloom", "int8", torch.float16, 256, 256, {}),
        ("bloom", "int8", torch.bfloat16, 256, 256, {}),
        # several segments, the last with few units
        ("llama", "int8", torch.float16, 640, 896, {"num_blocks": 24}),
        ("phi", "int4", torch.float16, 512, 512, INT4_STAGE),
        ("phi", "int4", torch.bfloat16, 512, 512, INT4_STAGE),
        ("pythia", "int4", torch.bfloat16, 512, 512, INT4_STAGE),  # its second input has sums too
        ("llama", "int4", torch.float16, 1536, 2560, INT4_STAGE | {"num_blocks": 24}),
    ],
)
@torch.inference_mode()
def test_quantized_weights(case, quantized, dtype, dim, ffn_dim, sizes):
    settings = CASES[case] | {"dim": dim, "ffn_dim": ffn_dim, "layers": 1}
    settings |= {"heads": dim // 64, "head_dim": 64, "kv_heads": 1 if dim < 1024 else 2}
    decoder = TritonDecoder(build(dtype, **settings), **{quantized: True})
    emulate(decoder, **sizes)
    reference = build(dtype, **settings).float()
    packed = TritonDecoder(build(dtype, **settings), **{quantized: True})
    for layer, block in zip(packed.layers, reference.decoder.layers, strict=True):
        _set_weights(
            layer.qkv, *(getattr(block.attention, name) for name in ("query", "key", "value"))
        )
        _set_weights(layer.out, block.attention.out)
        gate = [block.ffn.gate] if hasattr(block.ffn, "gate") else []
        _set_weights(layer.gate_up, *gate, block.ffn.up)
        _set_weights(layer.down, block.ffn.down)
    reference.head.matrix.copy_(packed.head.dequantize(torch.float32))
    # more than FLOAT16_TOLERANCE: the rounding of more columns adds up; bfloat16 has 8 bits
    tolerance = {torch.float16: 6e-3, torch.bfloat16: 5e-2}[dtype]
    assert largest_difference(decoder, reference, prompt=1, steps=2) < tolerance


def _set_weights(layer, *linears):
    """Give linear layers the values of packed weights."""
    weights = layer.dequantize(torch.float32).split([len(linear.weight) for linear in linears])
    for linear, weight in zip(linears, weights, strict=True):
        linear.weight.copy_(weight)


@needs_compiler
@torch.inference_mode()
def test_weights_of_another_type_are_refused():
    model = build(torch.bfloat16)
    model.head.half()
    with pytest.raises(nvrtc.CudaKernelError, match=r"float16, the embedding torch.bfloat16"):
        emulate(TritonDecoder(model))


@needs_compiler
def test_bfloat16_differs_by_its_rounding():
    assert compare({}, torch.bfloat16, steps=4) < 5e-2  # 8 bits


@needs_compiler
def test_a_split_with_several_stages_of_keys():
    settings = {"heads": 2, "kv_heads": 1, "head_dim": 128, "position": "alibi"}
    sizes = {"SPLIT_KEYS": 1000}  # 16 keys are a stage
    assert compare(settings, prompt=31, steps=4, **sizes) < FLOAT16_TOLERANCE


@needs_compiler
@torch.inference_mode()
def test_the_result_depends_neither_on_the_schedule_nor_on_earlier_steps():
    decoder = TritonDecoder(build(torch.bfloat16, layers=3))  # tags start with 1, 0, 1, …
    emulate(decoder)
    ids = torch.randint(0, VOCAB, (1, 9))
    _, state = decoder.model.step(ids[:, :8], decoder.model.start(1, CAPACITY))
    state = state.with_static_shapes()
    first, *others = [
        decoder.step(ids[:, 8:], replace(state, lengths=state.lengths.clone()))[0]
        for _ in range(10)
    ]
    assert all(torch.equal(first, logits) for logits in others)


@needs_compiler
@torch.inference_mode()
def test_positions_of_a_kv_cache_that_need_64_bits(tmp_path):
    settings = {"heads": 8, "kv_heads": 8, "head_dim": 8, "layers": 1}
    decoder = TritonDecoder(build(torch.bfloat16, **settings))
    emulate(decoder, num_blocks=16)
    ids = torch.randint(0, VOCAB, (1, 5))
    _, state = decoder.model.step(ids[:, :4], decoder.model.start(1, CAPACITY))
    (cache,) = state.layers
    capacity, large = 1 << 29, []  # 2³² positions of all heads
    for name in ("keys", "values"):
        file = tmp_path / name
        with file.open("wb") as stream:
            stream.truncate(8 * capacity * 16)  # blocks are allocated where it is written
        elements = torch.from_file(
            str(file), shared=True, size=8 * capacity * 8, dtype=torch.bfloat16
        )
        file.unlink()
        large.append(elements.view(1, 8, capacity, 8))
        large[-1][:, :, :4] = getattr(cache, name)[:, :, :4]
    x = decoder._embed(ids[:, 4:], state.lengths).squeeze(1)
    expected = decoder.persistent_step(x, state)
    new = replace(cache, keys=large[0], values=large[1])
    actual = decoder.persistent_step(x, replace(state, layers=[new]))
    assert torch.equal(actual, expected)
    assert torch.equal(new.keys[:, :, 4], cache.keys[:, :, 4])
    assert torch.equal(new.values[:, :, 4], cache.values[:, :, 4])


@needs_compiler
@torch.inference_mode()
def test_blocks_that_compute_nothing_of_a_layer_are_refused():
    settings = {"norm_placement": "parallel", "dim": 128, "heads": 8, "kv_heads": 1, "head_dim": 8}
    decoder = TritonDecoder(build(torch.float16, ffn_dim=64, **settings))
    # of 100 blocks, 20 have no row of q, k and v, and 68 no hidden values
    with pytest.raises(RuntimeError, match="every block must send something"):
        emulate(decoder, num_blocks=100)
    decoder = TritonDecoder(build(torch.float16))
    with pytest.raises(RuntimeError, match="every block must compute an output"):
        emulate(decoder, num_blocks=65)


@needs_compiler
@torch.inference_mode()
def test_weights_that_bulk_copies_cannot_read_are_refused():
    model = build(torch.bfloat16)
    weight = model.decoder.blocks[1].ffn.down.weight
    weight.data = torch.empty(weight.numel() + 1, dtype=weight.dtype)[1:].view_as(weight)
    decoder = TritonDecoder(model)
    with pytest.raises(nvrtc.CudaKernelError, match="not aligned to 16 bytes"):
        emulate(decoder)


@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
@pytest.mark.parametrize(
    ("case", "heads", "kv_heads", "head_dim", "quantized", "architecture"),
    [
        ("llama", 16, 4, 128, None, "90a"),
        ("llama", 16, 4, 128, None, "100a"),
        ("bloom", 16, 16, 64, None, "90a"),
        ("pythia", 16, 16, 64, None, "90a"),
        ("gemma 2", 16, 4, 256, None, "90a"),
        ("llama", 16, 4, 128, "int8", "90a"),
        ("llama", 16, 4, 128, "int4", "90a"),
    ],
)
@torch.inference_mode()
def test_it_compiles_for_hopper_and_blackwell_without_spilled_registers(
    tmp_path, case, heads, kv_heads, head_dim, quantized, architecture
):
    settings = CASES[case] | {
        "dim": 1024,
        "ffn_dim": 4096,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
    }
    options = {quantized: True} if quantized else {}
    decoder = TritonDecoder(build(torch.bfloat16, **settings), **options)

    class ConstantsError(Exception):
        """Raised with the constants of a kernel instead of compiling it."""

    def make_kernel(constants):
        raise ConstantsError(constants)

    with pytest.raises(ConstantsError) as caught:
        PersistentStep(decoder, 132, 232_448, make_kernel)
    operations = Path(nvrtc.__file__).parent.joinpath("cuda", "device.cuh").read_text()
    source = tmp_path / "kernel.cu"
    source.write_text(f"{caught.value}\n{kernel_source(operations)}")
    target = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
    command = [NVCC, "-std=c++17", "--use_fast_math", target, "-cubin", "-Xptxas", "-v"]
    result = subprocess.run(
        [*command, "-o", tmp_path / "kernel.cubin", source], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert " 0 bytes spill stores, 0 bytes spill loads" in result.stderr
    assert "Used 168 registers" in result.stderr  # LAUNCH_REGISTERS


H200 = GPUProperties((9, 0), multiprocessors=132, shared_bytes=232_448)


def unsupported_reason(settings=(), dtype=torch.bfloat16, gpu=H200, **options):
    config = TransformerConfig(**(BASE | {"dim": 192, **dict(settings)}))
    description = inspect_decoder(build_on_meta(config).to(dtype))
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
    assert "more than 448 MiB of 16-bit weights" in unsupported_reason({"ffn_dim": 800_000})
    assert "head_dim=20 is not" in unsupported_reason({"head_dim": 20, "heads": 16})
    queries = {"heads": 32, "kv_heads": 1, "head_dim": 8}
    assert "more than 16 query heads" in unsupported_reason(queries)


def test_without_a_gpu_the_reason_is_stated():
    decoder = TritonDecoder(build(torch.bfloat16))
    assert decoder.persistent_step is None
    assert decoder.persistent_unsupported_reason == "it needs a CUDA GPU"
