"""Read and replace activations: forward hooks on a model's hook points."""

import re
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
        recorded = list_available(self) if self else "nothing was recorded"
        raise RegardError(
            f"{name!r} was not recorded; {recorded}. Call the model inside the `with` block; "
            "a captured CUDA graph runs no hooks"
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
    """Record the outputs of hook points whose paths match `pattern`; replace outputs by `edit`.

    >>> import torch
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> with trace(run.model, "decoder.*.q_hook") as activations:
    ...     x = run.model(ids)
    >>> activations  # (batch, heads, time, head_dim)
    Trace(decoder.blocks.0.attention.q_hook (1, 2, 3, 8))

    `edit` maps paths or patterns to functions: the model uses their result instead of the
    activation. Use `ablate`, `patch`, `steer` or your own function. An activation that is both
    edited and recorded is recorded after the edit.

    >>> with trace(run.model, (), edit={"*.heads_hook": ablate(heads=[0])}):
    ...     without_head_0 = run.model(ids)

    A path may also be that of any other module, such as `decoder.blocks.0.ffn`, and a pattern that
    matches no hook point selects such modules, as `decoder.blocks.*.ffn` does: their outputs are
    recorded or replaced; if an output is a tuple, its first element. If a hook point is called
    several times, its last output is recorded. A recurrent layer computes gates, states and
    alignments step by step: an edit is called at each step with the whole sequence, in which later
    steps are NaN; its result must not depend on them, and they see the replaced value. Inside the
    `with` block, compiled functions run eagerly, with a warning if `model` itself is compiled, and
    `Run.generate` decodes with the model's own modules, without packed weights and CUDA graphs.
    """
    activations = Trace()
    if _is_compiled(model):
        message = "trace turns torch.compile off inside its `with` block: the model runs eagerly"
        warnings.warn(message, RegardWarning, stacklevel=3)
    with ExitStack() as stack:
        stack.enter_context(run_eagerly())
        for path, function in (edit or {}).items():
            for name, module in _modules_to_hook(model, path).items():
                hook = _edit_hook(name, module, function)
                stack.callback(module.register_forward_hook(hook).remove)
        for path in [pattern] if isinstance(pattern, str) else pattern:
            for name, module in _modules_to_hook(model, path).items():
                stack.callback(record(module, partial(activations.__setitem__, name)).remove)
        yield activations


def record(module: nn.Module, callback: Callable[[Tensor], None]) -> RemovableHandle:
    """Call `callback` with each output of a module.

    The outputs of a `StepHookPoint` are concatenated, and passed on once, after the last step.
    """
    steps_so_far: list[Tensor] = []

    def record_steps(_: nn.Module, inputs: tuple[Any, ...], out: Any) -> None:
        out, (first, steps) = _output_tensor(out), _steps(inputs)
        if first == 0:
            steps_so_far.clear()
        steps_so_far.append(out)
        if first + out.shape[-2] == steps:
            callback(torch.cat(steps_so_far, -2) if len(steps_so_far) > 1 else out)

    def record_output(_: nn.Module, __: object, out: Any) -> None:
        callback(_output_tensor(out))

    is_stepwise = isinstance(module, StepHookPoint)
    return module.register_forward_hook(record_steps if is_stepwise else record_output)


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
    and positions; in a recurrent layer, over the steps so far.
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
    """An edit for `trace` that copies recorded `values` into another forward pass.

    This is activation patching. `heads`, `units` and `positions` select the part that is copied,
    as in `ablate`.
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
    """An edit for `trace` that adds `scale` times a vector (activation steering).

    The vector is added at all positions or at some of them.
    """

    def edit(x: Tensor) -> Tensor:
        if vector.shape[-1] != x.shape[-1]:
            raise ShapeError(
                f"a vector of {vector.shape[-1]} values cannot be added to an activation of shape "
                f"{tuple(x.shape)}; give {x.shape[-1]} values"
            )
        return x + scale * vector.to(x) * _selection_mask(x, None, None, positions)

    return edit


def matching_modules(
    model: nn.Module, kind: type[M] | tuple[type[M], ...], pattern: str, noun: str
) -> dict[str, M]:
    """The submodules of one type whose path matches; if none does, raise and list their paths.

    `noun` is the name of the type in the message.
    """
    named = submodules(model)
    modules = {name: module for name, module in named.items() if isinstance(module, kind)}
    matches = {name: module for name, module in modules.items() if fnmatchcase(name, pattern)}
    if not matches:
        available = list_available(modules) if modules else f"{_class_name(model)} has none"
        paths = [name for name in named if name]
        if kind is HookPoint:
            if paths and not modules:
                available += f"; modules can be traced by their path, {list_available(paths)}"
        elif not any(type(module).__module__.startswith("regard.") for module in named.values()):
            available = (
                f"{_class_name(model)} has no regard modules; `regard import` converts a "
                "transformers checkpoint"
            )
        raise RegardError(f"no {noun} matches {pattern!r}; {available}")
    return matches


def submodules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model by path; for a compiled model, those of the original model."""
    return dict(getattr(model, "_orig_mod", model).named_modules())


def _class_name(model: nn.Module) -> str:
    return type(getattr(model, "_orig_mod", model)).__name__


def check_indices(indices: Iterable[int], count: int, noun: str) -> None:
    """Raise if one of the indices is not from 0 to count - 1; negative indices are not allowed."""
    for index in indices:
        if not 0 <= index < count:
            available = f"there are {count} {noun}s, 0 to {count - 1}"
            if count == 1:
                available = f"there is only {noun} 0"
            raise ConfigError(f"{noun} {index}: {available}")


def _modules_to_hook(model: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """The module with exactly this path, or the hook points whose paths match, or other modules.

    The pattern "*" selects all hook points, and no other modules.
    """
    modules = submodules(model)
    if pattern and pattern in modules:
        return {pattern: modules[pattern]}
    matches = {name: modules[name] for name in modules if name and fnmatchcase(name, pattern)}
    has_hook_point = any(isinstance(module, HookPoint) for module in matches.values())
    if matches and not has_hook_point and pattern != "*":
        return matches
    return dict(matching_modules(model, HookPoint, pattern, "hook point"))


def _steps(inputs: tuple[Any, ...]) -> tuple[int, int]:
    """The index of the first step of a call, and the number of steps."""
    x, first, steps = (*inputs, 0, None)[:3]
    return first, x.shape[-2] if steps is None else steps


def _edit_hook(name: str, module: nn.Module, function: Edit) -> Callable[..., Any]:
    """A forward hook that replaces the output of a module by the result of an edit."""
    unedited_steps: list[Tensor] = []  # the outputs of a StepHookPoint so far

    def replace_steps(hook_point: nn.Module, inputs: tuple[Any, ...], x: Tensor) -> Tensor:
        first, steps = _steps(inputs)
        last = first + x.shape[-2]
        if first == 0:
            unedited_steps.clear()
        unedited_steps.append(x)
        later = x.new_full((*x.shape[:-2], steps - last, x.shape[-1]), torch.nan)
        after: Tensor = replace(hook_point, inputs, torch.cat([*unedited_steps, later], -2))[
            ..., first:last, :
        ]
        if bool(after.isnan().any()) and not bool(x.isnan().any()):
            raise ConfigError(
                f"the edit of {name} at step {first} depends on later steps, which a recurrent "
                "layer has not computed yet; an edit may use only the current and earlier steps"
            )
        return after

    def replace(hook_point: nn.Module, _: object, out: Any) -> Any:
        before = _output_tensor(out)
        after = function(before)
        if not isinstance(after, Tensor) or after.shape != before.shape:
            shape = tuple(after.shape) if isinstance(after, Tensor) else type(after).__name__
            raise ShapeError(
                f"the edit of {name} returned {shape}; it must return a tensor of shape "
                f"{tuple(before.shape)}"
            )
        return (after, *out[1:]) if isinstance(out, tuple) else after

    return replace_steps if isinstance(module, StepHookPoint) else replace


def _output_tensor(out: Any) -> Tensor:
    """The output of a module; if it is a tuple, its first element."""
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
    for indices, axis, noun in (
        (heads, -3, "head"),
        (positions, -2, "position"),
        (units, -1, "unit"),
    ):
        if indices is None:
            continue
        if x.ndim < 1 - axis:
            raise ShapeError(
                f"an activation of shape {tuple(x.shape)} has no {noun}s; leave out {noun}s"
            )
        size = x.shape[axis]
        check_indices(indices, size, noun)
        on_axis = torch.zeros(size, dtype=torch.bool, device=x.device)
        on_axis[list(indices)] = True
        selected = selected & on_axis.view(-1, *(1,) * (-axis - 1))
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


def list_available(names: Iterable[str], limit: int = 24) -> str:
    """The available paths for a message; those that differ only in an index are merged.

    >>> list_available(["blocks.0.ffn", "blocks.1.ffn"])
    'available: blocks.0-1.ffn'
    """
    indices_of: dict[str, list[tuple[int, ...]]] = {}
    for name in names:
        pattern = re.sub(r"\b\d+\b", "{}", name.replace("{", "{{").replace("}", "}}"))
        indices_of.setdefault(pattern, []).append(tuple(map(int, re.findall(r"\b\d+\b", name))))
    merged = []
    for pattern, indices in indices_of.items():
        ends = [(min(column), max(column)) for column in zip(*indices, strict=True)]
        merged.append(
            pattern.format(*(f"{low}-{high}" if low < high else f"{low}" for low, high in ends))
        )
    more = f", … ({len(merged)} in all)" if len(merged) > limit else ""
    return f"available: {', '.join(merged[:limit])}{more}"
