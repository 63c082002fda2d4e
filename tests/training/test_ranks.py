"""Several ranks: one run, whoever takes which part of it and whatever happens to them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

import regard
from regard.data.batch import ImageBatch, MaskedBatch, PairBatch, TextBatch
from regard.nn.state import Source
from regard.tasks import Causal
from regard.training import run
from regard.training.loop import Objective
from regard.training.parallel.ranks import Ranks, UnscoredRow
from regard.training.parallel.strategy import Sharded
from regard.training.storage.checkpoint import latest, of_step, read_tensors
from regard.training.storage.run_folder import RunFolder, new_folder
from training.objectives import OBJECTIVES, make_objective
from training.runs import Crash, config, interrupt, text_batch, tiny

SCRIPT = Path(__file__).with_name("ranks.py")
forked = pytest.mark.skipif(not hasattr(os, "fork"), reason="the ranks are forked")
TRAIN = {
    "steps": 6,
    "batch": 3,  # so two ranks have one and two rows, and of four one has none
    "accumulate": 1,
    "evaluate_every": 2,  # also between steps: those after it must find all as it was
    "save_every": 3,
    "timeout": 30,
}


def job(data, folder, ranks, shard="none", *, event=None, over=None, **train):
    """A run, or what is left to do of it, on so many ranks, without dropout."""
    over = {"model": {"dropout": 0.0, "layers": 2}, **(over or {})}
    settings = {**TRAIN, "shard": shard, **train}
    table = {"data": str(data), "folder": str(folder), "ranks": ranks}
    table |= {"train": settings, "over": over}
    return table if event is None else {**table, "event": event}


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """Do one job after the other; the exit codes of each one's ranks, and all that was said."""
    said = tmp_path_factory.mktemp("ranks") / "said"
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    with (
        said.open("wb") as stderr,
        subprocess.Popen(
            [sys.executable, SCRIPT],
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as process,
    ):

        def launch(*jobs):
            before = said.stat().st_size
            print(json.dumps(jobs), file=process.stdin, flush=True)
            results = process.stdout.readline()
            new = said.read_bytes()[before:].decode()
            print(results, new)
            return json.loads(results), new

        yield launch
        process.stdin.close()


def losses(folder):
    return [row["loss"] for row in RunFolder(folder).rows() if "loss" in row]


def norms(folder):
    return [row["grad_norm"] for row in RunFolder(folder).rows() if "grad_norm" in row]


def judged(folder):
    return [row["validation"]["loss"] for row in RunFolder(folder).rows() if "validation" in row]


def same(left, right):
    """Equal but for the order of sums: gradients of six steps, in float32."""
    assert losses(left) == pytest.approx(losses(right), abs=1e-5)
    assert norms(left) == pytest.approx(norms(right), rel=1e-4)
    assert judged(left) == pytest.approx(judged(right), abs=1e-5)
    ours, wanted = (read_tensors(folder / "model.safetensors") for folder in (left, right))
    assert ours.keys() == wanted.keys()
    for name in wanted:
        if not name.endswith("key.bias"):  # its gradient is 0 but for rounding, which Adam scales
            torch.testing.assert_close(ours[name], wanted[name], rtol=0, atol=1e-4)


@forked
def test_two_ranks_learn_what_one_does_though_killed_and_stopped_on_the_way(data, tmp_path, launch):
    text = data / "cats.txt"
    alone, killed, stopped = (tmp_path / name for name in ("alone", "killed", "stopped"))
    results, said = launch(
        job(text, alone, 1),
        job(text, killed, 2, "none", event=[1, 4, "SIGKILL"]),
        job(text, killed, 2, "full"),
        job(text, stopped, 2, "full", event=[1, 3, "SIGTERM"]),
        job(text, stopped, 1),
    )
    codes = [result["codes"] for result in results]
    assert codes == [[0], [1, -9], [0, 0], [75, 75], [0]]
    assert results[1]["seconds"][0] < results[1]["seconds"][1] + 5  # long before the timeout
    assert "rank 0 lost the connection to the other ranks" in said
    assert said.count("stopped by SIGTERM at step 3 of 6; checkpoint saved") == 2
    same(killed, alone)
    same(stopped, alone)
    assert (stopped / "checkpoints" / "step-3" / "index.json").exists()
    assert (stopped / "checkpoints" / "step-6" / "model.safetensors").exists()
    for rank in range(2):
        log = (stopped / "logs" / f"rank-{rank}.txt").read_text()
        assert f"rank {rank} of 2" in log
        assert "saved step 3" in log


@forked
def test_what_happens_to_one_rank_ends_all_in_the_same_way(data, tmp_path, launch):
    text = data / "cats.txt"
    alone, nans, parts, owed, full = (tmp_path / n for n in ("alone", "nans", "parts", "owed", "f"))
    results, said = launch(
        job(text, alone, 1),
        job(text, nans, 2, event=[1, 3, "NaNs"]),
        job(text, parts, 2, "full", event=[1, 3, "full"]),
        job(text, full, 2, event=[0, 3, "full"]),
        job(text, owed, 1, event=[0, 2, "judged"]),
        job(text, owed, 2, "full"),
    )
    codes = [result["codes"] for result in results]
    assert codes == [[0], [5, 5], [4, 4], [4, 4], [75], [0, 0]]
    assert said.count("not finite in 3 steps in a row, up to step 5") == 2
    step = parts / "checkpoints" / "step-3"
    assert said.count(f"rank 1: cannot write {step}: File too large") == 2
    assert said.count(f"cannot write {full / 'checkpoints' / 'step-3'}: File too large") == 2
    assert not list(step.parent.iterdir())
    assert "lost" not in said
    same(owed, alone)


@pytest.fixture
def one_of_one():
    """A world of one process, which needs no other to agree with."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Ranks()
    dist.destroy_process_group()


@pytest.mark.parametrize("half", [False, True])
def test_an_evaluation_of_parts_may_come_before_the_first_step(half, one_of_one):
    batch, cpu = text_batch(), torch.device("cpu")
    torch.manual_seed(1)
    strategy = Sharded(Objective(tiny(), Causal()), one_of_one, cpu, batch, bfloat16=half)
    assert all(p.grad is None for p in strategy.objective.parameters())
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        judged = strategy.with_full_weights(lambda model: Causal().loss(model, batch))
        assert torch.equal(strategy.loss(batch), judged)


def test_in_bfloat16_positions_are_not_rounded(one_of_one):
    batch, cpu = text_batch(), torch.device("cpu")
    objective = Objective(tiny(position="rotary"), Causal())
    strategy = Sharded(objective, one_of_one, cpu, batch, bfloat16=True)
    seen = []
    (block,) = strategy.blocks
    block.attention.register_forward_pre_hook(
        lambda module, words, options: seen.append(options["inputs"].rotation.cos), with_kwargs=True
    )
    with torch.autocast("cpu", torch.bfloat16):
        strategy.loss(batch)
    assert [cos.dtype for cos in seen] == [torch.float32]


@forked
def test_activations_are_logged_alike_on_one_rank_with_ddp_and_with_fsdp(data, tmp_path, launch):
    text, log = data / "cats.txt", ["decoder.blocks.*.attention.q", "decoder.blocks.1.out"]
    folders = [tmp_path / name for name in ("one", "ddp", "fsdp")]
    results, _ = launch(
        job(text, folders[0], 1, log=log),
        job(text, folders[1], 2, log=log),
        job(text, folders[2], 2, "full", log=log),
    )
    assert [result["codes"] for result in results] == [[0], [0, 0], [0, 0]]
    one, *others = (
        [r["activations"] for r in RunFolder(f).rows() if "activations" in r] for f in folders
    )
    assert [len(activations) for activations in one] == [3, 3, 3]
    for activations in others:
        for expected, row in zip(one, activations, strict=True):
            assert expected.keys() == row.keys()
            for name, statistics in expected.items():
                assert row[name] == pytest.approx(statistics, rel=1e-4, abs=1e-6)


@forked
def test_one_rank_speaks_for_all(data, tmp_path, launch):
    small = ["data.tokenizer=char", "model.preset=tiny-decoder", "model.dim=8", "model.layers=1"]
    small += ["model.heads=2", "model.context=8", "train.steps=2", "device=cpu", "--json"]
    results, said = launch(
        {"words": ["train", str(tmp_path / "nothing.txt")], "ranks": 2},
        {"words": ["train", str(data / "cats.txt"), "model.family=no"], "ranks": 2},
        {
            "words": ["train", str(data / "cats.txt"), *small, "--out", str(tmp_path / "run")],
            "ranks": 2,
        },
        {
            "words": ["train", str(data / "cats.txt"), *small, "--out", str(tmp_path / "other")],
            "ranks": 2,
            "fails": 1,
        },
    )
    codes = [result["codes"] for result in results]
    assert [code for code, _ in codes] == [3, 2, 0, 3]
    assert [code != 0 for _, code in codes] == [True, True, False, True]
    assert said.count("my disk is empty") == said.count("regard: rank 1: my disk is empty") == 1
    assert said.count("regard: no file, folder or built-in dataset") == 1
    assert said.count("regard: unknown model family 'no'") == 1
    assert said.count('{"run": ') == 1
    assert said.count("tokenizer  ") == 1


@pytest.mark.long
@forked
@pytest.mark.parametrize("shard", ["none", "full"])
@pytest.mark.parametrize("accumulate", [1, 3, 4], ids=["rows", "rows of three", "dealt out"])
def test_one_two_and_four_ranks_agree(shard, accumulate, data, tmp_path, launch):
    step = {"batch": 4 if accumulate == 4 else 3, "accumulate": accumulate}
    folders = [tmp_path / str(ranks) for ranks in (1, 2, 4)]
    launch(*(job(data / "cats.txt", f, int(f.name), shard, **step) for f in folders))
    for folder in folders[1:]:
        same(folder, folders[0])


@pytest.mark.long
@forked
@pytest.mark.parametrize("model", [{"shared_layers": True}, {"tied": False}, {"position": "t5"}])
def test_models_of_other_kinds_agree(model, data, tmp_path, launch):
    over = {"model": {"dropout": 0.0, "layers": 2, **model}}
    jobs = [
        job(data / "cats.txt", tmp_path / f"{ranks}-{shard}", ranks, shard, over=over)
        for ranks, shard in ((1, "none"), (2, "none"), (2, "full"))
    ]
    launch(*jobs)
    for each in jobs[1:]:
        same(Path(each["folder"]), Path(jobs[0]["folder"]))


@pytest.mark.long
@forked
def test_a_sharded_run_saves_and_restores_the_buffers_of_its_model(data, tmp_path, launch):
    """The noise distribution of CBOW, which is counted once, before the first step."""
    alone, moved = tmp_path / "alone", tmp_path / "moved"
    words = ["train", str(data / "cats.txt"), "task=cbow", "model.preset=cbow", "model.dim=8"]
    words += ["data.tokenizer=char", "train.batch=4", "device=cpu", "train.shard=full"]
    results, _ = launch(
        {"words": [*words, "train.steps=1", "--out", str(alone)], "ranks": 1},
        {"words": [*words, "train.steps=2", "--out", str(moved)], "ranks": 3},
        {"words": ["resume", str(moved), "train.steps=4"], "ranks": 2},
    )
    assert [set(result["codes"]) for result in results] == [{0}, {0}, {0}]
    expected = read_tensors(alone / "model.safetensors")
    noise = expected["head.log_noise"]
    assert noise.std() > 0.1
    assert torch.equal(read_tensors(moved / "model.safetensors")["head.log_noise"], noise)
    saved = latest(moved / "checkpoints")
    assert saved.step == 4
    assert torch.equal(saved.tensors("model")["head.log_noise"], noise)
    regard.load(moved)


@pytest.mark.long
@forked
@pytest.mark.parametrize("shard", ["none", "full"])
def test_pairs_agree(shard, data, tmp_path, launch):
    folders = [tmp_path / str(ranks) for ranks in (1, 3)]
    launch(*(job(data / "pairs.tsv", f, int(f.name), shard) for f in folders))
    same(*folders)


@pytest.mark.long
@forked
@pytest.mark.parametrize("after", [(1, "none"), (2, "none"), (2, "full"), (8, "full")])
@pytest.mark.parametrize("before", ["none", "full"])
def test_saved_on_four_ranks_a_run_goes_on_with_any_number(before, after, data, tmp_path, launch):
    text, alone, moved = data / "cats.txt", tmp_path / "alone", tmp_path / "moved"
    ranks, shard = after
    results, _ = launch(
        job(text, alone, 1),
        job(text, moved, 4, before, event=[2, 3, "SIGTERM"]),
        job(text, moved, ranks, shard),
    )
    assert [set(result["codes"]) for result in results] == [{0}, {75}, {0}]
    same(moved, alone)


@pytest.mark.long
@forked
@pytest.mark.parametrize("shard", ["none", "full"])
def test_on_as_many_ranks_a_run_goes_on_bit_for_bit(shard, data, tmp_path, launch):
    text, whole, broken = data / "cats.txt", tmp_path / "whole", tmp_path / "broken"
    over = {"model": {"dropout": 0.1, "layers": 2}}
    launch(
        job(text, whole, 4, shard, over=over),
        job(text, broken, 4, shard, over=over, event=[0, 5, "SIGKILL"]),
        job(text, broken, 4, shard, over=over),
    )
    assert losses(broken) == losses(whole)
    for name in ("model.safetensors", "samples.txt"):
        assert (broken / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.long
@forked
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("signal", ["SIGKILL", "SIGSTOP"])
def test_when_one_of_four_ranks_is_lost_the_others_end(signal, victim, data, tmp_path, launch):
    ((result,), _) = launch(
        job(data / "cats.txt", tmp_path / "run", 4, event=[victim, 4, signal], timeout=8)
    )
    others = [code for rank, code in enumerate(result["codes"]) if rank != victim]
    assert all(code > 0 for code in others)
    assert max(result["seconds"]) < 40  # the timeout, and what beginning takes


@pytest.mark.long
@forked
@pytest.mark.parametrize("shard", ["none", "full"])
def test_a_loss_that_is_not_a_number_on_one_rank_is_skipped_by_all(shard, data, tmp_path, launch):
    folder = tmp_path / "run"
    ((result,), _) = launch(job(data / "cats.txt", folder, 2, shard, event=[1, 2, "NaN"]))
    assert result["codes"] == [0, 0]
    assert [row.get("skipped", False) for row in RunFolder(folder).rows() if "loss" in row] == [
        *(False, True, False, False, False, False)
    ]
    for tensor in read_tensors(folder / "model.safetensors").values():
        assert tensor.isfinite().all()


BATCHES = {
    "text": TextBatch(torch.arange(40).view(5, 8) % 11, torch.arange(40).view(5, 8) % 7 - 1),
    "pairs": PairBatch(
        Source(torch.arange(20).view(5, 4), torch.tensor([1, 2, 3, 4, 4])),
        torch.arange(15).view(5, 3),
        torch.arange(15).view(5, 3) % 4 - 1,
    ),
    "masked": MaskedBatch(
        ids=torch.arange(20).view(5, 4),
        documents=torch.ones(5, 4, dtype=torch.long),
        positions=torch.arange(4).expand(5, 4),
        masked_positions=torch.arange(10).view(5, 2) % 4,
        targets=torch.arange(10).view(5, 2),
        segments=torch.zeros(5, 4, dtype=torch.long),
        next_sentence_targets=torch.tensor([0, 1, 0, 1, 1]),
    ),
    "images": ImageBatch(torch.rand(5, 1, 2, 2), torch.arange(5)),
}


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("kind", BATCHES)
def test_every_row_is_one_rank_s_and_who_has_none_takes_part_without_counting(kind, size):
    batch = BATCHES[kind]
    shares = [Ranks(rank, size).shard_batch(batch) for rank in range(size)]
    scored = [share for share in shares if not isinstance(share, UnscoredRow)]
    rows = [share.row if isinstance(share, UnscoredRow) else share for share in shares]
    assert torch.equal(torch.cat([share.targets for share in scored]), batch.targets)
    sizes = [len(row.targets) for row in rows]
    assert min(sizes) == 1 if size >= 5 else max(sizes) - min(sizes) <= 1
    for row in rows:
        if kind == "pairs":
            assert len(row.source.ids) == len(row.source.lengths) == len(row.ids)
        if kind == "masked":
            assert len(row.next_sentence_targets) == len(row.targets)
    assert len(scored) == min(size, 5)


def test_the_losses_of_the_shares_add_up_to_that_of_the_batch():
    objective, batch = Objective(tiny(), Causal()), text_batch(5, unscored=0.3)
    shares = [Ranks(rank, 7).shard_batch(batch) for rank in range(7)]
    parts = [objective(share) for share in shares]
    torch.testing.assert_close(sum(parts), objective(batch), rtol=0, atol=1e-5)
    assert sum(int(objective.count(share)) for share in shares) == int(objective.count(batch))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_rank_without_rows_adds_no_loss_no_gradient_and_no_target(name):
    objective, batch = make_objective(name)
    row = Ranks(0, 8).shard_batch(batch)
    loss = objective(row)
    loss.backward()
    assert loss == 0
    assert objective.count(row) == 0
    assert all(p.grad is None or not p.grad.any() for p in objective.parameters())


@pytest.mark.parametrize(("size", "accumulate"), [(1, 3), (2, 4), (2, 3), (3, 3)])
def test_every_row_of_a_step_goes_to_one_rank(size, accumulate):
    batches = [text_batch(5, seed=number) for number in range(2 * accumulate)]
    taken = {}
    for rank in range(size):
        ranks = Ranks(rank, size)
        count = ranks.local_accumulate(accumulate)
        for step in range(2):
            numbers = range(step * count, (step + 1) * count)
            local = [ranks.local_batch(batches.__getitem__, accumulate, n) for n in numbers]
            rows = torch.cat([batch.targets for batch in local])
            taken.setdefault(step, []).extend(rows.tolist())
    for step, rows in taken.items():
        part = batches[step * accumulate : (step + 1) * accumulate]
        assert sorted(rows) == sorted(torch.cat([batch.targets for batch in part]).tolist())


@pytest.mark.parametrize("wrote", [1, 2, 3, 4])
@pytest.mark.parametrize("reads", [1, 2, 3, 8])
def test_any_number_of_ranks_reads_what_any_other_wrote(wrote, reads, tmp_path):
    whole = {
        "matrix": torch.randn(7, 3),
        "vector": torch.randn(5),
        "short": torch.randn(1, 2),
        "step": torch.tensor(4.0),
    }
    place = tmp_path / "step-1"
    place.mkdir()

    def rows(tensor, rank, ranks):  # as FSDP cuts
        parts = tensor.chunk(ranks) if tensor.dim() else [tensor] * ranks
        return parts[rank].clone() if rank < len(parts) else tensor[:0].clone()

    for rank in range(wrote):
        mine = {name: rows(tensor, rank, wrote) for name, tensor in whole.items()}
        save_file(mine, place / f"model-{rank}.safetensors")
    files = [f"model-{rank}.safetensors" for rank in range(wrote)]
    (place / "index.json").write_text(json.dumps({"model": files}))
    for rank in range(reads):
        found = of_step(tmp_path, 1).tensors("model", rank, reads)
        assert found.keys() == whole.keys()
        for name, tensor in whole.items():
            assert torch.equal(found[name], rows(tensor, rank, reads))


def test_a_restarted_launch_finds_the_folder_that_it_began(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    from regard.training.parallel.launch import launch_id as name

    for folder, owner in (("runs/a", "another"), ("runs/a-2", name())):
        Path(folder).mkdir(parents=True)
        Path(folder, "environment.json").write_text(json.dumps({"launch": owner}))
    assert new_folder("a") == Path("runs/a-3")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert new_folder("a") == Path("runs/a-2")
    assert re.fullmatch(rf"none .+ {os.getppid()}", name())


def test_a_restarted_launch_goes_back_to_a_step_once(data, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    list(run.begin(config(data / "cats.txt", keep_checkpoints=9), folder))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")

    def begins():
        events = run.resume(folder, step=6)
        at = next(events).step
        events.close()
        return at

    assert [begins(), begins()] == [6, 6]  # neither has gone back before it ended
    interrupt(monkeypatch, 10)
    with pytest.raises(Crash):
        list(run.resume(folder, step=6))
    assert begins() == 9
