"""`regard plan`."""

import math
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from regard.cli.info import amount, find, section
from regard.cli.options import Json, Overrides
from regard.cli.output import aligned, bold, print_json, working
from regard.errors import ConfigError, unknown

if TYPE_CHECKING:
    from regard.models.cost import Cost
    from regard.models.plan import Cluster, TrainingPlan

DAY = 86_400


def plan(
    what: Annotated[
        str,
        Argument(
            metavar="PRESET|RUN|RECIPE",
            help="A preset, a run folder, a recipe.",
            show_default=False,
        ),
    ],
    words: Overrides = [],  # noqa: B006 -- typer copies it
    gpus: Annotated[int, Option(metavar="N", help="How many GPUs.")] = 1,
    card: Annotated[str, Option(metavar="NAME", help="Which: a100, h100, h200, …")] = "h100",
    memory: Annotated[
        float | None, Option(metavar="GB", help="Of each GPU; by default the card's.")
    ] = None,
    peak: Annotated[
        float | None, Option(metavar="TFLOPS", help="bfloat16 TFLOP/s of each; by default its own.")
    ] = None,
    utilization: Annotated[
        float | None, Option(metavar="FRACTION", help="Fraction of the peak that is reached.")
    ] = None,
    link: Annotated[
        float | None, Option(metavar="GB/S", help="Between two GPUs, in each direction.")
    ] = None,
    tokens: Annotated[
        float | None, Option(metavar="T", help="To learn from; by default 20 a parameter.")
    ] = None,
    rows: Annotated[
        int | None, Option(metavar="N", help="At a time on each GPU; by default all that fit.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Tell what fits on so many GPUs, how to shard it, and how long training takes.

    \b
    regard plan llama-7b --gpus 8 --memory 80
    regard plan gpt2 model.context=2048 --card rtx4090 --tokens 10e9
    regard plan llama-7b --gpus 1024 --card a100 --tokens 1e12 --json
    """
    with working("planning"):
        from regard.config import parse_overrides
        from regard.models.cost import cost
        from regard.models.plan import (
            CARDS,
            GPUS_PER_MACHINE,
            TOKENS_PER_PARAMETER,
            Cluster,
            fastest,
            host_bytes,
            training_plans,
        )

        if card not in CARDS:
            raise ConfigError(unknown("card", card, CARDS))
        sheet = CARDS[card]
        own_link = sheet.link if gpus <= GPUS_PER_MACHINE else sheet.network
        cluster = Cluster(
            gpus=gpus,
            memory=sheet.memory if memory is None else memory * 1e9,
            peak=sheet.peak if peak is None else peak * 1e12,
            link=own_link if link is None else link * 1e9,
            **({} if utilization is None else {"utilization": utilization}),
        )
        if tokens is not None and not 0 < tokens < math.inf:
            raise ConfigError(f"--tokens {tokens:g} must be a number above 0")
        counted = cost(find(what, parse_overrides(words))[1])
        plans = training_plans(counted, cluster, rows)
        best = fastest(plans)
        if best is None:
            raise ConfigError(_too_large(what, counted, cluster, rows))
        to_learn = TOKENS_PER_PARAMETER * counted.parameters if tokens is None else tokens
    if as_json:
        print_json(
            {
                "name": what,
                "parameters": counted.parameters,
                "context": counted.context,
                "cluster": asdict(cluster),
                "tokens": to_learn,
                "plans": [_table(plan, cluster, to_learn) for plan in plans],
                "best": best.name,
                "host_bytes": host_bytes(counted, cluster),
                "generating": _generating(counted, cluster),
            }
        )
        return
    out = sys.stdout
    each = f"{gpus:,} GPUs" if gpus > 1 else "one GPU"
    memory_said = amount(cluster.memory, "B")
    print(f"{bold(what, out)}  {counted.parameters:,} parameters, on {each} of {memory_said}")
    section("memory of each GPU", aligned(_memory(plans), right=range(1, len(plans) + 1)))
    section("training", aligned(_speed(plans, cluster, to_learn), right=range(1, 5)))
    section("best", _advice(best, counted, cluster, to_learn))
    if counted.state_bytes:
        section("generating, on one GPU in bfloat16", _told_generating(counted, cluster))
    section("assumed", aligned(_assumed(cluster, card, to_learn, by_rule=tokens is None)))


def _memory(plans: "list[TrainingPlan]") -> list[list[str]]:
    """A column for each plan."""
    rows: list[tuple[str, list[int]]] = [
        ("weights", [plan.weight_bytes for plan in plans]),
        ("gradients", [plan.gradient_bytes for plan in plans]),
        ("AdamW's two moments", [plan.optimizer_bytes for plan in plans]),
        ("copies, or gathered", [plan.compute_weight_bytes for plan in plans]),
        ("gathered to evaluate", [plan.evaluation_weight_bytes for plan in plans]),
        ("a chunk of logits", [plan.logits_bytes for plan in plans]),
        ("activations of a row", [plan.activation_bytes for plan in plans]),
    ]
    told = [
        [name, *(amount(each, "B") if each else "-" for each in sizes)]
        for name, sizes in rows
        if any(sizes)
    ]
    fits = ["rows that fit", *(f"{plan.rows:,}" if plan.rows else "-" for plan in plans)]
    return [["", *(plan.name for plan in plans)], *told, fits]


def _speed(plans: "list[TrainingPlan]", cluster: "Cluster", tokens: float) -> list[list[str]]:
    rows = [["", "used", "tokens/s", "each GPU", "time", "limited by"]]
    for plan in plans:
        speed = plan.tokens_per_second
        if not plan.rows:
            rows.append([plan.name, "-", "-", "-", "-", "memory"])
            continue
        rows.append(
            [
                plan.name,
                amount(plan.used_bytes, "B"),
                amount(speed, ""),
                amount(speed / cluster.gpus, ""),
                lasting(tokens / speed),
                plan.limit,
            ]
        )
    return rows


def _advice(best: "TrainingPlan", cost: "Cost", cluster: "Cluster", tokens: float) -> list[str]:
    from regard.models.plan import host_bytes

    step = best.rows * (cost.context or 1) * cluster.gpus
    time = lasting(tokens / best.tokens_per_second)
    rows = f"{best.rows:,} row{'s' if best.rows > 1 else ''}"
    rows += " on each GPU" if cluster.gpus > 1 else ""
    recompute = " train.activation_checkpointing=true" if best.activation_checkpointing else ""
    words = f"train.batch={best.rows * cluster.gpus}{recompute}"
    launch = "regard train"
    if cluster.gpus > 1:
        launch = "torchrun … -m regard train"
        words += " train.shard=full" if best.sharded else ""
    host = amount(host_bytes(cost, cluster), "B")
    return [
        f"{best.name}: {rows} at a time, {amount(step, '')} tokens a step, {time}",
        f"{launch} … {words}",
        f"host memory: {host} a machine: each rank begins with the whole model",
    ]


def _assumed(
    cluster: "Cluster", card: str, tokens: float, *, by_rule: bool
) -> list[tuple[str, str, str]]:
    from regard.models.plan import GPUS_PER_MACHINE, TOKENS_PER_PARAMETER, USABLE_MEMORY

    learned = f"{TOKENS_PER_PARAMETER} a parameter (Chinchilla)" if by_rule else "as given"
    far = f" between machines of {GPUS_PER_MACHINE}" if cluster.gpus > GPUS_PER_MACHINE else ""
    link = f"{amount(cluster.link, 'B/s')}{far}, {cluster.link_utilization:.0%} reached"
    sent = [("link", link, "--link"), ("", "communication overlaps with compute", "")]
    return [
        ("card", f"{card}, {amount(cluster.peak, 'FLOP/s')} in bfloat16", "--card, --peak"),
        ("utilization", f"{cluster.utilization:.0%}, recomputing included", "--utilization"),
        ("memory", f"{amount(cluster.memory, 'B')}, {USABLE_MEMORY:.0%} of it usable", "--memory"),
        *(sent if cluster.gpus > 1 else []),
        ("tokens", f"{amount(tokens, '')}, {learned}", "--tokens"),
        ("weights", "float32, AdamW; matmuls in bfloat16, compiled", ""),
    ]


def _generating(cost: "Cost", cluster: "Cluster") -> dict[str, int]:
    """Bytes of the weights and of a row's keys and values in bfloat16, and the rows that fit."""
    weights, state = cost.weight_bytes // 2, cost.state_bytes // 2
    room = max(0, cluster.usable_memory - weights)
    fitting = int(room // state) if state else 0
    return {"weight_bytes": weights, "state_bytes": state, "rows": fitting}


def _told_generating(cost: "Cost", cluster: "Cluster") -> list[str]:
    found = _generating(cost, cluster)
    rows = [
        ("weights", amount(found["weight_bytes"], "B")),
        (f"keys, values, {cost.context or 1:,} tokens", amount(found["state_bytes"], "B")),
        ("rows that fit", f"{found['rows']:,}" if found["rows"] else "-"),
    ]
    return aligned(rows, right=[1])


def _too_large(what: str, cost: "Cost", cluster: "Cluster", rows: int | None) -> str:
    from regard.models.plan import gpus_needed, training_plans

    memory, least = amount(cluster.memory, "B"), training_plans(cost, cluster)[-1]
    if rows is not None and least.rows:
        return f"--rows {rows} do not fit on {cluster.gpus} × {memory}; at most {least.rows} do"
    message = f"{what} does not fit on {cluster.gpus} × {memory}: at best each GPU holds "
    way_out = "a smaller model"
    if least.sharded and least.evaluation_bytes > cluster.usable_memory:
        message += f"{amount(least.persistent_bytes, 'B')},\n"
        gathered = amount(least.evaluation_weight_bytes, "B")
        message += f"and gathers {gathered} more for an evaluation\n"
    else:
        way_out = "a smaller model.context"
        row = amount(least.activation_bytes + least.logits_bytes, "B")
        message += f"{amount(least.static_bytes, 'B')},\n"
        message += f"and {row} more for a row of {cost.context or 1:,} tokens\n"
    needed = gpus_needed(cost, cluster)
    if needed is None:
        return f"{message}no number of GPUs helps; give more --memory or {way_out}"
    return f"{message}it would with --gpus {needed}"


def _table(plan: "TrainingPlan", cluster: "Cluster", tokens: float) -> dict[str, Any]:
    days = tokens / plan.tokens_per_second / DAY if plan.rows else None
    per_gpu = plan.tokens_per_second / cluster.gpus
    return {**asdict(plan), "tokens_per_second_per_gpu": per_gpu, "days": days}


def lasting(seconds: float) -> str:
    """How long something takes, in the unit one would say it in.

    >>> lasting(90), lasting(7200), lasting(5 * DAY), lasting(800 * DAY)
    ('1.5 minutes', '2.0 hours', '5.0 days', '2.2 years')
    """
    units = ((365 * DAY, "years"), (DAY, "days"), (3600, "hours"), (60, "minutes"))
    for size, unit in units:
        if seconds >= size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.1f} seconds"
