"""Hook points: named identity modules where an observer reads activations."""

from torch import nn


class HookPoint(nn.Identity):
    """The identity; forward hooks registered on it see the tensor that passes."""

    @property
    def has_hooks(self) -> bool:
        """Whether a forward hook is registered; a fused layer then runs its explicit path."""
        return bool(self._forward_hooks)


class Tap(HookPoint):
    """An activation inside a layer, which `explain.trace` records and replaces."""


class ReadOnlyTap(Tap):
    """An activation that is recorded after it was used, so replacing it would change nothing."""


class Carry(HookPoint):
    """Everything that later positions can depend on; `explain.gradient_flow` records it.

    Attention and convolutions pass all positions at once, (batch, time, dim); a recurrent cell
    passes its state after each position, (batch, dim).
    """
