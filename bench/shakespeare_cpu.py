"""Tiny Shakespeare by characters on a CPU, beside nanoGPT, in one run.

    python bench/shakespeare_cpu.py --nanogpt DIR --text input.txt

DIR is a checkout of nanoGPT; its model and optimizer are used as they are, in the setting its
README gives for a CPU (4 layers, 4 heads, 128 wide, context 64, batch 12, 2,000 steps, rate 1e-3
with a cosine to 1e-4, no dropout). Three things are trained, in turns of 20 steps so that all
meet the same machine:

    nanoGPT     as above
    same        regard with the same model (learned positions, GELU, no biases), batch and
                steps; only the rate and its decay are its own
    chosen      the recipe that regard chooses by itself for this file

and the table says how fast each was, its loss on the whole held-out text, and how long `chosen`
took (evaluations included) to reach 1.88, against all of nanoGPT's 2,000 steps.
"""

import argparse
import importlib.util
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

from regard.config import parse_overrides
from regard.models.build import build_model
from regard.pipelines import prepare_training, validation_metrics
from regard.tasks import Objective
from regard.training.loop import train
from regard.training.optim import EMA, cosine, optimizers, schedule
from regard.training.setup.configure import configure

GOAL, TURN, LOOK = 1.88, 20, 100
CPU = torch.device("cpu")


class Regard:
    """A run of ours, taken a few steps at a time."""

    def __init__(self, name: str, text: str, *words: str) -> None:
        self.name = name
        config = configure(text, parse_overrides([*words, "device=cpu"]))
        self.material = prepare_training(config)
        torch.manual_seed(config.train.seed)
        self.model = build_model(self.material.model)
        factor = schedule(config.train.schedule, config.train.steps)
        self.total, self.seconds, self.done, self.targets = config.train.steps, 0.0, 0, 0
        self.turns: list[float] = []
        self.reached: float | None = None
        self.ema = EMA(self.model, config.train.ema)
        self.steps = train(
            Objective(self.model, self.material.task),
            (self.material.batch(number) for number in range(self.total)),
            optimizers(config.train.optimizer, self.model, config.train.lr),
            lambda step: config.train.lr * factor(step),
            clip=config.train.clip,
            seed=config.train.seed,
        )

    def turn(self) -> None:
        began = time.perf_counter()
        for _ in range(min(TURN, self.total - self.done)):
            step = next(self.steps)
            self.ema.update(step.number)
            self.targets += int(step.targets)
            self.done += 1
        self.turns.append(time.perf_counter() - began)
        self.seconds += self.turns[-1]

    def judge(self) -> None:
        """Has it reached the goal? The look itself is on its own clock."""
        began = time.perf_counter()
        loss = self.loss()
        self.seconds += time.perf_counter() - began
        print(f"{self.name}: {self.done} steps, {self.seconds:.1f} s, {loss:.4f}", file=sys.stderr)
        if loss <= GOAL:
            self.reached = self.seconds

    def loss(self) -> float:
        with self.ema.average_parameters():
            return validation_metrics(self.material, self.model, CPU)["loss"]


class NanoGPT:
    """nanoGPT's model, optimizer and batches, stepped as its train.py does."""

    name = "nanoGPT"

    def __init__(self, folder: str, text: str) -> None:
        spec = importlib.util.spec_from_file_location("nanogpt_model", Path(folder, "model.py"))
        module = importlib.util.module_from_spec(spec)
        sys.modules["nanogpt_model"] = module
        spec.loader.exec_module(module)
        torch.manual_seed(1337)
        letters = Path(text).read_text()
        table = {letter: i for i, letter in enumerate(sorted(set(letters)))}
        ids = np.array([table[letter] for letter in letters], dtype=np.uint16)
        cut = int(0.9 * len(ids))
        self.train_ids, self.held_ids = ids[:cut], ids[cut:]
        config = module.GPTConfig(
            block_size=64,
            vocab_size=len(table),
            n_layer=4,
            n_head=4,
            n_embd=128,
            dropout=0.0,
            bias=False,
        )
        self.model = module.GPT(config)
        self.optimizer = self.model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), "cpu")
        self.factor = cosine(2000, warmup=100, floor=0.1)
        self.total, self.seconds, self.done, self.targets = 2000, 0.0, 0, 0
        self.turns: list[float] = []

    def batch(self):
        starts = torch.randint(len(self.train_ids) - 64, (12,))
        x = torch.stack(
            [torch.from_numpy(self.train_ids[i : i + 64].astype(np.int64)) for i in starts]
        )
        y = torch.stack(
            [torch.from_numpy(self.train_ids[i + 1 : i + 65].astype(np.int64)) for i in starts]
        )
        return x, y

    def turn(self) -> None:
        self.model.train()
        began = time.perf_counter()
        for _ in range(min(TURN, self.total - self.done)):
            for group in self.optimizer.param_groups:
                group["lr"] = 1e-3 * self.factor(self.done)
            x, y = self.batch()
            _, loss = self.model(x, y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.done += 1
            self.targets += 12 * 64
            loss.item()
        self.turns.append(time.perf_counter() - began)
        self.seconds += self.turns[-1]

    @torch.no_grad()
    def loss(self) -> float:
        self.model.eval()
        count = (len(self.held_ids) - 1) // 64
        x = torch.from_numpy(self.held_ids[: count * 64].astype(np.int64)).view(count, 64)
        y = torch.from_numpy(self.held_ids[1 : count * 64 + 1].astype(np.int64)).view(count, 64)
        parts = [
            self.model(a, b)[1].item() * len(a)
            for a, b in zip(x.split(64), y.split(64), strict=True)
        ]
        return sum(parts) / count


SAME = [
    "model.preset=gpt2",
    "model.bias=false",
    "model.ffn=gelu",
    "model.layers=4",
    "model.heads=4",
    "model.dim=128",
    "model.context=64",
    "train.batch=12",
    "train.steps=2000",
    "train.lr=3e-3",
    "train.ema=0.0",
    "train.optimizer=adamw",
    'train.schedule={kind="cosine",warmup=100,floor=0.02}',
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nanogpt", required=True)
    parser.add_argument("--text", required=True)
    given = parser.parse_args()
    chosen, same = Regard("chosen", given.text), Regard("same", given.text, *SAME)
    nano = NanoGPT(given.nanogpt, given.text)
    while any(racer.done < racer.total for racer in (chosen, same, nano)):
        for racer in (chosen, same, nano):
            if racer.done < racer.total:
                racer.turn()
        if chosen.reached is None and not chosen.done % LOOK:
            chosen.judge()
    print(f"{'':10} {'steps':>6} {'seconds':>8} {'tokens/s':>9} {'held-out loss':>14}")
    for racer in (chosen, same, nano):
        speed = f"{racer.targets / racer.seconds:9,.0f}"
        print(f"{racer.name:10} {racer.done:6} {racer.seconds:8.1f} {speed} {racer.loss():14.4f}")
    ratios = [theirs / ours for ours, theirs in zip(same.turns, nano.turns, strict=True)]
    print(
        f"tokens per second, same / nanoGPT: {nano.seconds / same.seconds:.3f} in all,"
        f" {statistics.median(ratios):.3f} in the median turn"
    )
    if chosen.reached is not None:
        share = chosen.reached / nano.seconds
        print(f"chosen reached {GOAL} in {chosen.reached:.1f} s, {share:.2f} of nanoGPT's time")


if __name__ == "__main__":
    main()
