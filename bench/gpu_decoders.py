"""Decoding speed and correctness of decoder presets on one GPU, with random weights.

    python bench/gpu_decoders.py [SPEC …] [--compiled SPEC …] [--peer SPEC …] [--check]
    python bench/gpu_decoders.py --check-only [SPEC …]
    python bench/gpu_decoders.py --device cpu gpt2 --peer gpt2    (one layer: a smoke test)

A SPEC is PRESET[:LAYERS][*ROWS][@PROMPT][/int8 or /int4], such as gpt2*16 or llama-2-70b:8@4096:
all layers, one row and prompts of 128 ids unless stated otherwise, 256 new tokens, temperature 0.8
and top-k 50, in bfloat16. Printed for the decoder that `regard` chooses, for `--compiled` the
model's decode step compiled by Inductor (both as CUDA graphs), and for `--peer` transformers with a
static KV cache, which it compiles: tokens per second of all rows in the whole call, the median of
several runs, with the slowest and the fastest; the time to the first token; and for the first two,
the bandwidth at which a step reads weights and KV cache, and its ratio to the copy bandwidth of the
GPU. Encoder–decoders read a source of the length of the prompt, and no bandwidth is printed; their
peer has a dynamic KV cache.

`--check` also compares greedy ids: the decoder that `regard` chooses and the model itself, in
float32 with at most four layers (fewer where they have more than 8 GiB), must give the same 64 ids
for one row and for 16. Of the first row that differs is printed at which id, and by how much the
logits of both ids differ, in standard deviations of all logits. Where one row is one kernel, which
needs 16-bit weights, it also prints how many of the first ids in bfloat16 are those of the same
weights in float32, from this decoder and from the model itself. `--check-only` does this, and
nothing else, for the SPECs or for all presets that generate ids, except those that are fitted
without gradients.

Kernels are compiled by several processes side by side; then one SPEC after the other is timed.
"""

import argparse
import copy
import multiprocessing
import os
import random
import re
import statistics
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from gpu_decode import CHAIN, PROMPT, TOKENS, copy_bandwidth
from side_by_side import Worker, free_memory, retry_when_out_of_memory, wait_for_all

from regard.accel import decoding_path
from regard.generate import generate, parse_chain
from regard.generate.decode_loop import CudaGraphDecoder
from regard.hub.config_json import write_config
from regard.models import presets
from regard.models.base import LanguageModel
from regard.models.build import (
    FAMILIES,
    build_model,
    count_parameters,
    family_of,
    is_fitted_without_gradients,
    preset,
)
from regard.models.captioner import ImageGrid
from regard.models.recurrent import RecurrentConfig
from regard.models.seq2seq import Seq2SeqConfig
from regard.models.transformer import TransformerConfig
from regard.nn.state import ImageSource, Source

PRESETS = [
    "gpt2",
    "qwen3-0.6b",
    "pythia-1b",
    "bloom-560m",
    "phi-1.5",
    "gemma-2-2b",
    "llama-3.2-1b",
    "opt-1.3b",
    "gpt2-xl",
    "qwen2-1.5b",
]
DEVICE = torch.device("cuda")
RECURRENT = {"dim": 1024, "layers": 2, "vocab_size": 32000, "context": 1024}  # their sizes
INT4_ROWS = 4  # of a step up to which int4 weights are read, as in `accel.triton_decoder`
CHECKED_BYTES = 8 << 30  # of the layers, in float32, whose greedy ids are compared
SPEC = re.compile(r"([^:*@/]+)(?::(\d+))?(?:\*(\d+))?(?:@(\d+))?(?:/(int8|int4))?")


@dataclass(frozen=True)
class Spec:
    """A preset, its layers (None: all), rows and length of the prompt, and the weights' format."""

    name: str
    layers: int | None = None
    rows: int = 1
    prompt: int = PROMPT
    weights: str = ""

    @classmethod
    def parse(cls, text: str) -> "Spec":
        match = SPEC.fullmatch(text)
        if match is None or match[1] not in presets.PRESETS:
            raise ValueError(f"{text!r} must be PRESET[:LAYERS][*ROWS][@PROMPT][/int8 or /int4]")
        name, layers, rows, prompt, weights = match.groups()
        layers = int(layers) if layers else None
        return cls(name, layers, int(rows or 1), int(prompt or PROMPT), weights or "")

    def __str__(self) -> str:
        parts = [
            self.name,
            "" if self.layers is None else f"{self.layers} layers",
            "" if self.rows == 1 else f"{self.rows} rows",
            self.weights,
            "" if self.prompt == PROMPT else f"prompt {self.prompt}",
        ]
        return ", ".join(filter(None, parts))

    def config(self, layers: int | None = None) -> Any:
        """Its configuration, with at most this many layers."""
        config = preset(self.name)
        if isinstance(config, RecurrentConfig | Seq2SeqConfig):
            return replace(config, **RECURRENT)
        if not isinstance(config, TransformerConfig):
            return config
        limits = [limit for limit in (layers, self.layers) if limit is not None]
        context = max(config.context, self.prompt + TOKENS)
        return replace(config, context=context, layers=min([config.layers, *limits]))


def all_specs() -> list[Spec]:
    """All presets that generate ids and are trained by gradient descent, without aliases."""
    names = [name for name in presets.PRESETS if name not in presets.ALIASES]
    return [Spec(name) for name in names if _generates(preset(name))]


def _generates(config: Any) -> bool:
    family = family_of(config)
    is_encoder = getattr(config, "architecture", "") == "encoder"
    is_language_model = issubclass(FAMILIES[family][1], LanguageModel)
    return is_language_model and not is_encoder and not is_fitted_without_gradients(family)


def build(config: Any, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    with DEVICE:
        return build_model(config).to(dtype).eval()


def prompts(config: Any, rows: int, length: int) -> list[list[int]]:
    torch.manual_seed(1)
    vocab_size = getattr(config, "source_vocab_size", None) or config.vocab_size
    return [list(map(int, row)) for row in torch.randint(10, vocab_size, (rows, length))]


def inputs(spec: Spec, config: Any, rows: int) -> tuple[list[list[int]], dict[str, Any]]:
    """The prompts of `generate`, and its source."""
    ids = prompts(config, rows, spec.prompt)
    if not _has_source(config):
        return ids, {}
    lengths = torch.full((rows,), spec.prompt, device=DEVICE)
    source = Source(torch.tensor(ids, device=DEVICE), lengths)
    if isinstance(config, ImageGrid):
        shape = (rows, config.channels, config.image_size, config.image_size)
        source = ImageSource.of(torch.rand(shape, device=DEVICE), config.regions)
    return [[1]] * rows, {"source": source}


def _has_source(config: Any) -> bool:
    return getattr(config, "architecture", "") == "encoder-decoder"


def decode(decoder: Any, spec: Spec, config: Any, tokens: int = TOKENS) -> None:
    ids, source = inputs(spec, config, spec.rows)
    outputs = generate(decoder, ids, CHAIN, max_new_tokens=tokens, seed=1, **source)
    assert all(len(output) == tokens for output in outputs)


def read_bytes(model: Any, decoder: Any, spec: Spec, config: Any) -> float:
    """Bytes of weights and KV cache that a step reads, on average; 0: not known.

    An encoder–decoder reads only a part of its weights.
    """
    if _has_source(config):
        return 0.0
    embedding = next(m for m in model.modules() if isinstance(m, torch.nn.Embedding)).weight
    tied = getattr(config, "tied", False)
    weights = sum(p.nbytes for p in model.parameters()) - (0 if tied else embedding.nbytes)
    if spec.weights and (spec.weights == "int8" or spec.rows <= INT4_ROWS):
        layers = [
            layer
            for packed in decoder.layers
            for layer in (packed.qkv, packed.out, packed.gate_up, packed.down)
        ]
        weights = sum(layer.weight.nbytes + layer.scale.nbytes for layer in (*layers, decoder.head))
    if not isinstance(config, TransformerConfig):
        return weights
    caches = model.start(spec.rows, spec.prompt + TOKENS).layers
    filled = (spec.prompt + TOKENS / 2) / (spec.prompt + TOKENS)
    return weights + filled * sum(cache.keys.nbytes + cache.values.nbytes for cache in caches)


def measure(decoder: Any, spec: Spec, config: Any, repeats: int) -> tuple[list[float], float]:
    """Seconds of each run, and of a step, from the difference to runs with fewer tokens."""
    seconds = {}
    for tokens in (TOKENS // 4, TOKENS):
        captured = CudaGraphDecoder(decoder)  # it keeps the graphs of one number of tokens
        run = partial(decode, captured, spec, config, tokens)
        for _ in range(2):  # captures the step, then also the prefill
            run()
        seconds[tokens] = [_seconds(run) for _ in range(repeats)]
    few, many = (statistics.median(runs) for runs in seconds.values())
    return seconds[TOKENS], (many - few) / (TOKENS - TOKENS // 4)


def _seconds(run: Callable[[], Any]) -> float:
    _synchronize()
    start = time.perf_counter()
    run()
    _synchronize()
    return time.perf_counter() - start


def _synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def line(
    kind: str, spec: Spec, seconds: list[float], step: float, read: float, bandwidth: float
) -> str:
    speeds = sorted(spec.rows * TOKENS / duration for duration in seconds)
    first = statistics.median(seconds) - (TOKENS - 1) * step
    text = (
        f"{spec!s:28} {kind:12} {statistics.median(speeds):7,.0f} tok/s"
        f" ({speeds[0]:,.0f} to {speeds[-1]:,.0f})  first {1e3 * first:7.1f} ms"
        f"  step {1e3 * step:6.3f} ms"
    )
    if not read:
        return text
    return f"{text}  {read / step / 1e12:5.2f} TB/s  {read / step / bandwidth:5.1%} of copies"


def chosen_path(spec: Spec, model: Any) -> Any:
    return decoding_path(model, **({spec.weights: True} if spec.weights else {}))


def _is_one_kernel(path: Any) -> bool:
    return getattr(path.language, "persistent_step", None) is not None


def prepare_presets(specs: list[Spec], options: argparse.Namespace) -> Any:
    """Compile the kernels of presets, and check them; then time one of them."""
    _set_device(options.device)
    checks = []

    def compile_kernels(spec: Spec) -> None:
        config = spec.config(layers=2)
        path = chosen_path(spec, build(config, torch.bfloat16))
        if _is_one_kernel(path):  # it is compiled for the number of layers
            config = spec.config()
            path = chosen_path(spec, build(config, torch.bfloat16))
        decode(CudaGraphDecoder(path.language), spec, config)

    for spec in specs:
        if options.check and spec == Spec(spec.name):
            checks.append(check(spec))
        try:
            retry_when_out_of_memory(partial(compile_kernels, spec))
        except Exception:
            checks.append(f"{spec}: {traceback.format_exc()}")
        free_memory()

    def time_preset(spec: Spec | None) -> str:
        if spec is None:
            return "\n".join(checks)
        try:
            return measure_preset(spec)
        except Exception:
            return f"{spec}: {traceback.format_exc()}"

    def measure_preset(spec: Spec) -> str:
        free_memory()
        config = spec.config(layers=None if options.device == "cuda" else 1)
        model = build(config, torch.bfloat16)
        path = chosen_path(spec, model)
        seconds, step = measure(path.language, spec, config, options.repeats)
        kind = "one kernel" if spec.rows == 1 and _is_one_kernel(path) else path.name
        read = read_bytes(model, path.language, spec, config)
        return line(kind, spec, seconds, step, read, options.bandwidth)

    return time_preset


def check_all(specs: list[Spec], options: argparse.Namespace) -> None:
    """Compare the greedy ids of presets in several processes, and print them as they are ready."""
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    arguments = (options.device,)
    specs = random.Random(0).sample(specs, len(specs))  # not all of the largest at the same time
    with ProcessPoolExecutor(options.processes, context, _set_device, arguments) as pool:
        for future in as_completed([pool.submit(check, spec) for spec in specs]):
            print(future.result(), flush=True)


def check(spec: Spec) -> str:
    """What `compare_greedy_ids` says of a preset, or the exception that it raises."""
    start, results = time.perf_counter(), []
    try:
        retry_when_out_of_memory(lambda: results.append(compare_greedy_ids(spec)))
    except Exception:
        results.append(f"{spec}: {traceback.format_exc()}")
    free_memory()
    return f"{results[-1]}  ({time.perf_counter() - start:.0f} s)"


def compare_greedy_ids(spec: Spec) -> str:
    """Whether the greedy ids of the chosen decoder are those of the model."""
    torch.set_float32_matmul_precision("highest")  # not TF32, which rounds to ten bits
    config = spec.config(layers=checked_layers(spec))
    model = build(config, torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    greedy, path, results = parse_chain(["greedy"]), chosen_path(spec, model), []
    for rows in (1, 16):
        ids, source = inputs(spec, config, rows)
        outputs = [
            generate(decoder, ids, greedy, max_new_tokens=64, seed=1, **source)
            for decoder in (model, CudaGraphDecoder(path.language))
        ]
        pairs = [*zip(*outputs, strict=True)]
        different = [row for row, (a, b) in enumerate(pairs) if a != b]
        results.append(f"{rows - len(different)} of {rows}")
        for row in different[:1]:
            index = torch.tensor([row], device=DEVICE)
            row_source = {name: value.select(index) for name, value in source.items()}
            results.append(first_difference(model, ids[row], *pairs[row], **row_source))
    layers = f", {config.layers} layers" if hasattr(config, "layers") else ""
    text = f"greedy ids  {spec!s:20} {path.name + layers:17} equal: {', '.join(results)}"
    del path  # with its float32 weights
    return text + compare_bfloat16(spec, config, model.bfloat16())


def checked_layers(spec: Spec) -> int:
    """At most four, and at most as many as have 8 GiB of weights in float32, but at least one."""
    one, two = (count_parameters(spec.config(layers=layers)) for layers in (1, 2))
    return max(1, min(4, CHECKED_BYTES // (4 * max(1, two - one))))


@torch.inference_mode()
def first_difference(
    model: Any, prompt: list[int], a: list[int], b: list[int], source: Source | None = None
) -> str:
    """The first place where the ids `a` of the model differ from `b`, and by how much in logits."""
    place = next(n for n, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
    ids = torch.tensor([[*prompt, *a[:place]]], device=DEVICE)
    logits = model.step(ids, model.start(1, ids.shape[1], source))[0][0, -1]
    difference = float((logits[a[place]] - logits[b[place]]) / logits.std())
    return f"the first at id {place}, logits {difference:.0e} apart"


def compare_bfloat16(spec: Spec, config: Any, model: Any) -> str:
    """How many of the first greedy ids in bfloat16 are those in float32, for one kernel a step."""
    path = chosen_path(spec, model)
    if not _is_one_kernel(path):
        return ""
    reference = copy.deepcopy(model).float()
    ids, source = inputs(spec, config, 1)
    outputs = [
        generate(decoder, ids, parse_chain(["greedy"]), max_new_tokens=64, seed=1, **source)[0]
        for decoder in (reference, CudaGraphDecoder(path.language), model)
    ]
    equal = [
        next((n for n, (a, b) in enumerate(zip(outputs[0], other, strict=True)) if a != b), 64)
        for other in outputs[1:]
    ]
    return f"; one kernel in bfloat16: the first {equal[0]} of 64, the model itself {equal[1]}"


class CompiledStep:
    """A model whose decode step is compiled by Inductor; prefill calls the model."""

    def __init__(self, model: Any) -> None:
        self.model = model
        compiles = DEVICE.type == "cuda"
        self.compiled = torch.compile(model.step, dynamic=False) if compiles else model.step

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def step(self, ids: torch.Tensor, state: Any, **options: Any) -> Any:
        step = self.compiled if ids.shape[1] == 1 else self.model.step
        return step(ids, state, **options)


def prepare_compiled(spec: Spec, options: argparse.Namespace) -> Any:
    _set_device(options.device)
    config = spec.config(layers=None if options.device == "cuda" else 1)
    model = build(config, torch.bfloat16)
    decoder = CompiledStep(model)
    decode(CudaGraphDecoder(decoder), spec, config)
    read = read_bytes(model, model, spec, config)

    def time_compiled() -> str:
        seconds, step = measure(decoder, spec, config, options.repeats)
        return line("compiled", spec, seconds, step, read, options.bandwidth)

    return time_compiled


def prepare_peer(spec: Spec, options: argparse.Namespace) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    _set_device(options.device)
    config = spec.config(layers=None if options.device == "cuda" else 1)
    with DEVICE:
        hf_config = AutoConfig.for_model(**write_config(config)[1])
        auto = AutoModelForSeq2SeqLM if _has_source(config) else AutoModelForCausalLM
        model = auto.from_config(hf_config, dtype=torch.bfloat16).eval()
    ids = torch.tensor(prompts(config, spec.rows, spec.prompt), device=DEVICE)
    cache: dict[str, Any] = {"cache_implementation": "static"}
    if _has_source(config):
        model.generation_config.decoder_start_token_id = 0
        cache = {"eos_token_id": 1}

    def run(tokens: int = TOKENS) -> None:
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=True,
            temperature=0.8,
            top_k=50,
            pad_token_id=0,
            **cache,
        )

    run()
    run()

    def time_peer() -> str:
        run()
        seconds = [_seconds(run) for _ in range(options.repeats)]
        first = statistics.median(_seconds(partial(run, 1)) for _ in range(options.repeats + 1))
        step = (statistics.median(seconds) - first) / (TOKENS - 1)
        return line("transformers", spec, seconds, step, 0, options.bandwidth)

    return time_peer


def _set_device(device: str) -> None:
    global DEVICE
    DEVICE = torch.device(device)


def main() -> None:
    start = time.perf_counter()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = [*map(Spec.parse, PRESETS)]
    parser.add_argument("specs", nargs="*", default=default, type=Spec.parse, metavar="SPEC")
    for name in ("--compiled", "--peer"):
        parser.add_argument(name, nargs="*", default=[], type=Spec.parse, metavar="SPEC")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--check-only", nargs="*", type=Spec.parse, metavar="SPEC")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--processes", type=int, default=12, help="processes that compile")
    parser.add_argument("--compile-limit", type=float, default=600, help="seconds")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    specs, options.bandwidth = options.specs, 1e12
    if any(spec.weights for spec in options.peer):
        parser.error("transformers is measured in bfloat16 only: leave out /int8 and /int4")
    if options.device == "cuda":
        options.bandwidth = copy_bandwidth()
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
        print(f"copy bandwidth {options.bandwidth / 1e12:.2f} TB/s", flush=True)
        torch.cuda.empty_cache()
    if options.check_only is not None:
        check_all(options.check_only or all_specs(), options)
        print(f"{time.perf_counter() - start:.0f} s")
        return
    count = min(options.processes, len(specs))
    groups = [specs[number::count] for number in range(count)]
    chosen = [
        Worker(" | ".join(map(str, group)), prepare_presets, group, options) for group in groups
    ]
    compiled = [
        Worker(f"compiled {spec}", prepare_compiled, spec, options) for spec in options.compiled
    ]
    peers = [Worker(f"transformers {spec}", prepare_peer, spec, options) for spec in options.peer]
    wait_for_all([*chosen, *compiled, *peers], start + options.compile_limit)
    print(f"timing begins after {time.perf_counter() - start:.0f} s", flush=True)
    if options.check:
        for worker in chosen:
            print(worker.call(None), flush=True)
    for worker in (*compiled, *peers):
        if text := worker.call():
            print(text, flush=True)
        worker.end()
    for number, spec in enumerate(specs):
        if text := chosen[number % count].call(spec):
            print(text, flush=True)
    for worker in chosen:
        worker.end()
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
