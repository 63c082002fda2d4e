"""The command line: one module per command; this one assembles them.

No module imports torch at its top, so that `--help` is fast.
"""

import errno
import os
import re
import shlex
import sys
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, TextIO, cast

import typer

from regard import api
from regard.cli.arguments import with_common_options
from regard.cli.chat import chat
from regard.cli.compare import compare
from regard.cli.diff import diff
from regard.cli.doctor import doctor
from regard.cli.edit import edit
from regard.cli.evaluate import evaluate
from regard.cli.explain import explain
from regard.cli.export import export
from regard.cli.generate import as_sampler, generate, value_of
from regard.cli.import_ import import_
from regard.cli.info import info
from regard.cli.merge import merge
from regard.cli.neighbours import neighbours
from regard.cli.output import common_options
from regard.cli.overview import overview
from regard.cli.plan import plan
from regard.cli.predict import predict
from regard.cli.quickstart import quickstart
from regard.cli.resume import resume
from regard.cli.serve import serve
from regard.cli.settings import settings
from regard.cli.show import show
from regard.cli.streams import prepare_streams
from regard.cli.studio import studio
from regard.cli.train import train
from regard.cli.translate import translate
from regard.config import TABLES, RunConfig
from regard.errors import CheckpointError, RegardError, RegardWarning, shorten

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
    chat,
    translate,
    predict,
    neighbours,
    explain,
    show,
    import_,
    export,
    serve,
    studio,
    merge,
    edit,
    info,
    diff,
    compare,
    plan,
    settings,
    doctor,
):
    name = command.__name__.rstrip("_")  # `import` is a Python keyword
    app.command(name)(with_common_options(command))

FORMER_OPTIONS = {
    "regard generate": {"--until": "--stop", "--tokens": "--max-new-tokens"},
    "regard chat": {"--tokens": "--max-new-tokens"},
    "regard serve": {
        "--key": "--api-key",
        "--sequences": "--max-sequences",
        "--queue": "--max-queue",
    },
    "regard studio": {"--key": "--api-key"},
}
# options of other tools, and the commands of regard, in which they are arguments
POSITIONAL_OPTIONS = {
    "regard train": {"--data": "regard train {}"},
    "regard evaluate": {"--data": "regard evaluate RUN {}"},
    "regard generate": {"--prompt": "regard generate RUN {}"},
    "regard translate": {"--text": "regard translate RUN {}"},
    "regard predict": {"--text": "regard predict RUN {}"},
    "regard explain": {"--text": "regard explain RUN {}"},
}
EQUIVALENT_COMMANDS = {  # commands of other tools, and those of regard that do the same
    "fit": "regard train DATA",
    "finetune": "regard train DATA train.start=RUN",
    "fine-tune": "regard train DATA train.start=RUN",
    "pretrain": "regard train DATA",
    "continue": "regard resume RUN",
    "sample": "regard generate RUN 'some words'",
    "complete": "regard generate RUN 'some words'",
    "classify": "regard predict RUN IMAGE-OR-TEXT",
    "forecast": "regard predict RUN",
    "test": "regard evaluate RUN",
    "eval": "regard evaluate RUN",
    "attention": "regard explain RUN 'some words'",
    "plot": "regard compare RUN… --out curves.svg",
    "download": "regard import NAME RUN",
    "pull": "regard import NAME RUN",
    "convert": "regard export RUN FOLDER",
    "list": "regard info lists the presets, `ls runs` lists the runs",
    "models": "regard info lists the presets",
    "config": "regard settings",
    "version": "regard --version",
    "help": "regard --help",
}

# Some versions of typer vendor click, others import it: this is the class in use.
UsageError = cast(type[Exception], typer.BadParameter.__base__)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit.

    A `RegardError` and an `OSError` print their message, with `--debug` after the traceback.
    Other errors are not caught.
    """
    common_options.quiet = common_options.debug = False
    prepare_streams()
    words = sys.argv[1:] if arguments is None else arguments
    try:
        try:
            if any("\0" in word for word in arguments or ()):  # typer would raise ValueError
                raise typer.BadParameter("an argument contains a NUL character")
            with warnings.catch_warnings():
                warnings.showwarning = _show_warning
                code = app(arguments, prog_name="regard", standalone_mode=False)  # Ctrl-C gives 130
        finally:
            sys.stdout.flush()  # so that a closed pipe or a full disk raises here
    except UsageError as error:
        code = _print_error(*_usage_message(error, words))
    except RegardError as error:
        if common_options.debug:
            traceback.print_exc()
        code = _print_error(with_relative_paths(str(error), words), error.exit_code)
    except BrokenPipeError:
        code = 1
    except OSError as error:  # missing permissions, a full disk and the like
        if error.errno is None:
            raise
        if common_options.debug:
            traceback.print_exc()
        message = with_relative_paths(_system_message(error), words)
        code = _print_error(message, CheckpointError.exit_code)
    sys.exit(code)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning of this library as one line, others with their file and line."""
    if issubclass(category, RegardWarning):
        print(f"warning: {shorten(str(message))}", file=sys.stderr)
    else:
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))


def _print_error(message: str, code: int) -> int:
    if not api.rank():  # other ranks have the same error
        print(f"regard: {shorten(message)}", file=sys.stderr)
    return code


def with_relative_paths(message: str, arguments: Sequence[str]) -> str:
    """A message with relative paths of files in the working directory, as the user gives them.

    Settings hold absolute paths, so that a run can be resumed from another directory. If an
    argument has an absolute path in the working directory, the message is unchanged.
    """
    try:
        folder = os.path.join(os.getcwd(), "")
    except FileNotFoundError:  # the working directory was removed
        return message
    if folder == os.sep or any(folder in word for word in arguments):
        return message
    return re.sub(rf"(?<![\w./~-]){re.escape(folder)}(?=[^\s'\"])", "", message)


def _system_message(error: OSError) -> str:
    if error.errno == errno.ENAMETOOLONG:
        return f"a name is longer than the file system allows: {error.filename}"
    place = "" if error.filename is None else f"{error.filename}: "
    return f"{place}{error.strerror}\n--debug shows where it happened"


def _usage_message(error: Any, arguments: Sequence[str]) -> tuple[str, int]:
    """The message of a usage error, with a hint or the command's help, and the exit code."""
    message = error.format_message().rstrip(".")
    for option in getattr(getattr(error, "param", None), "opts", ()):
        if any(word.partition("=")[0] == option for word in arguments):  # pydantic omits the value
            value = value_of(option, arguments)
            message = message.replace(": Input should be", f": {value!r} should be")
    message = message.replace(": Value error, ", ": ")
    command = error.ctx.command_path if error.ctx is not None else "regard"
    extra = re.search(r"unexpected extra argument\S* \((.*)\)", message)
    extra_words = extra[1].split() if extra is not None else []
    hint = _hint(getattr(error, "option_name", None), command, arguments, extra_words)
    if command == "regard" and arguments and message.startswith("No such command"):
        name = next(word for word in arguments if not word.startswith("-"))
        message = f"no such command {name!r}"
        known = [command.name or "" for command in app.registered_commands]
        close = get_close_matches(name, known, n=1)
        instead = EQUIVALENT_COMMANDS.get(name) or (f"did you mean {close[0]!r}?" if close else "")
        message += f"; {instead}\n" if instead else "\n"
        message += f"commands: {', '.join(known)}"
    if hint is None and command == "regard generate" and extra is not None:
        hint = "quote a text of several words: 'To be, or not to be'"
    if hint is not None and (option := getattr(error, "option_name", None)) is not None:
        message = f"no such option: {option}"  # without the similar options that click suggests
    hint = "" if hint is None else f"; {hint}"
    return f"{message[:1].lower()}{message[1:]}{hint}\ntry: {command} --help", error.exit_code


def _hint(
    option: str | None, command: str, arguments: Sequence[str], extra_words: Sequence[str]
) -> str | None:
    """How to write an argument, sampler or setting that was given as an option, or an extra word.

    `extra_words` are those that the command has no argument for.
    """
    if option in FORMER_OPTIONS.get(command, {}):
        return f"it is called {FORMER_OPTIONS[command][option]} now"
    if option is not None and option in POSITIONAL_OPTIONS.get(command, {}):
        value = shlex.quote(value_of(option, arguments))
        return f"write {POSITIONAL_OPTIONS[command][option].format(value)}"
    if command == "regard generate":
        sampler = as_sampler(option, arguments) if option is not None else None
        if sampler is not None:
            return f"it is a sampler, so write {sampler}"
        for word in extra_words:
            if word == "greedy" or word.partition("=")[0] in api.SAMPLERS:
                return f"it is a sampler, so write -s {shlex.quote(word)}"
    if command in ("regard train", "regard resume", "regard quickstart") and option is not None:
        name = option.lstrip("-").replace("-", "_")
        tables = [f"{table}." for table, (names, _) in TABLES.items() if name in names]
        if tables or name in (*(field.name for field in fields(RunConfig)), "minutes"):
            value = value_of(option, arguments)
            return f"it is a setting, so write {''.join(tables[:1])}{name}={shlex.quote(value)}"
    return None
