"""A running mean of the weights, often better than the weights themselves."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class EMA:
    r"""a <- d a + (1 - d) w after every step, d = min(decay, (1 + n) / (10 + n)) at step n.

    The ramp lets a short run forget its beginning (as in Szegedy et al. 2016's released code).
    With decay 0 there is no mean, and the weights stand for it.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.names = [name for name, _ in model.named_parameters()]
        self.weights: list[Tensor] = [param.data for param in model.parameters()]
        self.means = [weight.clone() for weight in self.weights] if decay else []

    def update(self, step: int) -> None:
        """Take in the weights after `step`."""
        if self.decay:
            decay = min(self.decay, (1 + step) / (10 + step))
            torch._foreach_lerp_(self.means, self.weights, 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model has the mean weights."""
        if not self.decay:
            yield
            return
        own = [weight.clone() for weight in self.weights]
        torch._foreach_copy_(self.weights, self.means)
        try:
            yield
        finally:
            torch._foreach_copy_(self.weights, own)

    def tensors(self) -> dict[str, Tensor]:
        """The means by name; none where averaging is off."""
        return dict(zip(self.names, self.means, strict=True)) if self.decay else {}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Go on from saved means; where none were saved, from the weights."""
        for name, mean, weight in zip(self.names, self.means, self.weights, strict=False):
            mean.copy_(tensors.get(name, weight))
