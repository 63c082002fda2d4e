"""Training speed on one GPU, compared with a reference implementation of the same model.

    python bench/gpu_train.py --nanogpt DIR [--rows gpt2 llama …] [--repeats 3] [--seconds 2]
    python bench/gpu_train.py --nanogpt DIR --device cpu    (small models, uncompiled: a smoke test)

Prints the matmul FLOP/s and copy bandwidth of the GPU, measured with large tensors. Then, for each
model in regard and in the reference implementation: tokens (or images) per second, model FLOP/s
relative to the matmul FLOP/s, and peak memory. Both are compiled, use bfloat16 autocast, AdamW in
float32, and the same batch of random ids.

Every model of every library runs in a separate process. All compile at the same time; then they are
timed one after the other, the libraries of a row in alternation, while the others wait. The median
of the repeats is printed, with the slowest and the fastest.

The libraries of `APART` do not fit on the GPU together. There, regard is timed as in a row without
a peer; the peer starts after all other rows, when their processes have ended, and compiles and is
timed alone. Its line says so.
"""

import argparse
import importlib.util
import math
import os
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
from side_by_side import Worker, retry_when_out_of_memory, wait_for_all

from regard.accel import cublaslt, matmul
from regard.data.batch import ImageBatch, MaskedBatch, PairBatch, TextBatch
from regard.models.build import build_model, preset
from regard.models.cost import cost
from regard.models.transformer import TransformerConfig
from regard.nn.state import Source
from regard.tasks import Causal, ImageClassification, Masked, Seq2Seq
from regard.training.loop import Objective, SingleProcess, train
from regard.training.optim import optimizers
from regard.training.setup.device import checkpoint_activations

DEVICE = torch.device("cuda")
FLOAT8 = "regard, float8"
UNTUNED = "regard, torch's matmuls"
Turn = tuple[float, float]  # seconds of a step, and the peak memory in GB
# builds a model and returns a forward and backward pass, which compiles it, and its training step
Trial = Callable[[], tuple[Callable[[], None], Callable[[], None]]]


@dataclass(frozen=True)
class Row:
    """A model: its trials by library, and the amount of work per step."""

    name: str
    units: int  # tokens or images of a step
    unit: str
    flops: float  # of a step
    trials: dict[str, Trial]


def device_limits() -> tuple[float, float]:
    """Measured bfloat16 matmul FLOP/s and copy bandwidth in bytes/s."""
    size = 8192
    a, b = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    matmul_flops = 2 * size**3 / _median(lambda: a @ b)
    x, y = (torch.randn(1 << 29, device=DEVICE) for _ in range(2))
    return matmul_flops, 2 * x.nbytes / _median(lambda: y.copy_(x))


def _median(run: Callable[[], Any]) -> float:
    seconds = [_seconds(run) for _ in range(23)]
    return statistics.median(seconds[3:])


def _seconds(run: Callable[[], Any]) -> float:
    _synchronize()
    start = time.perf_counter()
    run()
    _synchronize()
    return time.perf_counter() - start


def _synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def ids(*shape: int, vocab: int) -> torch.Tensor:
    return torch.randint(10, vocab, shape, device=DEVICE)


def reduce_on_cpu(config: Any, rows: int, time_: int) -> tuple[Any, int, int]:
    """The configuration, rows and length unchanged; on a CPU, reduced for a smoke test."""
    if DEVICE.type == "cuda":
        return config, rows, time_
    small = {"vocab_size": 1000} if hasattr(config, "vocab_size") else {}
    return replace(config, layers=1, **small), 2, min(time_, 48)


def autocast() -> torch.autocast:
    return torch.autocast(DEVICE.type, torch.bfloat16)


def regard_trial(
    config: Any, task: Any, batch: Any, *, checkpointing: bool = False, float8: bool = False
) -> Trial:
    """A step of `training.loop.train`, as `regard train` runs it on a GPU."""

    def trial() -> tuple[Callable[[], None], Callable[[], None]]:
        with DEVICE:
            model = build_model(config).to(DEVICE)
        if checkpointing:
            checkpoint_activations(model)
        objective = Objective(model, task).train()
        strategy = SingleProcess(objective)
        if DEVICE.type == "cuda":
            strategy.compile(float8=float8)
        steps = train(
            objective,
            iter(lambda: batch, None),
            optimizers("adamw", objective.model, 3e-4),
            lambda number: 3e-4,
            autocast=autocast,
            strategy=strategy,
            capture=DEVICE.type == "cuda" and not checkpointing,
        )

        def compile_() -> None:
            with autocast():
                loss = strategy.loss(batch)
            loss.backward()
            objective.zero_grad(set_to_none=True)

        return compile_, lambda: next(steps) and None

    return trial


def peer_trial(make: Callable[[], Any], loss: Callable[[Any], torch.Tensor]) -> Trial:
    """A plain compiled training step of another library's model."""

    def trial() -> tuple[Callable[[], None], Callable[[], None]]:
        with DEVICE:
            model = make()
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
        compiled = torch.compile(model, dynamic=False) if DEVICE.type == "cuda" else model

        def compile_() -> None:
            with autocast():
                value = loss(compiled)
            value.backward()
            optimizer.zero_grad(set_to_none=True)

        def step() -> None:
            with autocast():
                value = loss(compiled)
            value.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return compile_, step

    return trial


def gpt2(nanogpt: str, bias: bool = False) -> Row:
    """Without biases, as nanoGPT trains it; or with, as GPT-2 was published."""
    config, rows, time_ = reduce_on_cpu(replace(preset("gpt2"), bias=bias), 64, 1024)
    x, y = (ids(rows, time_, vocab=config.vocab_size) for _ in range(2))

    def peer() -> Any:
        spec = importlib.util.spec_from_file_location("nanogpt", Path(nanogpt) / "model.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["nanogpt"] = module
        spec.loader.exec_module(module)
        vocab = 64 * (-(-config.vocab_size // 64))  # nanoGPT pads it to 50,304
        return module.GPT(
            module.GPTConfig(vocab_size=vocab, n_layer=config.layers, dropout=0.0, bias=bias)
        )

    return Row(
        f"GPT-2 124M{', biases' if bias else ''}, {rows} x {time_}",
        rows * time_,
        "tokens",
        _flops(config, time_) * rows * time_,
        {
            "regard": regard_trial(config, Causal(), TextBatch(x, y)),
            "nanoGPT": peer_trial(peer, lambda model: model(x, y)[1]),
            FLOAT8: regard_trial(config, Causal(), TextBatch(x, y), float8=True),
        },
    )


def decoder(
    _: str, name: str, rows: int, time_: int, *, checkpointing: bool = False, **changes: Any
) -> Row:
    """A decoder preset; its peer is the same configuration in transformers.

    With `checkpointing` both recompute the activations of each block in the backward pass.
    """
    config, rows, time_ = reduce_on_cpu(preset(name), rows, time_)
    config = replace(config, context=time_, **changes)
    x, y = (ids(rows, time_, vocab=config.vocab_size) for _ in range(2))

    def peer() -> Any:
        from transformers import AutoConfig, AutoModelForCausalLM

        from regard.hub.config_json import write_config

        settings = {**write_config(config)[1], "use_cache": False}
        model = AutoModelForCausalLM.from_config(  # with SDPA, where a model supports it
            AutoConfig.for_model(**settings), dtype=torch.float32
        )
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    return Row(
        f"{name} {changes or ''}, {rows} x {time_}{', checkpointing' if checkpointing else ''}",
        rows * time_,
        "tokens",
        _flops(config, time_) * rows * time_,
        {
            "regard": regard_trial(config, Causal(), TextBatch(x, y), checkpointing=checkpointing),
            "transformers": peer_trial(peer, lambda model: model(x, labels=x).loss),
            FLOAT8: regard_trial(
                config, Causal(), TextBatch(x, y), checkpointing=checkpointing, float8=True
            ),
        },
    )


def vaswani(_: str) -> Row:
    config = replace(preset("transformer-base"), dropout=0.1)
    config, rows, time_ = reduce_on_cpu(config, 256, 64)
    batch, mask = _pairs(rows, time_, config.vocab_size)
    x, y = batch.ids, batch.targets

    def peer() -> Any:
        from transformers import MarianConfig, MarianMTModel

        return MarianMTModel(
            MarianConfig(
                vocab_size=config.vocab_size,
                decoder_vocab_size=config.vocab_size,
                d_model=512,
                encoder_layers=config.layers,
                decoder_layers=config.layers,
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
        )

    def peer_loss(model: Any) -> torch.Tensor:
        logits = model(
            input_ids=batch.source.ids, attention_mask=mask, decoder_input_ids=x
        ).logits.flatten(0, 1)
        return F.cross_entropy(logits.float(), y.flatten(), label_smoothing=0.1)

    return Row(
        f"Vaswani base, {rows} pairs x {time_}",
        rows * time_,
        "target tokens",
        _flops(config, time_) * rows * time_,
        {
            "regard": regard_trial(config, Seq2Seq(label_smoothing=0.1), batch),
            "transformers' Marian": peer_trial(peer, peer_loss),
        },
    )


def t5(_: str) -> Row:
    config, rows, time_ = reduce_on_cpu(preset("t5-small"), 64, 256)
    batch, mask = _pairs(rows, time_, config.vocab_size)

    def peer() -> Any:
        from transformers import AutoConfig, T5ForConditionalGeneration

        from regard.hub.config_json import write_config

        settings = {**write_config(config)[1], "use_cache": False}
        return T5ForConditionalGeneration(AutoConfig.for_model(**settings))

    def peer_loss(model: Any) -> torch.Tensor:
        return model(
            input_ids=batch.source.ids,
            attention_mask=mask,
            decoder_input_ids=batch.ids,
            labels=batch.targets,
        ).loss

    return Row(
        f"T5 small, {rows} pairs x {time_}",
        rows * time_,
        "target tokens",
        _flops(config, time_) * rows * time_,
        {
            "regard": regard_trial(config, Seq2Seq(), batch),
            "transformers": peer_trial(peer, peer_loss),
        },
    )


def _pairs(rows: int, time_: int, vocab: int) -> tuple[PairBatch, torch.Tensor]:
    """Pairs of the same length, and a mask in which everything is valid."""
    source = Source(ids(rows, time_, vocab=vocab), torch.full((rows,), time_, device=DEVICE))
    x, y = (ids(rows, time_, vocab=vocab) for _ in range(2))
    return PairBatch(source, x, y), torch.ones_like(x)


def bert(_: str) -> Row:
    config = replace(preset("bert-base"), head="masked", dropout=0.1, attention_dropout=0.1)
    config, rows, time_ = reduce_on_cpu(config, 64, 512)
    x, original = (ids(rows, time_, vocab=config.vocab_size) for _ in range(2))
    masked_positions = torch.rand(rows, time_, device=DEVICE).argsort(1)[:, : round(0.15 * time_)]
    batch = MaskedBatch(
        ids=x,
        documents=None,  # as `Masked` makes batches of one long text
        positions=torch.arange(time_, device=DEVICE).repeat(rows, 1),
        masked_positions=masked_positions,
        targets=original.gather(1, masked_positions),
    )
    labels = torch.full_like(x, -100).scatter(1, masked_positions, batch.targets)

    def peer() -> Any:
        from transformers import BertConfig, BertForMaskedLM

        return BertForMaskedLM(
            BertConfig(
                vocab_size=config.vocab_size,
                num_hidden_layers=config.layers,
                attn_implementation="sdpa",
            )
        )

    return Row(
        f"BERT-base masked, {rows} x {time_}",
        rows * time_,
        "tokens",
        _flops(config, time_) * rows * time_,
        {
            "regard": regard_trial(config, Masked(), batch),
            "transformers": peer_trial(peer, lambda model: model(x, labels=labels).loss),
        },
    )


def vit(_: str) -> Row:
    config, rows, _time = reduce_on_cpu(preset("vit-b16"), 256, 1)
    images = torch.randn(rows, 3, 224, 224, device=DEVICE)
    classes = torch.randint(0, 1000, (rows,), device=DEVICE)

    def peer() -> Any:
        from transformers import ViTConfig, ViTForImageClassification

        return ViTForImageClassification(
            ViTConfig(num_labels=1000, num_hidden_layers=config.layers, attn_implementation="sdpa")
        )

    return Row(
        f"ViT-B/16, {rows} images",
        rows,
        "images",
        cost(config).training_flops_per_token * config.context * rows,
        {
            "regard": regard_trial(config, ImageClassification(), ImageBatch(images, classes)),
            "transformers": peer_trial(peer, lambda model: model(images, labels=classes).loss),
        },
    )


def _flops(config: TransformerConfig, time_: int) -> float:
    return cost(replace(config, context=time_)).training_flops_per_token


ROWS: dict[str, Callable[[str], Row]] = {
    "gpt2": gpt2,
    "llama": partial(decoder, name="tinyllama", rows=8, time_=2048),
    "bert": bert,
    "vaswani": vaswani,
    "vit": vit,
    "bloom": partial(decoder, name="bloom-560m", rows=8, time_=2048),
    "t5": t5,
    "llama-16k": partial(decoder, name="tinyllama", rows=1, time_=16384),
    "llama-16k-window": partial(decoder, name="tinyllama", rows=1, time_=16384, window=1024),
    "llama-64k": partial(decoder, name="tinyllama", rows=1, time_=65536, checkpointing=True),
    "gpt2-biased": partial(gpt2, bias=True),
    "gemma-2": partial(decoder, name="gemma-2-2b", rows=2, time_=4096),
}
APART = ("bloom",)  # rows whose libraries do not fit on the GPU together


def prepare(name: str, library: str, nanogpt: str, device: str) -> Callable[[float], Turn]:
    """Build and compile a model; return a function that times its steps for some seconds."""
    global DEVICE
    DEVICE = torch.device(device)
    torch.manual_seed(0)
    trials = ROWS[name](nanogpt).trials
    if library == UNTUNED:
        _disable_autotuning()
        library = next(iter(trials))
    compile_, step = trials[library]()
    retry_when_out_of_memory(compile_)
    warm_up = 6  # steps in which matmuls are autotuned and CUDA graphs captured

    def time_steps(seconds: float) -> Turn:
        nonlocal warm_up
        for _ in range(warm_up):
            step()
        warm_up = 2
        count = max(2, round(seconds / _seconds(step)))

        def run_steps() -> None:  # without synchronization between steps, as in a training run
            for _ in range(count):
                step()

        duration = _seconds(run_steps) / count
        return duration, torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else 0.0

    return time_steps


def _disable_autotuning() -> None:
    """Let torch choose the algorithm of every matmul of this process, without fused epilogues."""
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # graphs with autotuned matmuls
    matmul.MIN_AUTOTUNED_FLOPS = math.inf  # type: ignore[assignment]
    cublaslt.matmul = lambda *args, **options: False  # that of the loss


def time_row(
    row: Row, workers: dict[str, Worker], repeats: int, seconds: float, matmul_flops: float
) -> None:
    """Time the libraries of a row in alternation, and print their medians."""
    turns: dict[str, list[Turn]] = {library: [] for library in workers}
    for _ in range(repeats):
        for library, worker in workers.items():
            if turn := worker.call(seconds):
                turns[library].append(turn)
    for library, worker in workers.items():
        worker.end()
        if not turns[library]:
            continue
        durations, peaks = zip(*turns[library], strict=True)
        median = statistics.median(durations)
        print(
            f"{row.name:44} {library:23} {row.units / median:11,.0f} {row.unit}/s"
            f"  ({row.units / max(durations):,.0f} to {row.units / min(durations):,.0f})"
            f"  {row.flops / median / matmul_flops:6.1%} of matmul FLOP/s"
            f"  {max(peaks):5.1f} GB  {1e3 * median:8.1f} ms",
            flush=True,
        )


def start_workers(
    name: str, libraries: list[str], options: argparse.Namespace
) -> dict[str, Worker]:
    """The processes of these libraries of a row, which begin to compile."""
    arguments = (options.nanogpt, options.device)
    return {
        library: Worker(f"{name} of {library}", prepare, name, library, *arguments)
        for library in libraries
    }


def main() -> None:
    global DEVICE
    start = time.perf_counter()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nanogpt", default="")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--no-peer", nargs="*", default=[], help="rows of regard alone")
    parser.add_argument(
        "--float8", nargs="*", default=[], help="rows that also run with FP8 matmuls"
    )
    parser.add_argument(
        "--untuned", nargs="*", default=[], help="rows that also run without autotuned matmuls"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2, help="duration of a timed turn")
    parser.add_argument("--compile-limit", type=float, default=600, help="in seconds")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    DEVICE = torch.device(options.device)
    cores = len(os.sched_getaffinity(0))
    matmul_flops = 1e12
    if options.device == "cuda":
        matmul_flops, bandwidth = device_limits()
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {cores} cores")
        print(f"measured: {matmul_flops / 1e12:.0f} TFLOP/s bf16, {bandwidth / 1e12:.2f} TB/s")
        torch.cuda.empty_cache()
    rows: dict[str, Row] = {}
    workers: dict[str, dict[str, Worker]] = {}
    apart: list[tuple[str, str]] = []  # rows and their libraries that start later
    for name in options.rows:
        rows[name] = row = ROWS[name](options.nanogpt)
        libraries = [*row.trials][:1] if name in options.no_peer else [*row.trials][:2]
        if name in options.float8:
            libraries.append(FLOAT8)
        if name in options.untuned:
            libraries.append(UNTUNED)
        row.trials.clear()  # with their tensors
        together = libraries[:1] if name in APART else libraries
        apart += [(name, library) for library in libraries[len(together) :]]
        workers[name] = start_workers(name, together, options)
    wait_for_all(
        [worker for group in workers.values() for worker in group.values()],
        start + options.compile_limit,
    )
    print(f"timing begins after {time.perf_counter() - start:.0f} s", flush=True)
    for name, group in workers.items():
        time_row(rows[name], group, options.repeats, options.seconds, matmul_flops)
    for name, library in apart:
        row = replace(rows[name], name=f"{rows[name].name}, not in alternation")
        group = start_workers(name, [library], options)
        wait_for_all([*group.values()], time.perf_counter() + options.compile_limit)
        time_row(row, group, options.repeats, options.seconds, matmul_flops)
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
