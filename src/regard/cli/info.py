"""`regard info`."""

import os
import sys
import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from typer import Argument, Option

from regard import api
from regard.api.formatting import with_prefix
from regard.cli.arguments import MODEL_HELP, Json, ModelOverrides
from regard.cli.output import (
    align_columns,
    bold,
    dim,
    format_number,
    format_size,
    format_value,
    print_json,
    print_section,
    spinner,
)
from regard.cli.report import baseline_lines
from regard.errors import reject_options

if TYPE_CHECKING:
    from regard.api import ModelInfo

LINE_WIDTH = 80


def info(
    name: Annotated[
        str | None,
        Argument(
            metavar="PRESET|RECIPE|RUN",
            help=f"{MODEL_HELP} Without it, all presets are listed.",
            show_default=False,
        ),
    ] = None,
    overrides: ModelOverrides = [],  # noqa: B006 -- typer copies it
    hook_points: Annotated[
        bool,
        Option("--hook-points", help="List the hook points, at which activations can be recorded."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the structure and cost of a model, or list all presets.

    The cost is its parameters, memory and FLOPs.

    \b
    regard info
    regard info gpt2
    regard info gpt2 model.position=alibi model.layers=24 --json
    regard info runs/my --hook-points
    """
    if name is None:
        reject_options(
            "without a preset, recipe or run, the presets are listed",
            {"--hook-points": hook_points},
        )
        _print_presets(as_json)
        return
    with spinner("counting parameters and FLOPs"):
        model = api.info(name, *overrides)
    if as_json:
        _print_json(model, hook_points)
        return
    _print_heading(model)
    print_section("diagram", model.diagram(ascii=not supports_box_characters(sys.stdout)))
    rows = [row for key, value in model.applicable_settings.items() for row in _rows(key, value)]
    print_section("settings", align_columns(rows))
    if model.fine_tuning:
        *options, (_, trainable), (_, total) = model.fine_tuning.items()
        rows = [row for key, value in options for row in _rows(key, value)]
        rows.append(("trainable", f"{trainable:,} of {total:,} parameters"))
        print_section("fine-tuning", align_columns(rows))
    cost = model.cost
    if cost.parameters:
        parameter_rows = [
            (name, f"{count:,}", f"{count / cost.parameters:6.1%}")
            for name, count in cost.parts.items()
        ]
        total = ("total", f"{cost.parameters:,}", "")
        print_section("parameters", align_columns([*parameter_rows, total], right=[1, 2]))
        position = model.position_name
        print_section("memory", align_columns(_memory(cost, position), right=[1, 2]))
        if cost.flops_per_token:
            flops = align_columns(_flops(cost, position), right=[1])
            print_section(f"FLOPs per {position}", flops)
    if model.metrics:
        rows = [(name, format_number(value)) for name, value in model.metrics.items()]
        details = ", ".join(filter(None, (model.evaluated_on, model.unit)))
        print_section(f"validation ({details})", align_columns(rows, right=[1]))
    if model.baselines:
        print_section("baselines, on all validation data", baseline_lines(model.baselines))
    if hook_points:
        print_section("hook points", cost.hook_points or ["none"])


def _print_presets(as_json: bool) -> None:
    """Print all presets; those with the same first word, such as gpt2, are on one line."""
    with spinner("loading the presets"):
        names = api.presets()
    if as_json:
        print_json({"presets": names})
        return
    by_first_word: dict[str, list[str]] = {}
    for name in names:
        by_first_word.setdefault(name.split("-")[0], []).append(name)
    for group in by_first_word.values():
        line = ", ".join(group)
        print(textwrap.fill(line, LINE_WIDTH, subsequent_indent="  ", break_on_hyphens=False))


def _print_heading(model: "ModelInfo") -> None:
    out = sys.stdout
    print(f"{bold(model.name, out)}  {model.kind}, {model.family}, {format_size(model.parameters)}")
    notes = model.notes
    if model.published is not None:
        difference = model.published_difference
        ours = f"ours {difference:+.2%}" if difference else "the same"
        print(f"published: {model.published.count:,}, {ours}")
        reason = model.published.reason
        notes = [model.published.source, *([reason] if reason else [])]
    for note in notes:
        for line in textwrap.wrap(note, LINE_WIDTH):
            print(dim(line, out))


def _print_json(model: "ModelInfo", hook_points: bool) -> None:
    table = {
        "name": model.name,
        "kind": model.kind,
        "config": model.settings,
        **asdict(model.cost),
        "parameters": model.parameters,
    }
    if not hook_points:
        del table["hook_points"]
    if model.published is not None:
        difference = model.published_difference
        table["published"] = {**asdict(model.published), "difference": difference}
    if model.kind == "run":
        table["metrics"] = model.metrics
        table["evaluated_on"] = model.evaluated_on
        table |= {"unit": model.unit} if model.unit else {}
        table["baselines"] = model.baselines
        table["fine_tuning"] = model.fine_tuning
    print_json(table)


def supports_box_characters(stream: TextIO) -> bool:
    """Whether a stream can show the characters of a diagram."""
    try:
        "┌⊕▶".encode(stream.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return not (stream.isatty() and os.environ.get("TERM") == "dumb")


def _rows(key: str, value: Any) -> list[tuple[str, str]]:
    """A line for a setting, or several where its value is long."""
    lines = textwrap.wrap(format_value(value), LINE_WIDTH // 2)
    return [("" if index else key, line) for index, line in enumerate(lines)]


def _memory(cost: Any, position: str) -> list[tuple[str, str, str, str]]:
    """Bytes in float32 and in bfloat16, with notes; `position` is `ModelInfo.position_name`."""
    positions = f"{cost.context:,} {position}s"
    rows: list[tuple[str, int, int | None, str]] = [
        ("weights", cost.weight_bytes, cost.weight_bytes // 2, "4 or 2 bytes each"),
        ("gradients", cost.gradient_bytes, None, ""),
        ("AdamW's two moments", cost.optimizer_bytes, None, ""),
        ("to train", cost.training_bytes, cost.mixed_training_bytes, "mixed: + a bfloat16 copy"),
    ]
    if cost.activation_bytes:
        full, mixed = cost.activation_bytes, cost.mixed_activation_bytes
        rows.append((f"activations, {positions}", full, mixed, "no dropout; mixed: compiled"))
    if cost.checkpointed_bytes < cost.activation_bytes:
        full, mixed = cost.checkpointed_bytes, cost.mixed_checkpointed_bytes
        rows.append(("  checkpointed", full, mixed, "layer inputs, and one layer"))
    if cost.state_bytes_per_token:
        size = cost.state_bytes_per_token
        rows.append((f"KV cache, per {position}", size, size // 2, "2 × layers × kv width"))
    if cost.state_bytes:
        name = f"KV cache, {positions}" if cost.state_bytes_per_token else "state of a sequence"
        note = "including cross-attention" if "cross-attention" in cost.parts else ""
        note = note if cost.state_bytes_per_token else "for any length"
        rows.append((name, cost.state_bytes, cost.state_bytes // 2, note))
    if cost.window_bytes < cost.state_bytes:
        rows.append(("  in sliding windows", cost.window_bytes, cost.window_bytes // 2, ""))
    cells = [
        (name, with_prefix(full, "B"), "" if half is None else with_prefix(half, "B"), note)
        for name, full, half, note in rows
    ]
    return [("", "float32", "bfloat16", ""), *cells]


def _flops(cost: Any, position: str) -> list[tuple[str, str, str]]:
    forward, training = cost.flops_per_token, cost.training_flops_per_token
    context = f"{cost.context:,}"
    attention = f" + 4 × layers × width × {context}" if "attention" in cost.parts else ""
    rows = [
        ("forward", with_prefix(forward, "FLOPs"), f"2 × matmul weights{attention}"),
        ("training", with_prefix(training, "FLOPs"), "3 × forward"),
    ]
    if cost.decode_flops_per_token:
        decode = with_prefix(cost.decode_flops_per_token, "FLOPs")
        rows.append(("decoding", decode, f"the last of {context} {position}s"))
    return rows
