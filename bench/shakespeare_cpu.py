"""Character-level Tiny Shakespeare on a CPU, compared with nanoGPT.

    python bench/shakespeare_cpu.py --nanogpt DIR --text input.txt
    python bench/shakespeare_cpu.py --nanogpt DIR --text input.txt --seeds 0 1 2 3 4 --cpu-time

DIR is a checkout of nanoGPT; its model and optimizer are used unchanged, with the settings of its
README for a CPU (4 layers, 4 heads, dim 128, context 64, batch 12, 2,000 steps, learning rate 1e-3
with cosine decay to 1e-4, no dropout). Three models are trained alternately, 20 steps at a time:

    nanoGPT     as above
    same        regard with the same model (learned positions, GELU, no biases), batch and
                steps; only learning rate and schedule differ
    default     the default settings of regard for this file, except for the tokenizer (characters)

The table shows the speed of each, its loss on the whole validation text in consecutive blocks of 64
characters, and how long `default` took (with evaluations) to reach a loss of 1.88, compared with
nanoGPT's 2,000 steps. With --seeds, `default` is trained with each of these seeds, until it reaches
that loss, and `same` is left out.
--cpu-time measures CPU time instead of wall-clock time, for a machine that other programs use;
set OMP_NUM_THREADS=1 with it.
"""

import argparse
import importlib.util
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

from regard.accel import attach_onednn_linear
from regard.config import parse_overrides
from regard.models.build import build_model
from regard.pipelines import prepare_training, validation_metrics
from regard.training.loop import Objective, train
from regard.training.optim import EMA, cosine, optimizers, schedule
from regard.training.setup.configure import configure

TARGET_LOSS, TURN_STEPS, EVALUATE_EVERY = 1.88, 20, 100
CPU = torch.device("cpu")
clock = time.perf_counter


class Regard:
    """A training run of regard, advanced a few steps at a time."""

    ended = False  # whether the run was ended early, at the target loss

    def __init__(self, name: str, text: str, *overrides: str) -> None:
        self.name = name
        fixed = ["data.tokenizer=char", "device=cpu"]
        fixed += ["train.evaluate_stride=64"]  # consecutive blocks, as for nanoGPT
        config = configure(text, parse_overrides([*overrides, *fixed]))
        self.data = prepare_training(config)
        torch.manual_seed(config.train.seed)
        self.model = build_model(self.data.model)
        attach_onednn_linear(self.model)
        factor = schedule(config.train.schedule, config.train.steps)
        self.total, self.seconds, self.done, self.targets = config.train.steps, 0.0, 0, 0
        self.turn_seconds: list[float] = []
        self.reached: float | None = None
        self.ema = EMA(self.model, config.train.ema)
        self.steps = train(
            Objective(self.model, self.data.task),
            (self.data.batch(number) for number in range(self.total)),
            optimizers(config.train.optimizer, self.model, config.train.lr),
            lambda step: config.train.lr * factor(step),
            max_grad_norm=config.train.max_grad_norm,
            seed=config.train.seed,
        )

    def run_turn(self) -> None:
        start = clock()
        for _ in range(min(TURN_STEPS, self.total - self.done)):
            step = next(self.steps)
            self.ema.update(step.index)
            self.targets += int(step.num_targets)
            self.done += 1
        self.turn_seconds.append(clock() - start)
        self.seconds += self.turn_seconds[-1]

    def evaluate(self) -> None:
        """Check whether the target loss is reached; the evaluation counts as training time."""
        start = clock()
        loss = self.loss()
        self.seconds += clock() - start
        print(f"{self.name}: {self.done} steps, {self.seconds:.1f} s, {loss:.4f}", file=sys.stderr)
        if loss <= TARGET_LOSS:
            self.reached = self.seconds

    def loss(self) -> float:
        with self.ema.average_parameters():
            return validation_metrics(self.data, self.model, CPU)["loss"]


class NanoGPT:
    """nanoGPT's model, optimizer and batches, stepped as its train.py does."""

    name, ended = "nanoGPT", False

    def __init__(self, folder: str, text: str) -> None:
        spec = importlib.util.spec_from_file_location("nanogpt_model", Path(folder, "model.py"))
        module = importlib.util.module_from_spec(spec)
        sys.modules["nanogpt_model"] = module
        spec.loader.exec_module(module)
        torch.manual_seed(1337)
        characters = Path(text).read_text()
        vocab = {character: i for i, character in enumerate(sorted(set(characters)))}
        ids = np.array([vocab[character] for character in characters], dtype=np.uint16)
        cut = int(0.9 * len(ids))
        self.train_ids, self.validation_ids = ids[:cut], ids[cut:]
        config = module.GPTConfig(
            block_size=64,
            vocab_size=len(vocab),
            n_layer=4,
            n_head=4,
            n_embd=128,
            dropout=0.0,
            bias=False,
        )
        self.model = module.GPT(config)
        self.optimizer = self.model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), "cpu")
        self.factor = cosine(2000, warmup=100, min_lr_factor=0.1)
        self.total, self.seconds, self.done, self.targets = 2000, 0.0, 0, 0
        self.turn_seconds: list[float] = []

    def batch(self):
        starts = torch.randint(len(self.train_ids) - 64, (12,))
        x = torch.stack(
            [torch.from_numpy(self.train_ids[i : i + 64].astype(np.int64)) for i in starts]
        )
        y = torch.stack(
            [torch.from_numpy(self.train_ids[i + 1 : i + 65].astype(np.int64)) for i in starts]
        )
        return x, y

    def run_turn(self) -> None:
        self.model.train()
        start = clock()
        for _ in range(min(TURN_STEPS, self.total - self.done)):
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
        self.turn_seconds.append(clock() - start)
        self.seconds += self.turn_seconds[-1]

    @torch.no_grad()
    def loss(self) -> float:
        self.model.eval()
        count = (len(self.validation_ids) - 1) // 64
        x = torch.from_numpy(self.validation_ids[: count * 64].astype(np.int64)).view(count, 64)
        y = torch.from_numpy(self.validation_ids[1 : count * 64 + 1].astype(np.int64)).view(
            count, 64
        )
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
    'train.schedule={kind="cosine",warmup=100,min_lr_factor=0.02}',
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nanogpt", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--cpu-time", action="store_true")
    options = parser.parse_args()
    global clock
    clock = time.process_time if options.cpu_time else time.perf_counter
    nano = NanoGPT(options.nanogpt, options.text)
    same = None if options.seeds else Regard("same", options.text, *SAME)
    defaults = [
        Regard(f"seed {seed}", options.text, f"train.seed={seed}") for seed in options.seeds or []
    ] or [Regard("default", options.text)]
    runs = [nano, *defaults, *([] if same is None else [same])]
    while running := [run for run in runs if run.done < run.total and not run.ended]:
        for run in running:
            run.run_turn()
        for run in defaults:
            if run.reached is None and not run.done % EVALUATE_EVERY:
                run.evaluate()
                run.ended = run.reached is not None and same is None
    print(f"{'':10} {'steps':>6} {'seconds':>8} {'tokens/s':>9} {'validation loss':>16}")
    for run in runs:
        speed = f"{run.targets / run.seconds:9,.0f}"
        print(f"{run.name:10} {run.done:6} {run.seconds:8.1f} {speed} {run.loss():16.4f}")
    if same is not None:
        pairs = zip(same.turn_seconds, nano.turn_seconds, strict=True)
        ratios = [theirs / ours for ours, theirs in pairs]
        print(
            f"tokens per second, same / nanoGPT: {nano.seconds / same.seconds:.3f} in total,"
            f" {statistics.median(ratios):.3f} median"
        )
    for run in defaults:
        if run.reached is not None:
            ratio = run.reached / nano.seconds
            print(f"{run.name}: {TARGET_LOSS} in {run.reached:.1f} s, {ratio:.2f} of nanoGPT's")


if __name__ == "__main__":
    main()
