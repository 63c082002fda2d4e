"""`regard import`."""

import shlex
from pathlib import Path
from typing import Annotated

from typer import Argument

from regard import api
from regard.cli.arguments import Json, ModelOverrides
from regard.cli.output import align_columns, print_json, print_status, spinner


def import_(
    source: Annotated[
        str,
        Argument(
            metavar="FOLDER|NAME",
            help="A folder with config.json and safetensors, or a name on the Hugging Face hub.",
            show_default=False,
        ),
    ],
    run: Annotated[
        Path,
        Argument(
            metavar="RUN",
            help="The run folder to write; it must not exist.",
            show_default=False,
        ),
    ],
    overrides: ModelOverrides = [],  # noqa: B006 -- typer copies it
    as_json: Json = False,
) -> None:
    """Import a Hugging Face checkpoint as a run.

    Settings of the model can be changed if no tensor changes its shape.

    \b
    regard import downloads/gpt2 runs/gpt2
    regard import downloads/llama runs/llama model.position.base=500000
    regard generate runs/gpt2 'Once upon a time'
    regard train my.txt train.start=runs/gpt2
    """
    with spinner(f"importing {source}"):
        imported = api.import_checkpoint(source, run, *overrides)
    summary = {
        "run": str(run),
        "model_type": imported.model_type,
        "parameters": imported.parameters,
        "dtype": imported.dtype,
        "task": imported.task,
        "tokenizer": imported.tokenizer,
    }
    if as_json:
        print_json(summary)
        return
    cells = {**summary, "parameters": f"{imported.parameters:,}"}
    for line in align_columns([(name, str(value or "none")) for name, value in cells.items()]):
        print(line)
    print_status(f"\n{_usage_hint(imported)}")


def _usage_hint(imported: "api.ImportedRun") -> str:
    """The commands that use the imported model."""
    from regard.cli.report import DEFAULT_EXAMPLE, EXAMPLES

    run = shlex.quote(str(imported.path))
    if imported.tokenizer is None and imported.task != "image_classification":
        return (
            "the checkpoint has no tokenizer files: use run.model in Python, "
            "or add tokenizer.json to its folder and import it again"
        )
    fine_tune = f"fine-tune it: regard train DATA train.start={run}"
    if imported.command is None:
        return (
            f"it has no task yet (its head is {imported.head!r}); fine-tune it on your data:\n"
            f"regard train data.csv train.start={run}\nin Python, run.model is the model"
        )
    example = EXAMPLES.get(imported.task, DEFAULT_EXAMPLE)
    return f"try: regard {imported.command} {run} {example}\n{fine_tune}"
