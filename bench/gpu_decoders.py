"""Decoding speed and correctness of decoder presets on one GPU, with random weights.

    python bench/gpu_decoders.py [PRESET …] [--rows 1 16] [--prompt 128] [--compiled] [--peer]
    python bench/gpu_decoders.py --check [PRESET …] [--rows 1 16]

Speed: prompts of 128 ids, 256 new tokens, temperature 0.8 and top-k 50, in bfloat16. For each
preset: the model itself with a CUDA graph, the decoder that `regard` chooses, with `--compiled` the
model's decode step compiled by Inductor, and with `--peer` transformers with a static KV cache,
which it compiles. The weights and the KV cache that a step reads are relative to the copy bandwidth
of the GPU.

`--check` compares greedy ids instead: the decoder that `regard` chooses and the model itself, in
float32 with at most four layers, must give the same 64 ids for each of the row counts.
"""

import argparse
import gc
from dataclasses import replace
from typing import Any

import torch
from gpu_decode import CHAIN, CUDA, PROMPT, TOKENS, best_time, copy_bandwidth, run_and_report_errors

from regard.accel import decoding_path
from regard.generate import generate, parse_chain
from regard.generate.decode_loop import Engine
from regard.hub.config_json import write_config
from regard.models.build import preset
from regard.models.transformer import Transformer, TransformerConfig

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
CHECKED = [*PRESETS, "gpt1", "opt-350m", "phi-3-mini", "mistral-7b", "modern"]


def prompts(config: TransformerConfig, rows: int, length: int = PROMPT) -> list[list[int]]:
    torch.manual_seed(1)
    return [list(map(int, row)) for row in torch.randint(10, config.vocab_size, (rows, length))]


def speed(decoder: Any, ids: list[list[int]], read: float, copies: float) -> str:
    """Decoding speed; a step reads `read` bytes of weights and KV cache."""

    def decode(tokens: int = TOKENS) -> None:
        generate(decoder, ids, CHAIN, tokens=tokens, seed=1)

    decode()
    total, first = best_time(decode, 3), best_time(lambda: decode(1), 3)
    step = (total - first) / (TOKENS - 1)
    return (
        f"{len(ids) * TOKENS / total:9,.0f} tok/s  {1e3 * first:6.1f} ms to first token"
        f"  {1e3 * step:6.3f} ms/step  {read / step / copies:5.1%} of copy bandwidth"
    )


class CompiledStep:
    """A model whose decode step is compiled by Inductor; prefill calls the model."""

    def __init__(self, model: Transformer) -> None:
        self.model, self.compiled = model, torch.compile(model.step, dynamic=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def step(self, ids: torch.Tensor, state: Any, **options: Any) -> Any:
        step = self.compiled if ids.shape[1] == 1 else self.model.step
        return step(ids, state, **options)


def peer_speed(config: TransformerConfig, prompts: list[list[int]]) -> str:
    from transformers import AutoConfig, AutoModelForCausalLM

    with CUDA:
        hf_config = AutoConfig.for_model(**write_config(config)[1])
        model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.bfloat16).eval()
    ids = torch.tensor(prompts, device=CUDA)

    def run() -> None:
        model.generate(
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
    return f"{len(prompts) * TOKENS / best_time(run, 2):9,.0f} tok/s"


def report(
    name: str, rows: list[int], prompt: int, compiled: bool, peer: bool, copies: float
) -> None:
    config = preset(name)
    config = replace(config, context=max(config.context, prompt + TOKENS))
    with CUDA:
        torch.manual_seed(0)
        model = Transformer(config).to(torch.bfloat16).eval()
    embedding = model.embed.token.weight
    weights = sum(p.nbytes for p in model.parameters())
    weights -= 0 if config.tied else embedding.nbytes
    path = decoding_path(model)
    decoders: dict[str, Any] = {"model": model, path.name: path.language}
    if compiled:
        decoders["compiled"] = CompiledStep(model)
    for count in rows:
        ids = prompts(config, count, prompt)
        filled = (prompt + TOKENS / 2) / (prompt + TOKENS)  # part of the KV cache, on average
        caches = model.start(count, prompt + TOKENS).layers
        read = weights + filled * sum(cache.keys.nbytes + cache.values.nbytes for cache in caches)
        for kind, decoder in decoders.items():
            line = speed(Engine(decoder), ids, read, copies)
            print(f"{name:14} {count:3} rows  {kind:12} {line}", flush=True)
        if peer:
            print(f"{name:14} {count:3} rows  transformers {peer_speed(config, ids)}", flush=True)


def check(name: str, rows: list[int]) -> None:
    config = preset(name)
    config = replace(config, layers=min(config.layers, 4))
    with CUDA:
        torch.manual_seed(0)
        model = Transformer(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    greedy = parse_chain(["greedy"])
    path = decoding_path(model)
    for count in rows:
        outputs = [
            generate(decoder, prompts(config, count), greedy, tokens=64, seed=1)
            for decoder in (model, Engine(path.language))
        ]
        equal = sum(a == b for a, b in zip(*outputs, strict=True))
        print(f"{name:14} {count:3} rows  {path.name}: {equal} of {count} texts equal", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("presets", nargs="*")
    parser.add_argument("--rows", nargs="+", type=int, default=[1])
    parser.add_argument("--prompt", type=int, default=PROMPT)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    copies = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {copies / 1e12:.2f} TB/s")
    for name in options.presets or (CHECKED if options.check else PRESETS):

        def run(name: str = name) -> None:
            if options.check:
                check(name, options.rows)
            else:
                report(name, options.rows, options.prompt, options.compiled, options.peer, copies)

        run_and_report_errors(run)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
