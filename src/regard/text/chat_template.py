"""Dialogues as text: ChatML, or the Jinja chat template of a Hugging Face tokenizer.

A template is a program from a file. It runs in a separate process, in Jinja's sandbox, with
little memory and time (`text/jinja_process.py`).
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from regard.errors import ConfigError, DataError
from regard.text import jinja_process

Message = tuple[str, str]  # role and content
ASSISTANT = "assistant"  # the role whose messages a model learns to generate
CHATML = "chatml"
CHATML_JINJA = (  # ChatML as a Jinja template, for exported tokenizers
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}{{ '\n' }}{{ message['content'] }}<|im_end|>{{ '\n' }}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}<|im_start|>{ASSISTANT}{{{{ '\n' }}}}{{% endif %}}"
)
MAX_SECONDS = 1.0  # of CPU time, to render a dialogue
UNSTABLE = (
    "the chat template changes the beginning of a dialogue when it continues, so its responses "
    "cannot be separated from the prompts;\nset task.chat_template=chatml"
)

_LOCK = threading.Lock()
_PROCESSES: dict[int, "subprocess.Popen[bytes]"] = {}  # by the pid of the process that started it


def render(
    template: str,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = False,
    variables: Any = None,
) -> str:
    """A dialogue as text; with `add_generation_prompt`, up to where the next response begins.

    `template` is "chatml" or a Jinja template; `variables` gives it the texts of special tokens.

    >>> render("chatml", [("user", "Hello?")], add_generation_prompt=True)
    '<|im_start|>user\\nHello?<|im_end|>\\n<|im_start|>assistant\\n'
    """
    if template != CHATML:
        return _render_jinja(template, messages, add_generation_prompt, variables or {})
    turns = [f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages]
    return "".join(turns) + (f"<|im_start|>{ASSISTANT}\n" if add_generation_prompt else "")


def split_responses(
    template: str, messages: Sequence[Message], variables: Any = None
) -> list[tuple[str, bool]]:
    """Split a dialogue into parts, each with whether it is a response.

    A response includes the text that ends its turn. Messages after the last response are left out.

    >>> split_responses("chatml", [("user", "1 + 1?"), ("assistant", "2")])[1]
    ('2<|im_end|>\\n', True)
    """
    parts: list[tuple[str, bool]] = []
    rendered = ""
    for index, (role, _) in enumerate(messages):
        if role != ASSISTANT:
            continue
        before = render(template, messages[:index], add_generation_prompt=True, variables=variables)
        after = render(template, messages[: index + 1], variables=variables)
        if not (before.startswith(rendered) and after.startswith(before)):
            raise ConfigError(UNSTABLE)
        parts += [(before[len(rendered) :], False), (after[len(before) :], True)]
        rendered = after
    return [part for part in parts if part[0]]


def turn_end(template: str, variables: Any = None) -> str:
    """The text that a template puts after a response: "<|im_end|>" and a newline in ChatML."""
    response = "RESPONSE"
    (*_, (text, _)) = split_responses(template, [("user", "Q"), (ASSISTANT, response)], variables)
    return text.partition(response)[2]


def _render_jinja(
    template: str, messages: Sequence[Message], add_generation_prompt: bool, variables: Any
) -> str:
    table = [{"role": role, "content": content} for role, content in messages]
    variables = {"messages": table, "add_generation_prompt": add_generation_prompt} | variables
    reply = _send_request({"template": template, "variables": variables, "seconds": MAX_SECONDS})
    if "limit" in reply:
        raise ConfigError(f"the chat template {reply['limit']}; set task.chat_template=chatml")
    if "error" in reply:
        raise DataError(f"the chat template refuses a dialogue: {reply['error']}")
    return reply["text"]


def _send_request(request: dict[str, Any]) -> dict[str, str]:
    """Send a request to the process that renders templates; return its reply."""
    with _LOCK:
        process = _PROCESSES.get(os.getpid())  # a forked process starts its own
        if process is None or process.poll() is not None:
            process = _PROCESSES[os.getpid()] = _start_process()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with suppress(BrokenPipeError):
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.flush()
            line = process.stdout.readline()
        except BaseException:  # Ctrl-C: the next request must not get this reply
            _kill(process)
            raise
        if not line:
            code = _kill(process)
    if line:
        return dict(json.loads(line))
    if code == -getattr(signal, "SIGPROF", 0):
        return {"limit": f"takes more than {MAX_SECONDS} seconds"}
    return {"limit": f"ends the process that renders it, with exit code {code}"}


def _start_process() -> "subprocess.Popen[bytes]":
    spec = find_spec("jinja2")
    if spec is None or spec.origin is None:
        raise ConfigError(
            "the chat template of this model needs Jinja: pip install 'regard[chat]';\n"
            "or set task.chat_template=chatml"
        )
    # -P: do not import modules from the folder of the script. A new session: Ctrl-C must not reach
    # the child.
    command = [sys.executable, "-P", jinja_process.__file__, str(Path(spec.origin).parents[1])]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    process = subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=null, start_new_session=True
    )
    atexit.register(_kill, process)
    return process


def _kill(process: "subprocess.Popen[bytes]") -> int:
    process.kill()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(BrokenPipeError):
                stream.close()
    return process.wait()
