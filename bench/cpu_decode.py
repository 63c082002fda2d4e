"""Decoding speed on a CPU, compared with transformers or llama.cpp: GPT-2 124M and stories260K.

    REGARD_DATA=… python bench/cpu_decode.py [--models gpt2 stories] [--repeats 5] [--threads 2]

Both use the same weights, float32, batch size 1 and greedy decoding. They are timed alternately, so
that load on the machine affects both; the median of the ratios is printed. "regard" is what `regard
generate` and the server run, "not copied" the same without copies of the weights in oneDNN's
layout; float16 and int8 have weights of this type. In float32 the generated ids must be equal.

    python bench/serve.py make --shape gpt2 --run runs/gpt2
    for type in f32 f16 q8_0; do regard export runs/gpt2 gguf/$type --format gguf --type $type; done
    python bench/cpu_decode.py --run runs/gpt2 --llama gguf [--tokens 64] [--cpu-time]

compares with llama.cpp (`llama-cpp-python`) in each of these three types, and prints the mean KL
divergence of the next-token distributions from those in float32, for the same ids.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

import regard
from regard.accel import pack
from regard.accel.packed_decoder import PackedDecoder
from regard.generate import generate, parse_chain
from regard.generate.decode_loop import CudaGraphDecoder
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
        return lambda: generate(decoder, prompt.tolist(), GREEDY, max_new_tokens=tokens)[0]

    variants = {
        "transformers": transformers_ids,
        "regard, not packed": regard_ids(model),
        "regard": regard_ids(CudaGraphDecoder(pack(model, free_memory=sys.maxsize))),
        "regard, not copied": regard_ids(CudaGraphDecoder(pack(model))),
        "regard, float16": regard_ids(CudaGraphDecoder(pack(model, float16=True))),
        "regard, int8": regard_ids(CudaGraphDecoder(pack(model, int8=True))),
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


class LlamaCpp:
    """Greedy decoding of one row by llama.cpp."""

    def __init__(self, path: Path, threads: int) -> None:
        import llama_cpp

        self.lib = llama_cpp
        self.quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self.quiet, None)
        self.model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_threads, settings.n_threads_batch = 1024, threads, threads
        self.context = llama_cpp.llama_init_from_model(self.model, settings)
        self.batch = llama_cpp.llama_batch_init(512, 0, 1)
        self.greedy = llama_cpp.llama_sampler_init_greedy()

    def step(self, ids: list[int], position: int) -> int:
        """Read ids; return the most probable next id."""
        batch = self.batch
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position + i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, i == len(ids) - 1
        assert self.lib.llama_decode(self.context, batch) == 0
        return int(self.lib.llama_sampler_sample(self.greedy, self.context, -1))

    def clear(self) -> None:
        """Forget all ids."""
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)

    def log_probabilities(self, ids: list[int]) -> torch.Tensor:
        """The distributions after each of these ids, in float64."""
        self.clear()
        vocab = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(self.model))
        logits = []
        for position, token in enumerate(ids):
            self.step([token], position)
            pointer = self.lib.llama_get_logits_ith(self.context, -1)
            logits.append(torch.tensor(pointer[:vocab], dtype=torch.float64))
        return torch.stack(logits).log_softmax(1)

    def generate(self, prompt: list[int], tokens: int) -> list[int]:
        self.clear()
        ids = [self.step(prompt, 0)]
        while len(ids) < tokens:
            ids.append(self.step(ids[-1:], len(prompt) + len(ids) - 1))
        return ids


def compare_llama(options: argparse.Namespace, clock: Callable[[], float]) -> None:
    model: Any = regard.load(options.run, device="cpu").model
    prompt = torch.randint(3, 500, (PROMPT,), generator=torch.Generator().manual_seed(0)).tolist()
    decoders: dict[str, PackedDecoder] = {}
    llamas: dict[str, LlamaCpp] = {}
    ratios: dict[str, list[float]] = {}
    seconds: dict[str, tuple[list[float], list[float]]] = {}
    runs: dict[str, tuple[Callable[[], list[int]], Callable[[], list[int]]]] = {}
    for name, options_of_pack in (
        ("f32", {"free_memory": sys.maxsize}),
        ("f32 not copied", {}),
        ("f16", {"float16": True}),
        ("q8_0", {"int8": True}),
    ):
        packed = decoders[name] = cast(PackedDecoder, pack(model, **options_of_pack))
        packed.frozen = True  # as in `regard generate` and the server: nothing writes to the model
        decoder = CudaGraphDecoder(packed)
        path = options.llama / name.split()[0] / "model.gguf"
        llama = llamas[name] = LlamaCpp(path, options.threads)

        def regard_ids(decoder: Any = decoder) -> list[int]:
            return generate(decoder, [prompt], GREEDY, max_new_tokens=options.tokens)[0]

        def llama_ids(llama: LlamaCpp = llama) -> list[int]:
            return llama.generate(prompt, options.tokens)

        runs[name], ratios[name], seconds[name] = (regard_ids, llama_ids), [], ([], [])
    expected = runs["f32"][0]()
    ids = prompt + expected[:-1]
    reference = regard_log_probabilities(decoders["f32 not copied"], ids)
    for name, pair in runs.items():
        equal_ids = [sum(map(int.__eq__, run(), expected)) for run in pair]
        equal = " and ".join(map(str, equal_ids))
        both = regard_log_probabilities(decoders[name], ids), llamas[name].log_probabilities(ids)
        divergences = [(reference.exp() * (reference - other)).sum(1).mean() for other in both]
        divergence = " and ".join(f"{value:.1e}" for value in divergences)
        print(
            f"{name:14} {equal} of {options.tokens} ids equal those in float32, "
            f"divergences {divergence}"
        )
    for _ in range(options.repeats):
        for name, pair in runs.items():
            for run, times in zip(pair, seconds[name], strict=True):
                start = clock()
                run()
                times.append(clock() - start)
            ratios[name].append(seconds[name][1][-1] / seconds[name][0][-1])
    for name, values in ratios.items():
        ours, theirs = (options.tokens / statistics.median(times) for times in seconds[name])
        print(
            f"{name:14} regard {ours:6.1f}, llama.cpp {theirs:6.1f} tok/s: "
            f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
        )
    for name, decoder in decoders.items():
        start, read, step = split_times(decoder, prompt, clock)
        print(f"{name:14} start {start:.1f}, prompt {read:.1f}, step {step:.2f} ms")


@torch.inference_mode()
def regard_log_probabilities(decoder: PackedDecoder, ids: list[int]) -> torch.Tensor:
    """The distributions after each of these ids, in float64."""
    logits, state = [], decoder.start(1, len(ids))
    for token in ids:
        scores, state = decoder.step(torch.tensor([[token]]), state)
        logits.append(scores[0, -1].double())
    return torch.stack(logits).log_softmax(1)


@torch.inference_mode()
def split_times(
    decoder: PackedDecoder, prompt: list[int], clock: Callable[[], float]
) -> list[float]:
    """Milliseconds of `start`, of a prompt and of a decode step."""
    times: list[list[float]] = [[], [], []]

    def measure(part: int, call: Callable[[], Any]) -> Any:
        start = clock()
        result = call()
        times[part].append(1000 * (clock() - start))
        return result

    for _ in range(5):
        state = measure(0, lambda: decoder.start(1, 80))
        _, state = measure(1, lambda state=state: decoder.step(torch.tensor([prompt]), state))
        for token in range(40):
            ids = torch.tensor([[token]])
            _, state = measure(2, lambda ids=ids, state=state: decoder.step(ids, state))
    return [statistics.median(values) for values in times]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="CPU time, not wall-clock time")
    parser.add_argument("--run", type=Path)
    parser.add_argument("--llama", type=Path, help="a folder of f32, f16 and q8_0 exports of it")
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} threads")
    clock = time.process_time if options.cpu_time else time.perf_counter
    if options.llama is not None:
        compare_llama(options, clock)
        return
    for name in options.models:
        compare(name, options.repeats, clock)


if __name__ == "__main__":
    main()
