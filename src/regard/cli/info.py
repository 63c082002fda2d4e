"""`regard info`."""

import os
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from typer import Argument, Option

from regard.cli.options import Json, Overrides
from regard.cli.output import aligned, bold, dim, how_large, number, print_json, working
from regard.errors import ConfigError, unknown

if TYPE_CHECKING:
    from regard.models.cost import Cost

ROOM = 80  # cells of a line
LARGEST = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def info(
    what: Annotated[
        str | None,
        Argument(
            metavar="[PRESET|RUN|RECIPE]",
            help="A preset, a run folder, a recipe, a folder of weights; without it: all presets.",
            show_default=False,
        ),
    ] = None,
    words: Overrides = [],  # noqa: B006 -- typer copies it
    taps: Annotated[bool, Option("--taps", help="List the places one can listen at.")] = False,
    as_json: Json = False,
) -> None:
    """Tell what a model is made of, and what it costs; or list all presets.

    \b
    regard info
    regard info gpt2
    regard info gpt2 model.position=alibi model.layers=24 --json
    regard info runs/my --taps
    """
    if what is None:
        _list(as_json)
        return
    with working("counting"):
        from regard.config import parse_overrides
        from regard.models.build import describe, family_of
        from regard.models.cost import cost
        from regard.models.presets import PUBLISHED
        from regard.training.storage.run_folder import RunFolder
        from regard.training.tracking.history import stored_parameters

        over = parse_overrides(words)
        kind, config, metrics, notes = find(what, over)
        counted = cost(config)
        numbers = stored_parameters(RunFolder(what)) if kind == "run" and not over else 0
        published = PUBLISHED.get(what) if kind == "preset" and not over else None
    if as_json:
        table = {**asdict(counted), "parameters": counted.parameters or numbers}
        if not taps:
            del table["taps"]
        if published is not None:
            table["published"] = {
                **asdict(published),
                "difference": counted.parameters / published.count - 1,
            }
        named = {"name": what, "kind": kind, "config": describe(config)}
        print_json({**named, **table, **({"metrics": metrics} if kind == "run" else {})})
        return
    from regard.explain.render.diagram import diagram as draw

    out = sys.stdout
    large = how_large(counted.parameters, numbers)
    print(f"{bold(what, out)}  {kind}, {family_of(config)}, {large}")
    if published is not None:
        differs = counted.parameters / published.count - 1
        ours = f"ours {differs:+.2%}" if differs else "the same"
        print(f"published: {published.count:,}, {ours}")
        notes = [published.source, *([published.reason] if published.reason else [])]
    for line in (line for note in notes for line in textwrap.wrap(note, ROOM)):
        print(dim(line, out))
    section("drawing", draw(family_of(config), config, ascii=not can_draw(out)))
    chosen = [(key, value) for key, value in describe(config).items() if value not in (None, False)]
    section("choices", aligned([row for key, value in chosen for row in _rows(key, value)]))
    if counted.parameters:
        shares = [
            (name, f"{count:,}", f"{count / counted.parameters:6.1%}")
            for name, count in counted.parts.items()
        ]
        total = ("total", f"{counted.parameters:,}", "")
        section("parameters", aligned([*shares, total], right=[1, 2]))
        section("memory", aligned(_memory(counted), right=[1, 2]))
        if counted.flops_per_token:
            section("arithmetic of a token", aligned(_arithmetic(counted), right=[1]))
    if metrics:
        rows = [(name, number(value)) for name, value in metrics.items()]
        section("held out", aligned(rows, right=[1]))
    if taps:
        section("taps", counted.taps or ["none"])


def _list(as_json: bool) -> None:
    """All presets, those of one kind on one line."""
    with working("looking"):
        from regard.models.presets import PRESETS
    kinds: dict[str, list[str]] = {}
    for name in PRESETS:
        kinds.setdefault(name.split("-")[0], []).append(name)
    if as_json:
        print_json({"presets": list(PRESETS)})
        return
    for names in kinds.values():
        print(textwrap.fill(", ".join(names), ROOM, subsequent_indent="  ", break_on_hyphens=False))


def can_draw(stream: TextIO) -> bool:
    """Whether a stream can show lines and boxes."""
    try:
        "┌⊕▶".encode(stream.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return not (stream.isatty() and os.environ.get("TERM") == "dumb")


def section(title: str, lines: list[str]) -> None:
    """A title, and lines under it."""
    print(f"\n{bold(title, sys.stdout)}")
    for line in lines:
        print(f"  {line}".rstrip())


def _rows(key: str, value: Any) -> list[tuple[str, str]]:
    """A line for a setting, or several where it is long."""
    lines = textwrap.wrap(said(value), ROOM // 2)
    return [("" if number else key, line) for number, line in enumerate(lines)]


def _memory(cost: "Cost") -> list[tuple[str, str, str, str]]:
    """In float32, in bfloat16, and how it is counted."""
    tokens = f"{cost.context:,} tokens"
    rows: list[tuple[str, int, int | None, str]] = [
        ("weights", cost.weight_bytes, cost.weight_bytes // 2, "4 or 2 bytes each"),
        ("gradients", cost.gradient_bytes, None, ""),
        ("AdamW's two moments", cost.optimizer_bytes, None, ""),
        ("to train", cost.training_bytes, cost.mixed_training_bytes, "mixed: + a bfloat16 copy"),
    ]
    if cost.activation_bytes:
        whole, mixed = cost.activation_bytes, cost.mixed_activation_bytes
        rows.append((f"activations, {tokens}", whole, mixed, "no dropout; mixed: compiled"))
    if cost.checkpointed_bytes < cost.activation_bytes:
        whole, mixed = cost.checkpointed_bytes, cost.mixed_checkpointed_bytes
        rows.append(("with recomputation", whole, mixed, "inputs, and one layer"))
    if cost.state_bytes_per_token:
        each = cost.state_bytes_per_token
        rows.append(("keys, values, a token", each, each // 2, "2 × layers × kv width"))
    if cost.state_bytes:
        held = f"keys, values, {tokens}" if cost.state_bytes_per_token else "state of a row"
        note = "the source's too" if "cross-attention" in cost.parts else ""
        note = note if cost.state_bytes_per_token else "however long"
        rows.append((held, cost.state_bytes, cost.state_bytes // 2, note))
    if cost.window_bytes < cost.state_bytes:
        rows.append(("within the windows", cost.window_bytes, cost.window_bytes // 2, ""))
    told = [
        (name, amount(full, "B"), "" if half is None else amount(half, "B"), note)
        for name, full, half, note in rows
    ]
    return [("", "float32", "bfloat16", ""), *told]


def _arithmetic(cost: "Cost") -> list[tuple[str, str, str]]:
    forward, training = cost.flops_per_token, cost.training_flops_per_token
    context = f"{cost.context:,}"
    attending = f" + 4 × layers × width × {context}" if "attention" in cost.parts else ""
    rows = [
        ("forward", amount(forward, "FLOPs"), f"2 × matrices{attending}"),
        ("training", amount(training, "FLOPs"), "three times that"),
    ]
    if cost.decode_flops_per_token:
        one = amount(cost.decode_flops_per_token, "FLOPs")
        rows.append(("generating", one, f"the last of {context}"))
    return rows


def said(value: Any) -> str:
    """A setting as one reads it.

    >>> said({"kind": "rotary", "fraction": 0.25}), said(True), said(None), said(50257)
    ('rotary, fraction 0.25', 'yes', '-', '50,257')
    """
    if isinstance(value, Mapping):
        options = [f"{key} {said(each)}" for key, each in value.items() if key != "kind"]
        return ", ".join([str(value.get("kind", "")), *options])
    if isinstance(value, list | tuple):
        return ", ".join(map(said, value)) or "-"
    if value is None or isinstance(value, bool):
        return {None: "-", True: "yes", False: "no"}[value]
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def amount(count: float, unit: str) -> str:
    """A number that one can grasp.

    >>> amount(497_759_232, "B"), amount(24, "B")
    ('497.8 MB', '24 B')
    """
    for size, letter in LARGEST:
        if count >= size:
            return f"{count / size:,.1f} {letter}{unit}"
    return f"{count:.0f} {unit}".rstrip()


def find(what: str, over: dict[str, Any]) -> tuple[str, Any, dict[str, float], list[str]]:
    """What kind of thing it is, its model's configuration, its metrics, and what to know."""
    from regard.config import RunConfig, build, kind_of, merge, must_be_one, read_toml, to_table
    from regard.hub.external_checkpoint import is_external_checkpoint, open_checkpoint
    from regard.models.build import resolve
    from regard.models.presets import PRESETS
    from regard.training.setup.configure import RECIPES, recipes
    from regard.training.storage.run_folder import RunFolder

    if what in PRESETS:
        wrong = [key for key in over if key != "model"]
        if wrong:
            raise ConfigError(f"{wrong[0]}: a preset is a model; change it as in model.layers=4")
        return "preset", resolve({"preset": what, **over.get("model", {})}), {}, []
    if what.endswith(".toml") or what in recipes():
        path = Path(what) if what.endswith(".toml") else RECIPES / f"{what}.toml"
        table = {"name": path.stem, **read_toml(path)}
        must_be_one(table)
        run = build(RunConfig, merge(table, over))
        options = kind_of(run.data.tokenizer)[1]
        size = options.get("size")
        told = "vocab_size is the tokenizer's to say; here it is "
        if size is not None:
            source = None if options.get("shared", True) else size
            model = resolve(run.model, vocab_size=size, source_vocab_size=source)
            return "recipe", model, {}, [f"{told}its largest"]
        if "preset" in run.model:
            model = resolve(run.model)
            known = hasattr(model, "vocab_size")
            return "recipe", model, {}, [f"{told}the preset's"] if known else []
        return "recipe", resolve({"vocab_size": 256, **run.model}), {}, [f"{told}a guess"]
    if not Path(what).is_dir() and "/" not in what:
        raise ConfigError(_unknown(what, [*PRESETS, *recipes()]))
    if is_external_checkpoint(Path(what)):
        if over:
            raise ConfigError(f"{what} is a checkpoint; import it before changing its settings")
        return "checkpoint", open_checkpoint(Path(what)).config, {}, []
    folder = RunFolder(what)
    run = build(RunConfig, merge(to_table(folder.load_config()), over))
    kept = folder.best_metrics()
    return "run", resolve(run.model), kept, [] if kept else ["not evaluated yet"]


def _unknown(what: str, known: list[str]) -> str:
    begun = sorted(name for name in known if name.startswith(what))
    if len(begun) > 1:
        return f"{what!r} could be any of: {', '.join(begun)}"
    return unknown("preset, run or recipe", what, known)
