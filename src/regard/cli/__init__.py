"""The command line: one plain function per file; this file puts them together.

Nothing here or at the top of a verb's file imports torch, so that `--help` answers at once.
"""

import sys
import traceback
from collections.abc import Sequence
from typing import Any, cast

import typer

from regard.cli.compare import compare
from regard.cli.diff import diff
from regard.cli.evaluate import evaluate
from regard.cli.explain import explain
from regard.cli.export import export
from regard.cli.generate import as_sampler, generate
from regard.cli.import_ import import_
from regard.cli.info import info
from regard.cli.neighbours import neighbours
from regard.cli.options import verb
from regard.cli.output import settings
from regard.cli.overview import overview
from regard.cli.plan import plan
from regard.cli.predict import predict
from regard.cli.quickstart import quickstart
from regard.cli.resume import resume
from regard.cli.train import train
from regard.cli.translate import translate
from regard.errors import RegardError
from regard.training.parallel.launch import rank

__all__ = ["app", "main"]

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.callback(invoke_without_command=True)(overview)
for command in (
    quickstart,
    train,
    resume,
    evaluate,
    generate,
    translate,
    predict,
    neighbours,
    explain,
    import_,
    export,
    info,
    diff,
    compare,
    plan,
):
    app.command(command.__name__.rstrip("_"))(verb(command))  # `import` is a word of Python

# Some versions of typer carry their own click, others import it: this is the one in use.
UsageError = cast(type[Exception], typer.BadParameter.__base__)


def main(words: Sequence[str] | None = None) -> None:
    """Run a verb and exit. The user's mistakes are a few lines on stderr; ours a traceback."""
    settings.quiet = settings.debug = False
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a letter the terminal cannot show is no reason to stop
            stream.reconfigure(errors="replace")
    try:
        code = app(words, prog_name="regard", standalone_mode=False)  # typer makes Ctrl-C 130
        sys.stdout.flush()  # here, where a closed pipe is still ours to handle
    except UsageError as error:
        code = _complain(*_usage(error, sys.argv[1:] if words is None else words))
    except RegardError as error:
        if settings.debug:
            traceback.print_exc()
        code = _complain(str(error), error.exit_code)
    except BrokenPipeError:
        sys.stdout = None  # so that nothing is flushed at exit
        code = 1
    sys.exit(code)


def _complain(message: str, code: int) -> int:
    if not rank():  # the others have the same to say
        print(f"regard: {message}", file=sys.stderr)
    return code


def _usage(error: Any, words: Sequence[str]) -> tuple[str, int]:
    """What was wrong with the words themselves, and where to read about the right ones."""
    message = error.format_message().rstrip(".")
    where = error.ctx.command_path if error.ctx is not None else "regard"
    option = getattr(error, "option_name", None)
    if where == "regard generate" and option is not None:
        instead = as_sampler(option, words)
        if instead is not None:
            message = f"no such option: {option}; it is a sampler, so write {instead}"
    return f"{message[:1].lower()}{message[1:]}\ntry: {where} --help", error.exit_code
