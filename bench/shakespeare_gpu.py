"""Tiny Shakespeare by characters on one GPU, beside nanoGPT, in one run: time to a loss of 1.4697.

    python bench/shakespeare_gpu.py --nanogpt DIR --text input.txt [--ours KEY=VALUE …] …

DIR is a checkout of nanoGPT. Its model and optimizer are used as they are, in the setting of its
`config/train_shakespeare_char.py` (6 layers, 6 heads, 384 wide, context 256, batch 64, dropout
0.2, rate 1e-3 with a cosine to 1e-4, 5,000 steps), for which its README gives 1.4697. Ours has
the same size, the same text and the same split, the last tenth held out, and a recipe of its own:
`OURS` below. Each `--ours` is one more run of ours with these words laid over that recipe.

Both are compiled and autocast to bfloat16 on a GPU, and take turns of `--every` steps. The clock
runs in training only: starting up (building, compiling) and judging are told apart. Both are
judged in the same way, by the whole held-out text in blocks of the context, one after the other.
"""

import argparse
import importlib.util
import math
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.config import parse_overrides
from regard.data.batch import pin_memory
from regard.data.loader import prefetch
from regard.models.build import build_model
from regard.pipelines import prepare_training, validation_metrics
from regard.tasks import Objective
from regard.training.loop import train
from regard.training.optim import EMA, optimizers, schedule
from regard.training.parallel.strategy import SingleProcess
from regard.training.setup.configure import configure

GOAL = 1.4697
OURS = [
    "model.preset=tiny-decoder",
    "model.dropout=0.2",
    "train.optimizer=muon",
    "train.lr=3e-3",
    "train.ema=0.99",
    'train.schedule={kind="linear",warmup=30}',
    "data.tokenizer=char",
]


class Racer:
    """One of those who train, a few steps at a time, each on a clock of its own."""

    name: str
    total: int  # steps in all
    device: torch.device

    def __init__(self) -> None:
        self.done = 0
        self.training = self.judging = self.starting = 0.0  # seconds
        self.best = (math.inf, 0)  # loss and step
        self.reached: tuple[float, int] | None = None  # seconds and step

    def step(self) -> None:
        raise NotImplementedError

    def loss(self) -> float:
        """Nats per character over the whole held-out text."""
        raise NotImplementedError

    def autocast(self) -> AbstractContextManager[Any]:
        cuda = self.device.type == "cuda"
        return torch.autocast("cuda", torch.bfloat16) if cuda else nullcontext()

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def turn(self, steps: int) -> None:
        """Take some steps, then look how good it has become."""
        began = self.now()
        for _ in range(min(steps, self.total - self.done)):
            self.step()
            self.done += 1
        ended = self.now()
        loss = self.loss()
        self.training += ended - began
        self.judging += self.now() - ended
        self.best = min(self.best, (loss, self.done))
        if loss <= GOAL and self.reached is None:
            self.reached = self.training, self.done
        print(f"{self.name}: {self.done} {self.training:.2f} s {loss:.4f}", file=sys.stderr)


class Regard(Racer):
    """A run of ours, with the loop that `regard train` has."""

    def __init__(self, name: str, text: str, device: torch.device, words: list[str]) -> None:
        super().__init__()
        began = time.perf_counter()
        self.name, self.device = name, device
        config = configure(text, parse_overrides([*words, f"device={device.type}"]))
        self.material = prepare_training(config)
        settings = config.train
        torch.manual_seed(settings.seed)
        self.model = build_model(self.material.model).to(device)
        objective = Objective(self.model, self.material.task).train()
        strategy = SingleProcess(objective)
        if device.type == "cuda":
            strategy.compile()
        self.total = settings.steps
        with self.autocast():  # compile; the gradient is thrown away
            strategy.loss(self.material.batch(0).to(device)).backward()
        objective.zero_grad(set_to_none=True)
        self.ema = EMA(self.model, settings.ema)
        factor = schedule(settings.schedule, self.total)
        self.steps = train(
            objective,
            self._batches(),
            optimizers(settings.optimizer, self.model, settings.lr),
            lambda step: settings.lr * factor(step),
            clip=settings.clip,
            seed=settings.seed,
            autocast=self.autocast,
            strategy=strategy,
            capture=device.type == "cuda",
        )
        self.starting = self.now() - began

    def _batches(self) -> Iterator[Any]:
        cuda, batch = self.device.type == "cuda", self.material.batch
        ready = prefetch(lambda n: pin_memory(batch(n)) if cuda else batch(n), 0, self.total)
        return (each.to(self.device) for each in ready)

    def step(self) -> None:
        self.ema.update(next(self.steps).number)

    def loss(self) -> float:
        with self.ema.average_parameters(), self.autocast():
            return validation_metrics(self.material, self.model, self.device)["loss"]


class NanoGPT(Racer):
    """nanoGPT's model, optimizer, batches and schedule, stepped as its train.py does."""

    name = "nanoGPT"

    def __init__(self, folder: str, text: str, given: argparse.Namespace) -> None:
        super().__init__()
        began = time.perf_counter()
        self.device = torch.device(given.device)
        self.total, self.context, self.rows = given.steps, given.context, given.batch
        spec = importlib.util.spec_from_file_location("nanogpt_model", Path(folder, "model.py"))
        module = importlib.util.module_from_spec(spec)
        sys.modules["nanogpt_model"] = module
        spec.loader.exec_module(module)
        torch.manual_seed(1337)
        self.chance = torch.Generator().manual_seed(1337)  # our loop seeds the one of all
        letters = Path(text).read_text()
        table = {letter: i for i, letter in enumerate(sorted(set(letters)))}
        ids = torch.tensor([table[letter] for letter in letters])
        cut = int(0.9 * len(ids))
        self.train_ids, self.held_ids = ids[:cut].numpy().astype(np.uint16), ids[cut:]
        config = module.GPTConfig(
            block_size=given.context,
            vocab_size=len(table),
            n_layer=given.layers,
            n_head=given.heads,
            n_embd=given.dim,
            dropout=0.2,
            bias=False,
        )
        self.model = module.GPT(config).to(self.device)
        cuda = self.device.type == "cuda"
        self.compiled = torch.compile(self.model) if cuda else self.model
        self.optimizer = self.model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), self.device.type)
        self.next = self.batch()
        with self.autocast():
            self.compiled(*self.next)[1].backward()
        self.optimizer.zero_grad(set_to_none=True)
        self.starting = self.now() - began

    def batch(self) -> tuple[Tensor, Tensor]:
        starts = torch.randint(
            len(self.train_ids) - self.context, (self.rows,), generator=self.chance
        )
        x, y = (
            torch.stack(
                [
                    torch.from_numpy(self.train_ids[i + o : i + o + self.context].astype(np.int64))
                    for i in starts
                ]
            )
            for o in (0, 1)
        )
        if self.device.type != "cuda":
            return x, y
        return tuple(each.pin_memory().to(self.device, non_blocking=True) for each in (x, y))

    def rate(self) -> float:
        if self.done < 100:
            return 1e-3 * (self.done + 1) / 101
        share = (self.done - 100) / max(1, self.total - 100)
        return 1e-4 + 0.5 * (1 + math.cos(math.pi * share)) * (1e-3 - 1e-4)

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
        with self.autocast():
            _, loss = self.compiled(*self.next)
        self.next = self.batch()  # while the GPU is at work
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def loss(self) -> float:
        self.model.eval()
        total = 0.0
        for start in range(0, len(self.held_ids) - 1, 64 * self.context):
            part = self.held_ids[start : start + 64 * self.context + 1].to(self.device)
            for x, y in _rows(part[:-1], part[1:], self.context):
                with self.autocast():
                    total += float(self.model(x, y)[1]) * y.numel()
        self.model.train()
        return total / (len(self.held_ids) - 1)


def _rows(x: Tensor, y: Tensor, context: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Whole blocks together, and what is left over by itself."""
    whole = len(x) // context * context
    if whole:
        yield x[:whole].view(-1, context), y[:whole].view(-1, context)
    if whole < len(x):
        yield x[whole:].unsqueeze(0), y[whole:].unsqueeze(0)


def table(racers: list[Racer], batch: int, context: int) -> None:
    width = max(len(racer.name) for racer in racers)
    columns = f"  steps  training  tokens/s  best loss  at step  reached {GOAL}   start  judging"
    print(" " * width + columns)
    for racer in racers:
        speed = racer.done * batch * context / racer.training
        reached = "never" if racer.reached is None else "{:.2f} s, {}".format(*racer.reached)
        print(
            f"{racer.name:{width}} {racer.done:6} {racer.training:8.2f}s {speed:9,.0f}"
            f" {racer.best[0]:10.4f} {racer.best[1]:8} {reached:>15}"
            f" {racer.starting:6.1f}s {racer.judging:7.1f}s"
        )


def compare(ours: list[Racer], nano: Racer) -> None:
    """Our time to the goal as a share of nanoGPT's."""
    if nano.reached is None:
        print(f"nanoGPT did not reach {GOAL}; its {nano.done} steps stand for that time")
    theirs = nano.training if nano.reached is None else nano.reached[0]
    for racer in ours:
        if racer.reached is not None:
            share = racer.reached[0] / theirs
            print(f"{racer.name}: {GOAL} in {share:.3f} of nanoGPT's time ({theirs:.2f} s)")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nanogpt", help="without it, ours runs alone")
    parser.add_argument("--text", required=True)
    parser.add_argument("--ours", nargs="*", action="append", help="key=value over our recipe")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=5000, help="of nanoGPT; ours takes 0.3 of it")
    parser.add_argument("--every", type=int, default=50, help="steps between two looks")
    for name, value in (("layers", 6), ("heads", 6), ("dim", 384), ("context", 256), ("batch", 64)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    sizes = [
        f"model.{name}={getattr(given, name)}" for name in ("layers", "heads", "dim", "context")
    ]
    recipe = [*OURS, *sizes, f"train.batch={given.batch}", f"train.steps={3 * given.steps // 10}"]
    device = torch.device(given.device)
    ours: list[Racer] = [
        Regard(" ".join(["regard", *words]), given.text, device, [*recipe, *words])
        for words in given.ours or [[]]
    ]
    nano = NanoGPT(given.nanogpt, given.text, given) if given.nanogpt else None
    racers = ours if nano is None else [*ours, nano]
    while any(racer.done < racer.total for racer in racers):
        for racer in racers:
            if racer.done < racer.total:
                racer.turn(given.every)
    table(racers, given.batch, given.context)
    if nano is not None:
        compare(ours, nano)


if __name__ == "__main__":
    main()
