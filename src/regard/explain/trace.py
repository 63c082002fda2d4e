"""Listen to a model while it runs."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import TypeVar

from torch import Tensor, nn

from regard.errors import RegardError
from regard.nn.tap import Tap

M = TypeVar("M", bound=nn.Module)


@contextmanager
def trace(model: nn.Module, pattern: str = "*") -> Iterator[dict[str, Tensor]]:
    """Record what passes through the taps whose path matches `pattern`.

        with trace(model, "decoder.*.cross.*_tap") as seen:
            model(ids, source=source)
        seen["decoder.blocks.3.cross.q_tap"]               # (batch, heads, time, head_dim)

    A tap that is passed several times keeps the last. Run the eager model inside: a compiled
    one was made before anybody listened.
    """
    seen: dict[str, Tensor] = {}
    with ExitStack() as stack:
        for name, tap in matching(model, Tap, pattern, "tap").items():

            def keep(_: nn.Module, __: object, out: Tensor, name: str = name) -> None:
                seen[name] = out

            stack.callback(tap.register_forward_hook(keep).remove)
        yield seen


def matching(
    model: nn.Module, kind: type[M] | tuple[type[M], ...], pattern: str, what: str
) -> dict[str, M]:
    """The parts of one kind whose path matches; an error that says what there is, if none does."""
    parts = {name: part for name, part in model.named_modules() if isinstance(part, kind)}
    chosen = {name: part for name, part in parts.items() if fnmatchcase(name, pattern)}
    if not chosen:
        raise RegardError(f"no {what} matches {pattern!r}; {_listed(parts)}")
    return chosen


def _listed(names: Iterable[str], shown: int = 8) -> str:
    names = list(names)
    if not names:
        return "this model has none"
    more = f", … ({len(names)} in all)" if len(names) > shown else ""
    return f"there are: {', '.join(names[:shown])}{more}"
