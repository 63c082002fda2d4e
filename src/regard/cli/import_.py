"""`regard import`."""

from pathlib import Path
from typing import Annotated

from typer import Argument

from regard.cli.options import Json
from regard.cli.output import aligned, print_json, say, working


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
            help="The run folder to write; an existing one is refused.",
            show_default=False,
        ),
    ],
    as_json: Json = False,
) -> None:
    """Make a run of a checkpoint that another library wrote.

    \b
    regard import downloads/gpt2 runs/gpt2
    regard generate runs/gpt2 'Once upon a time'
    regard train my.txt train.start=runs/gpt2
    """
    with working(f"importing {source}"):
        from regard.cli.report import EXAMPLES
        from regard.models.build import count_parameters
        from regard.tasks import TASKS
        from regard.training.import_export import import_run

        foreign = import_run(source, run)
        parameters = count_parameters(foreign.config)
    dtype = str(foreign.dtype).removeprefix("torch.")
    facts = {
        "run": str(run),
        "family": foreign.family.name,
        "parameters": parameters,
        "numbers": dtype,
        "task": foreign.task,
        "tokenizer": getattr(foreign.tokenizers, "kind", None),
    }
    if as_json:
        print_json(facts)
        return
    shown = {**facts, "parameters": f"{parameters:,}"}
    for line in aligned([(name, str(value or "none")) for name, value in shown.items()]):
        print(line)
    if foreign.task == "none":
        say("\nno task trains a model with this head; use run.model in Python")
    elif foreign.tokenizers is not None or foreign.task == "classify":
        example = EXAMPLES.get(foreign.task, "'Once upon a time'")
        say(f"\ntry: regard {TASKS[foreign.task].verb} {run} {example}")
