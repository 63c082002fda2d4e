"""Hook points: named identity modules at which activations are read and replaced."""

from torch import Tensor, nn


class _Identity(nn.Identity):
    """The identity; forward hooks registered on it see the tensor that passes."""

    @property
    def has_hooks(self) -> bool:
        """Whether a forward hook is registered; a fused layer then runs its explicit path."""
        return bool(self._forward_hooks)


class HookPoint(_Identity):
    """An activation inside a layer, which `explain.trace` records and replaces."""


class StepHookPoint(HookPoint):
    """An activation that a recurrent model computes step by step, with time as its axis -2.

    It is called with a part of the sequence, the index of its first step and the total number of
    steps. `explain.trace` records and replaces the parts as one tensor.
    """

    def forward(self, x: Tensor, first: int = 0, steps: int | None = None) -> Tensor:
        """x."""
        return x


class StateHookPoint(_Identity):
    """The tensor through which later positions depend on earlier ones.

    `explain.gradient_flow` records it: the residual stream that attention or a convolution reads,
    (batch, time, dim), or the state of a recurrent cell after each position, (batch, dim).
    """
