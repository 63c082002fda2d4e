"""Character-level Tiny Shakespeare on one GPU: time to a loss of 1.4697, compared with nanoGPT.

    python bench/shakespeare_gpu.py --nanogpt DIR --text input.txt [--ours KEY=VALUE …] …
    python bench/shakespeare_gpu.py … --until-target --ours train.seed=1 --ours train.seed=2 …

DIR is a checkout of nanoGPT. Its model and optimizer are used unchanged, with the settings of its
`config/train_shakespeare_char.py` (6 layers, 6 heads, dim 384, context 256, batch 64, dropout 0.2,
learning rate 1e-3 with cosine decay to 1e-4, 5,000 steps), for which its README reports 1.4697.
regard has the same model size, text and split (the last tenth is for validation), and its own
training settings, `OURS`. Each `--ours` adds a run of regard with these settings overridden.

Both are compiled, use bfloat16 autocast on a GPU, and run alternately, `--every` steps at a time.
Training, startup (building, compiling) and evaluation are timed separately. Both are evaluated on
the whole validation text in consecutive blocks of the context.
"""

import argparse
import importlib.util
import math
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
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
from regard.training.loop import Objective, SingleProcess, train
from regard.training.optim import EMA, optimizers, schedule
from regard.training.setup.configure import configure

TARGET_LOSS = 1.4697
OURS = [
    "model.preset=tiny-decoder",
    "model.dropout=0.2",
    "train.optimizer=muon",
    "train.lr=2e-3",
    "train.ema=0.99",
    'train.schedule={kind="linear",warmup=30}',
    "data.tokenizer=char",
]


class TimedRun:
    """A training run that is advanced a few steps at a time and measures its own time."""

    name: str
    total: int  # number of steps
    device: torch.device

    def __init__(self) -> None:
        self.done = 0
        self.training = self.evaluation = self.startup = 0.0  # seconds
        self.best = (math.inf, 0)  # loss and step
        self.reached: tuple[float, int] | None = None  # seconds and step

    def step(self) -> None:
        raise NotImplementedError

    def loss(self) -> float:
        """Nats per character over the whole validation text."""
        raise NotImplementedError

    def autocast(self) -> AbstractContextManager[Any]:
        cuda = self.device.type == "cuda"
        return torch.autocast("cuda", torch.bfloat16) if cuda else nullcontext()

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def run_turn(self, steps: int) -> None:
        """Run some steps, then evaluate."""
        start = self.now()
        for _ in range(min(steps, self.total - self.done)):
            self.step()
            self.done += 1
        end = self.now()
        loss = self.loss()
        self.training += end - start
        self.evaluation += self.now() - end
        self.best = min(self.best, (loss, self.done))
        if loss <= TARGET_LOSS and self.reached is None:
            self.reached = self.training, self.done
        print(f"{self.name}: {self.done} {self.training:.2f} s {loss:.4f}", file=sys.stderr)


class Regard(TimedRun):
    """A run of regard with the training loop of `regard train`."""

    def __init__(self, name: str, text: str, device: torch.device, overrides: list[str]) -> None:
        super().__init__()
        start = time.perf_counter()
        self.name, self.device = name, device
        config = configure(text, parse_overrides([*overrides, f"device={device.type}"]))
        # consecutive blocks, as for nanoGPT
        train_settings = replace(config.train, evaluate_stride=config.model["context"])
        self.data = prepare_training(replace(config, train=train_settings))
        settings = config.train
        torch.manual_seed(settings.seed)
        self.model = build_model(self.data.model).to(device)
        objective = Objective(self.model, self.data.task).train()
        strategy = SingleProcess(objective)
        if device.type == "cuda":
            strategy.compile()
        self.total = settings.steps
        with self.autocast():  # compile; the gradients are discarded
            strategy.loss(self.data.batch(0).to(device)).backward()
        objective.zero_grad(set_to_none=True)
        self.ema = EMA(self.model, settings.ema)
        factor = schedule(settings.schedule, self.total)
        self.steps = train(
            objective,
            self._batches(),
            optimizers(settings.optimizer, self.model, settings.lr),
            lambda step: settings.lr * factor(step),
            max_grad_norm=settings.max_grad_norm,
            seed=settings.seed,
            autocast=self.autocast,
            strategy=strategy,
            capture=device.type == "cuda",
        )
        self.startup = self.now() - start

    def _batches(self) -> Iterator[Any]:
        cuda, batch = self.device.type == "cuda", self.data.batch
        prefetched = prefetch(lambda n: pin_memory(batch(n)) if cuda else batch(n), 0, self.total)
        return (item.to(self.device) for item in prefetched)

    def step(self) -> None:
        self.ema.update(next(self.steps).index)

    def loss(self) -> float:
        with self.ema.average_parameters(), self.autocast():
            return validation_metrics(self.data, self.model, self.device)["loss"]


class NanoGPT(TimedRun):
    """nanoGPT's model, optimizer, batches and schedule, stepped as its train.py does."""

    name = "nanoGPT"

    def __init__(self, folder: str, text: str, options: argparse.Namespace) -> None:
        super().__init__()
        start = time.perf_counter()
        self.device = torch.device(options.device)
        self.total, self.context, self.rows = options.steps, options.context, options.batch
        spec = importlib.util.spec_from_file_location("nanogpt_model", Path(folder, "model.py"))
        module = importlib.util.module_from_spec(spec)
        sys.modules["nanogpt_model"] = module
        spec.loader.exec_module(module)
        torch.manual_seed(1337)
        # regard's training loop seeds the global generator
        self.generator = torch.Generator().manual_seed(1337)
        characters = Path(text).read_text()
        vocab = {character: i for i, character in enumerate(sorted(set(characters)))}
        ids = torch.tensor([vocab[character] for character in characters])
        cut = int(0.9 * len(ids))
        self.train_ids, self.validation_ids = ids[:cut].numpy().astype(np.uint16), ids[cut:]
        config = module.GPTConfig(
            block_size=options.context,
            vocab_size=len(vocab),
            n_layer=options.layers,
            n_head=options.heads,
            n_embd=options.dim,
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
        self.startup = self.now() - start

    def batch(self) -> tuple[Tensor, Tensor]:
        starts = torch.randint(
            len(self.train_ids) - self.context, (self.rows,), generator=self.generator
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
        return tuple(ids.pin_memory().to(self.device, non_blocking=True) for ids in (x, y))

    def lr(self) -> float:
        if self.done < 100:
            return 1e-3 * (self.done + 1) / 101
        progress = (self.done - 100) / max(1, self.total - 100)
        return 1e-4 + 0.5 * (1 + math.cos(math.pi * progress)) * (1e-3 - 1e-4)

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr()
        with self.autocast():
            _, loss = self.compiled(*self.next)
        self.next = self.batch()  # while the GPU runs
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def loss(self) -> float:
        self.model.eval()
        total = 0.0
        for start in range(0, len(self.validation_ids) - 1, 64 * self.context):
            part = self.validation_ids[start : start + 64 * self.context + 1].to(self.device)
            for x, y in _rows(part[:-1], part[1:], self.context):
                with self.autocast():
                    total += float(self.model(x, y)[1]) * y.numel()
        self.model.train()
        return total / (len(self.validation_ids) - 1)


def _rows(x: Tensor, y: Tensor, context: int) -> Iterator[tuple[Tensor, Tensor]]:
    """All full blocks in one batch, and the shorter last block in another."""
    whole = len(x) // context * context
    if whole:
        yield x[:whole].view(-1, context), y[:whole].view(-1, context)
    if whole < len(x):
        yield x[whole:].unsqueeze(0), y[whole:].unsqueeze(0)


def print_table(runs: list[TimedRun], batch: int, context: int) -> None:
    width = max(len(run.name) for run in runs)
    columns = f"  steps  training  tokens/s  best loss  at step  reached {TARGET_LOSS}"
    columns += "  startup  evaluation"
    print(" " * width + columns)
    for run in runs:
        speed = run.done * batch * context / run.training
        reached = "never" if run.reached is None else "{:.2f} s, {}".format(*run.reached)
        print(
            f"{run.name:{width}} {run.done:6} {run.training:8.2f}s {speed:9,.0f}"
            f" {run.best[0]:10.4f} {run.best[1]:8} {reached:>15}"
            f" {run.startup:7.1f}s {run.evaluation:10.1f}s"
        )


def compare(ours: list[TimedRun], nano: TimedRun) -> None:
    """Print the time to the target loss relative to that of nanoGPT."""
    if nano.reached is None:
        print(f"nanoGPT did not reach {TARGET_LOSS}; the time of all its {nano.done} steps is used")
    theirs = nano.training if nano.reached is None else nano.reached[0]
    for run in ours:
        if run.reached is not None:
            ratio = run.reached[0] / theirs
            print(f"{run.name}: {TARGET_LOSS} in {ratio:.3f} of nanoGPT's time ({theirs:.2f} s)")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nanogpt", help="without it, only regard runs")
    parser.add_argument("--text", required=True)
    parser.add_argument("--ours", nargs="*", action="append", help="key=value overrides of OURS")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=5000, help="of nanoGPT; half for regard")
    parser.add_argument("--until-target", action="store_true", help="end runs at the target loss")
    parser.add_argument("--every", type=int, default=50, help="steps between two evaluations")
    for name, value in (("layers", 6), ("heads", 6), ("dim", 384), ("context", 256), ("batch", 64)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    sizes = [
        f"model.{name}={getattr(options, name)}" for name in ("layers", "heads", "dim", "context")
    ]
    settings = [
        *OURS,
        *sizes,
        f"train.batch={options.batch}",
        f"train.steps={options.steps // 2}",
    ]
    device = torch.device(options.device)
    ours: list[TimedRun] = [
        Regard(" ".join(["regard", *overrides]), options.text, device, [*settings, *overrides])
        for overrides in options.ours or [[]]
    ]
    nano = NanoGPT(options.nanogpt, options.text, options) if options.nanogpt else None
    runs = ours if nano is None else [*ours, nano]
    running = runs
    while running:
        for run in running:
            run.run_turn(options.every)
        ended = [run for run in running if options.until_target and run.reached]
        running = [run for run in running if run.done < run.total and run not in ended]
    print_table(runs, options.batch, options.context)
    if nano is not None:
        compare(ours, nano)


if __name__ == "__main__":
    main()
