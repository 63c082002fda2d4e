"""`regard explain --gradients`: the gradient norm of the last token's loss by distance."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from regard import api
from regard.cli.output import (
    align_columns,
    bold,
    print_json,
    print_status,
    spinner,
    text_for,
    write_file,
)
from regard.errors import ConfigError

if TYPE_CHECKING:
    from regard.api import GradientFlow


def show_gradients(
    runs: Sequence[Path], text: str, layer: int, out: Path | None, as_json: bool
) -> None:
    """Print the norms by distance, a column per run; with `out`, draw them too."""
    flows = []
    for run in runs:
        with spinner(f"opening {run}"):
            names = api.run_names(runs)
            flows.append(api.load(run).gradients(text))
            _check_layer(layer, flows[-1], run)
    if out is not None:
        write_file(out, api.encode_figure(api.draw_gradients(names, flows, layer), out.suffix))
    if as_json:
        tables = [
            {"name": name, "tokens": flow.tokens, "layers": _lists(flow)}
            for name, flow in zip(names, flows, strict=True)
        ]
        print_json({"runs": tables})
    else:
        _print_norms(names, flows, layer)
    if out is not None:
        print_status(f"curves: {out}")
    elif not as_json:
        print_status("all positions: --json; a figure: --out FILE.svg; another layer: --layer N")


def _lists(flow: "GradientFlow") -> dict[str, list[float]]:
    return {name: norms.tolist() for name, norms in flow.layers.items()}


def _check_layer(layer: int, flow: "GradientFlow", run: Path) -> None:
    layers = len(flow.layers)
    if not 0 <= layer < layers:
        known = "only layer 0" if layers == 1 else f"{layers} layers, 0 to {layers - 1}"
        raise ConfigError(f"--layer {layer}: {run} has {known}")


def _print_norms(names: Sequence[str], flows: "Sequence[GradientFlow]", layer: int) -> None:
    """Print the norms at a few distances, each about a quarter farther than the previous one."""
    norms = [flow.by_distance(layer) for flow in flows]
    farthest = max(map(len, norms)) - 1
    distances = [0]
    while distances[-1] < farthest:
        distances.append(min(farthest, max(distances[-1] + 1, distances[-1] * 5 // 4)))
    same_tokens = all(flow.tokens == flows[0].tokens for flow in flows)
    rows = [("distance", *(["token"] if same_tokens else []), *names)]
    for distance in distances:
        token = repr(text_for(sys.stdout, flows[0].tokens[-1 - distance])) if same_tokens else None
        cells = [f"{column[distance]:.3g}" if distance < len(column) else "-" for column in norms]
        rows.append((str(distance), *([] if token is None else [token]), *cells))
    right = [0, *range(1 + same_tokens, len(rows[0]))]
    first, *lines = align_columns(rows, right)
    print(bold(first, sys.stdout), *lines, sep="\n")
