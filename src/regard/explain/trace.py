"""Record activations: forward hooks on a model's taps."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor, nn

from regard.errors import RegardError
from regard.explain.tables import data_frame
from regard.html import html_table
from regard.nn.tap import Tap

if TYPE_CHECKING:
    from pandas import DataFrame

COLUMNS = ("tap", "shape", "mean", "std")
M = TypeVar("M", bound=nn.Module)


class Trace(dict[str, Tensor]):
    """The recorded activations by the path of their tap."""

    def __repr__(self) -> str:
        return f"Trace({', '.join(f'{name} {tuple(x.shape)}' for name, x in self.items())})"

    def _repr_html_(self) -> str:
        rows = ((name, size, f"{mean:.4g}", f"{std:.4g}") for name, size, mean, std in self._rows())
        return html_table(rows, header=COLUMNS)

    def to_pandas(self) -> "DataFrame":
        """A row for each tap: its shape, mean and standard deviation."""
        return data_frame(list(self._rows()), columns=COLUMNS)

    def _rows(self) -> Iterator[tuple[str, tuple[int, ...], float, float]]:
        for name, x in self.items():
            values = x.float()
            yield name, tuple(x.shape), values.mean().item(), values.std(correction=0).item()


@contextmanager
def trace(model: nn.Module, pattern: str = "*") -> Iterator[Trace]:
    """Record the output of every tap whose path matches `pattern`.

    >>> import torch
    >>> with trace(run.model, "decoder.*.q_tap") as activations:
    ...     x = run.model(torch.tensor([[1, 2, 3]]))
    >>> activations  # (batch, heads, time, head_dim)
    Trace(decoder.blocks.0.attention.q_tap (1, 2, 3, 8))

    A tap that is called several times keeps its last output. Run the eager model inside: a
    model that was compiled before has no hooks.
    """
    activations = Trace()
    with ExitStack() as stack:
        for name, tap in matching_modules(model, Tap, pattern, "tap").items():

            def record(_: nn.Module, __: object, out: Tensor, name: str = name) -> None:
                activations[name] = out

            stack.callback(tap.register_forward_hook(record).remove)
        yield activations


def matching_modules(
    model: nn.Module, kind: type[M] | tuple[type[M], ...], pattern: str, what: str
) -> dict[str, M]:
    """The submodules of one type whose path matches; if none does, raise and list their paths."""
    modules = {name: module for name, module in model.named_modules() if isinstance(module, kind)}
    matches = {name: module for name, module in modules.items() if fnmatchcase(name, pattern)}
    if not matches:
        raise RegardError(f"no {what} matches {pattern!r}; {_list_names(modules)}")
    return matches


def _list_names(names: Iterable[str], limit: int = 8) -> str:
    names = list(names)
    if not names:
        return "this model has none"
    more = f", … ({len(names)} in all)" if len(names) > limit else ""
    return f"available: {', '.join(names[:limit])}{more}"
