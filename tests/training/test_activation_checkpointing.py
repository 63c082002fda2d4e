"""Blocks computed again in the backward pass: less is kept, and nothing else changes."""

import pytest
import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from regard.errors import ConfigError
from regard.explain.trace import trace
from regard.nn.block import Block
from regard.training.run import begin, resume
from regard.training.setup.device import checkpoint_activations
from training.objectives import OBJECTIVES, make_objective
from training.runs import config, contents

DROPS = {"dropout": 0.2, "attention_dropout": 0.1, "ffn_dropout": 0.1}
every_learner = pytest.mark.parametrize("name", OBJECTIVES)


def made(name, *, again, **over):
    """An objective that drops what it can, and its batch."""
    objective, batch = make_objective(name, **DROPS, **over)
    if again:
        checkpoint_activations(objective.model)
    return objective, batch


def learned(loss, objective, batch):
    """The loss, every gradient, and the bytes that were kept for the backward pass."""
    kept = []

    def keep(tensor):
        kept.append(tensor.nbytes)
        return tensor

    torch.manual_seed(2)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        value = loss(batch)
    value.backward()
    grads = {each: parameter.grad for each, parameter in objective.named_parameters()}
    return value.detach(), grads, sum(kept)


def equal(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@every_learner
@pytest.mark.usefixtures("float64")
def test_loss_and_gradients_are_equal_to_the_last_bit_and_less_is_kept(name):
    plain, again = (made(name, again=again) for again in (False, True))
    loss, grads, kept = learned(plain[0], *plain)
    again_loss, again_grads, again_kept = learned(again[0], *again)
    assert torch.equal(loss, again_loss)
    assert equal(grads, again_grads)
    assert all(grad.abs().sum() > 0 for each, grad in grads.items() if "key.bias" not in each)
    assert again_kept < kept / 3


@pytest.mark.usefixtures("float64")
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_the_compiled_step_recomputes_too():
    torch._dynamo.reset()
    plain, again = (made("encoder-decoder", again=each, layers=2) for each in (False, True))
    loss, grads, kept = learned(plain[0], *plain)
    compiled = torch.compile(again[0], dynamic=False, backend="aot_eager", fullgraph=True)
    again_loss, again_grads, again_kept = learned(compiled, *again)
    torch.testing.assert_close(again_loss, loss, rtol=0, atol=1e-12)
    torch.testing.assert_close(again_grads, grads, rtol=0, atol=1e-12)
    assert again_kept < kept / 1.5  # the compiler keeps less than plain torch by itself


def test_whoever_listens_hears_the_same():
    heard = []
    for again in (False, True):
        objective, batch = made("encoder-decoder", again=again)
        torch.manual_seed(2)
        with trace(objective.model) as seen:
            objective(batch).backward()
        heard.append(seen)
    assert equal(*heard)
    assert len(heard[0]) == 6 * (2 + 4) + 6 * (2 + 4 + 4)  # of each block, four of each attention


def test_names_and_classes_stay_as_they_were():
    plain, again = (made("decoder", again=again)[0] for again in (False, True))
    assert plain.state_dict().keys() == again.state_dict().keys()
    assert type(again.model.decoder.blocks[0]) is Block


@pytest.fixture
def alone():
    """A group of one process, so that the wrappers of many can be had."""
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("float64", "alone")
def test_it_is_the_same_inside_the_wrappers_of_many_processes():
    objective, batch = made("decoder", again=False)
    loss, grads, _ = learned(objective, objective, batch)
    for wrap in (DistributedDataParallel, sharded):
        again, batch = made("decoder", again=True)
        again_loss, again_grads, _ = learned(wrap(again), again, batch)
        assert torch.equal(loss, again_loss)
        for name, grad in again_grads.items():
            assert torch.equal(
                grad.full_tensor() if isinstance(grad, DTensor) else grad, grads[name]
            )


def sharded(objective):
    mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
    for block in objective.model.decoder.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(objective, mesh=mesh)


def test_a_run_that_recomputes_from_its_beginning_or_later_is_the_same_run(data, tmp_path):
    for again in (False, True):
        given = config(data / "pairs.tsv", steps=4, activation_checkpointing=again)
        list(begin(given, tmp_path / str(again)))
        later = {"train": {"steps": 6, "activation_checkpointing": not again}}
        list(resume(tmp_path / str(again), later))
    assert contents(tmp_path / "False") == contents(tmp_path / "True")


def test_a_model_without_blocks_is_refused_before_there_is_a_folder(data, tmp_path):
    over = {"model": {"preset": "lstm", "dim": 8, "layers": 1}}
    given = config(data / "cats.txt", over, activation_checkpointing=True)
    given.model.pop("heads")
    with pytest.raises(
        ConfigError, match=r"train\.activation_checkpointing=true works block by block"
    ):
        list(begin(given, tmp_path / "run"))
    assert not (tmp_path / "run").exists()
