"""Throughput and time to the first token of the serving engine, compared with transformers.

    python bench/serve.py engine --run RUN [--streams 64] [--peer FOLDER]
    python bench/serve.py engine --shape llama-1.1b [--streams 64] [--peer] [--offline]
    python bench/serve.py http --run RUN [--streams 16] [--peer FOLDER]
    python bench/serve.py make --shape gpt2 --run RUN

`engine` drives the engine in this process: each of the streams sends its next request when its
last one has finished, with prompts of 16 to 256 ids and 64 to 512 new tokens (scaled down to the
context of a small model), sampled with temperature 0.8 and top-k 50. Tokens are counted while all
streams are busy. `--peer` runs the same requests for `--seconds` through the continuous batching
of transformers, the engine of `transformers serve`: of the exported FOLDER of the run, or with
`--shape` of a model of the same shape. `--offline` adds the rate of `generate` for as many rows of
equal length as there are streams, the upper bound. `--profile` shows the host time of functions.
`--llama` runs the same requests through llama.cpp in this process, without HTTP, with the same
number of threads and a file that `regard export --format gguf` wrote. `make` writes a
run of a shape with random weights. `http` starts `regard serve RUN`, and with `--peer`
`transformers serve FOLDER` (which needs `openai`), and measures the same through HTTP, streaming.
"""

import argparse
import asyncio
import contextlib
import cProfile
import inspect
import json
import os
import pstats
import random
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import deque
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch

SHAPES = {"llama-1.1b": "tinyllama", "gpt2": "gpt2"}  # presets


@dataclass
class Measurement:
    """The measurements of one run."""

    name: str
    tokens: int = 0
    seconds: float = 0.0
    cpu: float = 0.0  # seconds of CPU time, which does not depend on other load
    first: list[float] = field(default_factory=list)  # seconds to the first token of each request

    def stop(self, began: float, cpu: float) -> None:
        """Stop the clocks."""
        self.seconds, self.cpu = time.perf_counter() - began, time.process_time() - cpu

    def show(self) -> None:
        ordered = sorted(self.first) or [float("nan")]
        p50, p99 = (ordered[int(q * (len(ordered) - 1))] * 1e3 for q in (0.5, 0.99))
        print(
            f"{self.name:32s} {self.tokens / self.seconds:10,.0f} tok/s   "
            f"first token p50 {p50:8.1f} ms   p99 {p99:8.1f} ms   "
            + (f"{self.tokens / self.cpu:10,.0f} tokens per CPU second   " if self.cpu else "")
            + f"({self.tokens:,} tokens)",
            flush=True,
        )


def workload(requests: int, vocab: int, context: int, seed: int = 0) -> list[tuple[list[int], int]]:
    """Prompts and numbers of new tokens, of mixed lengths that fit into the context."""
    rng = random.Random(seed)
    longest, max_new = min(256, context // 3), min(512, 2 * context // 3)
    return [
        (
            [rng.randrange(3, vocab) for _ in range(rng.randint(min(16, longest), longest))],
            rng.randint(max_new // 8, max_new),
        )
        for _ in range(requests)
    ]


def run_engine(engine: Any, work: list[tuple[list[int], int]], streams: int) -> Measurement:
    """Our engine, with as many requests at a time as there are streams."""
    from regard.generate import parse_chain
    from regard.serve.request import Request

    chain = parse_chain(["top_k=50", "temperature=0.8"])
    requests = [
        Request(ids, chain, tokens, seed=number) for number, (ids, tokens) in enumerate(work)
    ]
    measurement, sent, waiting = Measurement("regard engine"), {}, deque(requests)
    running = 0
    began, cpu = time.perf_counter(), time.process_time()
    while True:
        while running < streams and waiting:
            request = waiting.popleft()
            engine.submit(request)
            sent[request] = time.perf_counter()
            running += 1
        if not waiting and not measurement.seconds:  # from now on there are fewer streams
            measurement.stop(began, cpu)
        if not running:
            break
        events = engine.step()
        now = time.perf_counter()
        for event in events:
            assert event.error is None, event.error
            if event.finish_reason:
                running -= 1
            else:
                measurement.tokens += not measurement.seconds
                if (start := sent.pop(event.request, None)) is not None:
                    measurement.first.append(now - start)
    return measurement


def run_peer(
    model: Any, work: list[tuple[list[int], int]], streams: int, limit: float
) -> Measurement:
    """The continuous batching of transformers, with the same requests, for `limit` seconds."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    settings = GenerationConfig(do_sample=True, temperature=0.8, top_k=50, eos_token_id=-1)
    longest = max(len(ids) + max_new for ids, max_new in work)
    known_options = inspect.signature(ContinuousBatchingConfig).parameters
    page = "page_size" if "page_size" in known_options else "block_size"  # before transformers 5.22
    size = 32 if model.device.type == "cpu" else 256
    options: dict[str, Any] = {  # the default cache and dense mask would fill the memory
        "max_requests_per_batch": streams,
        "max_batch_tokens": 512 if model.device.type == "cpu" else 1024,
        page: size,
        "num_blocks": streams * (longest // size + 2),
    }
    options = {name: value for name, value in options.items() if name in known_options}
    if find_spec("flash_attn") is None and hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation("paged|sdpa")  # else it downloads kernels
    measurement, sent = Measurement("transformers continuous batching"), {}
    waiting, running, tokens = deque(work), 0, {}
    manager = model.init_continuous_batching(
        generation_config=settings, continuous_batching_config=ContinuousBatchingConfig(**options)
    )
    manager.start()
    began, cpu = time.perf_counter(), time.process_time()
    try:
        while time.perf_counter() - began < limit and manager.is_running():
            while running < streams and waiting:
                ids, max_new = waiting.popleft()
                name = manager.add_request(ids, max_new_tokens=max_new, streaming=True)
                sent[name] = time.perf_counter()
                running += 1
            if not waiting:
                break
            result = manager.get_result(timeout=1)
            if result is None:
                continue
            assert not result.error, result.error
            tokens[result.request_id] = len(result.generated_tokens)
            if result.generated_tokens and (start := sent.pop(result.request_id, None)):
                measurement.first.append(time.perf_counter() - start)
            running -= result.is_finished()
        measurement.stop(began, cpu)
        measurement.tokens = sum(tokens.values())
    finally:
        hard = (
            {"hard_stop": True} if "hard_stop" in inspect.signature(manager.stop).parameters else {}
        )
        manager.stop(block=True, timeout=20, **hard)
    return measurement


class LlamaCpp:
    """llama.cpp's engine in this process, driven as its server does: one sequence per stream."""

    def __init__(self, path: str, streams: int, context: int) -> None:
        import llama_cpp

        self.lib = llama_cpp
        self.quiet = llama_cpp.llama_log_callback(lambda *_: None)  # kept alive for llama.cpp
        llama_cpp.llama_log_set(self.quiet, None)
        self.model = llama_cpp.llama_model_load_from_file(
            path.encode(), llama_cpp.llama_model_default_params()
        )
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = streams * context, 512, 512
        settings.n_seq_max, settings.kv_unified = streams, False
        settings.n_threads = settings.n_threads_batch = torch.get_num_threads()
        self.context = llama_cpp.llama_init_from_model(self.model, settings)
        self.batch = llama_cpp.llama_batch_init(512, 0, 1)
        chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        for sampler in (
            llama_cpp.llama_sampler_init_top_k(50),
            llama_cpp.llama_sampler_init_temp(0.8),
            llama_cpp.llama_sampler_init_dist(1),
        ):
            llama_cpp.llama_sampler_chain_add(chain, sampler)
        self.sampler = chain

    def step(self, entries: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Decode entries (sequence, position, token, sampled); return the sampled next tokens."""
        batch = self.batch
        batch.n_tokens = len(entries)
        for i, (sequence, position, token, sampled) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, sampled
        assert self.lib.llama_decode(self.context, batch) == 0
        return {
            sequence: self.lib.llama_sampler_sample(self.sampler, self.context, i)
            for i, (sequence, _, _, sampled) in enumerate(entries)
            if sampled
        }

    def end(self, sequence: int) -> None:
        """Remove a sequence from the KV cache."""
        memory = self.lib.llama_get_memory(self.context)
        self.lib.llama_memory_seq_rm(memory, sequence, -1, -1)


def run_llama(
    engine: LlamaCpp, work: list[tuple[list[int], int]], streams: int, limit: float
) -> Measurement:
    """The same requests through llama.cpp: one token per stream and step, prompts in chunks."""
    measurement, waiting, free = Measurement("llama.cpp"), deque(work), list(range(streams))
    prompts: dict[int, list[int]] = {}  # the ids of each sequence that are not read yet
    last: dict[int, int] = {}
    lengths, remaining, sent = [0] * streams, [0] * streams, [0.0] * streams
    began, cpu = time.perf_counter(), time.process_time()
    while waiting and time.perf_counter() - began < limit:
        while free and waiting:
            sequence = free.pop()
            ids, remaining[sequence] = waiting.popleft()
            prompts[sequence], lengths[sequence] = list(ids), 0
            sent[sequence] = time.perf_counter()
        entries = [(sequence, lengths[sequence], token, True) for sequence, token in last.items()]
        for sequence, ids in prompts.items():
            part = ids[: 512 - len(entries)]
            entries += [
                (sequence, lengths[sequence] + i, token, i == len(ids) - 1)
                for i, token in enumerate(part)
            ]
        tokens = engine.step(entries)
        for sequence, _, _, _ in entries:
            lengths[sequence] += 1
            if sequence in prompts:
                prompts[sequence] = prompts[sequence][1:]
        now = time.perf_counter()
        for sequence, token in tokens.items():
            if sequence in prompts:
                del prompts[sequence]
                measurement.first.append(now - sent[sequence])
            last[sequence] = token
            remaining[sequence] -= 1
            measurement.tokens += 1
            if not remaining[sequence]:
                del last[sequence]
                engine.end(sequence)
                free.append(sequence)
    measurement.stop(began, cpu)
    for sequence in range(streams):
        engine.end(sequence)
    return measurement


def make_run(shape: str, out: str) -> None:
    """A run of a shape with random weights, which `regard export` writes for the others."""
    from pathlib import Path

    from regard.config import RunConfig
    from regard.files.directory import Directory
    from regard.models.build import build_model, config_table, preset, weights
    from regard.pipelines import tokenizer_fingerprint
    from regard.text import train_tokenizer
    from regard.training.storage.checkpoint import write_tensors
    from regard.training.storage.run_folder import RunFolder

    torch.manual_seed(0)
    config = preset(SHAPES[shape])
    model, tokenizer = (
        build_model(config),
        train_tokenizer({"kind": "bpe", "vocab_size": 300}, [__doc__]),
    )
    run = RunConfig(name=Path(out).name, task="causal", model=config_table(config))

    def write(file: Path, metadata: Any) -> None:
        write_tensors(Directory(file.parent), file.name, weights(model), metadata)

    facts = {"data": None, "tokenizer": tokenizer_fingerprint(tokenizer)}
    RunFolder(Path(out)).create(run, facts, tokenizer, write)


def transformers_model(shape: str, config: Any) -> Any:
    """A model of transformers with the shape of a preset."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    if shape == "gpt2":
        return GPT2LMHeadModel(GPT2Config())
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.dim,
            intermediate_size=config.ffn_dim,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            max_position_embeddings=config.context,
        )
    )


def run_offline(model: Any, streams: int, vocab: int) -> Measurement:
    """`generate` for rows of equal length: prompts of 128 ids, 256 new tokens."""
    from regard.accel import pack
    from regard.generate import generate, parse_chain
    from regard.generate.decode_loop import CudaGraphDecoder

    engine, chain = CudaGraphDecoder(pack(model)), parse_chain(["top_k=50", "temperature=0.8"])
    rng = random.Random(1)
    prompts = [[rng.randrange(3, vocab) for _ in range(128)] for _ in range(streams)]
    for _ in range(2):
        generate(engine, prompts, chain, max_new_tokens=256, seed=1)
    measurement, began = Measurement(f"generate, {streams} equal rows"), time.perf_counter()
    answers = generate(engine, prompts, chain, max_new_tokens=256, seed=2)
    measurement.seconds = time.perf_counter() - began
    measurement.tokens, measurement.first = sum(map(len, answers)), [0.0]
    return measurement


async def ask(host: str, port: int, body: dict[str, Any], measurement: Measurement) -> None:
    """One streamed request through a connection of its own."""
    content = json.dumps(body).encode()
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(content) + content
    )
    first = True
    while line := await reader.readline():
        if line.startswith(b'data: {"id"'):
            if first:
                measurement.first.append(time.perf_counter() - began)
                first = False
            if b'"usage"' in line and (usage := json.loads(line[6:])["usage"]):
                measurement.tokens += usage["completion_tokens"]
    writer.close()


async def drive(
    address: str, bodies: list[dict[str, Any]], streams: int, name: str, seconds: float
) -> Measurement:
    """Send as many requests at a time as there are streams; no request begins after `seconds`."""
    host, port = address.removeprefix("http://").rsplit(":", 1)
    measurement, waiting = Measurement(name), iter(bodies)
    began = time.perf_counter()

    async def client() -> None:
        for body in waiting:
            await ask(host, int(port), body, measurement)
            if time.perf_counter() - began > seconds:
                break

    await asyncio.gather(*(client() for _ in range(streams)))
    measurement.seconds = time.perf_counter() - began
    return measurement


def start_peer(folder: str, streams: int) -> tuple[subprocess.Popen[str], str]:
    """`transformers serve` with continuous batching, once it answers."""
    port = 8765
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", folder]
    command += ["--continuous-batching", "--port", str(port), "--host", "127.0.0.1"]
    command += ["--cb-num-blocks", str(32 * streams), "--cb-max-batch-tokens", "512"]
    command += ["--cb-block-size", "32"]
    process = subprocess.Popen(command, text=True, env=os.environ)
    while process.poll() is None:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
            return process, f"http://127.0.0.1:{port}"
        time.sleep(0.5)
    raise SystemExit(f"transformers serve {folder} exited with code {process.returncode}")


def measure_http(arguments: argparse.Namespace) -> None:
    """`regard serve`, and with `--peer` `transformers serve`, with the same texts as prompts."""
    import regard

    run, streams = arguments.run, arguments.streams
    opened = regard.load(run)
    context = opened.model.context or 512
    work = workload(arguments.requests or 4 * streams, opened.tokenizer.vocab_size, context)
    shared = [
        {
            "model": arguments.peer or None,
            "prompt": opened.tokenizer.decode(ids),
            "max_tokens": tokens,
            "stream": True,
        }
        for ids, tokens in work
    ]
    ours = [
        {
            **body,
            "model": None,
            "seed": number,
            "sampler": ["top_k=50", "temperature=0.8"],
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }
        for number, body in enumerate(shared)
    ]
    settings = {"do_sample": True, "temperature": 0.8, "top_k": 50, "eos_token_id": -1}
    theirs = [
        {
            **body,
            "generation_config": json.dumps({**settings, "max_new_tokens": body["max_tokens"]}),
        }
        for body in shared
    ]
    command = [sys.executable, "-m", "regard", "serve", run, "--port", "0"]
    server = subprocess.Popen(
        [*command, "--max-sequences", str(streams)],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    assert server.stderr is not None
    measured = [(server, server.stderr.readline().split()[-1], ours, "regard serve")]
    if arguments.peer:
        measured.append((*start_peer(arguments.peer, streams), theirs, "transformers serve"))
    rates = []
    try:
        for _, address, bodies, name in measured:
            limit = arguments.seconds
            asyncio.run(drive(address, bodies[:streams], streams, name, limit / 3))
            measurement = asyncio.run(drive(address, bodies, streams, f"{name}, HTTP", limit))
            measurement.show()
            rates.append(measurement.tokens / measurement.seconds)
    finally:
        for process, *_ in measured:
            process.kill()
            process.wait()
    if arguments.peer:
        print(f"regard / transformers, over HTTP: {rates[0] / rates[1]:.2f}")


def measure_engine(arguments: argparse.Namespace) -> None:
    from regard.accel import pack
    from regard.serve.engine import BatchEngine, EngineConfig
    from regard.training.setup.device import free_memory

    device = "cuda" if torch.cuda.is_available() else "cpu"
    streams, count = arguments.streams, arguments.requests or 4 * arguments.streams
    peer = None
    if arguments.shape:
        from regard.models.build import build_model, preset

        config = preset(SHAPES[arguments.shape])
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        torch.manual_seed(0)
        with torch.device(device):
            model = build_model(config).eval().to(dtype)
        if arguments.peer is not None:
            with torch.device(device):
                peer = transformers_model(arguments.shape, config).eval().to(dtype)
        vocab, context = config.vocab_size, config.context
    else:
        import regard

        run = regard.load(arguments.run)
        model, vocab, context = run.model, run.tokenizer.vocab_size, run.model.context or 512
        if arguments.peer is not None:
            from transformers import AutoModelForCausalLM

            peer = AutoModelForCausalLM.from_pretrained(arguments.peer).eval()
    with torch.inference_mode():
        language = pack(model, free_memory=free_memory(model.device))
    if peer is not None:
        work = workload(count, vocab, arguments.longest or context)
        run_peer(peer, work, streams, arguments.seconds / 3).show()  # compiles
        theirs = run_peer(peer, work, streams, arguments.seconds)
        theirs.show()
        del peer
    engine, rates = (
        BatchEngine(language, EngineConfig(max_sequences=streams, max_queue=streams)),
        [],
    )
    profile = cProfile.Profile()
    for repeat in range(-1, arguments.repeats + 1):  # two to warm up
        work = workload(
            count, vocab, arguments.longest or context, seed=repeat
        )  # no prompt is read twice
        with profile if arguments.profile and repeat > 0 else contextlib.nullcontext():
            measurement = run_engine(engine, work, streams)
        if repeat > 0:
            measurement.show()
            rates.append(measurement.tokens / measurement.seconds)
    ours = statistics.median(rates)
    if arguments.llama:
        capacity = arguments.longest or context
        llama, llama_rates = LlamaCpp(arguments.llama, streams, capacity), []
        run_llama(llama, work[: streams + 1], streams, arguments.seconds / 3)
        for repeat in range(arguments.repeats):  # alternately, since the load on the machine varies
            work = workload(count, vocab, arguments.longest or context, seed=100 + repeat)
            llama_measurement = run_llama(llama, work, streams, arguments.seconds)
            llama_measurement.show()
            llama_rates.append(llama_measurement.tokens / llama_measurement.seconds)
            measurement = run_engine(engine, work, streams)
            measurement.show()
            rates.append(measurement.tokens / measurement.seconds)
        ours = statistics.median(rates)
        print(f"engine / llama.cpp: {ours / statistics.median(llama_rates):.2f}")
    if arguments.offline:
        offline = run_offline(model, streams, vocab)
        offline.show()
        print(f"engine / generate: {ours * offline.seconds / offline.tokens:.2f}")
    if arguments.peer is not None:
        print(f"engine / transformers: {ours * theirs.seconds / theirs.tokens:.2f}")
    if arguments.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=("engine", "http", "make"))
    parser.add_argument("--run")
    parser.add_argument("--shape", choices=("llama-1.1b", "gpt2"))
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peer", nargs="?", const="")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--llama", metavar="FILE")
    parser.add_argument("--longest", type=int, help="context that the workload is scaled to")
    parser.add_argument("--offline", action="store_true")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    if arguments.command == "make":
        make_run(arguments.shape, arguments.run)
    elif arguments.command == "http":
        measure_http(arguments)
    else:
        measure_engine(arguments)


if __name__ == "__main__":
    main()
