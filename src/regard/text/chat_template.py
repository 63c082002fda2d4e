"""Dialogues as text: ChatML, or the Jinja chat template of a Hugging Face tokenizer.

A template is a program from a file. It runs in Jinja's sandbox, which has no access to Python's
attributes, files or imports, and its output is limited.
"""

from collections.abc import Sequence
from typing import Any

from regard.errors import ConfigError, DataError

Message = tuple[str, str]  # role and content
ANSWERS = "assistant"  # the role whose messages a model learns to write
CHATML = "chatml"
LIMIT = 10_000_000  # characters of a rendered dialogue
UNSTABLE = (
    "the chat template changes the beginning of a dialogue when it continues, so its answers "
    "cannot be told apart;\nset task.template=chatml"
)


def render(
    template: str, messages: Sequence[Message], *, prompt: bool = False, tokens: Any = None
) -> str:
    """A dialogue as text; with `prompt`, up to where the next answer begins.

    `template` is "chatml" or a Jinja template; `tokens` gives it the texts of special tokens.

    >>> render("chatml", [("user", "Hello?")], prompt=True)
    '<|im_start|>user\\nHello?<|im_end|>\\n<|im_start|>assistant\\n'
    """
    if template != CHATML:
        return _render_jinja(template, messages, prompt, tokens or {})
    turns = [f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages]
    return "".join(turns) + (f"<|im_start|>{ANSWERS}\n" if prompt else "")


def segments(
    template: str, messages: Sequence[Message], tokens: Any = None
) -> list[tuple[str, bool]]:
    """A dialogue in parts, each with whether it is an answer, with the end of its turn.

    >>> segments("chatml", [("user", "1 + 1?"), ("assistant", "2")])[1]
    ('2<|im_end|>\\n', True)
    """
    parts: list[tuple[str, bool]] = []
    done = ""
    for number, (role, _) in enumerate(messages):
        if role != ANSWERS:
            continue
        before = render(template, messages[:number], prompt=True, tokens=tokens)
        after = render(template, messages[: number + 1], tokens=tokens)
        if not (before.startswith(done) and after.startswith(before)):
            raise ConfigError(UNSTABLE)
        parts += [(before[len(done) :], False), (after[len(before) :], True)]
        done = after
    return [part for part in parts if part[0]]


def turn_end(template: str, tokens: Any = None) -> str:
    """What follows an answer, by which a generated one ends: "<|im_end|>" and a newline."""
    answer = "ANSWER"
    (*_, (text, _)) = segments(template, [("user", "Q"), (ANSWERS, answer)], tokens)
    return text.partition(answer)[2]


def _render_jinja(template: str, messages: Sequence[Message], prompt: bool, tokens: Any) -> str:
    try:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ConfigError(
            "the chat template of this model needs Jinja: pip install 'regard[chat]';\n"
            "or set task.template=chatml"
        ) from None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    table = [{"role": role, "content": content} for role, content in messages]
    try:
        pieces, size = [], 0
        for piece in environment.from_string(template).generate(
            messages=table, add_generation_prompt=prompt, **tokens
        ):
            pieces.append(piece)
            size += len(piece)
            if size > LIMIT:
                raise ConfigError(f"the chat template writes more than {LIMIT:,} characters")
    except ConfigError:  # also a ValueError
        raise
    except (TemplateError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise DataError(f"the chat template refuses a dialogue: {error}") from None
    return "".join(pieces)
