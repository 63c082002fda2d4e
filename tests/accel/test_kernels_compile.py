"""The Triton kernels compiled to machine code, for GPUs that need not be present."""

import os
import re
import subprocess

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with torch for CUDA")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted, not compiled", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from regard.accel.kernels import (
    activation_matmul,
    common,
    cross_entropy,
    decode_attention,
    dropout,
    fingerprint,
    fused_sampling,
    gemm,
    penalties,
    sampling,
    transpose,
)
from regard.accel.support import MAX_QUERY_HEADS_PER_KV_HEAD
from regard.accel.triton_decoder import TritonDecoder
from regard.models.build import preset
from regard.models.transformer import Transformer
from regard.nn.state import KVCache

pytestmark = pytest.mark.long  # compiling takes minutes

GPUS = {"A100": (80, 166_912), "L40": (89, 101_376), "H200": (90, 232_448)}  # shared memory
TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float8_e5m2: "*fp8e5",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}


def source(kernel, values):
    """The kernel as it would be compiled for these arguments."""
    signature, constants, attributes = {}, {}, {}
    for place, (parameter, value) in enumerate(zip(kernel.params, values, strict=True)):
        name = parameter.name
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[name], constants[place,] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
            attributes[place,] = [["tt.divisibility", 16]]
        elif isinstance(value, TensorDescriptor):
            signature[name] = f"tensordesc<{TYPES[value.base.dtype][1:]}{value.block_shape}>"
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if value % 16 == 0:
                attributes[place,] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


def disassembled(cubin, folder):
    (folder / "cubin").write_bytes(cubin)
    tool = [triton.knobs.nvidia.cuobjdump.path, "--dump-sass", folder / "cubin"]
    return subprocess.run(tool, capture_output=True, text=True, check=True).stdout


def overwritten(code):
    """Registers that are written, in a loop, while tensor cores may still read them."""
    found = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@\S+\s+)?(\S.*?)\s*;", code, re.MULTILINE)
    places = {int(place, 16): at for at, (place, _) in enumerate(found)}
    lines, bad = [line for _, line in found], set()
    for end, line in enumerate(lines):
        back = re.match(r"BRA.*\b0x([0-9a-f]+)", line)
        if back is None or places[int(back[1], 16)] >= end:
            continue
        reading, group = [], set()  # by groups of products that are not waited for, in order
        for each in 2 * lines[places[int(back[1], 16)] : end]:
            if product := re.match(r"HGMMA\S* R\d+, (?:R(\d+))?.*?(gsb0)?$", each):
                group |= set(range(int(product[1]), int(product[1]) + 4)) if product[1] else set()
                if product[2]:
                    reading.append(group)
                    group = set()
            elif waits := re.match(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\w+)", each):
                reading = reading[max(0, len(reading) - int(waits[1], 16)) :]
            elif written := re.match(r"([A-Z]\S*) (?:U?P\w+, )*R(\d+)\b(?!\S*\])", each):
                sizes = {4: r"\.128|M88\.4", 2: r"64|WIDE|M88\.2|CS2R"}
                wide = next((size for size in sizes if re.search(sizes[size], written[1])), 1)
                registers = set(range(int(written[2]), int(written[2]) + wide))
                bad |= registers & group.union(*reading)
    return bad


def test_what_tensor_cores_still_read_is_found():
    loop = """
        /*0010*/                   LDS.128 R8, [R2] ;  /* 0x00 */
        /*0020*/                   HGMMA.64x64x16.F32.BF16 R24, R8, gdesc[UR4], R24, gsb0 ;
        /*0030*/              @!P2 {0} ;
        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, 0x{1} ;
        /*0050*/               @P1 BRA 0x10 ;
    """
    assert overwritten(loop.format("NOP", 0)) == set()
    assert overwritten(loop.format("NOP", 1)) == {8, 9, 10, 11}
    assert overwritten(loop.format("PRMT R11, R3, 0x4140, RZ", 0)) == {11}
    assert overwritten(loop.format("IMAD.WIDE R10, R3, 0x4, R6", 0)) == {10, 11}


@pytest.fixture(params=GPUS)
def compiled(request, monkeypatch, tmp_path):
    """The compiled kernels by name: a launch compiles instead."""
    capability, shared_bytes = GPUS[request.param]
    kernels = {}

    def run(kernel, *args, grid, warmup, **options):
        names = ("num_warps", "num_stages", "launch_pdl")
        launch = {name: options.pop(name) for name in names if name in options}
        values = [*args, *(options[p.name] for p in kernel.params[len(args) :])]
        target = GPUTarget("cuda", capability, 32)
        binary = triton.compile(source(kernel, values), target=target, options=launch)
        assert binary.metadata.shared <= shared_bytes
        assert not overwritten(disassembled(binary.asm["cubin"], tmp_path))
        kernels[kernel.__name__] = binary.asm["cubin"]

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(common, "_capability_major", lambda: capability // 10)
    for module in (decode_attention, gemm):
        monkeypatch.setattr(module, "shared_memory", lambda x: shared_bytes)
    return kernels


@torch.inference_mode()
def step_of_llama(rows, **quantized):
    config = preset("tinyllama", layers=1)
    model = TritonDecoder(Transformer(config).to(torch.bfloat16).eval(), **quantized)
    for capacity in (48, 2048):  # one split of the keys, and several
        _, state = model.step(torch.zeros(rows, 8, dtype=torch.long), model.start(rows, capacity))
        model.step(torch.zeros(rows, 1, dtype=torch.long), state.with_static_shapes())


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("quantized", [{}, {"int8": True}, {"int4": True}], ids=str)
def test_a_step_of_llama(compiled, rows, quantized):
    step_of_llama(rows, **quantized)
    kernels = {"_rotate_and_cache_kernel", "_rms_norm_kernel", "_activation_kernel"}
    kernels |= {"_attention_kernel"}
    gemm_kernels = {"_start_kernel", "_project_kernel", "_add_kernel"}
    kernels |= {"_qkv_kernel", "_linear_kernel"} if rows == 1 else gemm_kernels
    assert kernels == set(compiled)


@pytest.mark.skipif(triton.__version__ != "3.6.0", reason="others may wait by themselves")
@pytest.mark.parametrize("compiled", ["H200"], indirect=True)
def test_without_a_wait_it_would_be_overwritten(compiled, monkeypatch):
    monkeypatch.setattr(gemm, "is_hopper", lambda: False)
    with pytest.raises(AssertionError, match="overwritten"):
        step_of_llama(64, int8=True)


def test_samplers_and_the_loss(compiled):
    logits, one = torch.zeros(2, 50257), torch.zeros(2, dtype=torch.long)
    history, breakers = torch.zeros(2, 256, dtype=torch.long), torch.zeros(50257, dtype=torch.bool)
    sampling.sample_token(logits, one, one, one, one)
    sampling.top_k(logits, 50)
    penalties.repetition(logits, history, one, one, 256, 1.2)
    penalties.frequency(logits, history, one, None, 256, 0.5, presence=False)
    penalties.dry(logits, history, one, breakers, 256, 0.8, 1.75, 2, 1e30)
    wide = torch.zeros(2, 50304, dtype=torch.bfloat16)
    cross_entropy.cross_entropy_with_gradient(wide, None, one, 50257, 0.1, 5.0)
    assert len(compiled) == 6


@pytest.mark.parametrize("gradient_dtype", [torch.bfloat16, torch.float8_e5m2])
def test_the_loss_loads_and_stores_four_logits_at_once(compiled, tmp_path, gradient_dtype):
    logits, target = torch.zeros(2, 50304, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.long)
    arguments = (logits, None, target, 50257, 0.0, None, gradient_dtype, 2.0**15)
    cross_entropy.cross_entropy_with_gradient(*arguments)
    code = disassembled(compiled["_cross_entropy_with_gradient"], tmp_path)
    assert code.count("LDG.E.U16") == 1  # the target's logit
    assert "LDG.E.64" in code
    single, four = {1: ("STG.E.U8", "STG.E "), 2: ("STG.E.U16", "STG.E.64")}[
        gradient_dtype.itemsize
    ]
    assert code.count(single) <= 5  # the target's gradient; -inf in padding
    assert four in code


def test_bytes_are_transposed_in_words(compiled, tmp_path):
    transpose.transpose(torch.zeros(512, 256, dtype=torch.int8))
    code = disassembled(compiled["_transpose"], tmp_path)
    assert "LDG.E.128" in code
    assert "STG.E.128" in code
    assert not re.search(r"STS\.U8|STG\.E\.U8", code)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("first", ["top_n_sigma_of_row", "top_k"])
def test_the_end_of_a_chain(compiled, dtype, first):
    stages = ("exact_top_k", "typical", "top_p", "min_p", "xtc", "top_n_sigma", "temperature")
    ops = (first, *stages)
    gaps, min_keeps = tuple(n > 2 for n in range(len(ops))), tuple(op == first for op in ops)
    settings, one = torch.zeros(len(ops), 3).double(), torch.zeros(2, dtype=torch.long)
    logits = torch.zeros(2, 50257, dtype=dtype)
    fused_sampling.sample(logits, ops, gaps, min_keeps, settings, one, one, one, one)
    fused_sampling.sample(logits, ops, gaps, (True,) * len(ops), settings, one, one, one, one)
    assert set(compiled) == {"_group_max_kernel", "_select_kernel", "_samplers_kernel"}


def test_the_hash_of_contents_reads_16_bytes_at_once(compiled, tmp_path):
    fingerprint.ContentHashes([torch.zeros(8)])()
    assert "LDG.E.128" in disassembled(compiled["_hash_kernel"], tmp_path)


@pytest.mark.parametrize("compiled", ["H200"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_matmuls_with_activations_use_tensor_cores(compiled, tmp_path, dtype):
    x, up, down = (torch.zeros(shape, dtype=dtype) for shape in ((300, 72), (256, 72), (72, 256)))
    _, derivative = activation_matmul.matmul_gelu(x, up, up[:, 0].contiguous())
    codes = [disassembled(compiled["_activation_matmul"], tmp_path)]
    for relu in (False, True):
        activation_matmul.matmul_derivative(x, down, derivative, True, relu)
        codes.append(disassembled(compiled["_activation_matmul"], tmp_path))
    for code in codes:
        assert "HGMMA" in code
        assert "UTMALDG" in code  # copies of whole tiles
        assert not re.search(r"\b(LDL|STL)\b", code)  # registers suffice


def test_dropout_masks_are_written_16_elements_at_once(compiled, tmp_path):
    dropout.dropout_mask(torch.zeros(3, dtype=torch.long), 1, (5, 1008), 0.1)
    assert "STG.E.128" in disassembled(compiled["_dropout_mask"], tmp_path)


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("group", [2, MAX_QUERY_HEADS_PER_KV_HEAD])
def test_attention_of_wide_heads(compiled, rows, dtype, width, group):
    keys, lengths = torch.zeros(rows, 2, 2048, width, dtype=dtype), torch.zeros(rows).long()
    qkv = torch.zeros(rows, (2 * group + 4) * width, dtype=dtype)
    counters = torch.zeros(4096, dtype=torch.int32)
    options = decode_attention.AttentionOptions(1.0, cap=50.0, slopes=torch.zeros(2 * group))
    decode_attention.attend(qkv, KVCache(keys, keys), lengths, options, counters)
    assert set(compiled) == {"_attention_kernel"}
