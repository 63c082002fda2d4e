"""Compiled training: the inductor pass, substituted functions and fused layers."""

import copy
import math
import shutil
from dataclasses import replace

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from torch._inductor.custom_graph_pass import get_hash_for_files
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from regard.accel import compile as compiling
from regard.accel import cublaslt, dropout, inductor_pass, matmul
from regard.accel.compile import (
    FUSIBLE_ACTIVATIONS,
    attach_fused_layers,
    compile_for_training,
    prepare_tracing,
)
from regard.accel.dropout import dropout_mask
from regard.data.batch import TextBatch
from regard.models.build import build_model, preset, resolve
from regard.nn import attention
from regard.nn.attention import Mask
from regard.nn.block import FFNS, Block, FeedForward, NormPlacement, Stack, gelu_tanh
from regard.nn.lora import add_lora
from regard.nn.norm import LayerNorm, RMSNorm
from regard.nn.position import Position, Rotary
from regard.nn.state import Source
from regard.tasks import Causal
from regard.training.loop import Objective
from regard.training.setup.device import checkpoint_activations


def work(x, up, down, bias):
    wide = torch.addmm(bias, x, up.T)
    return torch.addmm(x, wide, down.T) + torch.mm(wide, down.T)


@pytest.fixture
def given():
    return torch.randn(3, 4), torch.randn(5, 4), torch.randn(4, 5), torch.randn(5)


def test_tuned_matmuls_replace_those_of_torch(given, monkeypatch):
    monkeypatch.setattr(inductor_pass, "_is_large", lambda a, b: True)
    traced = make_fx(work)(*given)
    inductor_pass.AutotunedMatmuls()(traced.graph)
    traced.recompile()
    tuned = traced.graph.find_nodes(
        op="call_function", target=torch.ops.regard.autotuned_matmul.default
    )
    assert len(tuned) == 2  # an addmm with a matrix stays
    assert torch.equal(traced(*given), work(*given))


def test_matmuls_on_a_cpu_and_small_ones_stay(given):
    traced = make_fx(work)(*given)
    before = str(traced.graph)
    inductor_pass.AutotunedMatmuls()(traced.graph)
    assert str(traced.graph) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_masks_are_drawn_by_the_operator(dtype, monkeypatch):
    import torch._inductor.inductor_prims  # registers the random operators of the compiler

    prims = torch.ops.prims

    def numbers(seeds, index, distribution="rand"):
        seed = prims.inductor_lookup_seed(seeds, index)
        random = prims.inductor_random([3, 500], seed, distribution)
        return random if dtype == torch.float32 else prims.convert_element_type(random, dtype)

    def work(x, seeds):
        shared = numbers(seeds, 0)
        others = [
            (shared > 0.25) == (shared - 0.25 > 0),  # used twice
            numbers(seeds, 2, "randn") > 0.25,
            numbers(seeds, 2) > 0.001,
            x > 0.25,
        ]
        return torch.gt(numbers(seeds, 1), 0.25) * x, others

    x, seeds = torch.ones(3, 500, dtype=dtype), torch.tensor([3, 4, 5])
    traced = make_fx(work)(x, seeds)
    before = str(traced.graph)
    inductor_pass.DropoutMasks()(traced.graph)
    assert str(traced.graph) == before  # on a CPU
    monkeypatch.setattr(inductor_pass, "_is_large_mask", lambda node: True)
    inductor_pass.DropoutMasks()(traced.graph)
    traced.recompile()
    dropped, (agrees, normal, *_) = traced(x, seeds)
    assert torch.equal(dropped != 0, dropout_mask(seeds, 1, [3, 500], 0.25))
    assert 0.2 < (dropped == 0).float().mean() < 0.3
    assert agrees.all()
    assert 0.3 < normal.float().mean() < 0.5
    operator = torch.ops.regard.dropout_mask.default
    assert len(traced.graph.find_nodes(op="call_function", target=operator)) == 1


@pytest.mark.parametrize(
    ("rows", "device", "runs", "large"),
    [
        (1024, "cuda", True, True),
        (1023, "cuda", True, False),
        (1024, "cuda", False, False),  # an old GPU
        (1024, "cpu", True, False),
    ],
)
def test_only_large_masks_on_a_gpu_are_drawn_by_the_operator(
    rows, device, runs, large, monkeypatch
):
    monkeypatch.setattr(inductor_pass, "can_run_triton", lambda device: runs)
    node = torch.fx.Graph().placeholder("mask")
    with FakeTensorMode():
        node.meta["val"] = torch.empty(rows, 1024, dtype=torch.bool, device=device)
    assert inductor_pass._is_large_mask(node) == large


def test_the_compiler_caches_graphs_by_what_its_passes_depend_on():
    matmuls, masks = inductor_pass.AutotunedMatmuls().uuid(), inductor_pass.DropoutMasks().uuid()
    assert matmuls == get_hash_for_files((inductor_pass.__file__, matmul.__file__))
    assert masks == get_hash_for_files((inductor_pass.__file__, dropout.__file__))


@pytest.mark.parametrize(
    ("rows", "dtype", "large"),
    [(65536, torch.bfloat16, True), (64, torch.bfloat16, False), (65536, torch.float32, False)],
)
def test_only_large_matmuls_of_half_precision_on_a_gpu_are_tuned(rows, dtype, large):
    graph = torch.fx.Graph()
    a, b = (graph.placeholder(name) for name in "ab")
    with FakeTensorMode():
        a.meta["val"] = torch.empty(rows, 768, dtype=dtype, device="cuda")
        b.meta["val"] = torch.empty(768, 3072, dtype=dtype, device="cuda")
    assert inductor_pass._is_large(a, b) == large


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize(
    ("bias", "checkpointing", "ffn"),
    [(False, True, "gelu_tanh"), (True, False, "gelu"), (True, False, "relu")],
)
def test_a_compiled_model_with_fused_layers_has_the_same_gradients(
    bias, checkpointing, ffn, monkeypatch
):
    calls = []
    monkeypatch.setattr(compiling, "can_run_activation_matmul", lambda weight: True)
    monkeypatch.setattr(
        compiling, "is_large_in_graph", lambda x, weight: torch.compiler.is_compiling()
    )
    torch._dynamo.reset()
    torch.manual_seed(0)
    small = {"dim": 8, "layers": 2, "heads": 2, "context": 6, "vocab_size": 16, "dropout": 0.0}
    config = replace(preset("gpt2"), bias=bias, ffn=ffn, **small)
    objective = Objective(build_model(config), Causal())
    objective.double().train()
    if checkpointing:
        checkpoint_activations(objective.model)
    attach_fused_layers(objective.model)
    prepare_tracing()
    batch = TextBatch(*torch.randint(0, 16, (2, 3, 6)))

    def gradients(loss):
        value = loss(batch)
        return [value, *torch.autograd.grad(value, [*objective.parameters()])]

    def backend(graph, inputs):
        calls.append(graph)
        return aot_eager(graph, inputs)

    compiled = torch.compile(objective, backend=backend, fullgraph=True)
    torch.testing.assert_close(gradients(compiled), gradients(objective))
    if not checkpointing:  # then blocks are graphs inside the graph
        assert "FusedMLP" in str(calls[0].graph) or "autograd_function_apply" in str(calls[0].graph)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_the_loop_of_a_soft_window_is_not_unrolled_in_a_compiled_graph():
    prepare_tracing()
    table = {"family": "soft_window", "vocab_size": 4, "dim": 6, "components": 2}
    model = build_model(resolve(table))
    source = Source(torch.tensor([[0, 1, 2]]), torch.tensor([3]))
    sizes = []
    for time in (2, 6):
        torch._dynamo.reset()
        graphs = []

        def backend(graph, inputs, graphs=graphs):
            graphs.append(graph)
            return graph

        compiled = torch.compile(model, backend=backend, dynamic=False)
        points = torch.randn(1, time, 5)
        torch.testing.assert_close(compiled(points, source=source), model(points, source=source))
        sizes.append(sum(len(graph.graph.nodes) for graph in graphs))
    assert sizes[0] == sizes[1]


def stack_of(position, **options):
    blocks = [
        Block(
            attention.Attention(8, 2, **options),
            FFNS[kind](8, 16),
            lambda: LayerNorm(8),
            NormPlacement("pre"),
        )
        for kind in ("gelu_tanh", "gelu", "relu", "relu2", "geglu_tanh")
    ]
    return Stack(blocks, position, windows=[None] * len(blocks))


@pytest.mark.parametrize("hopper", [False, True])
def test_only_matching_layers_get_a_fused_forward(hopper, monkeypatch):
    monkeypatch.setattr(compiling, "can_run_activation_matmul", lambda weight: hopper)
    stack = stack_of(Position())
    attach_fused_layers(stack)
    fused = ["forward" in vars(block.ffn) for block in stack.layers]
    assert fused == [True, hopper, hopper, False, False]
    stack = stack_of(Position())
    add_lora(stack, ["*.up"], rank=2, alpha=1.0)
    attach_fused_layers(stack)
    assert not any("forward" in vars(block.ffn) for block in stack.layers)
    assert all("_fused_qkv" in vars(block.attention) for block in stack.layers)
    for other in (stack_of(Rotary(4)), stack_of(Position(), qk_norm=LayerNorm)):
        attach_fused_layers(other)
        assert not any("_fused_qkv" in vars(block.attention) for block in other.layers)


def test_keys_without_a_bias_are_projected_as_without_the_fused_layer(monkeypatch):
    score = {"kind": "disentangled", "position_projections": True}
    sizes = {"vocab_size": 16, "dim": 8, "layers": 1, "heads": 2, "context": 6}
    layer = build_model(preset("deberta-base", score=score, **sizes)).encoder.layers[0].attention
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    assert layer.query.bias is not None
    assert layer.key.bias is None
    x = torch.randn(3, 6, 8)
    monkeypatch.setattr(compiling, "is_large_in_graph", lambda x, weight: True)
    fused = compiling._split_gradient_qkv(layer, x)
    for expected, projected in zip(layer._fused_qkv(x), fused, strict=True):
        torch.testing.assert_close(projected, expected)


def test_a_copy_of_a_model_with_fused_layers_runs_its_own_weights():
    stack = stack_of(Position())
    attach_fused_layers(stack)
    copied = copy.deepcopy(stack)
    assert copied.layers[0].ffn.forward.__self__ is copied.layers[0].ffn
    x = torch.randn(3, 8)
    assert torch.equal(copied.layers[0].ffn(x), stack.layers[0].ffn(x))


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_functions_are_substituted_in_compiled_graphs_only():
    prepare_tracing()
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(str(graph.graph))
        return graph.forward

    rotary, q = Rotary(4, interleaved=True), torch.randn(1, 2, 3, 4)

    def work(q, positions):
        return gelu_tanh(rotary.rotation(positions).apply(q))

    positions = torch.arange(3).unsqueeze(0)
    compiled = torch.compile(work, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(q, positions), work(q, positions))
    assert "cos_sin" in graphs[0]
    assert "sigmoid" in graphs[0]
    assert "complex" not in graphs[0]


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_loops_over_time_are_not_traced():
    prepare_tracing()
    torch._dynamo.reset()
    model = build_model(replace(preset("lstm"), dim=8, layers=1, vocab_size=16))
    graphs = []

    def backend(graph, inputs):
        graphs.append(str(graph.graph))
        return graph.forward

    ids = torch.randint(0, 16, (2, 5))
    expected = model(ids)
    torch.testing.assert_close(torch.compile(model, backend=backend)(ids), expected)
    assert not any("lstm" in graph for graph in graphs)


def test_the_compiler_is_given_the_pass(monkeypatch):
    given = {}
    monkeypatch.setattr(torch, "compile", lambda function, **options: given.update(options))
    compile_for_training(abs, torch.nn.Linear(4, 4))
    found = given["options"]["post_grad_custom_post_pass"]
    assert isinstance(found, inductor_pass.AutotunedMatmuls)
    assert isinstance(given["options"]["joint_custom_post_pass"], inductor_pass.DropoutMasks)


@pytest.mark.parametrize(
    ("norms", "narrow"),
    [
        ([LayerNorm(512)], True),
        ([RMSNorm(64), LayerNorm(768)], False),
        ([RMSNorm(768), LayerNorm(64)], False),
    ],
)
def test_gradients_of_narrow_norms_take_two_kernels(norms, narrow, monkeypatch):
    given = {}
    monkeypatch.setattr(torch, "compile", lambda function, **options: given.update(options))
    monkeypatch.setattr(compiling, "is_on_gpu", lambda model: True)
    compile_for_training(abs, torch.nn.Sequential(torch.nn.Linear(4, 4), *norms))
    assert given["options"].get("triton.mix_order_reduction", True) is not narrow


@pytest.mark.long  # g++ takes ten seconds
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU by g++")
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_the_compiler_runs_the_pass(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(inductor_pass, "_is_large", lambda a, b: True)
    torch._dynamo.reset()
    layer = torch.nn.Linear(4, 4, bias=False)
    x, calls = torch.randn(3, 4), []
    monkeypatch.setattr(cublaslt, "matmul", lambda *args, **options: bool(calls.append(args)))
    compiled = compile_for_training(lambda x: layer(x).sin().sum(), layer)
    (gradient,) = torch.autograd.grad(compiled(x), layer.weight)
    assert len(calls) == 2
    torch.testing.assert_close(gradient, layer(x).cos().T @ x)


@pytest.mark.long  # g++ takes ten seconds
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU by g++")
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_backward_pass_drops_what_the_forward_pass_dropped(
    checkpointing, monkeypatch, tmp_path
):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(inductor_pass, "_is_large_mask", lambda node: True)
    torch._dynamo.reset()
    calls = []
    monkeypatch.setattr(dropout, "can_run_kernels", lambda seeds: bool(calls.append(seeds)))
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.4), torch.nn.Softplus())

    def work(x):
        return checkpoint(layer, x, use_reentrant=False) if checkpointing else layer(x)

    compiled = compile_for_training(work, layer)
    masks = []
    for _ in range(2):
        x = torch.randn(64, 8)
        y = compiled(x)
        dropped = torch.isclose(y, torch.full_like(y, math.log(2.0)))
        assert 0.3 < dropped.float().mean() < 0.5
        (gradient,) = torch.autograd.grad(y.sum(), layer[0].weight)
        kept = (layer[0](x) / 0.6).sigmoid() / 0.6
        torch.testing.assert_close(gradient, (kept * ~dropped).T @ x)
        masks.append(dropped)
    assert not torch.equal(*masks)
    assert len(calls) == (4 if checkpointing else 2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", FUSIBLE_ACTIVATIONS)
def test_a_compiled_block_has_the_gradients_of_the_plain_one(activation, bias, monkeypatch):
    monkeypatch.setattr(matmul, "MIN_AUTOTUNED_FLOPS", 0)
    torch.manual_seed(0)
    block = Block(
        attention.Attention(256, 4, bias=bias),
        FeedForward(256, 1024, activation, bias=bias),
        lambda: LayerNorm(256),
        NormPlacement("pre"),
    )
    stack = Stack([block], Position(), windows=[None]).cuda()
    x = torch.randn(8, 128, 256, device="cuda", requires_grad=True)
    goal, positions = torch.randn_like(x), torch.arange(128, device="cuda").unsqueeze(0)

    def forward(x):
        return stack(x, positions=positions, mask=Mask.causal())

    def gradients(work, mixed_precision=True):
        with torch.autocast("cuda", torch.bfloat16, enabled=mixed_precision):
            loss = (work(x) * goal).sum()
        return [loss, *torch.autograd.grad(loss, [x, *stack.parameters()])]

    exact, plain = gradients(forward, mixed_precision=False), gradients(forward)
    fused = gradients(compile_for_training(forward, stack))
    noise = 1e-3 * max(float(gradient.norm()) for gradient in exact)  # that of key biases is 0
    for right, actual, rounded in zip(exact, fused, plain, strict=True):
        # ReLU's derivative jumps: two results in bfloat16 may differ more than from the exact one
        assert (actual - right).norm() <= 1.5 * (rounded - right).norm() + noise
