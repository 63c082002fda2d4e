"""What the compiler is told to do better, on the graphs it is given."""

import shutil
from dataclasses import replace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from regard.accel import inductor_pass as faster
from regard.accel import matmul as products
from regard.data.batch import TextBatch
from regard.models.build import build_model, preset
from regard.nn import attention, ffn
from regard.nn.mask import Mask
from regard.tasks import Causal, Objective
from regard.training.parallel.strategy import compiled
from regard.training.setup.device import checkpoint_activations


def work(x, up, down, bias):
    wide = torch.addmm(bias, x, up.T)
    return torch.addmm(x, wide, down.T) + torch.mm(wide, down.T)


@pytest.fixture
def given():
    return torch.randn(3, 4), torch.randn(5, 4), torch.randn(4, 5), torch.randn(5)


def test_products_take_the_place_of_torchs_own(given, monkeypatch):
    monkeypatch.setattr(faster, "_large", lambda a, b: True)
    traced = make_fx(work)(*given)
    faster.Faster()(traced.graph)
    traced.recompile()
    ours = traced.graph.find_nodes(op="call_function", target=torch.ops.regard.product.default)
    assert len(ours) == 2  # what is added to a matrix stays
    assert torch.equal(traced(*given), work(*given))


def test_products_on_a_cpu_and_small_ones_stay(given):
    traced = make_fx(work)(*given)
    before = str(traced.graph)
    faster.Faster()(traced.graph)
    assert str(traced.graph) == before


@pytest.mark.parametrize(
    ("rows", "dtype", "large"),
    [(65536, torch.bfloat16, True), (64, torch.bfloat16, False), (65536, torch.float32, False)],
)
def test_only_large_products_of_half_precision_on_a_gpu_are_taken(rows, dtype, large):
    from torch._subclasses.fake_tensor import FakeTensorMode

    graph = torch.fx.Graph()
    a, b = (graph.placeholder(name) for name in "ab")
    with FakeTensorMode():
        a.meta["val"] = torch.empty(rows, 768, dtype=dtype, device="cuda")
        b.meta["val"] = torch.empty(768, 3072, dtype=dtype, device="cuda")
    assert faster._large(a, b) == large


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_compiled_model_learns_the_same_with_its_products(bias, again, monkeypatch):
    for module in (attention, ffn):
        monkeypatch.setattr(
            module, "compiling_large", lambda x, weight: torch.compiler.is_compiling()
        )
    torch._dynamo.reset()
    torch.manual_seed(0)
    small = {"dim": 8, "layers": 2, "heads": 2, "context": 6, "vocab_size": 16, "dropout": 0.0}
    objective = Objective(build_model(replace(preset("gpt2"), bias=bias, **small)), Causal())
    objective.double().train()
    if again:
        checkpoint_activations(objective.model)
    batch = TextBatch(*torch.randint(0, 16, (2, 3, 6)))

    def gradients(loss):
        value = loss(batch)
        return [value, *torch.autograd.grad(value, [*objective.parameters()])]

    compiled = torch.compile(objective, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(gradients(compiled), gradients(objective))


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU by g++")
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_the_compiler_takes_the_pass(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(faster, "_large", lambda a, b: True)
    torch._dynamo.reset()
    weight = torch.randn(4, 4, requires_grad=True)
    x, calls = torch.randn(3, 4), []
    monkeypatch.setattr(products, "multiply", lambda *given, **options: bool(calls.append(given)))
    (slope,) = torch.autograd.grad(compiled(lambda x: (x @ weight).sin().sum())(x), weight)
    assert len(calls) == 2
    torch.testing.assert_close(slope, x.T @ (x @ weight).cos())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("biased", [False, True])
def test_a_compiled_block_learns_as_the_plain_one(biased, monkeypatch):
    monkeypatch.setattr(products, "LARGE", 0)
    torch.manual_seed(0)
    looking = attention.Attention(256, 4, bias=biased).cuda()
    layer = ffn.FeedForward(256, 1024, ffn.gelu_tanh, bias=biased).cuda()
    x = torch.randn(8, 128, 256, device="cuda", requires_grad=True)
    goal = torch.randn_like(x)
    view = attention.AttentionInputs.of(
        Mask.causal(), torch.arange(128, device="cuda").unsqueeze(0)
    )

    def block(x):
        return layer(looking(x, view=view))

    def gradients(work):
        with torch.autocast("cuda", torch.bfloat16):
            loss = (work(x) * goal).sum()
        parameters = [*looking.parameters(), *layer.parameters()]
        return [loss, *torch.autograd.grad(loss, [x, *parameters])]

    found, wanted = gradients(compiled(block)), gradients(block)
    noise = 1e-3 * max(float(plain.norm()) for plain in wanted)  # that of the keys' bias is all
    for ours, plain in zip(found, wanted, strict=True):
        assert (ours - plain).norm() <= 0.02 * plain.norm() + noise
