"""Optimizers: Muon against its formula, AdamW against torch's, and what they remember."""

import pytest
import torch

from regard.errors import ConfigError
from regard.files.directory import Directory
from regard.models.build import build_model, preset
from regard.tasks import Causal
from regard.training.loop import Objective, train
from regard.training.optim import (
    OPTIMIZERS,
    Muon,
    is_hidden,
    load_state_tensors,
    optimizers,
    orthogonalize,
    state_tensors,
)
from regard.training.storage.checkpoint import read_tensors, write_tensors
from training.runs import text_batch, tiny

SHAPES = [(32, 32), (64, 16), (16, 64), (7, 5), (1, 9)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_orthogonal_makes_every_singular_value_about_one(shape, scale):
    u, s, vh = torch.linalg.svd(torch.randn(20, *shape), full_matrices=False)
    s = s.clamp_min(0.02 * s.max())  # five steps do not lift what is next to nothing
    values = torch.linalg.svdvals(orthogonalize(scale * (u * s.unsqueeze(-2)) @ vh))
    assert values.min() > 0.6
    assert values.max() < 1.3


@pytest.mark.parametrize("shape", SHAPES)
def test_orthogonal_keeps_the_singular_vectors(shape):
    x = torch.randn(3, *shape, dtype=torch.float64)
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    inner = u.mT @ orthogonalize(x) @ vh.mT  # would be the identity if all values were 1
    off = inner - torch.diag_embed(inner.diagonal(dim1=-2, dim2=-1))
    assert off.abs().max() < 1e-9


@pytest.mark.parametrize("shape", SHAPES)
def test_many_matrices_are_made_orthogonal_as_each_alone(shape):
    many = torch.randn(5, *shape, dtype=torch.float64)
    alone = torch.cat([orthogonalize(each.unsqueeze(0)) for each in many])
    torch.testing.assert_close(orthogonalize(many), alone, rtol=0, atol=1e-12)


def test_nothing_becomes_nothing():
    assert not orthogonalize(torch.zeros(1, 4, 6)).any()


def slow_orthogonal(x):
    """Newton–Schulz written out, for a matrix that is not taller than wide."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x / (x.square().sum().sqrt() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + b * (gram @ x) + c * (gram @ (gram @ x))
    return x


@pytest.mark.parametrize("shape", [(4, 4), (3, 8), (8, 3)])
def test_muon_takes_the_step_of_its_formula(shape):
    lr, m, decay = 0.02, 0.9, 0.1
    start = torch.randn(shape, dtype=torch.float64)
    grads = torch.randn(3, *shape, dtype=torch.float64)
    param = torch.nn.Parameter(start.clone())
    muon = Muon([param], lr=lr, momentum=m, weight_decay=decay)
    for grad in grads:
        param.grad = grad.clone()
        muon.step()

    weight, momentum = start.clone(), torch.zeros(shape, dtype=torch.float64)
    for grad in grads:
        momentum = m * momentum + (1 - m) * grad
        update = (1 - m) * grad + m * momentum
        tall = shape[0] > shape[1]
        update = slow_orthogonal(update.T).T if tall else slow_orthogonal(update)
        weight = (1 - lr * decay) * weight - lr * 0.2 * max(shape) ** 0.5 * update
    torch.testing.assert_close(param.detach(), weight, rtol=0, atol=1e-12)


def test_muon_steps_matrices_of_one_shape_as_if_each_were_alone():
    grads = torch.randn(4, 6, 3, dtype=torch.float64)

    def stepped(*groups):
        params = [torch.nn.Parameter(torch.ones(6, 3, dtype=torch.float64)) for _ in grads]
        for group in groups:
            muon = Muon([params[i] for i in group], lr=0.1, weight_decay=0.1)
            for i in group:
                params[i].grad = grads[i].clone()
            muon.step()
        return torch.stack([param.detach() for param in params])

    together, apart = stepped([0, 1, 2, 3]), stepped([0], [1], [2], [3])
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-12)


def test_muon_leaves_alone_what_has_no_gradient():
    param = torch.nn.Parameter(torch.ones(3, 3))
    muon = Muon([param], lr=0.1, weight_decay=0.1)
    muon.step()
    assert torch.equal(param, torch.ones(3, 3))


@pytest.mark.parametrize("name", ["tiny-decoder", "tiny-encoder-decoder", "lstm"])
def test_muon_gets_the_matrices_of_the_layers_and_adamw_the_rest(name):
    fields = {} if name == "lstm" else {"heads": 2}
    model = build_model(preset(name, dim=8, layers=1, vocab_size=20, **fields))
    hidden, others = optimizers("muon", model, 0.1)
    assert isinstance(hidden, Muon)
    assert isinstance(others, torch.optim.AdamW)
    names = {param: each for each, param in model.named_parameters()}
    ours = {names[p] for group in hidden.param_groups for p in group["params"]}
    theirs = {names[p] for group in others.param_groups for p in group["params"]}
    assert ours | theirs == set(names.values())
    assert not ours & theirs
    inside = ("blocks.", "layers.")
    assert ours == {
        n for n, p in model.named_parameters() if p.dim() == 2 and any(i in n for i in inside)
    }
    assert "embed.token.weight" in theirs or "embed.weight" in theirs


def test_tables_of_positions_are_not_hidden_matrices():
    model = tiny(position="learned", score="shaw")
    tables = [n for n, _ in model.named_parameters() if "position" in n or "relative" in n]
    assert len(tables) == 2
    assert not any(map(is_hidden, tables))


@pytest.mark.parametrize("momentum", [-0.1, 1.0, float("nan")])
def test_muon_refuses_a_momentum_that_is_no_average(momentum):
    with pytest.raises(ConfigError, match=r"train.optimizer: momentum=.* must be at least 0"):
        optimizers({"kind": "muon", "momentum": momentum}, tiny(), 0.1)


def test_muon_manages_with_hidden_matrices_only_and_with_none():
    model = tiny()
    for param_name, param in model.named_parameters():
        param.requires_grad = is_hidden(param_name) and param.dim() == 2
    assert [type(each) for each in optimizers("muon", model, 0.1)] == [Muon]
    assert [type(each) for each in optimizers("muon", torch.nn.Embedding(3, 2), 0.1)] == [
        torch.optim.AdamW
    ]


def test_adamw_is_torchs_slow_one_and_vectors_are_not_decayed():
    torch.manual_seed(1)
    ours, theirs = (torch.nn.Linear(5, 3).double() for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    (fused,) = optimizers({"kind": "adamw", "beta2": 0.95, "weight_decay": 0.3}, ours, 0.05)
    slow = torch.optim.AdamW(
        [
            {"params": [theirs.weight], "weight_decay": 0.3},
            {"params": [theirs.bias], "weight_decay": 0.0},
        ],
        lr=0.05,
        betas=(0.9, 0.95),
        foreach=False,
    )
    for step in range(5):
        for model, optimizer in ((ours, fused), (theirs, slow)):
            optimizer.zero_grad()
            x = torch.linspace(-1, 1 + step, 10, dtype=torch.float64).view(2, 5)
            model(x).square().sum().backward()
            optimizer.step()
    for mine, yours in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, yours, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_goes_on_bit_for_bit_from_what_it_saved(kind, tmp_path):
    batches = [text_batch(seed=seed) for seed in range(6)]

    def learn(objective, ours, part, start):
        list(train(objective, part, ours, lambda step: 0.01, start=start))

    torch.manual_seed(1)
    objective = Objective(tiny(), Causal())
    ours = optimizers(kind, objective, 0.01)
    learn(objective, ours, batches[:3], 0)
    write_tensors(Directory(tmp_path), "optimizer", dict(state_tensors(objective, ours)))
    write_tensors(Directory(tmp_path), "model", objective.state_dict())
    learn(objective, ours, batches[3:], 3)

    again = Objective(tiny(), Causal())
    again.load_state_dict(read_tensors(tmp_path / "model"))
    loaded = optimizers(kind, again, 0.01)
    load_state_tensors(again, loaded, read_tensors(tmp_path / "optimizer"))
    learn(again, loaded, batches[3:], 3)
    for mine, yours in zip(objective.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, yours)
    saved, reached = (dict(state_tensors(m, o)) for m, o in ((objective, ours), (again, loaded)))
    assert saved.keys() == reached.keys()
    assert all(torch.equal(saved[name], reached[name]) for name in saved)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer_lowers_the_loss_of_one_batch(kind):
    torch.manual_seed(1)
    objective, batch = Objective(tiny(), Causal()), text_batch()
    ours = optimizers(kind, objective, 0.02)
    losses = [float(s.loss) for s in train(objective, [batch] * 30, ours, lambda step: 0.02)]
    assert losses[-1] < 0.6 * losses[0]


def test_an_unknown_optimizer_gets_a_suggestion():
    with pytest.raises(ConfigError, match="did you mean 'adamw'"):
        optimizers("adam", tiny(), 0.1)
