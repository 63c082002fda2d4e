"""`regard info`."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from regard.cli.options import Json, Overrides
from regard.cli.talk import aligned, bold, dim, number, print_json, working
from regard.errors import ConfigError, unknown


def info(
    what: Annotated[
        str,
        Argument(
            metavar="PRESET|RUN|RECIPE",
            help="A preset, a run folder, a recipe.",
            show_default=False,
        ),
    ],
    words: Overrides = [],  # noqa: B006 -- typer copies it
    taps: Annotated[bool, Option("--taps", help="List the places one can listen at.")] = False,
    as_json: Json = False,
) -> None:
    """Tell what a model is made of, and what it costs.

    \b
    regard info gpt2
    regard info gpt2 model.position=alibi model.layers=24 --json
    regard info runs/my --taps
    """
    with working("counting"):
        from regard.config import parse_overrides
        from regard.models.build import describe, family_of
        from regard.models.cost import cost

        kind, config, metrics, notes = _find(what, parse_overrides(words))
        counted = cost(config)
    table = asdict(counted)
    if as_json:
        named = {"name": what, "kind": kind, "config": describe(config)}
        if not taps:
            del table["taps"]
        print_json({**named, **table, **({"metrics": metrics} if kind == "run" else {})})
        return
    out = sys.stdout
    print(f"{bold(what, out)}  {kind}, {family_of(config)}, {counted.parameters:,} parameters")
    for note in notes:
        print(dim(note, out))
    chosen = [
        (key, str(value)) for key, value in describe(config).items() if value not in (None, False)
    ]
    _section("choices", aligned(chosen))
    if counted.parameters:
        shares = [
            (name, f"{count:,}", f"{count / counted.parameters:6.1%}")
            for name, count in counted.parts.items()
        ]
        total = ("total", f"{counted.parameters:,}", "")
        _section("parameters", aligned([*shares, total], right=[1, 2]))
        _section("cost", aligned(_costs(table), right=[1]))
    if metrics:
        rows = [(name, number(value)) for name, value in metrics.items()]
        _section("held out", aligned(rows, right=[1]))
    if taps:
        _section("taps", counted.taps or ["none"])


def _section(title: str, lines: list[str]) -> None:
    print(f"\n{bold(title, sys.stdout)}")
    for line in lines:
        print(f"  {line}")


def _costs(table: dict[str, Any]) -> list[tuple[str, str, str]]:
    rows = [
        ("weights", _bytes(table["weight_bytes"]), "float32: 4 bytes a parameter"),
        ("to train", _bytes(table["training_bytes"]), "weights, gradients, AdamW's two moments"),
    ]
    if table["state_bytes_per_token"]:
        each = _bytes(table["state_bytes_per_token"])
        rows.append(("keys, values", each, "a token: 2 layers kv_heads head_dim 4 bytes"))
    if table["state_bytes"]:
        rows.append(("state", _bytes(table["state_bytes"]), "a row, however long"))
    forward, training = table["flops_per_token"], table["training_flops_per_token"]
    if forward:
        meaning = "a token: 2 (weights that multiply) + 4 attentions context heads head_dim"
        rows.append(("forward", f"{forward:,} FLOPs", meaning))
        rows.append(("training", f"{training:,} FLOPs", "a token: three times that"))
    return rows


def _bytes(count: int) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count} bytes"


def _find(what: str, over: dict[str, Any]) -> tuple[str, Any, dict[str, float], list[str]]:
    """What kind of thing it is, its model's configuration, its metrics, and what to know."""
    from regard.api import RECIPES, recipes
    from regard.config import RunConfig, build, kind_of, merge, read_toml, to_table
    from regard.models.build import resolve
    from regard.models.presets import PRESETS
    from regard.training.folder import Folder

    if what in PRESETS:
        wrong = [key for key in over if key != "model"]
        if wrong:
            raise ConfigError(f"{wrong[0]}: a preset is a model; change it as in model.layers=4")
        return "preset", resolve({"preset": what, **over.get("model", {})}), {}, []
    if what.endswith(".toml") or what in recipes():
        path = Path(what) if what.endswith(".toml") else RECIPES / f"{what}.toml"
        run = build(RunConfig, {"name": path.stem, **merge(read_toml(path), over)})
        size = kind_of(run.data.tokenizer)[1].get("size")
        told = "vocab_size is the tokenizer's to say; here it is "
        if size is not None:
            return "recipe", resolve({"vocab_size": size, **run.model}), {}, [f"{told}its largest"]
        if "preset" in run.model:
            return "recipe", resolve(run.model), {}, [f"{told}the preset's"]
        return "recipe", resolve({"vocab_size": 256, **run.model}), {}, [f"{told}a guess"]
    if not Path(what).is_dir() and "/" not in what:
        known = [*PRESETS, *recipes()]
        raise ConfigError(f"{unknown('preset, run or recipe', what, known)}")
    folder = Folder(what)
    run = build(RunConfig, merge(to_table(folder.load_config()), over))
    kept = folder.kept_metrics()
    return "run", resolve(run.model), kept, [] if kept else ["not evaluated yet"]
