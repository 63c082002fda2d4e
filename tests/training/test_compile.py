"""The compiled objective is the eager one: what runs on a GPU by default, checked on a CPU."""

import warnings

import pytest
import torch

from regard.accel.compile import prepare_tracing
from regard.data.batch import PairBatch, TextBatch
from regard.models.build import build_model, preset
from regard.nn.recurrent import Recurrent
from regard.nn.state import Source
from regard.tasks import Causal, Seq2Seq
from regard.training.loop import Objective

TINY = {"vocab_size": 23, "dim": 16, "layers": 2, "heads": 2, "context": 8}


def text_batch():
    ids = torch.randint(23, (3, 9))
    return TextBatch(ids[:, :-1], ids[:, 1:].masked_fill(ids[:, 1:] == 5, -1))


def pair_batch():
    ids = torch.randint(23, (3, 9))
    source = Source(torch.randint(23, (3, 6)), torch.tensor([6, 4, 1]))
    return PairBatch(source, ids[:, :-1], ids[:, 1:])


@pytest.mark.parametrize(
    ("name", "fields", "task", "batch"),
    [
        ("modern", {"kv_heads": 1}, Causal(), text_batch),
        ("tiny-decoder", {}, Causal(label_smoothing=0.1), text_batch),
        ("gpt2", {"position": "alibi", "window": 3}, Causal(), text_batch),
        (
            "transformer-base",
            {"dropout": 0.0, "position": "t5", "encoder_layers": 1},
            Seq2Seq(label_smoothing=0.1),
            pair_batch,
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_the_compiled_loss_and_gradient_are_the_eager_ones(name, fields, task, batch):
    torch._dynamo.reset()
    prepare_tracing()
    objective = Objective(build_model(preset(name, **{**TINY, **fields})), task).train()
    given = batch()
    compiled = torch.compile(objective, dynamic=False, backend="aot_eager", fullgraph=True)
    losses, grads = [], []
    for loss in (objective, compiled):
        objective.zero_grad()
        losses.append(loss(given))
        losses[-1].backward()
        grads.append({n: p.grad.clone() for n, p in objective.named_parameters()})
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*grads)
    assert all(grad.abs().sum() > 0 for n, grad in grads[0].items() if "key.bias" not in n)


def test_a_compiler_does_not_unroll_a_cell():
    layers, x = Recurrent("update_gate", 3, 4, 1).double(), torch.randn(2, 20, 3).double()
    expected, _ = layers(x)
    seen = []

    def count(graph, _):
        seen.append(len(graph.graph.nodes))
        return graph.forward

    torch.compiler.reset()
    prepare_tracing()
    with warnings.catch_warnings():  # the compiler of torch 2.13 looks at .grad where it breaks
        warnings.simplefilter("ignore", UserWarning)
        y, _ = torch.compile(layers, backend=count)(x)
    torch.compiler.reset()
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    assert sum(seen) < 20
