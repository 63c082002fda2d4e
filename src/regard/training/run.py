"""A run from beginning to end: everything is wired here, once, in plain sight.

`begin` and `resume` are generators of events; whoever iterates shows them. Nothing is printed.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from signal import Signals
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from regard.config import RunConfig, TrainConfig, kind_of, merge, to_table
from regard.config import build as build_config
from regard.data.batch import Batch, TextBatch, pinned
from regard.data.loader import prefetch
from regard.data.sources import Images, Pairs
from regard.errors import CheckpointError, ConfigError, Stopped
from regard.generate import Beam, generate, parse_chain
from regard.models.base import Language
from regard.models.build import (
    build_model,
    count_parameters,
    describe,
    hollow,
    load_weights,
    resolve,
    weights,
)
from regard.tasks import Objective
from regard.tasks.masked import Masked
from regard.tasks.metrics import better
from regard.tasks.seq2seq import Seq2Seq
from regard.text import PairTokenizers, Tokenizer
from regard.training import checkpoint, evaluate, images, launch
from regard.training.average import Average
from regard.training.device import (
    autocast,
    captures,
    check_memory,
    compiles,
    environment,
    ready_device,
    recompute,
)
from regard.training.disk import check_room
from regard.training.distributed import Order, Ranks, give, joined, receive
from regard.training.events import Begun, Ended, Evaluated, Event
from regard.training.fault import fault
from regard.training.folder import Folder, ReadOnly
from regard.training.learner import learner_of, must_shard
from regard.training.log import Log
from regard.training.loop import train
from regard.training.material import Material, Progress
from regard.training.nonfinite import Skips, must_be_finite
from regard.training.optim import load_state_tensors, optimizers, state_tensors
from regard.training.prepare import load_tokenizers, prepare, tokenizer_fingerprint
from regard.training.schedule import schedule
from regard.training.signals import Interrupted, Interrupts
from regard.training.watch import check_watchers, watching

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Best:
    """The best evaluation so far, and how many came after it."""

    step: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    since: int = 0
    sha256: str | None = None  # of model.safetensors

    def sees(self, step: int, metrics: dict[str, float], name: str) -> bool:
        """Take in an evaluation; whether it is the best one by the metric of this name."""
        is_best = (
            name == "last" or self.step is None or better(name, metrics[name], self.metrics[name])
        )
        if is_best:
            self.step, self.metrics, self.since = step, metrics, 0
        else:
            self.since += 1
        return is_best


def begin(config: RunConfig, path: Path, progress: Progress | None = None) -> Iterator[Event]:
    """Train a new run in a folder that does not exist yet."""
    if launch.rank():
        yield from assist()
        return
    folder = Folder(path)
    if launch.attempt() and folder.is_of(launch.launch()):
        yield from resume(path, progress=progress)
        return
    folder.must_be_new()
    check_watchers(config.train.watch)
    tokenizers = None
    if config.train.start is not None:
        start = Folder(config.train.start)
        tokenizers = load_tokenizers(start.path, start.load_config())
    device = ready_device(config)
    if "preset" in config.model:  # refuse the impossible before the data is read
        least = resolve(config.model, vocab_size=1)
        check_memory(count_parameters(least), config.train, device)
    material = prepare(config, tokenizers, progress)
    config = replace(config, model=describe(material.model), task=material.choice)
    parameters = count_parameters(material.model)
    check_memory(parameters, config.train, device)
    _check_room(path, config, parameters)
    if config.train.recompute:
        recompute(hollow(material.model))  # what cannot be done leaves no folder behind
    if config.train.start is not None:
        # weights that do not fit leave no folder behind
        _start_from(config, hollow(material.model))
    facts = environment(device) | {
        "data": material.fingerprint,
        "tokenizer": tokenizer_fingerprint(material.tokenizers),
        "launch": launch.launch(),
    }
    folder.create(config, facts, material.tokenizers)
    with folder.locked():
        yield from _lead(config, material, folder, device, None)


def resume(
    path: Path,
    overrides: dict[str, Any] | None = None,
    *,
    step: int | None = None,
    progress: Progress | None = None,
) -> Iterator[Event]:
    """Go on with a run from its newest checkpoint (or that of `step`), bit for bit."""
    if launch.rank():
        yield from assist()
        return
    folder = Folder(path)
    before = folder.load_config()
    if before.data.path is None and before.data.source is None:
        raise ConfigError(
            f"{path} was not trained here, so there is nothing to go on with;\n"
            f"train it on your own data: regard train DATA train.start={path}"
        )
    config = build_config(RunConfig, merge(to_table(before), overrides or {}))
    _must_stay(before, config, path)
    with folder.locked():
        newest = checkpoint.latest(folder.checkpoints, None if launch.attempt() else step)
        try:
            _must_have_more(folder, config, newest)
        except ConfigError:
            if not launch.attempt():
                raise
            give(None)  # a rank died after the end
            yield Ended(path, config.train.steps, folder.kept_metrics(), 0.0)
            return
        if newest is not None:
            _must_be_as_saved(folder, config, newest)
        material = prepare(config, load_tokenizers(folder.path, config), progress)
        folder.must_have(tokenizer_fingerprint(material.tokenizers))
        folder.must_be_of(material.fingerprint)
        _check_room(path, config, count_parameters(material.model))
        yield from _lead(config, material, folder, ready_device(config), newest)


def _lead(
    config: RunConfig,
    material: Material,
    folder: Folder,
    device: torch.device,
    newest: checkpoint.Checkpoint | None,
) -> Iterator[Event]:
    """Train alone, or as rank 0 of several, which are told what to do."""
    order = Order(
        folder=str(folder.path),
        config=to_table(config),
        step=None if newest is None else newest.step,
        shard=must_shard(count_parameters(material.model), config.train, device),
        device=device.type,
        timeout=config.train.timeout,
    )
    with watching(folder, config, order.step or 0), joined(order, give(order)) as ranks:
        ranks.together(lambda: None)  # the others make their material ready
        yield from _run(config, material, folder, device, newest, ranks, shard=order.shard)


def assist() -> Iterator[Event]:
    """Train as another rank than 0: do what that one says, when it has prepared the data."""
    order, store = receive()
    if order is None:
        return
    config, folder = build_config(RunConfig, order.config), ReadOnly(order.folder)
    with joined(order, store) as ranks:
        device, material = ranks.together(
            lambda: (ready_device(config), prepare(config, load_tokenizers(folder.path, config)))
        )
        newest = None
        if order.step is not None:
            newest = checkpoint.of_step(folder.checkpoints, order.step)
        yield from _run(config, material, folder, device, newest, ranks, shard=order.shard)


def _must_stay(before: RunConfig, after: RunConfig, path: Path) -> None:
    """Refuse to change what the weights and the optimizer's memory depend on."""
    new = _lasting(after)
    for key, old in _lasting(before).items():
        if old != new[key]:
            raise ConfigError(
                f"{key} cannot change when a run goes on;\n"
                f"begin a new one, with train.start={path} to begin from these weights"
            )


def _must_be_as_saved(folder: Folder, config: RunConfig, newest: checkpoint.Checkpoint) -> None:
    """Refuse a config.json that was edited in what the checkpoint depends on."""
    saved, now = newest.state()["config"], _lasting(config)
    if not isinstance(saved, dict):  # an older checkpoint: a hash of all settings
        return
    for key, value in saved.items():
        if value != now[key]:
            raise CheckpointError(
                f"{key} in {folder.config} is not what the checkpoint of step {newest.step:,} was "
                f"trained with\nput it back, or begin a new run with train.start={folder.path}"
            )


def _lasting(config: RunConfig) -> dict[str, Any]:
    """What stays as it is for as long as a run lasts, as JSON has it."""
    table: dict[str, Any] = to_table(
        {
            "task": kind_of(config.task)[0],
            "model": config.model,
            "data.tokenizer": config.data.tokenizer,
            "train.optimizer": kind_of(config.train.optimizer)[0],
            "train.seed": config.train.seed,
            "train.start": config.train.start,
        }
    )
    return table


def _must_have_more(
    folder: Folder, config: RunConfig, newest: checkpoint.Checkpoint | None
) -> None:
    """Refuse to go on with a run that has come to its end."""
    steps, patience = config.train.steps, config.train.patience
    if newest is None:
        if config.model["family"] == "ngram" and folder.model.exists():
            raise ConfigError(f"{folder.path} has counted all of its data; there is no more to do")
        return
    if newest.step >= steps:
        raise ConfigError(
            f"{folder.path} is at step {newest.step:,} already, and train.steps={steps};\n"
            f"to train on, say for how long: train.steps={2 * newest.step}"
        )
    since = newest.state()["best"]["since"]
    if patience is not None and since >= patience:
        raise ConfigError(
            f"{folder.path} stopped early at step {newest.step:,}: {since} evaluations in a row "
            f"were no better\nto train on, raise train.patience (now {patience}) or give "
            "train.patience=none"
        )


def _rhythm(settings: TrainConfig) -> tuple[int, int]:
    """After how many steps each to evaluate and to save."""
    every = settings.evaluate_every or -(-settings.steps // 10)
    return every, settings.save_every or every


def _check_room(path: Path, config: RunConfig, parameters: int) -> None:
    """Refuse a run that would fill the disk: with the newest checkpoints, the best and the next."""
    settings = config.train
    saves = -(-settings.steps // _rhythm(settings)[1])
    checkpoints = min(settings.keep + 2, saves)
    check_room(path, parameters, checkpoints=checkpoints, averaged=settings.average > 0)


def _run(
    config: RunConfig,
    material: Material,
    folder: Folder,
    device: torch.device,
    newest: checkpoint.Checkpoint | None,
    ranks: Ranks,
    *,
    shard: bool,
) -> Iterator[Event]:
    settings = config.train
    torch.manual_seed(settings.seed)
    model = build_model(material.model)
    device = torch.device("cpu") if hasattr(model, "fit") else device  # counting is in float64
    parameters = sum(p.numel() for p in model.parameters())
    start = 0 if newest is None else newest.step
    yield Begun(folder.path, config, material.description, parameters, start)
    if settings.start is not None and newest is None:
        _start_from(config, model)
    if hasattr(model, "fit"):
        if ranks.first:
            yield from _fit(model, material, folder, device)
        return

    if settings.recompute:
        recompute(model)
    objective = Objective(model, material.task)
    cast_up = autocast(settings, device)
    learner = learner_of(
        objective, ranks, device, material.batch, shard=shard, half=cast_up is not nullcontext
    )
    all_optimizers = optimizers(settings.optimizer, learner.own, settings.rate)
    learner.equip(all_optimizers)
    average = Average(learner.own, settings.average)
    best = _Best()
    owed = False  # whether the evaluation after the last step is still to be made
    if newest is not None:
        learner.load(newest.tensors("model", *learner.cut), str(newest.path))
        remembered = newest.tensors("optimizer", *learner.cut)
        load_state_tensors(learner.own, all_optimizers, remembered)
        average.load(newest.tensors("average", *learner.cut))
        state = newest.state()
        owed = state.get("owed", False)
        ranks.most(0)  # all have read what may be removed now
        if ranks.first:
            best = _Best(**state["best"])
            checkpoint.drop_after(folder.checkpoints, start)
            folder.cut_back(state["sizes"])
            best = _restored(best, folder)
        best = _Best(**ranks.tell(asdict(best)))
    else:
        folder.cut_back(dict.fromkeys(folder.sizes(), 0))
    folder.save_config(config)  # only now is it known to fit

    factor = schedule(settings.schedule, settings.steps)
    if compiles(settings, device):
        learner.compile()
    every, save_every = _rhythm(settings)
    cuda = device.type == "cuda"
    # Micro-batches are dealt out whole if that is fair; else each rank takes its rows of all.
    deal = ranks.size if settings.accumulate % ranks.size == 0 else 1
    accumulate = settings.accumulate // deal

    def batch_of(number: int) -> Batch:
        batch = material.batch(number * deal + ranks.rank % deal)
        batch = batch if deal == ranks.size else ranks.share(batch)
        return pinned(batch) if cuda else batch

    batches = prefetch(batch_of, start * accumulate, settings.steps * accumulate)
    steps = train(
        objective,
        (batch.to(device) for batch in batches),
        all_optimizers,
        lambda number: settings.rate * factor(number),
        accumulate=accumulate,
        clip=settings.clip,
        seed=settings.seed,
        start=start,
        autocast=cast_up,
        learner=learner,
        capture=captures(settings, device) and ranks.size == 1,
    )
    log = Log(folder, settings.steps, Skips(folder, material.samples, settings.accumulate))
    began = time.perf_counter()
    early = False

    def save(step: int) -> None:
        tensors = {
            "model": learner.part(),
            "optimizer": dict(state_tensors(learner.own, all_optimizers)),
            "average": average.tensors(),
        }
        state = {
            "best": asdict(best),
            "sizes": folder.sizes(),
            "config": _lasting(config),
            "data": material.fingerprint,
            "owed": owed,
        }
        ranks.together(partial(must_be_finite, folder, step, *tensors.values()))
        if shard:
            checkpoint.save(folder.checkpoints, step, tensors, state, ranks)
        elif ranks.first:
            checkpoint.save(folder.checkpoints, step, tensors, state)
        if ranks.first:
            checkpoint.prune(folder.checkpoints, settings.keep, best.step)
        logger.info("saved step %d", step)
        ranks.most(0)  # nobody ends before all is saved

    def judge(step: int, *, hasty: bool) -> Iterator[Event]:
        """Evaluate after a step, or owe it when a signal comes and saving is more urgent."""
        nonlocal owed, early

        def judged(model: nn.Module) -> tuple[dict[str, float], str] | None:
            try:
                with interrupts.hasty() if hasty else nullcontext():
                    metrics = evaluate.losses(material, model, device, settings.evaluate_tokens)
                    return metrics, _sample(material, model, settings.seed)
            except Interrupted:
                return None

        kept = (learner.part(), average.tensors())
        ranks.together(partial(must_be_finite, folder, step, *kept))
        with average.applied(), cast_up():
            found: tuple[dict[str, float], str] | None = ranks.tell(learner.look(judged))
            owed = found is None
            if found is None:
                return
            metrics, sample = found
            is_best = best.sees(step, metrics, settings.best)
            if is_best:
                best_weights = learner.whole()
                if ranks.first:
                    checkpoint.write_tensors(folder.model, best_weights)
                    best.sha256 = checkpoint.sha256(folder.model)
        folder.append({"step": step, "validation": metrics})
        fault("log")
        folder.add_sample(step, sample)
        yield Evaluated(step, metrics, is_best, sample)
        early = settings.patience is not None and best.since >= settings.patience

    done = start
    with Interrupts() as interrupts:
        if owed:
            yield from judge(start, hasty=False)
        for step in () if early else steps:
            done = step.number + 1
            average.update(step.number)
            event = log.add(step, now=done == settings.steps or done % every == 0)
            if event is not None:
                logger.info("step %d, loss %.6g", event.step, event.loss)
                yield event
            if done % every == 0 or done == settings.steps:
                # of shards, all ranks evaluate, and must do it to the end
                yield from judge(done, hasty=done < settings.steps and not shard)
            stopping = ranks.most(interrupts.received or 0)
            if done % save_every == 0 or done == settings.steps or stopping or early:
                log.flush()
                save(done)
            if stopping and done < settings.steps:
                interrupts.received = Signals(stopping)  # whichever rank it was sent to
                raise Stopped(
                    f"stopped by {interrupts.received.name} at step {done:,} of "
                    f"{settings.steps:,}, and saved;\ngo on with: regard resume {folder.path}",
                    interrupts.exit_code,
                )
            if early:
                break
    yield Ended(folder.path, done, best.metrics, time.perf_counter() - began, early)


def _restored(best: _Best, folder: Folder) -> _Best:
    """The best at a checkpoint, though model.safetensors may be of a step after it.

    Then it is taken from its own checkpoint; without one, the next to be judged is the best.
    """
    if folder.model.exists() and checkpoint.sha256(folder.model) == best.sha256:
        return best
    kept = checkpoint.whole(folder.checkpoints, best.step)
    if kept is None:
        return _Best()
    tensors = {**kept.tensors("model"), **kept.tensors("average")}
    checkpoint.write_tensors(folder.model, tensors)
    return best


def _fit(
    model: nn.Module, material: Material, folder: Folder, device: torch.device
) -> Iterator[Event]:
    """Models that count need no steps: look at everything once, judge, save."""
    began = time.perf_counter()
    folder.cut_back(dict.fromkeys(folder.sizes(), 0))
    cast(Any, model).fit(material.train_in_order())
    metrics = evaluate.losses(material, model, device)
    sample = _sample(material, model, 1)
    folder.append({"step": 1, "validation": metrics})
    folder.add_sample(1, sample)
    checkpoint.write_tensors(folder.model, weights(model))  # last: where it is, all is done
    yield Evaluated(1, metrics, True, sample)
    yield Ended(folder.path, 1, metrics, time.perf_counter() - began)


def _start_from(config: RunConfig, model: nn.Module) -> None:
    """Begin with the weights that another run ended with; a head for something else is new."""
    start = Folder(cast(str, config.train.start))
    tensors = start.kept_weights()
    if _goal(start.load_config()) != _goal(config):
        own = {name: each for name, each in weights(model).items() if name.startswith("head.")}
        kept = {name: each for name, each in tensors.items() if not name.startswith("head.")}
        tensors = kept | own
    load_weights(model, tensors, str(start.model))


def _goal(config: RunConfig) -> tuple[Any, Any]:
    """What the head of a run reads off, and the names of its classes."""
    return config.model.get("head"), kind_of(config.task)[1].get("names")


def _sample(material: Material, model: nn.Module, seed: int) -> str:
    """A little of what the model does now: text, a translation, blanks filled in, classes."""
    model.eval()
    language = cast(Language, model)
    data, tokenizers = material.held_out_data, material.tokenizers
    if isinstance(data, Images):
        return images.sample(material, model)
    if isinstance(data, Pairs) and isinstance(tokenizers, PairTokenizers):
        source, target = next(data.rows())
        assert isinstance(material.task, Seq2Seq)
        found = evaluate.translate(model, material.task, tokenizers, [source], search=Beam(1))
        return f"{source}\n→ {next(found)[1]}\n= {target}"
    if isinstance(material.task, Masked):
        return material.task.sample(model, material.held_out(material.model.context))
    assert isinstance(tokenizers, Tokenizer)
    batch = cast(TextBatch, next(iter(material.held_out(1))))
    first = np.asarray(batch.ids)[0, :1].tolist()
    chain = parse_chain(["temperature=0.8", "top_p=0.95"])
    (ids,) = generate(language, [first], chain, tokens=160, seed=seed)
    return tokenizers.decode(first + ids)
