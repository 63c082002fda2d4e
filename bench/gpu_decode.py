"""Writing on one GPU: the LLaMA shape of 1.1B in bfloat16, random weights, one row and 64.

    python bench/gpu_decode.py [--rows 1 64] [--out DIR] [--tune] [--peer]

128 ids are read and 256 written, with temperature 0.8 and top-k 50 on the device. Prints what
the card copies in a second, then for each way of writing: tokens a second over the whole call,
over all but the first token, the time to the first, and the bytes of weights read in a second
as a share of what is copied. The better of some turns counts. `--peer` adds transformers with a
static cache, compiled by itself; `--out` writes the kernels of a step with their times.
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
from regard.generate.decode_loop import Engine
from regard.models.build import preset
from regard.models.transformer import Transformer

CUDA = torch.device("cuda")
PROMPT, TOKENS = 128, 256
CHAIN = parse_chain(["top_k=50", "temperature=0.8"])
SHAPE = preset("tinyllama")


def copied() -> float:
    """Bytes a second of a large copy, read and written."""
    x, y = (torch.empty(1 << 29, device=CUDA) for _ in range(2))
    found = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        y.copy_(x)
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return 2 * x.nbytes / statistics.median(found)


@cache
def prompts(rows: int) -> list[list[int]]:
    torch.manual_seed(1)
    ids = torch.randint(10, SHAPE.vocab_size, (rows, PROMPT))
    return [[int(each) for each in row] for row in ids]


def write(model: Any, rows: int, tokens: int = TOKENS) -> None:
    answers = generate(model, prompts(rows), CHAIN, tokens=tokens, seed=1)
    assert all(len(answer) == tokens for answer in answers)


def first(model: Any) -> float:
    """Seconds until the first id of a stream."""
    (prompt,) = prompts(1)
    return measured(
        lambda: next(iter(stream(model, prompt, CHAIN, tokens=TOKENS, seed=1))), turns=5
    )


def measured(work: Callable[[], Any], turns: int) -> float:
    found = []
    for _ in range(turns):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return min(found)


def agreement(model: Transformer, other: Any, rows: int) -> str:
    """How far the logits of one step are from the model's own."""
    with torch.inference_mode():
        ids = torch.tensor(prompts(rows), device=CUDA)
        found = []
        for each in (model, other):
            _, state = each.step(ids, each.start(rows, PROMPT + 8))
            logits, _ = each.step(ids[:, :1], state)
            found.append(logits[:, 0].float())
        far = float((found[0] - found[1]).abs().max() / found[0].std())
        same = float((found[0].argmax(-1) == found[1].argmax(-1)).float().mean())
    return f"logits differ by {far:.1e} of their spread, same best {same:.0%}"


def kernels(model: Any, rows: int, tokens: int = 48) -> str:
    """The kernels of the last steps, by name, with their share of the time."""
    from torch.profiler import ProfilerActivity, profile

    write(model, rows)  # to record
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        write(model, rows, TOKENS)
    return seen.key_averages().table(
        sort_by="self_device_time_total", row_limit=25, max_name_column_width=70
    )


def ways(model: Transformer) -> dict[str, Callable[[], Any]]:
    return {
        "model": lambda: model,
        "model, recorded": lambda: Engine(model),
        "packed, recorded": lambda: Engine(PackedDecoder(model)),
        "fused, recorded": lambda: Engine(pack(model)),
        "fused int8, recorded": lambda: Engine(pack(model, int8=True)),
    }


def report(name: str, model: Any, rows: int, weights: float, copy: float, turns: int) -> None:
    tokens = 32 if name == "model" else TOKENS
    write(model, rows, tokens)
    write(model, rows, tokens)
    whole = measured(lambda: write(model, rows, tokens), turns)
    begun = measured(lambda: write(model, rows, 1), turns)
    each = (whole - begun) / (tokens - 1)
    print(
        f"{rows:3} rows  {name:24} {rows * tokens / whole:9,.0f} tok/s"
        f"  {rows / each:9,.0f} after the first  {1e3 * begun:7.2f} ms to the first"
        f"  {1e3 * each:6.3f} ms a step  {weights / each / copy:5.1%} of the copy",
        flush=True,
    )


def tune(model: Transformer, copy: float) -> None:
    """One row with other sizes of programs, one kind of product after the other."""
    from regard.accel.kernels import gemv

    for kind, own in list(gemv.PROGRAM_SIZES.items()):
        for size in ((8192, 4), (16384, 4), (16384, 8), (32768, 8)):
            gemv.PROGRAM_SIZES[kind] = size

            def work(name: str = f"{kind} {size}", int8: bool = kind[1]) -> None:
                report(name, Engine(pack(model, int8=int8)), 1, _bytes(model), copy, 2)

            guarded(work)
        gemv.PROGRAM_SIZES[kind] = own


def peer(rows: int, turns: int) -> None:
    """transformers' own generate with a static cache, which it compiles."""
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
        other = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    ids = torch.tensor(prompts(rows), device=CUDA)

    def work() -> None:
        other.generate(
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

    work()
    work()
    whole = measured(work, turns)
    print(
        f"{rows:3} rows  transformers, static     {rows * TOKENS / whole:9,.0f} tok/s", flush=True
    )


def guarded(work: Callable[[], None]) -> None:
    """One way that fails must not take the others with it."""
    try:
        work()
    except Exception:
        traceback.print_exc()
        torch.cuda.synchronize()


def _bytes(model: Transformer) -> float:
    """What a token reads: all but the table of embeddings."""
    return sum(p.nbytes for p in model.parameters()) - model.embed.token.weight.nbytes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 64])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--ways", nargs="+", help="only those whose name contains one of these")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--peer", action="store_true")
    given = parser.parse_args()
    copy = copied()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {copy / 1e12:.2f} TB/s")
    torch.manual_seed(0)
    with CUDA:
        model = Transformer(SHAPE).to(torch.bfloat16).eval()
    weights = _bytes(model)
    print(f"weights of a token: {weights / 1e9:.2f} GB, so {copy / weights:,.0f} tok/s at most")
    began = time.perf_counter()
    for rows in given.rows:
        for name, make in ways(model).items():
            if given.ways and not any(each in name for each in given.ways):
                continue

            def work(name: str = name, make: Callable[[], Any] = make, rows: int = rows) -> None:
                made = make()
                share = weights / 2 if "int8" in name else weights
                report(name, made, rows, share, copy, given.turns)
                if name != "model":
                    print("          ", agreement(model, made, rows))
                if given.out and name != "model":
                    given.out.mkdir(parents=True, exist_ok=True)
                    path = given.out / f"{rows}-{name.replace(', ', '-').replace(' ', '-')}.txt"
                    path.write_text(kernels(made, rows))

            guarded(work)
    guarded(lambda: print(f"first id of a stream after {1e3 * first(Engine(pack(model))):.2f} ms"))
    if given.tune:
        tune(model, copy)
    if given.peer:
        for rows in given.rows:
            guarded(lambda rows=rows: peer(rows, given.turns))
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
