"""Hooks of MkDocs: the page of commands is generated from their help."""

from typing import Any

import typer

from regard.cli import app

MARKER = "[commands]: # "


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Put the help of every command into commands.md."""
    if page.file.src_uri != "commands.md":
        return markdown
    start, _, _ = markdown.partition(MARKER)
    return start + "\n".join(_help())


def _help() -> list[str]:
    parts = []
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        context = command.make_context(f"regard {name}", [], resilient_parsing=True)
        context.max_content_width = context.terminal_width = 90
        parts += [f"## {name}\n", f"```text\n{command.get_help(context).strip()}\n```\n"]
    return parts
