"""Decoding speed on a CPU, compared with transformers: GPT-2 124M and stories260K.

    REGARD_DATA=… python bench/cpu_decode.py [--models gpt2 stories] [--repeats 5] [--threads 2]

Both use the same weights, float32, batch size 1 and greedy decoding. They are timed alternately, so
that load on the machine affects both; the median of the ratios is printed. With int8, decode steps
use int8 weights. In float32 the generated ids must be equal.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import regard
from regard.accel import pack
from regard.generate import generate, parse_chain
from regard.generate.decode_loop import Engine
from regard.hub.external_checkpoint import open_checkpoint

GREEDY = parse_chain(["greedy"])
PROMPT = 16


def gpt2() -> tuple[Any, Any, int]:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    hf_model = GPT2LMHeadModel(GPT2Config()).eval()
    with tempfile.TemporaryDirectory() as folder:
        hf_model.save_pretrained(folder)
        model = open_checkpoint(Path(folder)).load()
    return model.eval(), hf_model, 24


def stories() -> tuple[Any, Any, int]:
    from transformers import AutoModelForCausalLM

    source = Path(os.environ["REGARD_DATA"]) / "weights" / "stories260k"
    with tempfile.TemporaryDirectory() as parent:
        run = regard.import_model(source, Path(parent) / "run")
        run.export(Path(parent) / "stories")
        hf_model = AutoModelForCausalLM.from_pretrained(Path(parent) / "stories").float().eval()
    return run.model.cpu(), hf_model, 200


MODELS: dict[str, Callable[[], tuple[Any, Any, int]]] = {"gpt2": gpt2, "stories": stories}


def compare(name: str, repeats: int, clock: Callable[[], float]) -> None:
    model, hf_model, tokens = MODELS[name]()
    prompt = torch.randint(3, 500, (1, PROMPT), generator=torch.Generator().manual_seed(0))

    def transformers_ids() -> list[int]:
        ids = hf_model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
        new_ids: list[int] = ids[0, PROMPT:].tolist()
        return new_ids

    def regard_ids(decoder: Any) -> Callable[[], list[int]]:
        return lambda: generate(decoder, prompt.tolist(), GREEDY, tokens=tokens)[0]

    variants = {
        "transformers": transformers_ids,
        "regard, not packed": regard_ids(model),
        "regard": regard_ids(Engine(pack(model))),
        "regard, int8": regard_ids(Engine(pack(model, int8=True))),
    }
    outputs = {variant: run() for variant, run in variants.items()}
    assert outputs["transformers"] == outputs["regard"] == outputs["regard, not packed"]
    speeds: dict[str, list[float]] = {variant: [] for variant in variants}
    for _ in range(repeats):
        for variant, run in variants.items():
            start = clock()
            run()
            speeds[variant].append(tokens / (clock() - start))
    for variant, values in speeds.items():
        ratios = [ours / hf for ours, hf in zip(values, speeds["transformers"], strict=True)]
        same = sum(a == b for a, b in zip(outputs[variant], outputs["transformers"], strict=True))
        print(
            f"{name:8} {variant:18} {statistics.median(values):8.1f} tok/s"
            f"  {statistics.median(ratios):5.2f} times  ({min(ratios):.2f} to {max(ratios):.2f})"
            f"  {same} of {tokens} ids equal",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="CPU time, not wall-clock time")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} threads")
    for name in options.models:
        compare(name, options.repeats, time.process_time if options.cpu_time else time.perf_counter)


if __name__ == "__main__":
    main()
