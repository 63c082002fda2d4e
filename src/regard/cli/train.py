"""`regard train`."""

import os
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from regard import api
from regard.cli.arguments import Json, Out, Overrides
from regard.cli.output import format_size, print_json, print_section, print_status, spinner
from regard.config import check_overrides, is_override, parse_overrides, read_recipe
from regard.errors import ConfigError

if TYPE_CHECKING:
    from regard.api import TrainingPreview

MANY_FILES = 10_000  # a folder with more takes noticeable time to read


@api.stoppable()
def train(
    data_or_recipe: Annotated[
        str,
        Argument(
            metavar="DATA|RECIPE",
            help="Your own data: a file or folder of text; a table (.csv, .tsv, .jsonl) of pairs, "
            "labels, tags, scores or dialogues, or of numbers, a time series; questions in SQuAD's "
            ".json; images, a folder for each class or with a table of captions; strokes in .npz. "
            "Or the name of a recipe, or a .toml file.",
            show_default=False,
        ),
    ],
    overrides: Overrides = [],  # noqa: B006 -- typer copies it
    out: Out = None,
    dry_run: Annotated[
        bool,
        Option("--dry-run", help="Print the data and the settings; train and write nothing."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a model on your own data or from a recipe.

    The chosen settings are printed, and each can be changed; minutes=N chooses model size and
    steps for this machine, and the command ends in that time. Ctrl-C saves; `regard resume`
    continues. A recipe that is a study trains several runs, and continues where it was stopped.

    \b
    regard train my.txt
    regard train my.txt minutes=10 model.position=alibi
    regard train pairs.tsv --out runs/pairs
    regard train photos/ minutes=10
    regard train hourly.csv task.horizon=24
    regard train dialogues.jsonl train.start=runs/base train.tune=lora
    regard train data.source=train.en data.target=train.de
    regard train my.txt model.family=ngram model.order=5
    regard train my.txt --dry-run

    `regard settings` lists all settings.
    """
    if api.rank():
        api.run_worker()
        return
    path: str | None = data_or_recipe
    if is_override(data_or_recipe):
        path, overrides = None, [data_or_recipe, *overrides]
    table = parse_overrides(overrides)
    check_overrides(table)  # before torch is imported
    if dry_run and "minutes" in table:
        raise ConfigError(
            "minutes=… times training steps, and --dry-run trains none; leave one out"
        )
    if data_or_recipe.endswith(".toml"):
        read_recipe(Path(data_or_recipe))
    if any(islice(_files(data_or_recipe), MANY_FILES, None)):
        folder = Path(os.path.expanduser(data_or_recipe)).resolve()
        print_status(f"reading more than {MANY_FILES:,} files in {folder}; Ctrl-C stops …")
    with spinner("loading"):
        from regard.cli.report import print_result, show_progress
        from regard.cli.study import train_study

        study = api.open_study(path, *overrides, out=out)
    if study is not None and dry_run:
        _print_previews(
            [api.preview(c, study.folder / n) for n, c in study.configs.items()], as_json
        )
        return
    if study is not None:
        train_study(study, as_json=as_json)
        return
    api.require_new_folder(out)  # before the data is read
    with spinner("reading the data"):
        config = api.configure(
            path,
            *overrides,
            started=api.process_start_time(),
            on_timing=lambda: print_status(
                "measuring the training speed of a few model sizes on this machine …"
            ),
        )
    for line in api.unused_overrides(config, table):
        print_status(line)
    if dry_run:
        _print_previews([api.preview(config, out)], as_json)
        return
    finished = show_progress(
        lambda progress: api.train_events(
            config, out=out, progress=progress, started=api.process_start_time()
        )
    )
    print_result(finished, as_json=as_json)


def _print_previews(previews: "list[TrainingPreview]", as_json: bool) -> None:
    if as_json:
        print_json({"runs": [asdict(preview) for preview in previews]})
        return
    for preview in previews:
        at_least = "at least " if preview.parameters else ""
        size = f"{at_least}{format_size(preview.parameters)}"
        lines = [
            f"data        {preview.data}",
            *(f"{label:<12}{note}" for label, note in preview.notes.items()),
            f"validation  {preview.validation}",
            *([f"tokenizer   {preview.tokenizer}"] if preview.tokenizer else []),
            f"model       {preview.family}, {size}, on {preview.device}",
            *(f"settings    {' '.join(group)}" for group in preview.settings if group),
        ]
        print_section(f"would train {preview.folder}", lines)


def _files(folder: str) -> Iterator[str]:
    """The names of all files in a folder, without hidden files and folders."""
    for _, folders, files in os.walk(os.path.expanduser(folder)):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (name for name in files if not name.startswith("."))
