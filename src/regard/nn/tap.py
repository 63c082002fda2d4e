"""Named places where an observer may listen."""

from torch import Tensor, nn


class Place(nn.Module):
    """The identity, with a name."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` itself."""
        return x

    @property
    def has_hooks(self) -> bool:
        """Whether somebody listens: then a layer takes the way that shows what passes here."""
        return bool(self._forward_hooks)


class Tap(Place):
    """What a layer computes. `explain.trace` listens here; nobody else notices."""


class Carry(Place):
    """All that later positions can know of each one. `explain.gradient_flow` listens here.

    What attention or a convolution looks back at passes all at once, (batch, time, dim); the
    state of a cell passes after each position, (batch, dim).
    """
