"""Decoding speed and correctness of decoder presets on one GPU, with random weights.

    python bench/gpu_decoders.py [SPEC …] [--compiled SPEC …] [--peer PRESET …] [--check]
    python bench/gpu_decoders.py --device cpu gpt2 --peer gpt2    (one layer: a smoke test)

A SPEC is PRESET, PRESET@PROMPT or PRESET/int8, PRESET/int4: prompts of 128 ids unless stated
otherwise, 256 new tokens, one row, temperature 0.8 and top-k 50, in bfloat16. Printed for the
decoder that `regard` chooses, for `--compiled` the model's decode step compiled by Inductor (both
as CUDA graphs), and for `--peer` transformers with a static KV cache, which it compiles: tokens per
second of the whole call, the median of several runs, with the slowest and the fastest; and the
bandwidth at which a step reads weights and KV cache, relative to the copy bandwidth of the GPU.
Encoder–decoders read a source of the length of the prompt; their peer has a dynamic KV cache.

`--check` also compares greedy ids: the decoder that `regard` chooses and the model itself, in
float32 with at most four layers, must give the same 64 ids for one row and for 16. Where one row is
one kernel, which needs 16-bit weights, it also prints how many of the first ids in bfloat16 are
those of the same weights in float32, from this decoder and from the model itself.

Kernels are compiled by several processes side by side; then one SPEC after the other is timed.
"""

import argparse
import copy
import gc
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from gpu_decode import CHAIN, PROMPT, TOKENS, copy_bandwidth
from side_by_side import Worker, wait_for_all

from regard.accel import decoding_path
from regard.generate import generate, parse_chain
from regard.generate.decode_loop import CudaGraphDecoder
from regard.hub.config_json import write_config
from regard.models.build import build_model, preset
from regard.models.transformer import TransformerConfig
from regard.nn.state import Source

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


@dataclass(frozen=True)
class Spec:
    """A preset, the length of its prompt, and the format of its weights."""

    name: str
    prompt: int = PROMPT
    weights: str = ""

    @classmethod
    def parse(cls, text: str) -> "Spec":
        text, _, weights = text.partition("/")
        name, _, prompt = text.partition("@")
        return cls(name, int(prompt or PROMPT), weights)

    def __str__(self) -> str:
        prompt = "" if self.prompt == PROMPT else f", prompt {self.prompt}"
        return self.name + (f", {self.weights}" if self.weights else "") + prompt

    def config(self, layers: int | None = None) -> Any:
        config = preset(self.name)
        if not isinstance(config, TransformerConfig):
            return replace(config, **RECURRENT)
        config = replace(config, context=max(config.context, self.prompt + TOKENS))
        return config if layers is None else replace(config, layers=min(layers, config.layers))


def build(config: Any, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    with DEVICE:
        return build_model(config).to(dtype).eval()


def prompts(config: Any, rows: int, length: int) -> list[list[int]]:
    torch.manual_seed(1)
    vocab_size = getattr(config, "source_vocab_size", None) or config.vocab_size
    return [list(map(int, row)) for row in torch.randint(10, vocab_size, (rows, length))]


def inputs(spec: Spec, config: Any) -> tuple[list[list[int]], dict[str, Any]]:
    """The prompts of `generate`, and its source."""
    ids = prompts(config, 1, spec.prompt)
    if not _has_source(config):
        return ids, {}
    source = Source(torch.tensor(ids, device=DEVICE), torch.tensor([spec.prompt], device=DEVICE))
    return [[1]], {"source": source}


def _has_source(config: Any) -> bool:
    return getattr(config, "architecture", "") == "encoder-decoder"


def decode(decoder: Any, spec: Spec, config: Any, tokens: int = TOKENS) -> None:
    ids, source = inputs(spec, config)
    (output,) = generate(decoder, ids, CHAIN, max_new_tokens=tokens, seed=1, **source)
    assert len(output) == tokens


def read_bytes(model: Any, decoder: Any, spec: Spec, config: Any) -> float:
    """Bytes of weights and KV cache that a step reads, on average."""
    embedding = next(m for m in model.modules() if isinstance(m, torch.nn.Embedding)).weight
    tied = getattr(config, "tied", False)
    weights = sum(p.nbytes for p in model.parameters()) - (0 if tied else embedding.nbytes)
    if spec.weights:
        layers = [
            layer
            for packed in decoder.layers
            for layer in (packed.qkv, packed.out, packed.gate_up, packed.down)
        ]
        weights = sum(layer.weight.nbytes + layer.scale.nbytes for layer in (*layers, decoder.head))
    if not isinstance(config, TransformerConfig) or _has_source(config):
        return weights
    caches = model.start(1, spec.prompt + TOKENS).layers
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


def line(kind: str, spec: Spec, seconds: list[float], step: float, read: float) -> str:
    speeds = sorted(TOKENS / duration for duration in seconds)
    first = statistics.median(seconds) - (TOKENS - 1) * step
    return (
        f"{spec!s:28} {kind:12} {statistics.median(speeds):7,.0f} tok/s"
        f" ({speeds[0]:,.0f} to {speeds[-1]:,.0f})  first {1e3 * first:7.1f} ms"
        f"  step {1e3 * step:6.3f} ms  {read / step / 1e12:5.2f} TB/s"
    )


def chosen_path(spec: Spec, model: Any) -> Any:
    return decoding_path(model, **({spec.weights: True} if spec.weights else {}))


def prepare_presets(specs: list[Spec], check: bool, repeats: int, device: str) -> Any:
    """Compile the kernels of presets with a few layers, and check them; then time one of them."""
    _set_device(device)
    checks = []
    for spec in specs:
        try:
            if check and not spec.weights and spec.prompt == PROMPT:
                checks.append(compare_greedy_ids(spec))
            config = spec.config(layers=2)
            path = chosen_path(spec, build(config, torch.bfloat16))
            decode(CudaGraphDecoder(path.language), spec, config)
        except Exception:
            checks.append(f"{spec}: {traceback.format_exc()}")
        gc.collect()

    def time_preset(spec: Spec | None) -> str:
        if spec is None:
            return "\n".join(checks)
        try:
            return measure_preset(spec)
        except Exception:
            return f"{spec}: {traceback.format_exc()}"

    def measure_preset(spec: Spec) -> str:
        gc.collect()
        torch.cuda.empty_cache()
        config = spec.config(layers=None if device == "cuda" else 1)
        model = build(config, torch.bfloat16)
        path = chosen_path(spec, model)
        seconds, step = measure(path.language, spec, config, repeats)
        return line(path.name, spec, seconds, step, read_bytes(model, path.language, spec, config))

    return time_preset


def compare_greedy_ids(spec: Spec) -> str:
    """Whether the greedy ids of the chosen decoder are those of the model."""
    torch.set_float32_matmul_precision("highest")  # not TF32, which rounds to ten bits
    config = spec.config(layers=4)
    model = build(config, torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    greedy, path, results = parse_chain(["greedy"]), chosen_path(spec, model), []
    for rows in (1, 16):
        ids, source = prompts(config, rows, PROMPT), {}
        if _has_source(config):
            lengths = torch.full((rows,), PROMPT, device=DEVICE)
            source = {"source": Source(torch.tensor(ids, device=DEVICE), lengths)}
            ids = [[1]] * rows
        outputs = [
            generate(decoder, ids, greedy, max_new_tokens=64, seed=1, **source)
            for decoder in (model, CudaGraphDecoder(path.language))
        ]
        equal = sum(a == b for a, b in zip(*outputs, strict=True))
        results.append(f"{equal} of {rows}")
    text = f"greedy ids  {spec!s:20} {path.name:10} equal: {', '.join(results)}"
    return text + compare_bfloat16(spec, model.bfloat16())


def compare_bfloat16(spec: Spec, model: Any) -> str:
    """How many of the first greedy ids in bfloat16 are those in float32, for one kernel a step."""
    decoder = chosen_path(spec, model).language
    if getattr(decoder, "persistent_step", None) is None:
        return ""
    reference = copy.deepcopy(model).float()
    ids, source = inputs(spec, spec.config())
    outputs = [
        generate(decoder, ids, parse_chain(["greedy"]), max_new_tokens=64, seed=1, **source)[0]
        for decoder in (reference, CudaGraphDecoder(decoder), model)
    ]
    equal = [
        next((n for n, (a, b) in enumerate(zip(outputs[0], other, strict=True)) if a != b), 64)
        for other in outputs[1:]
    ]
    return f"; in bfloat16 the first {equal[0]} of 64, of the model itself {equal[1]}"


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


def prepare_compiled(spec: Spec, repeats: int, device: str) -> Any:
    _set_device(device)
    config = spec.config(layers=None if device == "cuda" else 1)
    model = build(config, torch.bfloat16)
    decoder = CompiledStep(model)
    decode(CudaGraphDecoder(decoder), spec, config)
    read = read_bytes(model, model, spec, config)

    def time_compiled() -> str:
        return line("compiled", spec, *measure(decoder, spec, config, repeats), read)

    return time_compiled


def prepare_peer(name: str, repeats: int, device: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    _set_device(device)
    spec = Spec(name)
    config = spec.config(layers=None if device == "cuda" else 1)
    with DEVICE:
        hf_config = AutoConfig.for_model(**write_config(config)[1])
        auto = AutoModelForSeq2SeqLM if _has_source(config) else AutoModelForCausalLM
        model = auto.from_config(hf_config, dtype=torch.bfloat16).eval()
    ids = torch.tensor(prompts(config, 1, PROMPT), device=DEVICE)
    cache: dict[str, Any] = {"cache_implementation": "static"}
    if _has_source(config):
        model.generation_config.decoder_start_token_id = 0
        cache = {"eos_token_id": 1}

    def run() -> None:
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
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
        speeds = sorted(TOKENS / _seconds(run) for _ in range(repeats))
        return (
            f"{spec!s:28} transformers {statistics.median(speeds):7,.0f} tok/s"
            f" ({speeds[0]:,.0f} to {speeds[-1]:,.0f})"
        )

    return time_peer


def _set_device(device: str) -> None:
    global DEVICE
    DEVICE = torch.device(device)


def main() -> None:
    start = time.perf_counter()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("specs", nargs="*", default=PRESETS)
    parser.add_argument("--compiled", nargs="*", default=[], metavar="SPEC")
    parser.add_argument("--peer", nargs="*", default=[], metavar="PRESET")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--processes", type=int, default=12, help="processes that compile")
    parser.add_argument("--compile-limit", type=float, default=600, help="seconds")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    specs, device, repeats = [*map(Spec.parse, options.specs)], options.device, options.repeats
    if device == "cuda":
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
        print(f"copy bandwidth {copy_bandwidth() / 1e12:.2f} TB/s", flush=True)
        torch.cuda.empty_cache()
    count = min(options.processes, len(specs))
    groups = [specs[number::count] for number in range(count)]
    presets = [
        Worker(" ".join(map(str, group)), prepare_presets, group, options.check, repeats, device)
        for group in groups
    ]
    compiled = [
        Worker(f"compiled {text}", prepare_compiled, Spec.parse(text), repeats, device)
        for text in options.compiled
    ]
    peers = [
        Worker(f"transformers {name}", prepare_peer, name, repeats, device) for name in options.peer
    ]
    wait_for_all([*presets, *compiled, *peers], start + options.compile_limit)
    print(f"timing begins after {time.perf_counter() - start:.0f} s", flush=True)
    if options.check:
        for worker in presets:
            print(worker.call(None), flush=True)
    for worker in (*compiled, *peers):
        if text := worker.call():
            print(text, flush=True)
        worker.end()
    for number, spec in enumerate(specs):
        if text := presets[number % count].call(spec):
            print(text, flush=True)
    for worker in presets:
        worker.end()
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
