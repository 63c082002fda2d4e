"""Small data, small settings and small models for the tests of training."""

import hashlib
import signal
from pathlib import Path

import torch

from regard.config import RunConfig, build, merge
from regard.data.batch import TextBatch
from regard.models.build import build_model, preset
from regard.training import run

SMALL = {"dim": 8, "layers": 1, "heads": 2}


def tiny(**fields):
    """A decoder of about a thousand parameters over 11 ids."""
    return build_model(
        preset("tiny-decoder", **{**SMALL, "vocab_size": 11, "context": 8, **fields})
    )


def text_batch(rows=4, *, unscored=0.0, seed=0):
    """Random ids; of the targets, about a share of `unscored` does not count."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(11, (rows, 8), generator=generator)
    targets = torch.randint(11, (rows, 8), generator=generator)
    targets[torch.rand(rows, 8, generator=generator) < unscored] = -1
    return TextBatch(ids, targets)


def write_data(folder: Path) -> Path:
    """A text and a table of pairs."""
    lines = [f"the {n}th cat sat on the mat, and so did {n + 1} dogs\n" for n in range(60)]
    (folder / "cats.txt").write_text("".join(lines))
    pairs = [f"{n} cats\t{n} chats\n" for n in range(100, 200)]
    (folder / "pairs.tsv").write_text("".join(pairs))
    return folder


def config(path, over=None, **train) -> RunConfig:
    """A run on text or on pairs, whichever `path` holds, that uses all there is to lose."""
    pairs = Path(path).suffix == ".tsv"
    base = {
        "name": "test",
        "task": {"kind": "seq2seq" if pairs else "causal", "label_smoothing": 0.1},
        "data": {"path": str(path), "tokenizer": "char"},
        "model": {
            "preset": "tiny-encoder-decoder" if pairs else "tiny-decoder",
            **SMALL,
            "context": 32 if pairs else 8,
            "dropout": 0.1,
        },
        "train": {
            "steps": 12,
            "batch": 2,
            "accumulate": 2,
            "lr": 1e-2,
            "optimizer": "muon",
            "schedule": {"kind": "cosine", "warmup": 3},
            "ema": 0.9,
            "evaluate_every": 4,
            "evaluate_targets": 200,
            "save_every": 3,
        },
        "device": "cpu",
    }
    return build(RunConfig, merge(merge(base, over or {}), {"train": train}))


class Crash(Exception):
    """The process dies here."""


def interrupt(monkeypatch, at, *, asked=None):
    """Let the next run die right after step `at`, or be asked to stop there by a signal."""
    train = run.train

    def dying(*words, **options):
        for step in train(*words, **options):
            if step.index + 1 == at:
                if asked is None:
                    raise Crash
                signal.raise_signal(asked)
            yield step

    monkeypatch.setattr(run, "train", dying)


def contents(folder: Path) -> dict[str, str]:
    """The sha256 of every file that two equal runs have in common, by name."""
    files = [folder / name for name in ("metrics.jsonl", "samples.txt", "model.safetensors")]
    files += sorted(folder.glob("checkpoints/*/*.safetensors"))
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
    }
