"""Writing on a CPU beside transformers, in one run: the GPT-2 124M shape and stories260K.

    REGARD_DATA=… python bench/cpu_decode.py [--models gpt2 stories] [--turns 5] [--threads 2]

The same weights in both, float32, one row, greedy. Each is timed in turns of some tokens, one
after the other, so that all meet the same machine; the median of the turns' ratios counts. With
`int8` the weights of single tokens have eight bits. The ids of float32 must be the same.
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
    theirs = GPT2LMHeadModel(GPT2Config()).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = open_checkpoint(Path(folder)).load()
    return ours.eval(), theirs, 24


def stories() -> tuple[Any, Any, int]:
    from transformers import AutoModelForCausalLM

    source = Path(os.environ["REGARD_DATA"]) / "weights" / "stories260k"
    with tempfile.TemporaryDirectory() as parent:
        run = regard.import_model(source, Path(parent) / "run")
        run.export(Path(parent) / "stories")
        theirs = AutoModelForCausalLM.from_pretrained(Path(parent) / "stories").float().eval()
    return run.model.cpu(), theirs, 200


MODELS: dict[str, Callable[[], tuple[Any, Any, int]]] = {"gpt2": gpt2, "stories": stories}


def compare(name: str, turns: int, clock: Callable[[], float]) -> None:
    ours, theirs, tokens = MODELS[name]()
    prompt = torch.randint(3, 500, (1, PROMPT), generator=torch.Generator().manual_seed(0))

    def peer() -> list[int]:
        ids = theirs.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
        found: list[int] = ids[0, PROMPT:].tolist()
        return found

    def mine(model: Any) -> Callable[[], list[int]]:
        return lambda: generate(model, prompt.tolist(), GREEDY, tokens=tokens)[0]

    ways = {
        "transformers": peer,
        "regard, the model": mine(ours),
        "regard": mine(Engine(pack(ours))),
        "regard, int8": mine(Engine(pack(ours, int8=True))),
    }
    answers = {way: work() for way, work in ways.items()}
    assert answers["transformers"] == answers["regard"] == answers["regard, the model"]
    speeds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(turns):
        for way, work in ways.items():
            began = clock()
            work()
            speeds[way].append(tokens / (clock() - began))
    for way, found in speeds.items():
        ratios = [one / other for one, other in zip(found, speeds["transformers"], strict=True)]
        same = sum(a == b for a, b in zip(answers[way], answers["transformers"], strict=True))
        print(
            f"{name:8} {way:18} {statistics.median(found):8.1f} tok/s"
            f"  {statistics.median(ratios):5.2f} times  ({min(ratios):.2f} to {max(ratios):.2f})"
            f"  {same} of {tokens} ids the same",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--busy", action="store_true", help="time of the processor, not the wall")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    print(f"torch {torch.__version__}, {given.threads} threads")
    for name in given.models:
        compare(name, given.turns, time.process_time if given.busy else time.perf_counter)


if __name__ == "__main__":
    main()
