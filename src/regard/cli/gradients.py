"""`regard explain --gradients`: how far back the loss of the last token reaches."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from regard.cli.explain import write
from regard.cli.output import aligned, bold, print_json, say, shown, working
from regard.errors import ConfigError

if TYPE_CHECKING:
    from regard.explain import GradientFlow

MOST_DOTS = 80  # of a curve: more would run into each other


def show_gradients(
    runs: Sequence[Path], text: str, layer: int, out: Path | None, as_json: bool
) -> None:
    """Print the norms by distance, a column for each run; and draw them, where asked to."""
    names = [run.resolve().name for run in runs]
    names = names if len(set(names)) == len(names) else list(map(str, runs))
    flows = []
    for run in runs:
        with working(f"opening {run}"):
            from regard.api import load

            flows.append(load(run).gradients(text))
            _must_have(layer, flows[-1], run)
    if out is not None:
        write(out, _drawn(names, [flow.by_distance(layer) for flow in flows], out.suffix))
    if as_json:
        tables = [
            {"name": name, "read": flow.pieces, "layers": _lists(flow)}
            for name, flow in zip(names, flows, strict=True)
        ]
        print_json({"runs": tables})
    else:
        _print(names, flows, layer)
    if out is not None:
        say(f"curves: {out}")
    elif not as_json:
        say("every position: --json; as a picture: --out reach.svg; another layer: --layer N")


def _lists(flow: "GradientFlow") -> dict[str, list[float]]:
    return {name: norms.tolist() for name, norms in flow.layers.items()}


def _must_have(layer: int, flow: "GradientFlow", run: Path) -> None:
    layers = len(flow.layers)
    if not 0 <= layer < layers:
        raise ConfigError(f"--layer {layer}: {run} has {layers} layers, 0 to {layers - 1}")


def _print(names: Sequence[str], flows: "Sequence[GradientFlow]", layer: int) -> None:
    """The norms at a few distances, each about a quarter farther than the one before."""
    norms = [flow.by_distance(layer) for flow in flows]
    farthest = max(map(len, norms)) - 1
    steps = [0]
    while steps[-1] < farthest:
        steps.append(min(farthest, max(steps[-1] + 1, steps[-1] * 5 // 4)))
    alike = all(flow.pieces == flows[0].pieces for flow in flows)
    rows = [("back", *(["read"] if alike else []), *names)]
    for step in steps:
        read = [repr(shown(flows[0].pieces[-1 - step], sys.stdout))] if alike else []
        numbers = [f"{each[step]:.3g}" if step < len(each) else "-" for each in norms]
        rows.append((str(step), *read, *numbers))
    right = [0, *range(1 + alike, len(rows[0]))]
    first, *lines = aligned(rows, right)
    print(bold(first, sys.stdout), *lines, sep="\n")


def _drawn(names: Sequence[str], norms: Sequence[Sequence[float]], ending: str) -> bytes:
    """A line for each run; where the loss does not depend on a position there is nothing."""
    from regard.explain.render.curves import Curve, Panel, draw_curves
    from regard.explain.render.picture import to_png, to_svg

    farthest = max(map(len, norms)) - 1
    apart = -(-(farthest + 1) // MOST_DOTS)
    curves = [
        Curve(run, [], [(at, each[at]) for at in range(0, len(each), apart) if each[at] > 0])
        for run, each in enumerate(norms)
    ]
    panel = Panel("gradient of the last loss", "norm", curves)
    told = "how much the loss of the last token depends on what was kept of each one before it"
    picture = draw_curves(names, [panel], x_label="positions back", caption=told)
    return to_png(picture) if ending == ".png" else to_svg(picture).encode()
