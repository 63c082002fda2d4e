"""Train the runs of a study one after the other, then compare them."""

import sys
from functools import partial
from typing import TYPE_CHECKING

from regard.cli.compare import show_comparison
from regard.cli.output import bold, print_status, spinner
from regard.cli.report import show_progress
from regard.errors import TrainingStopped

if TYPE_CHECKING:
    from regard.api import Study


def train_study(study: "Study", *, as_json: bool) -> None:
    """Train the runs that have not finished, then print the table of `regard compare`.

    Where the recipe has a `report`, the runs are also evaluated on its data, by length.
    """
    with spinner("looking for finished runs"):
        remaining = study.remaining()
    for number, name in enumerate(study.configs, 1):
        finished = "" if name in remaining else ": already finished"
        print_status(f"{bold(f'{name}, {number} of {len(study.configs)}', sys.stderr)}{finished}")
        if name in remaining:
            try:
                show_progress(partial(study.events, name))
            except TrainingStopped as stopped:
                hint = "or continue the whole study: run the same command again"
                raise TrainingStopped(f"{stopped}\n{hint}", stopped.exit_code) from None
            print_status()
    show_comparison(study.paths(), by_length=bool(study.report), data=study.report, as_json=as_json)
