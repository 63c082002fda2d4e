"""A run from beginning to end: everything is wired here, once, in plain sight.

`begin` and `resume` are generators of events; whoever iterates shows them. Nothing is printed.
"""

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from regard.config import RunConfig, kind_of, merge, to_table
from regard.config import build as build_config
from regard.data.batch import TextBatch, pinned
from regard.data.loader import prefetch
from regard.data.sources import Images, Pairs
from regard.errors import ConfigError, Stopped
from regard.generate import generate, parse_chain
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
from regard.training import checkpoint, evaluate, images
from regard.training.average import Average
from regard.training.device import autocast, check_memory, compiles, environment, pick_device
from regard.training.events import Begun, Ended, Evaluated, Event
from regard.training.folder import Folder
from regard.training.log import Log
from regard.training.loop import train
from regard.training.material import Material, Progress
from regard.training.optim import load_state_tensors, optimizers, state_tensors
from regard.training.prepare import load_tokenizers, prepare, tokenizer_fingerprint
from regard.training.schedule import schedule
from regard.training.signals import Interrupts


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
    folder = Folder(path)
    folder.must_be_new()
    tokenizers = None
    if config.train.start is not None:
        start = Folder(config.train.start)
        tokenizers = load_tokenizers(start.path, start.load_config())
    device = pick_device(config.device)
    if "preset" in config.model:  # refuse the impossible before the data is read
        least = resolve(config.model, vocab_size=1)
        check_memory(count_parameters(least), config.train, device)
    material = prepare(config, tokenizers, progress)
    config = replace(config, model=describe(material.model), task=material.choice)
    parameters = count_parameters(material.model)
    check_memory(parameters, config.train, device)
    checkpoint.check_room(path, parameters, averaged=config.train.average > 0)
    if config.train.start is not None:
        # weights that do not fit leave no folder behind
        _start_from(config, hollow(material.model))
    facts = environment(device) | {
        "data": material.fingerprint,
        "tokenizer": tokenizer_fingerprint(material.tokenizers),
    }
    folder.create(config, facts, material.tokenizers)
    with folder.locked():
        yield from _run(config, material, folder, device, None)


def resume(
    path: Path,
    overrides: dict[str, Any] | None = None,
    *,
    step: int | None = None,
    progress: Progress | None = None,
) -> Iterator[Event]:
    """Go on with a run from its newest checkpoint (or that of `step`), bit for bit."""
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
        newest = checkpoint.latest(folder.checkpoints, step)
        _must_have_more(folder, config, newest)
        material = prepare(config, load_tokenizers(folder.path, config), progress)
        folder.must_have(tokenizer_fingerprint(material.tokenizers))
        folder.must_be_of(material.fingerprint)
        yield from _run(config, material, folder, pick_device(config.device), newest)


def _must_stay(before: RunConfig, after: RunConfig, path: Path) -> None:
    """Refuse to change what the weights and the optimizer's memory depend on."""
    for key, old, new in (
        ("task", kind_of(before.task)[0], kind_of(after.task)[0]),
        ("model", before.model, after.model),
        ("data.tokenizer", before.data.tokenizer, after.data.tokenizer),
        ("train.optimizer", kind_of(before.train.optimizer)[0], kind_of(after.train.optimizer)[0]),
        ("train.seed", before.train.seed, after.train.seed),
        ("train.start", before.train.start, after.train.start),
    ):
        if old != new:
            raise ConfigError(
                f"{key} cannot change when a run goes on;\n"
                f"begin a new one, with train.start={path} to begin from these weights"
            )


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


def _run(
    config: RunConfig,
    material: Material,
    folder: Folder,
    device: torch.device,
    newest: checkpoint.Checkpoint | None,
) -> Iterator[Event]:
    settings = config.train
    torch.manual_seed(settings.seed)
    model = build_model(material.model)
    device = torch.device("cpu") if hasattr(model, "fit") else device  # counting is in float64
    model = model.to(device)
    parameters = sum(p.numel() for p in model.parameters())
    start = 0 if newest is None else newest.step
    yield Begun(folder.path, config, material.description, parameters, start)
    if settings.start is not None and newest is None:
        _start_from(config, model)
    if hasattr(model, "fit"):
        yield from _fit(model, material, folder, device)
        return

    objective = Objective(model, material.task)
    all_optimizers = optimizers(settings.optimizer, model, settings.rate)
    average = Average(model, settings.average)
    best = _Best()
    if newest is not None:
        load_weights(model, newest.tensors("model"), str(newest.path))
        load_state_tensors(model, all_optimizers, newest.tensors("optimizer"))
        average.load(newest.tensors("average"))
        state = newest.state()
        best = _Best(**state["best"])
        checkpoint.drop_after(folder.checkpoints, start)
        folder.cut_back(state["sizes"])
        best = _restored(best, folder)
    else:
        folder.cut_back(dict.fromkeys(folder.sizes(), 0))
    folder.save_config(config)  # only now is it known to fit

    factor = schedule(settings.schedule, settings.steps)
    cast_up = autocast(settings, device)
    loss = torch.compile(objective, dynamic=False) if compiles(settings, device) else None
    every = settings.evaluate_every or -(-settings.steps // 10)
    save_every = settings.save_every or every
    cuda = device.type == "cuda"
    batches = prefetch(
        lambda number: pinned(material.batch(number)) if cuda else material.batch(number),
        start * settings.accumulate,
        settings.steps * settings.accumulate,
    )
    steps = train(
        objective,
        (batch.to(device) for batch in batches),
        all_optimizers,
        lambda number: settings.rate * factor(number),
        accumulate=settings.accumulate,
        clip=settings.clip,
        seed=settings.seed,
        start=start,
        loss=loss,
        autocast=cast_up,
    )
    log = Log(folder, settings.steps)
    began = time.perf_counter()
    early = False

    def save(step: int) -> None:
        checkpoint.save(
            folder.checkpoints,
            step,
            {
                "model": weights(model),
                "optimizer": dict(state_tensors(model, all_optimizers)),
                "average": average.tensors(),
            },
            {
                "best": asdict(best),
                "sizes": folder.sizes(),
                "config": _hash(to_table(config)),
                "data": material.fingerprint,
            },
        )
        checkpoint.prune(folder.checkpoints, settings.keep, best.step)

    done = start
    with Interrupts() as interrupts:
        for step in steps:
            done = step.number + 1
            average.update(step.number)
            event = log.add(step, now=done == settings.steps or done % every == 0)
            if event is not None:
                yield event
            if done % every == 0 or done == settings.steps:
                with average.applied(), cast_up():
                    metrics = evaluate.losses(material, model, device, settings.evaluate_tokens)
                    sample = _sample(material, model, settings.seed)
                    is_best = best.sees(done, metrics, settings.best)
                    if is_best:
                        checkpoint.write_tensors(folder.model, weights(model))
                        best.sha256 = checkpoint.sha256(folder.model)
                folder.append({"step": done, "validation": metrics})
                folder.add_sample(done, sample)
                yield Evaluated(done, metrics, is_best, sample)
                early = settings.patience is not None and best.since >= settings.patience
            stopping = interrupts.received is not None
            if done % save_every == 0 or done == settings.steps or stopping or early:
                log.flush()
                save(done)
            if stopping and done < settings.steps:
                name = interrupts.received.name if interrupts.received is not None else ""
                raise Stopped(
                    f"stopped by {name} at step {done:,} of {settings.steps:,}, and saved;\n"
                    f"go on with: regard resume {folder.path}",
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
    tensors = checkpoint.read_tensors(start.model)
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
        found = evaluate.translate(model, material.task, tokenizers, [source], width=1)
        return f"{source}\n→ {next(found)[1]}\n= {target}"
    if isinstance(material.task, Masked):
        return material.task.sample(model, material.held_out(material.model.context))
    assert isinstance(tokenizers, Tokenizer)
    batch = cast(TextBatch, next(iter(material.held_out(1))))
    first = np.asarray(batch.ids)[0, :1].tolist()
    chain = parse_chain(["temperature=0.8", "top_p=0.95"])
    (ids,) = generate(language, [first], chain, tokens=160, seed=seed)
    return tokenizers.decode(first + ids)


def _hash(table: Any) -> str:
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()
