"""`regard train`."""

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated

from typer import Argument

from regard.cli.options import Json, Out, Overrides
from regard.cli.output import run_worker, say, working
from regard.config import check_overrides, parse_overrides, read_recipe
from regard.training.parallel.launch import rank
from regard.training.signals import stoppable

MANY = 10_000  # files of a folder that take long enough to be told of


@stoppable()
def train(
    what: Annotated[
        str,
        Argument(
            metavar="WHAT",
            help="A recipe's name, a .toml file, or your own data: a file or folder of text, a "
            ".tsv of pairs, a folder of images for each class.",
            show_default=False,
        ),
    ],
    words: Overrides = [],  # noqa: B006 -- typer copies it
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Train a model on a recipe or on your own data.

    What is found and chosen is printed, and each choice can be changed; minutes=N sizes model
    and steps to this machine. Ctrl-C saves; `regard resume` goes on. A recipe that is a study of
    several runs trains them all, and goes on where it was stopped.

    \b
    regard train my.txt
    regard train my.txt minutes=10 model.position=alibi
    regard train pairs.tsv --out runs/pairs
    regard train photos/ minutes=10
    regard train data.source=train.en data.target=train.de
    regard train my.txt model.family=ngram model.order=5
    """
    if rank():
        run_worker()
        return
    own = "=" in what and not Path(what).exists()  # data.source=… and data.target=… need no WHAT
    over = parse_overrides([what, *words] if own else words)
    check_overrides(over)  # a slip of the pen need not wait for torch
    if what.endswith(".toml"):
        read_recipe(Path(what))
    if any(islice(_files(what), MANY, None)):
        where = Path(what).expanduser().resolve()
        say(f"looking at more than {MANY:,} files in {where}; Ctrl-C stops …")
    with working("getting ready"):
        from regard.cli.report import follow, report
        from regard.cli.study import train_all
        from regard.training.run import begin
        from regard.training.setup.configure import configure, configure_study
        from regard.training.storage.run_folder import new_folder

    study = {} if own else configure_study(what, over)
    if study:
        train_all(study, Path("runs", Path(what).stem) if out is None else out, as_json=as_json)
        return
    if "minutes" in over:
        say("trying a few sizes, to see how fast this machine trains each …")
    with working("looking at the data"):
        config = configure(None if own else what, over)
    folder = new_folder(config.name) if out is None else out
    report(follow(lambda progress: begin(config, folder, progress)), as_json=as_json)


def _files(folder: str) -> Iterator[str]:
    """The names of all files in a folder, hidden ones and what is in hidden folders left out."""
    for _, folders, files in os.walk(os.path.expanduser(folder)):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (name for name in files if not name.startswith("."))
