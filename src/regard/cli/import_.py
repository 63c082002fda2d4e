"""`regard import`."""

from pathlib import Path
from typing import Annotated

from typer import Argument

from regard.cli.options import Json
from regard.cli.output import aligned, print_json, say, working
from regard.config import parse_overrides


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
    words: Annotated[
        list[str],
        Argument(
            metavar="KEY=VALUE",
            help="Settings of the model to change, as in model.context=4096.",
            show_default=False,
        ),
    ] = [],  # noqa: B006 -- typer copies it
    as_json: Json = False,
) -> None:
    """Import a Hugging Face checkpoint as a run.

    Settings of the model can be changed if they change no shape of a tensor.

    \b
    regard import downloads/gpt2 runs/gpt2
    regard import downloads/llama runs/llama model.position.base=500000
    regard generate runs/gpt2 'Once upon a time'
    regard train my.txt train.start=runs/gpt2
    """
    overrides = parse_overrides(words)
    with working(f"importing {source}"):
        from regard.cli.report import EXAMPLES
        from regard.models.build import count_parameters
        from regard.tasks import TASKS
        from regard.training.import_export import import_run

        checkpoint = import_run(source, run, overrides)
        parameters = count_parameters(checkpoint.config)
    dtype = str(checkpoint.dtype).removeprefix("torch.")
    facts = {
        "run": str(run),
        "family": checkpoint.family.name,
        "parameters": parameters,
        "dtype": dtype,
        "task": checkpoint.task,
        "tokenizer": getattr(checkpoint.tokenizers, "kind", None),
    }
    if as_json:
        print_json(facts)
        return
    shown = {**facts, "parameters": f"{parameters:,}"}
    for line in aligned([(name, str(value or "none")) for name, value in shown.items()]):
        print(line)
    if checkpoint.task == "none":
        say("\nno task trains a model with this head; use run.model in Python")
    elif checkpoint.tokenizers is not None or checkpoint.task == "classify":
        example = EXAMPLES.get(checkpoint.task, "'Once upon a time'")
        say(f"\ntry: regard {TASKS[checkpoint.task].verb} {run} {example}")
