"""Read and replace activations: forward hooks on a model's hook points."""

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from regard.errors import ConfigError, RegardError, RegardWarning, ShapeError
from regard.explain.data_frame import data_frame
from regard.html import html_table
from regard.nn.hook_point import HookPoint, StepHookPoint

if TYPE_CHECKING:
    from pandas import DataFrame

COLUMNS = ("hook point", "shape", "mean", "std")
Edit = Callable[[Tensor], Tensor]
M = TypeVar("M", bound=nn.Module)


class Trace(dict[str, Tensor]):
    """The recorded activations by the path of their hook point."""

    def __missing__(self, name: str) -> Tensor:
        recorded = _list_names(self) if self else "nothing was recorded"
        raise RegardError(
            f"{name!r} was not recorded; {recorded}. Call the model inside the `with`; a captured "
            "CUDA graph runs no hooks"
        )

    def __repr__(self) -> str:
        return f"Trace({', '.join(f'{name} {tuple(x.shape)}' for name, x in self.items())})"

    def _repr_html_(self) -> str:
        rows = ((name, size, f"{mean:.4g}", f"{std:.4g}") for name, size, mean, std in self._rows())
        return html_table(rows, header=COLUMNS)

    def to_pandas(self) -> "DataFrame":
        """A row for each hook point: its shape, mean and standard deviation."""
        return data_frame(list(self._rows()), columns=COLUMNS)

    def _rows(self) -> Iterator[tuple[str, tuple[int, ...], float, float]]:
        for name, x in self.items():
            values = x.float()
            yield name, tuple(x.shape), values.mean().item(), values.std(correction=0).item()


@contextmanager
def trace(
    model: nn.Module,
    pattern: str | Sequence[str] = "*",
    *,
    edit: Mapping[str, Edit] | None = None,
) -> Iterator[Trace]:
    """Record the output of every hook point whose path matches `pattern`; replace others by `edit`.

    >>> import torch
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> with trace(run.model, "decoder.*.q_hook") as activations:
    ...     x = run.model(ids)
    >>> activations  # (batch, heads, time, head_dim)
    Trace(decoder.blocks.0.attention.q_hook (1, 2, 3, 8))

    `edit` maps paths or patterns to functions of the activation, whose result is used instead:
    `ablate`, `patch`, `steer`, or your own. Recorded activations are the edited ones.

    >>> with trace(run.model, (), edit={"*.heads_hook": ablate(heads=[0])}):
    ...     without_head_0 = run.model(ids)

    A path that is not a hook point's may be any module, such as `decoder.blocks.0.ffn`: its output
    is read and replaced, of a tuple the first part. A hook point that is called several times keeps
    its last output. A recurrent layer computes gates, states and alignments step by step: an edit
    is called at each step with the sequence so far, NaN at the steps to come, and must not depend
    on those; later steps see the replaced value. Inside the `with`, compiled functions run eagerly,
    with a warning if `model` itself is compiled, and `Run.generate` decodes with the model's own
    modules, without packed weights and CUDA graphs.
    """
    activations = Trace()
    if _is_compiled(model):
        message = "trace switches torch.compile off inside its `with`: the model runs eagerly"
        warnings.warn(message, RegardWarning, stacklevel=3)
    with ExitStack() as stack:
        stack.enter_context(run_eagerly())
        for path, function in (edit or {}).items():
            for name, module in _hook_points(model, path).items():
                editor = _editor(name, module, function)
                stack.callback(module.register_forward_hook(editor).remove)
        for path in [pattern] if isinstance(pattern, str) else pattern:
            for name, module in _hook_points(model, path).items():
                stack.callback(record(module, partial(activations.__setitem__, name)).remove)
        yield activations


def record(module: nn.Module, keep: Callable[[Tensor], None]) -> RemovableHandle:
    """Call `keep` with every output of a module; of one that runs step by step, after the last."""
    parts: list[Tensor] = []

    def hook(_: nn.Module, inputs: tuple[Any, ...], out: Any) -> None:
        out, (first, steps) = _first(out), _steps(inputs)
        if first == 0:
            parts.clear()
        parts.append(out)
        if first + out.shape[-2] == steps:
            keep(torch.cat(parts, -2) if len(parts) > 1 else out)

    def whole(_: nn.Module, __: object, out: Any) -> None:
        keep(_first(out))

    return module.register_forward_hook(hook if isinstance(module, StepHookPoint) else whole)


def ablate(
    *,
    heads: Sequence[int] | None = None,
    units: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    mean: bool = False,
) -> Edit:
    """An edit for `trace` that sets part of an activation to 0, or to its mean.

    `heads` for a hook point with heads (`heads_hook`, `q_hook` …), `units` of the last axis (the
    neurons of `ffn.hidden_hook`), `positions` of the sequence; None: all. The mean is over batch
    and positions, of a recurrent layer over the steps so far.
    """

    def edit(x: Tensor) -> Tensor:
        axes = [0, x.ndim - 2] if x.ndim > 2 else [0]
        value = x.nanmean(axes, keepdim=True) if mean else torch.zeros_like(x)
        return x.where(~_selection_mask(x, heads, units, positions), value)

    return edit


def patch(
    values: Tensor,
    *,
    heads: Sequence[int] | None = None,
    units: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
) -> Edit:
    """An edit for `trace` that copies part of `values`, recorded in another run (activation
    patching); see `ablate` for the parts.
    """

    def edit(x: Tensor) -> Tensor:
        if values.shape[1:] != x.shape[1:]:
            raise ShapeError(
                f"values of shape {tuple(values.shape)} cannot replace an activation of shape "
                f"{tuple(x.shape)}; record them from an input of the same length"
            )
        return x.where(~_selection_mask(x, heads, units, positions), values.to(x))

    return edit


def steer(vector: Tensor, *, scale: float = 1.0, positions: Sequence[int] | None = None) -> Edit:
    """An edit for `trace` that adds `scale` times a vector, at all positions or some of them."""

    def edit(x: Tensor) -> Tensor:
        if vector.shape[-1] != x.shape[-1]:
            raise ShapeError(
                f"a vector of {vector.shape[-1]} values cannot be added to an activation of shape "
                f"{tuple(x.shape)}"
            )
        return x + scale * vector.to(x) * _selection_mask(x, None, None, positions)

    return edit


def matching_modules(
    model: nn.Module, kind: type[M] | tuple[type[M], ...], pattern: str, what: str
) -> dict[str, M]:
    """The submodules of one type whose path matches; if none does, raise and list their paths."""
    named = submodules(model)
    modules = {name: module for name, module in named.items() if isinstance(module, kind)}
    matches = {name: module for name, module in modules.items() if fnmatchcase(name, pattern)}
    if not matches:
        exists = _list_names(modules) if modules else f"{_class_name(model)} has none"
        paths = [name for name in named if name]
        if kind is HookPoint and paths and not modules:
            exists += f"; modules can be traced by their path, {_list_names(paths)}"
        raise RegardError(f"no {what} matches {pattern!r}; {exists}")
    return matches


def submodules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model by path, of a compiled one those that it was compiled from."""
    return dict(getattr(model, "_orig_mod", model).named_modules())


def _class_name(model: nn.Module) -> str:
    return type(getattr(model, "_orig_mod", model)).__name__


def check_indices(indices: Iterable[int], count: int, what: str) -> None:
    """Raise if one of the indices is not from 0 to count - 1; negative indices are not allowed."""
    for index in indices:
        if not 0 <= index < count:
            raise ConfigError(f"{what} {index}: there are {count} {what}s, 0 to {count - 1}")


def _hook_points(model: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """The hook points that match, or else a module with exactly this path."""
    module = submodules(model).get(pattern)
    if pattern and module is not None:
        return {pattern: module}
    return dict(matching_modules(model, HookPoint, pattern, "hook point"))


def _steps(inputs: tuple[Any, ...]) -> tuple[int, int]:
    """The index of the first step of a call, and the number of steps."""
    x, first, steps = (*inputs, 0, None)[:3]
    return first, x.shape[-2] if steps is None else steps


def _editor(name: str, module: nn.Module, function: Edit) -> Callable[..., Any]:
    parts: list[Tensor] = []  # of a sequence that is computed step by step, as they were

    def replace_steps(hook_point: nn.Module, inputs: tuple[Any, ...], x: Tensor) -> Tensor:
        first, steps = _steps(inputs)
        last = first + x.shape[-2]
        if first == 0:
            parts.clear()
        parts.append(x)
        later = x.new_full((*x.shape[:-2], steps - last, x.shape[-1]), torch.nan)
        after: Tensor = replace(hook_point, inputs, torch.cat([*parts, later], -2))[
            ..., first:last, :
        ]
        if bool(after.isnan().any()) and not bool(x.isnan().any()):
            raise ConfigError(
                f"the edit of {name} at step {first} depends on later steps, which a recurrent "
                "layer has not computed yet; change each position from itself and earlier ones"
            )
        return after

    def replace(hook_point: nn.Module, _: object, out: Any) -> Any:
        before = _first(out)
        after = function(before)
        if not isinstance(after, Tensor) or after.shape != before.shape:
            shape = tuple(after.shape) if isinstance(after, Tensor) else type(after).__name__
            raise ShapeError(
                f"the edit of {name} returned {shape}; it must return a tensor of shape "
                f"{tuple(before.shape)}"
            )
        return (after, *out[1:]) if isinstance(out, tuple) else after

    return replace_steps if isinstance(module, StepHookPoint) else replace


def _first(out: Any) -> Tensor:
    tensor = out[0] if isinstance(out, tuple) and out else out
    if not isinstance(tensor, Tensor):
        raise ConfigError(
            f"a module that returns {type(out).__name__} cannot be traced; trace one that returns "
            "a tensor"
        )
    return tensor


def _selection_mask(
    x: Tensor,
    heads: Sequence[int] | None,
    units: Sequence[int] | None,
    positions: Sequence[int] | None,
) -> Tensor:
    """A boolean tensor that broadcasts to x: (batch, heads, time, dim) or (batch, time, dim)."""
    selected = torch.ones((1,) * x.ndim, dtype=torch.bool, device=x.device)
    for indices, axis, what in (
        (heads, -3, "head"),
        (positions, -2, "position"),
        (units, -1, "unit"),
    ):
        if indices is None:
            continue
        if x.ndim < 1 - axis:
            raise ShapeError(f"an activation of shape {tuple(x.shape)} has no {what}s")
        size = x.shape[axis]
        check_indices(indices, size, what)
        chosen = torch.zeros(size, dtype=torch.bool, device=x.device)
        chosen[list(indices)] = True
        selected = selected & chosen.view(-1, *(1,) * (-axis - 1))
    return selected


def _is_compiled(model: nn.Module) -> bool:
    return any(
        hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
        for module in model.modules()
    )


@contextmanager
def run_eagerly() -> Iterator[None]:
    """Run compiled functions eagerly: they ignore hooks that are added after compilation."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled; importing it takes seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _list_names(names: Iterable[str], limit: int = 8) -> str:
    names = list(names)
    more = f", … ({len(names)} in all)" if len(names) > limit else ""
    return f"available: {', '.join(names[:limit])}{more}"
