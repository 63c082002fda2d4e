"""`regard plan`."""

import sys
from dataclasses import asdict
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from regard import api
from regard.api.formatting import with_prefix
from regard.cli.arguments import MODEL_HELP, Json, ModelOverrides
from regard.cli.output import align_columns, bold, print_json, print_section, spinner

if TYPE_CHECKING:
    from regard.api import Plan

DAY = 86_400


def plan(
    name: Annotated[
        str, Argument(metavar="PRESET|RECIPE|RUN", help=MODEL_HELP, show_default=False)
    ],
    overrides: ModelOverrides = [],  # noqa: B006 -- typer copies it
    gpus: Annotated[int, Option(metavar="N", help="How many GPUs.")] = 1,
    gpu_type: Annotated[str, Option(metavar="NAME", help="GPU type: a100, h100, h200, …")] = "h100",
    memory: Annotated[
        float | None,
        Option(metavar="GB", help="Memory of each GPU; by default that of --gpu-type."),
    ] = None,
    peak: Annotated[
        float | None,
        Option(
            metavar="TFLOPS", help="bfloat16 TFLOP/s of each GPU; by default those of --gpu-type."
        ),
    ] = None,
    utilization: Annotated[
        float | None, Option(metavar="FRACTION", help="Fraction of the peak that matmuls reach.")
    ] = None,
    link: Annotated[
        float | None, Option(metavar="GB/S", help="Bandwidth between two GPUs, in each direction.")
    ] = None,
    tokens: Annotated[
        float | None, Option(metavar="T", help="Training tokens; by default 20 per parameter.")
    ] = None,
    sequences: Annotated[
        int | None, Option(metavar="N", help="Sequences per GPU and step; by default all that fit.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Estimate the memory, sharding and time of training on GPUs.

    \b
    regard plan llama-7b --gpus 8 --memory 80
    regard plan gpt2 model.context=2048 --gpu-type rtx4090 --tokens 10e9
    regard plan llama-7b --gpus 1024 --gpu-type a100 --tokens 1e12 --json
    """
    with spinner("planning"):
        result = api.plan(
            name,
            *overrides,
            gpus=gpus,
            gpu_type=gpu_type,
            memory=memory,
            peak=peak,
            utilization=utilization,
            link=link,
            tokens=tokens,
            sequences=sequences,
        )
    if as_json:
        print_json(_table(result))
        return
    out = sys.stdout
    strategies = len(result.strategies)
    where = f"{gpus:,} GPUs" if gpus > 1 else "one GPU"
    size = with_prefix(result.cluster.memory, "B")
    print(f"{bold(name, out)}  {result.cost.parameters:,} parameters, on {where} of {size}")
    print_section("memory per GPU", align_columns(_memory(result), right=range(1, strategies + 1)))
    print_section("training", align_columns(_speed(result), right=range(1, 5)))
    print_section("best", _advice(result))
    if result.cost.state_bytes:
        lines = align_columns(_generation(result), right=[1])
        print_section("generation, on one GPU in bfloat16", lines)
    assumptions = _assumptions(result, default_tokens=tokens is None)
    print_section("assumptions", align_columns(assumptions))


def _memory(plan: "Plan") -> list[list[str]]:
    """A column per strategy."""
    columns = plan.strategies
    rows: list[tuple[str, list[int]]] = [
        ("weights", [strategy.weight_bytes for strategy in columns]),
        ("gradients", [strategy.gradient_bytes for strategy in columns]),
        ("AdamW's two moments", [strategy.optimizer_bytes for strategy in columns]),
        ("bfloat16 weights", [strategy.compute_weight_bytes for strategy in columns]),
        (
            "gathered for evaluation",
            [strategy.evaluation_weight_bytes for strategy in columns],
        ),
        ("a chunk of logits", [strategy.logits_bytes for strategy in columns]),
        ("activations/sequence", [strategy.activation_bytes for strategy in columns]),
    ]
    cells = [
        [name, *(with_prefix(size, "B") if size else "-" for size in sizes)]
        for name, sizes in rows
        if any(sizes)
    ]
    fits = ["sequences that fit", *(f"{s.sequences:,}" if s.sequences else "-" for s in columns)]
    names = [wrap(strategy.name, 13) for strategy in columns]
    height = max(map(len, names))
    headers = zip(*([""] * (height - len(lines)) + lines for lines in names), strict=True)
    return [*(["", *header] for header in headers), *cells, fits]


def _speed(plan: "Plan") -> list[list[str]]:
    rows = [["", "used", "tokens/s", "per GPU", "time", "limited by"]]
    for strategy in plan.strategies:
        seconds = plan.seconds(strategy)
        *lines, last_line = wrap(strategy.name, 20)
        rows += [[line, *[""] * 5] for line in lines]
        if seconds is None:
            rows.append([last_line, "-", "-", "-", "-", "memory"])
            continue
        rows.append(
            [
                last_line,
                with_prefix(strategy.used_bytes, "B"),
                with_prefix(strategy.tokens_per_second, ""),
                with_prefix(strategy.tokens_per_second / plan.cluster.gpus, ""),
                format_time(seconds),
                strategy.bottleneck,
            ]
        )
    return rows


def _advice(plan: "Plan") -> list[str]:
    best, gpus = plan.best, plan.cluster.gpus
    tokens = with_prefix(best.sequences * (plan.cost.context or 1) * gpus, "")
    sequences = f"{best.sequences:,} sequence{'s' if best.sequences > 1 else ''}"
    sequences += " per GPU" if gpus > 1 else ""
    settings = f"train.batch={best.sequences * gpus}"
    settings += " train.activation_checkpointing=true" if best.activation_checkpointing else ""
    launch = "regard train"
    if gpus > 1:
        launch = "torchrun … -m regard train"
        settings += " train.shard=full" if best.sharded else ""
    seconds = plan.tokens / best.tokens_per_second
    host = with_prefix(plan.host_bytes, "B")
    summary = f"{best.name}: {sequences} and {tokens} tokens per step, {format_time(seconds)}"
    return [
        *wrap(summary, 78),
        f"{launch} … {settings}",
        f"host memory: {host} per machine: each rank creates the whole model",
    ]


def _assumptions(plan: "Plan", *, default_tokens: bool) -> list[tuple[str, str, str]]:
    cluster = plan.cluster
    per_parameter = f"{plan.tokens / plan.cost.parameters:.0f} per parameter (Chinchilla)"
    source = per_parameter if default_tokens else "as given"
    between = " between machines" if plan.spans_machines else ""
    link = f"{with_prefix(cluster.link, 'B/s')}{between}, {cluster.link_utilization:.0%} reached"
    communication = [("link", link, "--link"), ("", "communication overlaps with compute", "")]
    usable = cluster.usable_memory / cluster.memory
    peak = with_prefix(cluster.peak, "FLOP/s")
    return [
        ("GPU type", f"{plan.gpu_type}, {peak} in bfloat16", "--gpu-type, --peak"),
        ("utilization", f"{cluster.utilization:.0%} of the peak in matmuls", "--utilization"),
        ("memory", f"{with_prefix(cluster.memory, 'B')}, {usable:.0%} of it usable", "--memory"),
        *(communication if cluster.gpus > 1 else []),
        ("tokens", f"{with_prefix(plan.tokens, '')}, {source}", "--tokens"),
        ("weights", "float32, AdamW; matmuls in bfloat16, compiled", ""),
    ]


def _generation(plan: "Plan") -> list[tuple[str, str]]:
    generation = plan.generation
    return [
        ("weights", with_prefix(generation.weight_bytes, "B")),
        (f"KV cache, {plan.cost.context or 1:,} tokens", with_prefix(generation.state_bytes, "B")),
        ("sequences that fit", f"{generation.sequences:,}" if generation.sequences else "-"),
        ("tokens/s of one sequence", with_prefix(generation.tokens_per_second, "")),
        (f"prefill, {plan.cost.context or 1:,} tokens", _prefill_time(generation.prefill_seconds)),
    ]


def _prefill_time(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds < 1 else format_time(seconds)


def _table(plan: "Plan") -> dict[str, Any]:
    """The plan as a table, for --json."""
    strategies = []
    for strategy in plan.strategies:
        seconds = plan.seconds(strategy)
        per_gpu = strategy.tokens_per_second / plan.cluster.gpus
        days = None if seconds is None else seconds / DAY
        strategies.append({**asdict(strategy), "tokens_per_second_per_gpu": per_gpu, "days": days})
    return {
        "name": plan.name,
        "parameters": plan.cost.parameters,
        "context": plan.cost.context,
        "cluster": asdict(plan.cluster),
        "tokens": plan.tokens,
        "plans": strategies,
        "best": plan.best.name,
        "host_bytes": plan.host_bytes,
        "generation": asdict(plan.generation),
    }


def format_time(seconds: float) -> str:
    """A duration in its largest unit.

    >>> format_time(90), format_time(7200), format_time(5 * DAY), format_time(800 * DAY)
    ('1.5 minutes', '2.0 hours', '5.0 days', '2.2 years')
    """
    units = ((365 * DAY, "years"), (DAY, "days"), (3600, "hours"), (60, "minutes"))
    for size, unit in units:
        if seconds >= size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.1f} seconds"
