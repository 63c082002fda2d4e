"""How good runs are at short and at long texts: the table, and the picture."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from regard.cli.output import aligned, number

if TYPE_CHECKING:
    from regard.explain.render.picture import Picture
    from regard.pipelines.by_length import ByLength, Span


def as_lines(found: "ByLength") -> list[str]:
    """A line for each range of lengths, the metrics of one run beside each other."""
    names = list(found.spans[0].metrics)
    rows = [
        (_lengths(span), number(span.examples), *(number(span.metrics[name]) for name in names))
        for span in found.spans
    ]
    return aligned([(found.unit, "examples", *names), *rows], range(1, 2 + len(names)))


def as_groups(runs: "Sequence[ByLength]") -> dict[str, list[tuple[str, ...]]]:
    """A group for each metric, in it a line for each range of lengths, several runs beside."""
    tables = [{_lengths(span): span for span in run.spans} for run in runs]
    ranges = {key: span.longest for table in tables for key, span in table.items()}
    metrics = dict.fromkeys(name for run in runs for name in run.spans[0].metrics)

    def told(span: "Span | None", metric: str) -> str:
        return number(span.metrics[metric]) if span and metric in span.metrics else "-"

    return {
        f"{metric}, by {runs[0].unit}": [
            (key, *(told(table.get(key), metric) for table in tables))
            for key in sorted(ranges, key=ranges.__getitem__)
        ]
        for metric in metrics
    }


def as_table(found: "ByLength") -> dict[str, Any]:
    """All of it for --json."""
    spans = [
        {"shortest": span.shortest, "longest": span.longest, "examples": span.examples}
        | span.metrics
        for span in found.spans
    ]
    return {"unit": found.unit, "lengths": spans}


def as_curves(names: Sequence[str], runs: "Sequence[ByLength]") -> "Picture":
    """A panel for each metric, in it a curve for each run over the lengths."""
    from regard.explain.render.curves import Curve, Panel, draw_curves

    metrics = dict.fromkeys(name for run in runs for name in run.spans[0].metrics)
    panels = []
    for metric in metrics:
        curves = [
            Curve(at, [], [(s.mean, s.metrics[metric]) for s in run.spans if metric in s.metrics])
            for at, run in enumerate(runs)
        ]
        title = metric.replace("_", " ")
        panels.append(Panel(title, title, curves, from_zero=True))
    return draw_curves(names, panels, x_label=f"{runs[0].unit} read")


def _lengths(span: "Span") -> str:
    same = span.shortest == span.longest
    return str(span.longest) if same else f"{span.shortest}-{span.longest}"
