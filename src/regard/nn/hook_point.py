"""Hook points: named identity modules at which activations are read and replaced."""

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)


class _Identity(nn.Identity):
    """The identity; forward hooks registered on it receive the tensor."""

    @property
    def has_hooks(self) -> bool:
        """Whether a forward hook is registered; a fused layer then runs its explicit path."""
        return bool(self._forward_hooks)

    def __call__(self, x: Tensor, *args: Any) -> Tensor:
        """Return x; `nn.Module.__call__` runs only if there are hooks, since it takes longer."""
        if (
            self._forward_hooks
            or self._forward_pre_hooks
            or self._backward_hooks
            or self._backward_pre_hooks
            or _global_forward_hooks
            or _global_forward_pre_hooks
            or _global_backward_hooks
            or _global_backward_pre_hooks
        ):
            output: Tensor = super().__call__(x, *args)
            return output
        return x


class HookPoint(_Identity):
    """An activation inside a layer, which `explain.trace` records and replaces."""


class StepHookPoint(HookPoint):
    """An activation that a recurrent model computes step by step, with time as its axis -2.

    It is called with a part of the sequence, the index of its first step and the total number of
    steps. `explain.trace` records and replaces the parts as one tensor.
    """

    def forward(self, x: Tensor, first: int = 0, steps: int | None = None) -> Tensor:
        """Return x; forward hooks also receive `first` and `steps`."""
        return x


class CarryHookPoint(_Identity):
    """The tensor through which later positions depend on earlier ones.

    `explain.gradient_flow` records it: the residual stream that attention or a convolution reads,
    (batch, time, dim), or the state of a recurrent cell after each position, (batch, dim).
    """


def add_hook_points(module: nn.Module, **points: HookPoint | CarryHookPoint) -> None:
    """Register hook points as submodules, and also in the `__dict__` of the module.

    Reading an attribute in `__dict__` does not call `nn.Module.__getattr__`, which takes longer
    than the identity itself.
    """
    for name, point in points.items():
        module.add_module(name, point)
        module.__dict__[name] = point
