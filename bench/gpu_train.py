"""Training speed on one GPU, compared with a reference implementation of the same model.

    python bench/gpu_train.py --nanogpt DIR [--rows gpt2 gpt2-biased llama …] [--steps 20]

Prints the matmul FLOP/s and copy bandwidth of the GPU, measured with large tensors. Then, for each
model in regard and in the reference implementation: tokens (or images) per second, model FLOP/s
relative to the matmul FLOP/s, and peak memory. Both are compiled, use bfloat16 autocast, AdamW in
float32, and the same batch of random ids. They are timed alternately; the better repeat counts.
"""

import argparse
import gc
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from regard.data.batch import ImageBatch, MaskedBatch, PairBatch, TextBatch
from regard.models.build import build_model, preset
from regard.models.cost import cost
from regard.models.transformer import TransformerConfig
from regard.nn.state import Source
from regard.tasks import Causal, ImageClassification, Masked, Seq2Seq
from regard.training.loop import train
from regard.training.optim import optimizers
from regard.training.parallel.strategy import Objective, SingleProcess
from regard.training.setup.device import checkpoint_activations

CUDA = torch.device("cuda")
Trial = Callable[[], Callable[[], None]]  # builds a model and returns its training step


@dataclass(frozen=True)
class Row:
    """A model: its training steps in regard and in the peer, and the amount of work per step."""

    name: str
    units: int  # tokens or images of a step
    unit: str
    flops: float  # of a step
    ours: Trial
    peer: Trial
    peer_name: str


def device_limits() -> tuple[float, float]:
    """Measured bfloat16 matmul FLOP/s and copy bandwidth in bytes/s."""
    size = 8192
    a, b = (torch.randn(size, size, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
    matmul_flops = 2 * size**3 / _median(lambda: a @ b)
    x, y = (torch.randn(1 << 29, device=CUDA) for _ in range(2))
    return matmul_flops, 2 * x.nbytes / _median(lambda: y.copy_(x))


def _median(run: Callable[[], Any], repeats: int = 20, warmup: int = 3) -> float:
    for _ in range(warmup):
        run()
    seconds = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return statistics.median(seconds)


def ids(*shape: int, vocab: int) -> torch.Tensor:
    return torch.randint(10, vocab, shape, device=CUDA)


def ours(config: Any, task: Any, batch: Any, *, checkpointing: bool = False) -> Trial:
    """A step of `training.loop.train`, as `regard train` runs it on a GPU."""

    def trial() -> Callable[[], None]:
        model = build_model(config).to(CUDA)
        if checkpointing:
            checkpoint_activations(model)
        objective = Objective(model, task)
        strategy = SingleProcess(objective)
        strategy.compile()
        steps = train(
            objective,
            iter(lambda: batch, None),
            optimizers("adamw", objective.model, 3e-4),
            lambda number: 3e-4,
            autocast=lambda: torch.autocast("cuda", torch.bfloat16),
            strategy=strategy,
            capture=not checkpointing,
        )
        return lambda: next(steps) and None

    return trial


def theirs(make: Callable[[], Any], loss: Callable[[Any], torch.Tensor]) -> Trial:
    """A plain compiled training step of another library's model."""

    def trial() -> Callable[[], None]:
        with CUDA:
            model = make()
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
        compiled = torch.compile(model, dynamic=False)

        def step() -> None:
            with torch.autocast("cuda", torch.bfloat16):
                value = loss(compiled)
            value.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    return trial


def gpt2(nanogpt: str, bias: bool = False) -> Row:
    """Without biases, as nanoGPT trains it; or with, as GPT-2 was published."""
    rows, time_ = 64, 1024
    config = replace(preset("gpt2"), bias=bias)
    x, y = ids(rows, time_, vocab=50257), ids(rows, time_, vocab=50257)
    spec = importlib.util.spec_from_file_location("nanogpt", Path(nanogpt) / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt"] = module
    spec.loader.exec_module(module)
    make = lambda: module.GPT(module.GPTConfig(vocab_size=50304, dropout=0.0, bias=bias))  # noqa: E731
    return Row(
        f"GPT-2 124M{', biases' if bias else ''}, 64 x 1024",
        rows * time_,
        "tokens",
        _flops(config, time_) * rows * time_,
        ours(config, Causal(), TextBatch(x, y)),
        theirs(make, lambda model: model(x, y)[1]),
        "nanoGPT",
    )


def decoder(
    _: str, name: str, rows: int, time_: int, *, checkpointing: bool = False, **changes: Any
) -> Row:
    """A decoder preset; its peer is the same configuration in transformers.

    With `checkpointing` both recompute the activations of each block in the backward pass.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from regard.hub.config_json import write_config

    config = replace(preset(name), context=time_, **changes)
    x = ids(rows, time_, vocab=config.vocab_size)

    def peer() -> Any:
        settings = {**write_config(config)[1], "use_cache": False}
        hf = AutoConfig.for_model(**settings, attn_implementation="sdpa")
        model = AutoModelForCausalLM.from_config(hf, dtype=torch.float32)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    return Row(
        f"{name} {changes or ''}, {rows} x {time_}{', checkpointing' if checkpointing else ''}",
        rows * time_,
        "tokens",
        _flops(config, time_) * rows * time_,
        ours(
            config,
            Causal(),
            TextBatch(x, ids(rows, time_, vocab=config.vocab_size)),
            checkpointing=checkpointing,
        ),
        theirs(peer, lambda model: model(x, labels=x).loss),
        "transformers",
    )


def vaswani(_: str) -> Row:
    from transformers import MarianConfig, MarianMTModel

    rows, time_, vocab = 256, 64, 37000
    config = replace(preset("transformer-base"), dropout=0.1)
    lengths = torch.full((rows,), time_, device=CUDA)
    source = Source(ids(rows, time_, vocab=vocab), lengths)
    x, y = ids(rows, time_, vocab=vocab), ids(rows, time_, vocab=vocab)
    peer = MarianConfig(
        vocab_size=vocab,
        decoder_vocab_size=vocab,
        d_model=512,
        encoder_layers=6,
        decoder_layers=6,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=2048,
        decoder_ffn_dim=2048,
        activation_function="relu",
        dropout=0.1,
        use_cache=False,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
        scale_embedding=True,
    )
    mask = torch.ones_like(source.ids)
    return Row(
        "Vaswani base, 256 pairs x 64",
        rows * time_,
        "target tokens",
        _flops(config, time_) * rows * time_,
        ours(
            config,
            Seq2Seq(label_smoothing=0.1),
            PairBatch(source, x, y),
        ),
        theirs(
            lambda: MarianMTModel(peer),
            lambda model: F.cross_entropy(
                model(input_ids=source.ids, attention_mask=mask, decoder_input_ids=x)
                .logits.flatten(0, 1)
                .float(),
                y.flatten(),
                label_smoothing=0.1,
            ),
        ),
        "transformers' Marian",
    )


def bert(_: str) -> Row:
    from transformers import BertConfig, BertForMaskedLM

    rows, time_, vocab = 64, 512, 30522
    config = replace(preset("bert-base"), head="masked", dropout=0.1, attention_dropout=0.1)
    x, original = ids(rows, time_, vocab=vocab), ids(rows, time_, vocab=vocab)
    masked_positions = torch.rand(rows, time_, device=CUDA).argsort(1)[:, : round(0.15 * time_)]
    batch = MaskedBatch(
        ids=x,
        documents=torch.ones_like(x),
        positions=torch.arange(time_, device=CUDA).repeat(rows, 1),
        masked_positions=masked_positions,
        targets=original.gather(1, masked_positions),
    )
    labels = torch.full_like(x, -100).scatter(1, masked_positions, batch.targets)
    return Row(
        "BERT-base masked, 64 x 512",
        rows * time_,
        "tokens",
        _flops(config, time_) * rows * time_,
        ours(config, Masked(), batch),
        theirs(
            lambda: BertForMaskedLM(BertConfig(attn_implementation="sdpa")),
            lambda model: model(x, labels=labels).loss,
        ),
        "transformers",
    )


def vit(_: str) -> Row:
    from transformers import ViTConfig, ViTForImageClassification

    rows = 256
    config = preset("vit-b16")
    images = torch.randn(rows, 3, 224, 224, device=CUDA)
    classes = torch.randint(0, 1000, (rows,), device=CUDA)
    return Row(
        "ViT-B/16, 256 images",
        rows,
        "images",
        cost(config).training_flops_per_token * config.context * rows,
        ours(config, ImageClassification(), ImageBatch(images, classes)),
        theirs(
            lambda: ViTForImageClassification(
                ViTConfig(num_labels=1000, attn_implementation="sdpa")
            ),
            lambda model: model(images, labels=classes).loss,
        ),
        "transformers",
    )


def _flops(config: TransformerConfig, time_: int) -> float:
    return cost(replace(config, context=time_)).training_flops_per_token


ROWS: dict[str, Callable[[str], Row]] = {
    "gpt2": gpt2,
    "gpt2-biased": partial(gpt2, bias=True),
    "llama": partial(decoder, name="tinyllama", rows=8, time_=2048),
    "llama-16k": partial(decoder, name="tinyllama", rows=1, time_=16384),
    "llama-16k-window": partial(decoder, name="tinyllama", rows=1, time_=16384, window=1024),
    "llama-64k": partial(decoder, name="tinyllama", rows=1, time_=65536, checkpointing=True),
    "bloom": partial(decoder, name="bloom-560m", rows=8, time_=2048),
    "gemma-2": partial(decoder, name="gemma-2-2b", rows=2, time_=4096),
    "bert": bert,
    "vaswani": vaswani,
    "vit": vit,
}


def measure(trial: Trial, steps: int) -> tuple[float, float]:
    """Seconds per step, and peak memory in gigabytes."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step = trial()
    for _ in range(5):
        step()

    def run_steps() -> None:  # without synchronization between steps, as in a training run
        for _ in range(steps):
            step()

    seconds = _median(run_steps, 3, warmup=0) / steps
    return seconds, torch.cuda.max_memory_allocated() / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nanogpt", default="")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--no-peer", action="store_true", help="time regard only")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    matmul_flops, bandwidth = device_limits()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"measured: {matmul_flops / 1e12:.0f} TFLOP/s bf16, copies {bandwidth / 1e12:.2f} TB/s")
    for name in options.rows:
        row = ROWS[name](options.nanogpt)
        trials = {"regard": row.ours} | ({} if options.no_peer else {row.peer_name: row.peer})
        best: dict[str, tuple[float, float]] = {}
        start = time.perf_counter()
        for _ in range(options.repeats):
            for library, trial in trials.items():
                previous = best.get(library, (float("inf"), 0.0))
                best[library] = min(previous, measure(trial, options.steps))
        print(f"{row.name}  (measured in {time.perf_counter() - start:.0f} s)")
        for library, (seconds, peak) in best.items():
            speed, share = row.units / seconds, row.flops / seconds / matmul_flops
            print(
                f"  {library:22} {speed:12,.0f} {row.unit}/s  {share:6.1%} of matmul FLOP/s"
                f"  {peak:6.1f} GB  {1e3 * seconds:7.1f} ms",
                flush=True,
            )


if __name__ == "__main__":
    main()
