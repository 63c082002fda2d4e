"""`regard evaluate`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from regard import api
from regard.api.display import make_display
from regard.cli.arguments import AdapterOption, Beam, Folder, Json, Penalty, parse_data
from regard.cli.output import (
    align_columns,
    check_output_file,
    common_options,
    format_number,
    print_json,
    print_status,
    spinner,
    write_file,
)
from regard.errors import ConfigError, reject_options

if TYPE_CHECKING:
    from regard.api import MetricsByLength


def evaluate(
    run: Folder,
    data: Annotated[
        list[str],
        Argument(
            metavar="DATA",
            help="Other data: one path, a source and a target file, or a built-in dataset, as in "
            "\"{kind='copy'}\". By default the run's validation data.",
            show_default=False,
        ),
    ] = [],  # noqa: B006 -- typer copies it
    beam: Beam = None,
    length_penalty: Penalty = None,
    stride: Annotated[
        int | None,
        Option(
            metavar="N",
            help="Language models: advance the windows by N tokens. A smaller N gives every token "
            "more context; by default train.evaluate_stride, or three quarters of the context.",
        ),
    ] = None,
    test: Annotated[
        bool, Option("--test", help="Evaluate on the test split of data.split.")
    ] = False,
    column: Annotated[
        str | None, Option(metavar="NAME", help="Series: the column that --out draws.")
    ] = None,
    by_length: Annotated[
        bool, Option("--by-length", help="Show the metrics by source length.")
    ] = False,
    out: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Write the curves of --by-length, or the forecasts of a series: .svg, .png, .pdf, "
            ".html.",
        ),
    ] = None,
    force: Annotated[bool, Option("--force", help="Overwrite an existing FILE.")] = False,
    as_json: Json = False,
    adapter: AdapterOption = None,
) -> None:
    """Evaluate a run: all metrics of its task.

    \b
    regard evaluate runs/my
    regard evaluate runs/my other.txt --json
    regard evaluate runs/my --stride 16
    regard evaluate runs/pairs test.en test.de --beam 5
    regard evaluate runs/pairs --by-length --out lengths.svg
    regard evaluate runs/ett --test --out forecast.svg
    """
    check_output_file(out, force)
    if column is not None and out is None:
        raise ConfigError("--column is the column of a series that --out draws; give --out too")
    if by_length:
        reject_options(
            "--by-length is for pairs and labels; --stride is for language models, --test and "
            "--column are for series",
            {"--stride": stride, "--test": test, "--column": column},
        )
        with spinner(f"evaluating {run}"):
            loaded_run, datasets = api.load(run, adapter=adapter), parse_data(data)
            result = loaded_run.evaluate_by_length(
                *datasets, beam=beam, length_penalty=length_penalty
            )
        _print_by_length(run.resolve().name, result, out, as_json)
        return
    with make_display(common_options.quiet, transient=True) as display:
        loaded_run, datasets = api.load(run, adapter=adapter), parse_data(data)
        if out is not None and "forecast" not in loaded_run.methods:
            raise ConfigError("--out needs --by-length, or a run that forecasts a series")
        evaluation = loaded_run.evaluation(
            *datasets,
            beam=beam,
            length_penalty=length_penalty,
            stride=stride,
            test=test,
            progress=display.show_progress,
        )
    metrics, unit = evaluation.metrics, loaded_run.unit
    if any(name.startswith("mae [") for name in metrics):  # of the columns of a series
        unit += "; mae [COLUMN]: the unit of the column"
    if out is not None:
        figure = loaded_run.draw_evaluation(*datasets, test=test, column=column)
        write_file(out, api.encode_figure(figure, out.suffix))
        print_status(f"curves: {out}")
    if as_json:
        print_json(
            {**metrics, "evaluated_on": evaluation.evaluated_on, **({"unit": unit} if unit else {})}
        )
        return
    print_status(f"on {evaluation.evaluated_on}{', ' * bool(unit)}{unit}:")
    signatures = metrics.pop("signatures", {})
    rows = [(name, format_number(value)) for name, value in metrics.items()]
    for line in align_columns(rows, [1]):
        print(line)
    if "chrf" in metrics and "bleu" not in metrics:
        print_status("without bleu, which counts 4-grams: no reference has four tokens")
    for name, signature in signatures.items():
        print_status(f"{name}: {signature}")


def _print_by_length(name: str, result: "MetricsByLength", out: Path | None, as_json: bool) -> None:
    from regard.cli.by_length import as_lines, as_table

    if as_json:
        print_json(as_table(result))
    else:
        print(*as_lines(result), sep="\n")
    if out is not None:
        write_file(out, api.encode_figure(api.by_length_curves([name], [result]), out.suffix))
        print_status(f"curves: {out}")
