"""Metrics by the length of the example, as tables."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from regard.cli.output import align_columns, format_number

if TYPE_CHECKING:
    from regard.api import MetricsByLength


def as_lines(result: "MetricsByLength") -> list[str]:
    """The metrics of one run: a line per range of lengths, a column per metric."""
    names = result.metric_names
    rows = [
        (
            _range(span),
            format_number(span.examples),
            *(_cell(span, name) for name in names),
        )
        for span in result.ranges
    ]
    return align_columns([(result.unit, "examples", *names), *rows], range(1, 2 + len(names)))


def as_groups(results: "Sequence[MetricsByLength]") -> dict[str, list[tuple[str, ...]]]:
    """The metrics of several runs: a group per metric, with a line per range of lengths."""
    tables = [{_range(span): span for span in result.ranges} for result in results]
    ranges = {key: span.longest for table in tables for key, span in table.items()}
    metrics = dict.fromkeys(name for result in results for name in result.metric_names)

    return {
        f"{metric}, by {results[0].unit}": [
            (key, *(_cell(table.get(key), metric) for table in tables))
            for key in sorted(ranges, key=ranges.__getitem__)
        ]
        for metric in metrics
    }


def as_table(result: "MetricsByLength") -> dict[str, Any]:
    """The result as a table, for --json."""
    spans = [
        {"shortest": span.shortest, "longest": span.longest, "examples": span.examples}
        | span.metrics
        for span in result.ranges
    ]
    return {"unit": result.unit, "lengths": spans}


def _cell(span: Any, metric: str) -> str:
    return format_number(span.metrics[metric]) if span and metric in span.metrics else "-"


def _range(span: Any) -> str:
    same = span.shortest == span.longest
    return str(span.longest) if same else f"{span.shortest}-{span.longest}"
