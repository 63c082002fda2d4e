"""The Triton kernels of decoding against the model itself: on a GPU, or interpreted."""

import os
from dataclasses import replace

import pytest
import torch

from regard.generate import generate, parse_chain
from regard.generate.chain import sample_token
from regard.generate.samplers.truncation import TopK
from regard.generate.sampling_state import RowGenerators
from regard.models.transformer import Transformer, TransformerConfig

pytest.importorskip("triton", reason="Triton comes with torch for CUDA")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no GPU, and TRITON_INTERPRET=1 is not set", allow_module_level=True)

import triton
import triton.language as tl

from regard.accel import triton_decoder
from regard.accel.description import inspect_decoder
from regard.accel.kernels import common, decode_attention, gemm, gemv, sampling
from regard.accel.kernels.common import INTERPRETED, FFNActivation
from regard.accel.packed import FusedNormLinear, PackedLinear
from regard.accel.support import triton_unsupported_reason
from regard.accel.triton_decoder import TritonDecoder
from regard.nn.norm import RMSNorm
from regard.serve.engine import BatchEngine, EngineConfig
from regard.serve.prefill_graphs import make_prefill_graphs
from regard.serve.request import Request
from regard.serve.rows import make_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LLAMA = TransformerConfig(
    vocab_size=53,
    dim=64,
    layers=1 if INTERPRETED else 2,  # the interpreter is slow; test_block_choices.py has more
    heads=4,
    kv_heads=2,
    ffn_dim=88,
    context=128,
    position="rotary",
    norm="rms",
    ffn="swiglu",
    bias=False,
    tied=False,
)
CHANGES = [
    {},
    {"position": {"kind": "rotary", "interleaved": True}, "tied": True},
    {"position": {"kind": "rotary", "partial_rotary_factor": 0.5}, "bias": "qkv"},
    {"window": 20, "kv_heads": 4},
    {"norm": "rms_plus_one", "ffn": "geglu_tanh", "kv_heads": 1},
    {"ffn": "relu2", "bias": True},
    {"norm": "layer", "bias": True, "position": "learned", "ffn": "gelu_tanh"},
    {"norm": "layer", "position": "alibi", "norm_placement": "parallel", "embed_norm": True},
    {"qk_norm": True, "norm_placement": "sandwich", "score": {"kind": "scaled_dot", "cap": 3.0}},
    {"norm_placement": "post", "norm": "layer", "bias": True, "head_dim": 20, "kv_heads": 4},
    {"norm_placement": "parallel_norms", "norm": "layer", "position": "sinusoidal"},
    {"norm_placement": "deepnorm", "qk_norm": True, "head": {"kind": "linear", "scaled": True}},
]
INTERPRETER_CHANGES = [CHANGES[number] for number in (0, 1, 3, 7, 8, 9)]  # one of each kind
LONG = [pytest.mark.long] if INTERPRETED else []
# the format of weights, and rows up to which GEMV is used
MODES = [({}, 0), ({"int8": True}, 4), ({"int4": True}, 4), ({}, 4), ({"int8": True}, 0)]


def copy_weights(layer, *modules):
    """Give modules the dequantized weights of a packed layer."""
    w = layer.dequantize(torch.float32)[:, : modules[0].weight.shape[1]]
    for module, part in zip(modules, w.split([len(m.weight) for m in modules]), strict=True):
        module.weight.copy_(part.clone())


@pytest.mark.parametrize(
    ("change", "quantized", "gemv_rows"),
    [  # the interpreter takes a second for each: there, a change has one of the first three
        (change, *mode)
        for number, change in enumerate(INTERPRETER_CHANGES if INTERPRETED else CHANGES)
        for mode in ([MODES[number % 3]] if INTERPRETED else MODES)
    ],
    ids=str,
)
@torch.inference_mode()
def test_a_decode_step_gives_the_logits_of_the_model(change, quantized, gemv_rows, monkeypatch):
    monkeypatch.setattr(triton_decoder, "MAX_GEMV_ROWS", {4: gemv_rows})
    monkeypatch.setattr(decode_attention, "TILE_BYTES", 4 * 16 * 16)  # 16 of the 64 keys
    monkeypatch.setattr(decode_attention, "PIPELINED_TILE", 16)
    # one split of four tiles, four splits of one tile, two splits of two tiles
    programs = 1 if not gemv_rows else 12 if "int4" in quantized else 128
    monkeypatch.setattr(decode_attention, "FULL_OCCUPANCY_PROGRAMS", programs)
    sizes = {key: (size, 32, *rest) for key, (size, _, *rest) in gemm.PROGRAM_SIZES.items()}
    monkeypatch.setattr(gemm, "PROGRAM_SIZES", sizes)  # several splits of the inputs
    torch.manual_seed(0)
    model = Transformer(replace(LLAMA, **change)).to(DEVICE).eval()
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    assert triton_unsupported_reason(inspect_decoder(model)) is None
    fast = TritonDecoder(model, **quantized)
    ids, counts = torch.randint(0, 53, (3, 40)), torch.tensor([40, 25, 3])
    ids, counts = ids.to(DEVICE), counts.to(DEVICE)
    _, state = model.step(ids, model.start(3, 64), counts=counts)
    _, fast_state = fast.step(ids, fast.start(3, 64), counts=counts)
    fast_state = fast_state.with_static_shapes()
    for packed in fast.layers:  # give the model the dequantized weights
        attention, ffn = packed.block.attention, packed.block.ffn
        copy_weights(packed.qkv, attention.query, attention.key, attention.value)
        copy_weights(packed.out, attention.out)
        copy_weights(packed.gate_up, *([ffn.gate] if hasattr(ffn, "gate") else []), ffn.up)
        copy_weights(packed.down, ffn.down)
    if not model.config.tied:
        copy_weights(fast.head, model.head)
    tolerance = 0.05 if quantized and model.config.tied else 1e-4
    for t in range(2):
        expected, state = model.step(ids[:, t : t + 1], state)
        actual, fast_state = fast.step(ids[:, t : t + 1], fast_state)
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("activation", [FFNActivation(), FFNActivation("silu", gated=True)])
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize(
    ("width", "outputs"), [(16, 12), (30, 12), (30, 24), (48, 5), (64, 12), (100, 12)]
)
@torch.inference_mode()
def test_a_linear_layer_of_any_width(monkeypatch, width, outputs, has_norm, activation):
    small = {
        kind: program._replace(block=program.block // 64)  # 8 to 32 inputs
        for kind, program in gemv.PROGRAMS.items()
    }
    monkeypatch.setattr(gemv, "PROGRAMS", small)
    monkeypatch.setattr(gemv, "WIDE", 48)
    monkeypatch.setattr(gemv, "FEW_ROWS", 20)
    monkeypatch.setattr(gemv, "MANY_ROWS", 40)
    torch.manual_seed(0)
    linear, norm = torch.nn.Linear(width, 2 * outputs), RMSNorm(width) if has_norm else None
    if norm is not None:
        torch.nn.init.normal_(norm.to(DEVICE).weight)
    layer = FusedNormLinear.of(PackedLinear.of(linear.to(DEVICE)), norm)
    x, residual = torch.randn(2, width).to(DEVICE), torch.randn(2, 2 * outputs).to(DEVICE)
    expected = linear(x if norm is None else norm(x))
    if activation.gated:
        gate, up = expected.chunk(2, 1)
        expected, residual = torch.nn.functional.silu(gate) * up, residual[:, :outputs].clone()
    actual = gemv.linear(x, layer, residual=residual, activation=activation)
    torch.testing.assert_close(actual, expected + residual, rtol=1e-5, atol=1e-5)


def test_a_layer_of_two_blocks_is_prefetched_where_all_programs_fit():
    def options(inputs, outputs, has_norm=False):
        weight = torch.empty(outputs, inputs, dtype=torch.bfloat16, device="meta")
        return gemv._linear_options(PackedLinear(weight), 1, has_norm=has_norm)

    assert options(2048, 2048)["PREFETCH"]
    assert options(4096, 1024)["PREFETCH"]
    assert options(1024, 4096, has_norm=True)["PREFETCH"]
    assert not options(2048, 8192)["PREFETCH"]  # too many programs
    assert not options(8192, 2048)["PREFETCH"]  # four blocks
    assert not options(1024, 1024)["PREFETCH"]  # one block


def test_a_head_of_a_large_vocabulary_has_at_most_as_many_programs_as_a_grid():
    weight = torch.empty(262_208, 2560, dtype=torch.bfloat16, device="meta")
    outputs = gemv._linear_options(PackedLinear(weight), 1, has_norm=True)["OUTPUTS"]
    assert (outputs, -(-len(weight) // outputs) <= 65_535) == (8, True)


@pytest.mark.parametrize(("heads", "kv_heads", "fits"), [(32, 1, True), (33, 1, False)])
def test_only_so_many_heads_share_their_keys(heads, kv_heads, fits):
    config = replace(LLAMA, heads=heads, kv_heads=kv_heads, head_dim=16)
    assert (triton_unsupported_reason(inspect_decoder(Transformer(config))) is None) == fits


@triton.jit
def plain_unpack_int8(w):
    a, b, c, d = w << 24, w << 16, w << 8, w
    return (
        (a >> 24).to(tl.float32) / 64,
        (b >> 24).to(tl.float32) / 64,
        (c >> 24).to(tl.float32) / 64,
        (d >> 24).to(tl.float32) / 64,
    )


@pytest.fixture
def packed_dtype(monkeypatch):
    """The dtype of vectors that are multiplied with packed int8."""
    if not INTERPRETED:
        return torch.bfloat16

    def also_float32(layer, dtype):
        return layer.scale is not None and layer.weight.shape[1] % 64 == 0

    monkeypatch.setattr(gemm, "reads_packed_int8", also_float32)
    monkeypatch.setattr(triton_decoder, "reads_packed_int8", also_float32)
    monkeypatch.setattr(common, "unpack_int8", plain_unpack_int8)
    return torch.float32  # the interpreter has no bfloat16 matmul


@pytest.mark.parametrize("inputs", [64, 256, 704])
@torch.inference_mode()
def test_a_matmul_with_every_packed_int8(inputs, packed_dtype):
    torch.manual_seed(0)
    x, before = torch.randn(70, inputs).to(DEVICE, packed_dtype), torch.randn(70, 192)
    before = before.to(DEVICE, packed_dtype)
    all_int8 = torch.arange(-128, 128).to(DEVICE, torch.int8)
    weight = all_int8[torch.randperm(192 * inputs) % 256].view(192, inputs)
    scale = (torch.rand(192) / 128).to(DEVICE, packed_dtype)
    counters = torch.zeros(8, dtype=torch.int32, device=DEVICE)
    order = permuted(inputs)
    layer = PackedLinear(weight, None, scale)
    normed = FusedNormLinear.of(layer, RMSNorm(192).to(DEVICE))
    stream = gemm.ResidualStream.start(before, normed)
    stream = stream.add(x[:, order], layer, normed, counters)
    expected = before.double() + x.double() @ (weight.double() * scale.double().unsqueeze(1)).T
    actual = stream.residual.double()[:, permuted(192)]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def permuted(width):
    """Columns with bits 5 and 4 swapped with bits 2 and 1."""
    bits = torch.arange(width).view(-1, 4, 2, 4, 2)
    return bits.permute(0, 3, 2, 1, 4).flatten()


@pytest.mark.parametrize(
    ("change", "packed_layers"),
    [
        ({}, 4),
        pytest.param({"heads": 8}, 4, marks=LONG),
        pytest.param({"heads": 2, "kv_heads": 1}, 4, marks=LONG),
        pytest.param({"ffn": "relu2", "bias": True}, 4, marks=LONG),
        ({"ffn_dim": 88}, 3),
        ({"dim": 96, "head_dim": 16, "ffn": "relu2", "bias": True}, 2),
    ],
    ids=str,
)
@torch.inference_mode()
def test_gemm_with_packed_int8_gives_what_gemv_gives(
    change, packed_layers, packed_dtype, monkeypatch
):
    torch.manual_seed(0)
    config = replace(LLAMA, **{"dim": 128, "ffn_dim": 192, **change})
    model = Transformer(config).to(DEVICE, packed_dtype).eval()
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    fast = TritonDecoder(model, int8=True)
    block = fast.layers[0]
    layers = (block.qkv, block.out, block.gate_up, block.down)
    assert sum(gemm.reads_packed_int8(layer, packed_dtype) for layer in layers) == packed_layers
    ids = torch.randint(0, 53, (3, 9)).to(DEVICE)
    logits = []
    for gemv_rows in (4, 0):
        monkeypatch.setattr(triton_decoder, "MAX_GEMV_ROWS", {packed_dtype.itemsize: gemv_rows})
        _, state = fast.step(ids, fast.start(3, 128))
        logits.append(fast.step(ids[:, :1], state.with_static_shapes())[0])
    tolerance = 1e-4 if INTERPRETED else 0.03
    torch.testing.assert_close(*logits, rtol=tolerance, atol=tolerance)


def test_floats_below_the_smallest_normal_ones_are_evenly_spaced():
    every = torch.arange(-128, 128)
    bits = (every + 128).to(torch.int16).view(torch.bfloat16)
    assert torch.equal(bits.double() * 2.0**127 - 2, every.double() / 64)


def test_the_kernel_draws_what_torch_draws():
    torch.manual_seed(0)
    for vocab in (53, 9001) if INTERPRETED else (53, 9001, 40000):
        logits = 3 * torch.randn(4, vocab, device=DEVICE)
        logits[0, ::2] = logits[1, :-1] = logits[2, 1:] = -torch.inf
        one, other = (RowGenerators.from_seed(7, 4, DEVICE) for _ in range(2))
        lengths, failed = torch.tensor([5, 6, 7, 8]), torch.full((4,), 99)
        lengths, failed = lengths.to(DEVICE), failed.to(DEVICE)
        for _ in range(4 if INTERPRETED else 15):
            expected = sample_token(logits, one)
            actual = sampling.sample_token(logits, other.keys, other.counters, lengths, failed)
            assert torch.equal(actual, expected)
        assert failed.tolist() == [99] * 4
        logits[1], logits[2, 1] = -torch.inf, torch.nan
        sampling.sample_token(logits, other.keys, other.counters, lengths, failed)
        lengths += 1
        sampling.sample_token(logits, other.keys, other.counters, lengths, failed)
        assert failed.tolist() == [99, 6, 7, 99]
        assert torch.equal(one.counters + 2, other.counters)


def test_the_kernel_keeps_the_top_k():
    torch.manual_seed(0)
    for vocab, k in ((53, 5), (53, 1), (9001, 50), (9001, 9000)):
        logits = torch.randn(4, vocab, device=DEVICE)
        logits[1] = logits[1].round()  # ties
        logits[2, 3:] = -torch.inf  # fewer than k are left
        logits[3] = -logits[3].abs()
        expected = TopK(k).process(logits, None)
        assert torch.equal(sampling.top_k(logits, k), expected)
        assert torch.equal(sampling.top_k(logits.T.contiguous().T, k), expected)


@pytest.mark.parametrize("change", [{"window": 5}] if INTERPRETED else [{}, {"window": 5}], ids=str)
def test_kernels_read_concatenated_prompts(change, monkeypatch):
    """The engine reads several prompts at once, without padding, into its rows."""
    monkeypatch.setattr("regard.serve.prefill_graphs.SIZES", (8, 20))
    torch.manual_seed(0)
    model = Transformer(replace(LLAMA, **change)).to(DEVICE).eval()
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16  # FlashAttention needs 16 bits
    model = model.to(dtype)
    fast = TritonDecoder(model)
    prompts = [torch.randint(0, 53, (length,)).tolist() for length in (5, 1, 9, 3)]
    with torch.inference_mode():
        rows = make_rows(fast, 1 << 24, 6, capture=True)
        graphs = make_prefill_graphs(fast, rows)
        rows.lengths = [3]  # a row in use, which stays as it is
        before = rows.buffers[0][:, 0].clone()
        for group in (prompts[:2], prompts[1:], prompts):  # captured, then replayed
            logits = graphs.prefill(group)
        assert set(graphs.graphs) == {8, 20}
        assert torch.equal(rows.buffers[0][:, 0], before)
        tolerance = 1e-4 if dtype == torch.float32 else 5e-2
        for row, prompt in enumerate(prompts):
            ids = torch.tensor([prompt], device=DEVICE)
            expected, state = model.step(ids, model.start(1, 128))
            torch.testing.assert_close(
                logits[row], expected[0, -1].to(logits), rtol=tolerance, atol=tolerance
            )
            for layer, cache in enumerate(state.layers):
                for buffer, part in zip(rows.buffers, (cache.keys, cache.values), strict=True):
                    stored, size = buffer[layer, row + 1], len(prompt)
                    torch.testing.assert_close(
                        stored[:, :size], part[0, :, :size], rtol=tolerance, atol=tolerance
                    )
                    assert not stored[:, 9:].any()  # padding is not stored
    if DEVICE == "cpu":
        chain = parse_chain(["temperature=0.9"])
        requests = [Request(p, chain, max_new_tokens=3, seed=n) for n, p in enumerate(prompts)]
        engine = BatchEngine(fast, EngineConfig(max_sequences=4), capture=True)
        assert engine.prefiller.graphs is not None
        alone = [
            generate(model, [r.prompt], chain, max_new_tokens=3, seed=[r.seed]) for r in requests
        ]
        assert engine.run(requests) == alone
