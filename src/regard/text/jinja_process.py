"""A process that renders Jinja templates within limits; `text/chat_template.py` starts it.

It reads one JSON object per line and replies with {"text": …}, {"error": …} or {"limit": …}, which
names a limit that the template exceeds. It ends when its input ends, and when a template takes more
than the given CPU time.

A template is a program from a file: Jinja's sandbox has no access to Python's attributes, files or
imports, and the process has little memory and time. Where the system has no such limits (Windows),
only the length of the output is limited. No module of regard is imported, so that it starts fast.
"""

import json
import signal
import sys
from contextlib import suppress
from functools import lru_cache
from typing import Any

MAX_BYTES = 500_000_000  # of memory
MAX_CHARACTERS = 1_000_000  # of a rendered dialogue


def main() -> None:
    """Reply to every line until the input ends."""
    sys.path.append(sys.argv[1])  # the folder of jinja2
    compile_template = _compiler()
    with suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    for line in sys.stdin.buffer:
        try:
            request = json.loads(line)
            _limit_time(request["seconds"])
            reply = _render(compile_template, request)
        except MemoryError:
            reply = {"limit": f"needs more than {MAX_BYTES // 1_000_000} MB"}
        except Exception as error:  # an untrusted template may raise any exception
            reply = {"error": str(error)[:1000]}
        _limit_time(0)
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


def _compiler() -> Any:
    """A function that compiles the text of a template; it caches the most recent templates."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = raise_exception
    return lru_cache(maxsize=8)(environment.from_string)


def _render(compile_template: Any, request: dict[str, Any]) -> dict[str, str]:
    pieces, size = [], 0
    for piece in compile_template(request["template"]).generate(**request["variables"]):
        pieces.append(piece)
        size += len(piece)
        if size > MAX_CHARACTERS:
            return {"limit": f"writes more than {MAX_CHARACTERS:,} characters"}
    return {"text": "".join(pieces)}


def _limit_time(seconds: float) -> None:
    """End this process, even inside a single operation, after this CPU time."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


if __name__ == "__main__":
    main()
