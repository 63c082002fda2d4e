"""Hook points: named identity modules where an observer reads activations."""

from torch import Tensor, nn


class HookPoint(nn.Identity):
    """The identity; forward hooks registered on it see the tensor that passes."""

    @property
    def has_hooks(self) -> bool:
        """Whether a forward hook is registered; a fused layer then runs its explicit path."""
        return bool(self._forward_hooks)


class Tap(HookPoint):
    """An activation inside a layer, which `explain.trace` records and replaces."""


class StepTap(Tap):
    """An activation that a recurrent model computes step by step, with time as its axis -2.

    It is called with a part of the sequence, the number of its first step and the number of all
    steps. `explain.trace` records and replaces the parts as one tensor.
    """

    def forward(self, x: Tensor, first: int = 0, steps: int | None = None) -> Tensor:
        """x."""
        return x


class Carry(HookPoint):
    """Everything that later positions can depend on; `explain.gradient_flow` records it.

    Attention and convolutions pass all positions at once, (batch, time, dim); a recurrent cell
    passes its state after each position, (batch, dim).
    """
