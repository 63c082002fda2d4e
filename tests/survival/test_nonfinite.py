"""Loss, gradient or weights stop being finite: nothing learns from it, nothing of it is saved."""

import json
import math

import pytest
import torch

from cli.conftest import TEXT_WORDS, invoke
from regard.data.token_store import pair_store, text_store
from regard.errors import DivergedError
from regard.pipelines import open_split, prepare_training
from regard.tasks import Causal
from regard.training import run
from regard.training.events import RunFinished
from regard.training.loop import Objective, SingleProcess, train
from regard.training.optim import OPTIMIZERS, optimizers, state_tensors
from regard.training.run import begin, resume
from regard.training.storage.checkpoint import read_tensors
from training.runs import config, text_batch, tiny


class Spoiled(torch.autograd.Function):
    """Zero forwards; backwards, one number of the gradient is bad."""

    @staticmethod
    def forward(context, weight, bad):
        context.shape, context.bad = weight.shape, bad
        return weight.new_zeros(())

    @staticmethod
    def backward(context, grad):
        spoiled = torch.zeros(context.shape)
        spoiled.view(-1)[-1] = context.bad
        return spoiled, None


FAULTS = {
    "a loss of NaN": lambda objective, summed: summed * torch.nan,
    "an infinite loss": lambda objective, summed: summed * torch.inf,
    "an infinite loss with a finite gradient": lambda objective, summed: summed + torch.inf,
    "one gradient of NaN": lambda objective, summed: summed + spoil(objective, torch.nan),
    "one infinite gradient": lambda objective, summed: summed + spoil(objective, -torch.inf),
    "a loss that float16 cannot hold": lambda objective, summed: (summed.half() * 60_000).float(),
}


def spoil(objective, bad):
    return Spoiled.apply(objective.model.decoder.blocks[0].ffn.up.weight, bad)


def kept(objective, ours):
    """All that learning changes."""
    return {
        **{name: weight.detach().clone() for name, weight in objective.named_parameters()},
        **{name: value.clone() for name, value in state_tensors(objective, ours)},
    }


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_no_optimizer_takes_a_step_that_is_not_finite(kind, fault):
    torch.manual_seed(1)
    objective = Objective(tiny(), Causal())
    ours = optimizers(kind, objective, 0.01)
    bad = text_batch(seed=9)

    def loss(batch):
        return FAULTS[fault](objective, objective(batch)) if batch is bad else objective(batch)

    good = [text_batch(seed=seed) for seed in (1, 2)]
    wrapped = SingleProcess(objective)
    wrapped.loss = loss
    steps = train(objective, [*good, bad, good[0]], ours, lambda step: 0.01, strategy=wrapped)
    told = [float(next(steps).skipped) for _ in good]
    before = kept(objective, ours)
    told.append(float(next(steps).skipped))
    after = kept(objective, ours)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    told.append(float(next(steps).skipped))
    assert told == [0, 0, 1, 0]
    assert any(not torch.equal(after[name], value) for name, value in kept(objective, ours).items())


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_nobody_waits_for_the_device_to_learn_of_it(kind, monkeypatch):
    objective = Objective(tiny(), Causal())
    steps = train(objective, [text_batch()], optimizers(kind, objective, 0.01), lambda step: 0.01)
    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "__bool__", "__float__", "__int__", "numpy"):
            patch.setattr(torch.Tensor, name, lambda *words: pytest.fail("the host waited"))
        (step,) = steps
    assert step.skipped == 0


def faulty(monkeypatch, fault, bad):
    """Let this go wrong in these steps (counted from 1); the batches of all steps."""
    forward, seen = Objective.forward, []

    def spoiled(self, batch):
        seen.append(batch)
        step = (len(seen) + 1) // 2  # two micro-batches each
        summed = forward(self, batch)
        return FAULTS[fault](self, summed) if step in bad else summed

    monkeypatch.setattr(Objective, "forward", spoiled)
    return seen


def skipped(folder):
    lines = (folder / "skipped.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]


def finite(folder):
    files = [*folder.glob("*.safetensors"), *folder.glob("checkpoints/*/*.safetensors")]
    tensors = [tensor for file in files for tensor in read_tensors(file).values()]
    return bool(tensors) and all(tensor.isfinite().all() for tensor in tensors)


@pytest.mark.parametrize("fault", [name for name in FAULTS if "NaN" in name or "finite" in name])
def test_too_many_in_a_row_end_the_run_and_what_they_read_is_written(
    fault, data, tmp_path, monkeypatch
):
    seen = faulty(monkeypatch, fault, {5, 7, 8, 9})
    folder = tmp_path / "run"
    settings = config(data / "cats.txt")
    with pytest.raises(DivergedError, match="in 3 steps in a row, up to step 9") as raised:
        list(begin(settings, folder))
    assert raised.value.exit_code == 5
    assert f"{folder}/skipped.jsonl" in str(raised.value)
    assert f"regard resume {folder} train.lr=" in str(raised.value)
    assert len(str(raised.value).splitlines()) <= 5
    assert finite(folder)
    told = skipped(folder)
    assert [row["step"] for row in told] == [5, 7, 8, 9]
    wrong = [not math.isfinite(float(row[key])) for row in told for key in ("loss", "grad_norm")]
    assert sum(wrong) >= 4
    text, _ = open_split(settings)
    tokens = text_store(text, prepare_training(settings).tokenizers).tokens
    for row in told:
        ids = torch.cat([batch.ids for batch in seen[2 * row["step"] - 2 : 2 * row["step"]]])
        read = [tokens[start : start + 8].tolist() for start in row["examples"]]
        assert read == ids.tolist()
    monkeypatch.undo()
    assert isinstance(list(resume(folder, {"train": {"lr": 1e-3}}))[-1], RunFinished)
    assert finite(folder)


def test_of_pairs_the_rows_are_written(data, tmp_path, monkeypatch):
    seen = faulty(monkeypatch, "a loss of NaN", {2})
    settings = config(data / "pairs.tsv", steps=3, batch=8)
    list(begin(settings, tmp_path / "run"))
    (row,) = skipped(tmp_path / "run")
    pairs, _ = open_split(settings)
    both = prepare_training(settings).tokenizers
    store = pair_store(pairs, both.source, both.target)
    sources = [
        ids[: length - 1].tolist()  # without EOS
        for batch in seen[2:4]
        for ids, length in zip(batch.source.ids, batch.source.lengths.tolist(), strict=True)
    ]
    assert [store.source(sample).tolist() for sample in row["examples"]] == sources
    rows = list(pairs.rows())
    assert [both.source.decode(each) for each in sources] == [rows[n][0] for n in row["examples"]]


def poisoned(monkeypatch, at, name, index=...):
    """Let some weights be NaN right after this step."""
    train = run.train

    def spoiled(objective, *words, **options):
        for step in train(objective, *words, **options):
            if step.index + 1 == at:
                objective.model.get_parameter(name).data[index] = torch.nan
            yield step

    monkeypatch.setattr(run, "train", spoiled)


@pytest.mark.parametrize(("at", "ema"), [(8, 0.0), (9, 0.9), (10, 0.0)])
def test_weights_that_are_not_finite_are_noticed_and_never_saved(
    at, ema, data, tmp_path, monkeypatch
):
    """Step 8 is judged, step 9 is saved."""
    poisoned(monkeypatch, at, "decoder.blocks.0.ffn.up.weight")
    folder = tmp_path / "run"
    with pytest.raises(DivergedError) as raised:
        list(begin(config(data / "cats.txt", ema=ema), folder))
    assert "not finite" in str(raised.value)
    assert f"regard resume {folder} train.lr=" in str(raised.value)
    assert finite(folder)


def test_a_weight_that_no_loss_depends_on_is_noticed_before_it_is_saved(
    data, tmp_path, monkeypatch
):
    over = {"model": {"tied": False}}
    settings = config(data / "cats.txt", over, ema=0.0)
    unused = prepare_training(settings).tokenizers.eos_id  # of a single text, none ends
    poisoned(monkeypatch, 5, "embed.token.weight", unused)
    with pytest.raises(DivergedError, match=r"embed\.token\.weight is not finite at step 6"):
        list(begin(settings, tmp_path / "run"))
    assert not (tmp_path / "run" / "skipped.jsonl").exists()
    assert finite(tmp_path / "run")


def test_the_command_line_exits_with_5(data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Objective, "forward", lambda self, batch: next(self.parameters()).sum() / 0)
    said = invoke(capsys, "train", data / "cats.txt", *TEXT_WORDS, "--out", tmp_path / "run")
    assert said.code == 5
    assert said.out == ""
    complaint = said.err[said.err.rindex("regard: loss or gradient") :].splitlines()
    assert len(complaint) <= 5
    assert [row["step"] for row in skipped(tmp_path / "run")] == [1, 2, 3]
