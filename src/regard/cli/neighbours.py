"""`regard neighbours`."""

import sys
from itertools import combinations
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from regard import api
from regard.cli.arguments import Folder, Json
from regard.cli.output import align_columns, print_json, spinner, text_for
from regard.errors import ConfigError, reject_options

DEFAULT_TOP = 10


def neighbours(
    run: Folder,
    terms: Annotated[
        list[str],
        Argument(
            metavar="WORD [± WORD] …",
            help="Words, or sums of them, as in: king - man + woman",
            show_default=False,
        ),
    ],
    top: Annotated[
        int | None,
        Option(
            "-n", "--top", metavar="N", min=1, help=f"How many to show; {DEFAULT_TOP} by default."
        ),
    ] = None,
    text: Annotated[
        str | None,
        Option(
            "--in",
            metavar="TEXT",
            help="Compare the vectors of one word at all its positions in this text.",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="For a run on sentences: a file of sentences to search, one per line; by default "
            "its validation data.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the most similar words or sentences.

    Similarity is the cosine of embedding vectors.

    \b
    regard neighbours runs/tolstoy war peace
    regard neighbours runs/tolstoy king - man + woman
    regard neighbours runs/tolstoy can --in 'I can buy a can of fish'
    regard neighbours runs/sentences 'a dog runs' --data captions.txt

    For words: any run whose model has an embedding. For sentences: runs of task=contrastive.
    """
    if text is not None:
        reject_options("--in compares a word with itself", {"--top": top, "--data": data})
    top = DEFAULT_TOP if top is None else top
    with spinner(f"opening {run}"):
        loaded_run = api.load(run)
        if "embed" in loaded_run.methods and text is None:
            result = loaded_run.similar(terms, data, top=top)
        elif data is not None:
            raise ConfigError(f"--data is for runs on sentences (task=contrastive), not {run}")
        elif text is None:
            result = loaded_run.neighbours(terms, top=top)
        elif len(terms) > 1:
            raise ConfigError(f"--in compares one word with itself, not {' '.join(terms)}")
        else:
            cosines = loaded_run.compare_occurrences(terms[0], text)
    if as_json:
        print_json(result if text is None else cosines)
    elif text is None:
        rows = [
            (query if index == 0 else "", text_for(sys.stdout, word), f"{cosine:.3f}")
            for query, nearest in result.items()
            for index, (word, cosine) in enumerate(nearest)
        ]
        print("\n".join(align_columns(rows, [2])))
    else:
        positions = cosines.pop("positions")
        table = [("tokens", *cosines)]
        for i, j in combinations(range(len(positions)), 2):
            cells = (f"{matrix[i][j]:.3f}" for matrix in cosines.values())
            table.append((f"{positions[i]} and {positions[j]}", *cells))
        print("\n".join(align_columns(table, list(range(1, len(cosines) + 1)))))
