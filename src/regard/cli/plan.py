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
    from regard.models.plan import Machine, Way

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
    reached: Annotated[
        float | None, Option(metavar="SHARE", help="Share of the peak that is reached.")
    ] = None,
    link: Annotated[
        float | None, Option(metavar="GB/S", help="Between two GPUs, each way, if all is reached.")
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
            PER_MACHINE,
            TOKENS,
            Machine,
            fastest,
            host_bytes,
            ways,
        )

        if card not in CARDS:
            raise ConfigError(unknown("card", card, CARDS))
        sheet = CARDS[card]
        own_link = sheet.link if gpus <= PER_MACHINE else sheet.network
        machine = Machine(
            gpus=gpus,
            memory=sheet.memory if memory is None else memory * 1e9,
            peak=sheet.peak if peak is None else peak * 1e12,
            link=own_link if link is None else link * 1e9,
            **({} if reached is None else {"reached": reached}),
        )
        if tokens is not None and not 0 < tokens < math.inf:
            raise ConfigError(f"--tokens {tokens:g} must be a number above 0")
        counted = cost(find(what, parse_overrides(words))[1])
        all_ways = ways(counted, machine, rows)
        best = fastest(all_ways)
        if best is None:
            raise ConfigError(_too_large(what, counted, machine, rows))
        to_learn = TOKENS * counted.parameters if tokens is None else tokens
    if as_json:
        print_json(
            {
                "name": what,
                "parameters": counted.parameters,
                "context": counted.context,
                "machine": asdict(machine),
                "tokens": to_learn,
                "ways": [_table(way, machine, to_learn) for way in all_ways],
                "best": best.name,
                "host_bytes": host_bytes(counted, machine),
                "generating": _generating(counted, machine),
            }
        )
        return
    out = sys.stdout
    each = f"{gpus:,} GPUs" if gpus > 1 else "one GPU"
    memory_said = amount(machine.memory, "B")
    print(f"{bold(what, out)}  {counted.parameters:,} parameters, on {each} of {memory_said}")
    section("memory of each GPU", aligned(_memory(all_ways), right=range(1, len(all_ways) + 1)))
    section("training", aligned(_speed(all_ways, machine, to_learn), right=range(1, 5)))
    section("best", _advice(best, counted, machine, to_learn))
    if counted.state_bytes:
        section("generating, on one GPU in bfloat16", _told_generating(counted, machine))
    section("assumed", aligned(_assumed(machine, card, to_learn, by_rule=tokens is None)))


def _memory(all_ways: "list[Way]") -> list[list[str]]:
    """A column for each way."""
    rows: list[tuple[str, list[int]]] = [
        ("weights", [way.weight_bytes for way in all_ways]),
        ("gradients", [way.gradient_bytes for way in all_ways]),
        ("AdamW's two moments", [way.optimizer_bytes for way in all_ways]),
        ("copies, or gathered", [way.copy_bytes for way in all_ways]),
        ("borrowed to evaluate", [way.borrowed_bytes for way in all_ways]),
        ("a chunk of logits", [way.logits_bytes for way in all_ways]),
        ("activations of a row", [way.activation_bytes for way in all_ways]),
    ]
    told = [
        [name, *(amount(each, "B") if each else "-" for each in sizes)]
        for name, sizes in rows
        if any(sizes)
    ]
    fits = ["rows that fit", *(f"{way.rows:,}" if way.rows else "-" for way in all_ways)]
    return [["", *(way.name for way in all_ways)], *told, fits]


def _speed(all_ways: "list[Way]", machine: "Machine", tokens: float) -> list[list[str]]:
    rows = [["", "used", "tokens/s", "each GPU", "time", "limited by"]]
    for way in all_ways:
        speed = way.tokens_per_second
        if not way.rows:
            rows.append([way.name, "-", "-", "-", "-", "memory"])
            continue
        rows.append(
            [
                way.name,
                amount(way.used_bytes, "B"),
                amount(speed, ""),
                amount(speed / machine.gpus, ""),
                lasting(tokens / speed),
                way.limit,
            ]
        )
    return rows


def _advice(best: "Way", cost: "Cost", machine: "Machine", tokens: float) -> list[str]:
    from regard.models.plan import host_bytes

    step = best.rows * (cost.context or 1) * machine.gpus
    time = lasting(tokens / best.tokens_per_second)
    rows = f"{best.rows:,} row{'s' if best.rows > 1 else ''}"
    rows += " on each GPU" if machine.gpus > 1 else ""
    recompute = " train.activation_checkpointing=true" if best.recomputed else ""
    words = f"train.batch={best.rows * machine.gpus}{recompute}"
    launch = "regard train"
    if machine.gpus > 1:
        launch = "torchrun … -m regard train"
        words += " train.shard=full" if best.sharded else ""
    host = amount(host_bytes(cost, machine), "B")
    return [
        f"{best.name}: {rows} at a time, {amount(step, '')} tokens a step, {time}",
        f"{launch} … {words}",
        f"host memory: {host} a machine, for each rank begins with the whole model",
    ]


def _assumed(
    machine: "Machine", card: str, tokens: float, *, by_rule: bool
) -> list[tuple[str, str, str]]:
    from regard.models.plan import PER_MACHINE, TOKENS, USABLE

    learned = f"{TOKENS} a parameter (Chinchilla)" if by_rule else "as given"
    far = f" between machines of {PER_MACHINE}" if machine.gpus > PER_MACHINE else ""
    link = f"{amount(machine.link, 'B/s')}{far}, {machine.link_reached:.0%} reached"
    sent = [("link", link, "--link"), ("", "what is sent overlaps with arithmetic", "")]
    return [
        ("card", f"{card}, {amount(machine.peak, 'FLOP/s')} in bfloat16", "--card, --peak"),
        ("reached of it", f"{machine.reached:.0%}, recomputing included", "--reached"),
        ("memory", f"{amount(machine.memory, 'B')}, {USABLE:.0%} of it usable", "--memory"),
        *(sent if machine.gpus > 1 else []),
        ("tokens", f"{amount(tokens, '')}, {learned}", "--tokens"),
        ("weights", "float32, AdamW; products in bfloat16, compiled", ""),
    ]


def _generating(cost: "Cost", machine: "Machine") -> dict[str, int]:
    """Bytes of the weights and of a row's keys and values in bfloat16, and the rows that fit."""
    weights, state = cost.weight_bytes // 2, cost.state_bytes // 2
    room = max(0, machine.usable - weights)
    fitting = int(room // state) if state else 0
    return {"weight_bytes": weights, "state_bytes": state, "rows": fitting}


def _told_generating(cost: "Cost", machine: "Machine") -> list[str]:
    found = _generating(cost, machine)
    rows = [
        ("weights", amount(found["weight_bytes"], "B")),
        (f"keys, values, {cost.context or 1:,} tokens", amount(found["state_bytes"], "B")),
        ("rows that fit", f"{found['rows']:,}" if found["rows"] else "-"),
    ]
    return aligned(rows, right=[1])


def _too_large(what: str, cost: "Cost", machine: "Machine", rows: int | None) -> str:
    from regard.models.plan import gpus_needed, ways

    memory, least = amount(machine.memory, "B"), ways(cost, machine)[-1]
    if rows is not None and least.rows:
        return f"--rows {rows} do not fit on {machine.gpus} × {memory}; at most {least.rows} do"
    message = f"{what} does not fit on {machine.gpus} × {memory}: at best each GPU holds "
    way_out = "a smaller model"
    if least.sharded and least.evaluating_bytes > machine.usable:
        message += f"{amount(least.own_bytes, 'B')},\n"
        message += f"and borrows {amount(least.borrowed_bytes, 'B')} more for an evaluation\n"
    else:
        way_out = "a smaller model.context"
        row = amount(least.activation_bytes + least.logits_bytes, "B")
        message += f"{amount(least.held_bytes, 'B')},\n"
        message += f"and {row} more for a row of {cost.context or 1:,} tokens\n"
    needed = gpus_needed(cost, machine)
    if needed is None:
        return f"{message}no number of GPUs helps; give more --memory or {way_out}"
    return f"{message}it would with --gpus {needed}"


def _table(way: "Way", machine: "Machine", tokens: float) -> dict[str, Any]:
    days = tokens / way.tokens_per_second / DAY if way.rows else None
    per_gpu = way.tokens_per_second / machine.gpus
    return {**asdict(way), "tokens_per_second_per_gpu": per_gpu, "days": days}


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
