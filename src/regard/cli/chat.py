"""`regard chat`."""

import sys
from collections.abc import Iterator
from typing import Annotated

from typer import Option

from regard import api
from regard.cli.arguments import AdapterOption, Folder
from regard.cli.output import print_status, spinner, stdin_lines, text_for


def chat(
    run: Folder,
    system: Annotated[
        str | None, Option(metavar="TEXT", help="A system message at the start of the dialogue.")
    ] = None,
    sampler: Annotated[
        list[str],
        Option(
            "-s",
            "--sampler",
            metavar="NAME=VALUE",
            help="A sampler; repeatable, in order.",
            show_default=False,
        ),
    ] = [],  # noqa: B006 -- typer copies it
    max_new_tokens: Annotated[
        int,
        Option(
            "-n", "--max-new-tokens", metavar="N", min=1, help="Generate at most this many tokens."
        ),
    ] = 400,
    seed: Annotated[
        int | None, Option(metavar="N", help="Random seed; the same seed gives the same responses.")
    ] = None,
    adapter: AdapterOption = None,
) -> None:
    """Chat with a model trained on dialogues.

    \b
    regard chat runs/assistant
    regard chat runs/assistant --system 'Answer in one sentence.' -s temperature=0.5
    printf 'Hello!\\nAnd again?\\n' | regard chat runs/assistant

    Each line is a message, and the dialogue so far is remembered. /new begins a new dialogue, and
    Ctrl-D ends the chat.
    """
    from regard.api.generation import require_template  # imports torch

    with spinner(f"opening {run}"):
        loaded_run = api.load(run, adapter=adapter)
        require_template(loaded_run)  # before the first message is written
        loaded_run.limit_threads()
    first = [] if system is None else [("system", system)]
    history = list(first)
    for line in _messages():
        if line.strip() == "/new":
            history = list(first)
            continue
        history.append(("user", line))
        options = {"sampler": sampler} if sampler else {}
        response = ""
        for chunk in loaded_run.chat(history, max_new_tokens=max_new_tokens, seed=seed, **options):
            print(text_for(sys.stdout, chunk), end="", flush=True)
            response += chunk
        print(flush=True)
        history.append(("assistant", response or " "))


def _messages() -> Iterator[str]:
    """The lines of the terminal, with a prompt, or of a pipe; empty ones are skipped."""
    if not sys.stdin.isatty():
        yield from (line for line in stdin_lines() if line.strip())
        return
    print_status("one message per line; /new begins a new dialogue, Ctrl-D ends")
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        if line.strip():
            yield line
