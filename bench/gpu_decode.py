"""Decoding speed on one GPU: LLaMA 1.1B in bfloat16, random weights, batch sizes 1 and 64.

    python bench/gpu_decode.py [--rows 1 64] [--out DIR] [--tune] [--peer]

Prompts of 128 ids, 256 new tokens, sampled on the device with temperature 0.8 and top-k 50. Prints
the copy bandwidth of the GPU, then for each decoder: tokens/s of the whole call, tokens/s without
prefill, the time to the first token, and the bandwidth at which weights are read, relative to the
copy bandwidth. The best of several repeats is printed. `--peer` adds transformers with a static KV
cache, which it compiles; `--out` writes a profile of the kernels of each decoder; `--tune` also
times batch size 1 with other program sizes of the gemv kernels.
"""

import argparse
import statistics
import time
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from regard.accel import pack
from regard.accel.packed_decoder import PackedDecoder
from regard.generate import generate, parse_chain, stream
from regard.generate.decode_loop import CudaGraphDecoder
from regard.models.build import preset
from regard.models.transformer import Transformer

CUDA = torch.device("cuda")
PROMPT, TOKENS = 128, 256
CHAIN = parse_chain(["top_k=50", "temperature=0.8"])
SHAPE = preset("tinyllama")


def copy_bandwidth() -> float:
    """Bytes per second of a large copy, reads and writes."""
    x, y = (torch.empty(1 << 29, device=CUDA) for _ in range(2))
    seconds = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        y.copy_(x)
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return 2 * x.nbytes / statistics.median(seconds)


@cache
def prompts(rows: int) -> list[list[int]]:
    torch.manual_seed(1)
    ids = torch.randint(10, SHAPE.vocab_size, (rows, PROMPT))
    return [[int(id) for id in row] for row in ids]


def decode(model: Any, rows: int, tokens: int = TOKENS) -> None:
    outputs = generate(model, prompts(rows), CHAIN, max_new_tokens=tokens, seed=1)
    assert all(len(output) == tokens for output in outputs)


def time_to_first_token(model: Any) -> float:
    """Seconds until a stream yields its first id."""
    (prompt,) = prompts(1)
    return best_time(
        lambda: next(iter(stream(model, prompt, CHAIN, max_new_tokens=TOKENS, seed=1))), repeats=5
    )


def best_time(run: Callable[[], Any], repeats: int) -> float:
    """The shortest time of `run` in seconds."""
    seconds = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def logits_difference(model: Transformer, decoder: Any, rows: int) -> str:
    """Compare the logits of one decode step with those of the model."""
    with torch.inference_mode():
        ids = torch.tensor(prompts(rows), device=CUDA)
        logits = []
        for language in (model, decoder):
            _, state = language.step(ids, language.start(rows, PROMPT + 8))
            step_logits, _ = language.step(ids[:, :1], state)
            logits.append(step_logits[:, 0].float())
        expected, actual = logits
        difference = float((expected - actual).abs().max() / expected.std())
        same = float((expected.argmax(-1) == actual.argmax(-1)).float().mean())
    return f"max logit difference {difference:.1e} standard deviations, same argmax {same:.0%}"


def profile_kernels(model: Any, rows: int) -> str:
    """A table of the kernels by name with their times."""
    from torch.profiler import ProfilerActivity, profile

    decode(model, rows)  # captures the CUDA graph
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        decode(model, rows)
    return profiler.key_averages().table(
        sort_by="self_device_time_total", row_limit=25, max_name_column_width=70
    )


def decoders(model: Transformer) -> dict[str, Callable[[], Any]]:
    return {
        "eager": lambda: model,
        "CUDA graph": lambda: CudaGraphDecoder(model),
        "packed, CUDA graph": lambda: CudaGraphDecoder(PackedDecoder(model)),
        "Triton, CUDA graph": lambda: CudaGraphDecoder(pack(model)),
        "Triton int8, CUDA graph": lambda: CudaGraphDecoder(pack(model, int8=True)),
        "Triton int4, CUDA graph": lambda: CudaGraphDecoder(pack(model, int4=True)),
    }


def report(
    name: str, model: Any, rows: int, weights: float, bandwidth: float, repeats: int
) -> None:
    tokens = 32 if name == "eager" else TOKENS
    decode(model, rows, tokens)
    decode(model, rows, tokens)
    total = best_time(lambda: decode(model, rows, tokens), repeats)
    first_token = best_time(lambda: decode(model, rows, 1), repeats)
    step = (total - first_token) / (tokens - 1)
    print(
        f"{rows:3} rows  {name:24} {rows * tokens / total:9,.0f} tok/s"
        f"  {rows / step:9,.0f} without prefill  {1e3 * first_token:7.2f} ms to first token"
        f"  {1e3 * step:6.3f} ms/step  {weights / step / bandwidth:5.1%} of copy bandwidth",
        flush=True,
    )


def tune(model: Transformer, bandwidth: float) -> None:
    """Time batch size 1 with other program sizes of the gemv kernels."""
    from regard.accel.kernels import gemv

    for kind, default in list(gemv.PROGRAM_SIZES.items()):
        for size in ((8192, 4), (16384, 4), (16384, 8), (32768, 8)):
            gemv.PROGRAM_SIZES[kind] = size

            def run(name: str = f"{kind} {size}", bits: int = kind[1]) -> None:
                decoder = CudaGraphDecoder(pack(model, int8=bits == 8, int4=bits == 4))
                report(name, decoder, 1, _weight_bytes(model), bandwidth, 2)

            run_and_report_errors(run)
        gemv.PROGRAM_SIZES[kind] = default


def report_transformers(rows: int, repeats: int) -> None:
    """Time `generate` of transformers with a static KV cache, which it compiles."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=SHAPE.vocab_size,
        hidden_size=SHAPE.dim,
        num_hidden_layers=SHAPE.layers,
        num_attention_heads=SHAPE.heads,
        num_key_value_heads=SHAPE.kv_heads,
        intermediate_size=SHAPE.ffn_dim,
    )
    with CUDA:
        hf_model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    ids = torch.tensor(prompts(rows), device=CUDA)

    def run() -> None:
        hf_model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
            do_sample=True,
            temperature=0.8,
            top_k=50,
            cache_implementation="static",
            pad_token_id=0,
        )

    run()
    run()
    total = best_time(run, repeats)
    print(
        f"{rows:3} rows  transformers, static     {rows * TOKENS / total:9,.0f} tok/s", flush=True
    )


def run_and_report_errors(run: Callable[[], None]) -> None:
    """Print the traceback of an exception instead of raising it, so that the others still run."""
    try:
        run()
    except Exception:
        traceback.print_exc()
        torch.cuda.synchronize()


def _weight_bytes(model: Transformer) -> float:
    """Bytes of weights that a decode step reads: all except the embedding table."""
    return sum(p.nbytes for p in model.parameters()) - model.embed.token.weight.nbytes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 64])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--decoders", nargs="+", help="only those whose names contain one of these")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--peer", action="store_true")
    options = parser.parse_args()
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {bandwidth / 1e12:.2f} TB/s")
    torch.manual_seed(0)
    with CUDA:
        model = Transformer(SHAPE).to(torch.bfloat16).eval()
    weights = _weight_bytes(model)
    limit = bandwidth / weights
    print(f"weights read per step: {weights / 1e9:.2f} GB, so at most {limit:,.0f} steps/s")
    start = time.perf_counter()
    for rows in options.rows:
        for name, make in decoders(model).items():
            if options.decoders and not any(part in name for part in options.decoders):
                continue

            def run(name: str = name, make: Callable[[], Any] = make, rows: int = rows) -> None:
                decoder = make()
                read_bytes = weights / (2 if "int8" in name else 4 if "int4" in name else 1)
                report(name, decoder, rows, read_bytes, bandwidth, options.repeats)
                if name != "eager":
                    print("          ", logits_difference(model, decoder, rows))
                if options.out and name != "eager":
                    options.out.mkdir(parents=True, exist_ok=True)
                    path = options.out / f"{rows}-{name.replace(', ', '-').replace(' ', '-')}.txt"
                    path.write_text(profile_kernels(decoder, rows))

            run_and_report_errors(run)

    def report_stream() -> None:
        seconds = time_to_first_token(CudaGraphDecoder(pack(model)))
        print(f"first token of a stream after {1e3 * seconds:.2f} ms")

    run_and_report_errors(report_stream)
    if options.tune:
        tune(model, bandwidth)
    if options.peer:
        for rows in options.rows:
            run_and_report_errors(lambda rows=rows: report_transformers(rows, options.repeats))
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
