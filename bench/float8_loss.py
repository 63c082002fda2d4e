"""The training loss with FP8 matmuls, compared with bfloat16, on one GPU.

    python bench/float8_loss.py --text input.txt [--steps 300] [--dim 2048] [--layers 22]
    python bench/float8_loss.py --text input.txt --model gpt2 --vocab 50257 [--steps 600]

The shape of LLaMA 1.1B or GPT-2 on a text, the same batches and initial weights in both: AdamW with
learning rate 3e-4 and 50 steps of warm-up, 8 rows of 1,024. The tokens are the bytes of the text,
or with `--vocab` those of a BPE tokenizer trained on it, of which a short text has fewer. The loss
over bytes is in bfloat16 in both. Both train at the same time. Prints the training loss, averaged
over the steps since the last line, and the loss on 64 rows of the last tenth of the text at the
end.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from side_by_side import Worker, wait_for_all

from regard.data.batch import TextBatch
from regard.models.build import build_model, preset
from regard.models.transformer import TransformerConfig
from regard.tasks import Causal
from regard.text import bpe
from regard.training.loop import Objective, SingleProcess, train
from regard.training.optim import optimizers

ROWS, TIME, LR, WARM_UP = 8, 1024, 3e-4, 50
BYTES = 256


def tokenize(text: bytes, vocab: int) -> torch.Tensor:
    """The bytes of a text; with a larger vocabulary, its tokens."""
    if vocab == BYTES:
        return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    decoded = text.decode()
    return torch.tensor(bpe.train([decoded], vocab_size=vocab).encode(decoded))


def model_config(options: argparse.Namespace) -> TransformerConfig:
    sizes = {"vocab_size": options.vocab, "context": options.time, "bias": False}
    if options.dim:
        ffn_dim = options.dim * 4 if options.model == "gpt2" else options.dim * 11 // 4
        sizes |= {"dim": options.dim, "ffn_dim": ffn_dim}
    if options.layers:
        sizes["layers"] = options.layers
    config = preset(options.model, **sizes)
    assert isinstance(config, TransformerConfig)
    return config


def prepare(options: argparse.Namespace, ids: torch.Tensor, precision: str) -> Any:
    """A function that trains for some steps and returns their mean loss; for 0 steps, evaluate."""
    device = torch.device(options.device)
    cut = len(ids) * 9 // 10
    training, validation = ids[:cut].to(device), ids[cut:].to(device)
    generator = torch.Generator().manual_seed(1)

    def batch(ids: torch.Tensor) -> TextBatch:
        starts = torch.randint(0, len(ids) - options.time - 1, (ROWS,), generator=generator)
        windows = torch.stack([ids[i : i + options.time + 1] for i in starts.tolist()])
        return TextBatch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())

    def autocast() -> torch.autocast:
        return torch.autocast(device.type, torch.bfloat16)

    torch.manual_seed(1)
    with device:
        model = build_model(model_config(options))
    objective = Objective(model.to(device), Causal()).train()
    strategy = SingleProcess(objective)
    if device.type == "cuda":
        strategy.compile(float8=precision == "float8")
    steps = train(
        objective,
        iter(lambda: batch(training), None),
        optimizers("adamw", model, LR),
        lambda number: LR * min(1.0, (number + 1) / WARM_UP),
        autocast=autocast,
        strategy=strategy,
        capture=device.type == "cuda",
    )

    def run(count: int) -> float:
        losses = [next(steps).loss.clone() for _ in range(count)]
        return float(torch.stack(losses).mean())

    def evaluate() -> float:
        model.eval()
        generator.manual_seed(2)
        with torch.no_grad(), autocast():
            total = [objective.task.loss(model, batch(validation)) for _ in range(8)]
        return float(torch.stack(total).sum()) / (8 * ROWS * options.time)

    return lambda count: run(count) if count else evaluate()


def main() -> None:
    start = time.perf_counter()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=25)
    parser.add_argument("--model", choices=["tinyllama", "gpt2"], default="tinyllama")
    parser.add_argument("--vocab", type=int, default=BYTES)
    parser.add_argument("--dim", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--time", type=int, default=TIME)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    ids = tokenize(Path(options.text).read_bytes(), options.vocab)
    print(f"{len(ids):,} tokens, {len(ids.unique()):,} of them different")
    workers = [Worker(name, prepare, options, ids, name) for name in ("bfloat16", "float8")]
    wait_for_all(workers, start + 300)
    print("steps  " + "  ".join(f"{worker.name:>9}" for worker in workers))
    for step in range(options.every, options.steps + 1, options.every):
        for worker in workers:  # both at the same time
            worker.pipe.send((options.every,))
        losses = [worker.pipe.recv()[0] for worker in workers]
        print(f"{step:5}  " + "  ".join(f"{loss:9.4f}" for loss in losses), flush=True)
    losses = [worker.call(0) for worker in workers]
    print("validation " + "  ".join(f"{loss:.4f}" for loss in losses))
    for worker in workers:
        worker.end()
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
