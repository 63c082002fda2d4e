"""Gradient flow: how strongly a loss pulls at what each earlier position left behind."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.errors import RegardError
from regard.explain.trace import matching
from regard.nn.tap import Carry


def gradient_flow(
    model: nn.Module, loss: Callable[[], Float[Tensor, ""]], *, pattern: str = "*"
) -> dict[str, Float[Tensor, "batch time"]]:
    r"""How much a loss would change with what the model has kept of each position.

        flow_t = || d loss / d h_t ||

        flow = gradient_flow(model, lambda: F.cross_entropy(model.head(model(ids))[0, -1:], last))
        flow["layers.0"]                                   # (batch, time)

    h_t is all that later positions can know of position t in one layer: the state that a cell
    carries on (of an LSTM h and c together), the vector that attention or a convolution looks
    back at. So for a cell  d loss / d h_t = U' (d loss / d h_{t+1} * f'(W x_{t+1} + U h_t + b)),
    U' the transpose of U, which shrinks or grows with every step back. Layers are named by their
    path, from below; `pattern` chooses among them. While it is asked, cells run as loops: the
    fused kernel shows no gradient inside. Bengio et al. 1994, Pascanu et al. 2013.
    """
    passed: list[tuple[str, Tensor]] = []
    with ExitStack() as stack, torch.enable_grad():
        for name, place in matching(model, Carry, pattern, "layer that looks back").items():

            def keep(_: nn.Module, __: object, out: Tensor, name: str = name) -> Tensor:
                out = out if out.requires_grad else out.detach().requires_grad_()
                passed.append((name.removesuffix(".carry"), out))
                return out

            stack.callback(place.register_forward_hook(keep).remove)
        total = loss()
    if not passed:
        raise RegardError("nothing was read; `loss` must call this model")
    gradients = torch.autograd.grad(
        total, [each for _, each in passed], allow_unused=True, materialize_grads=True
    )
    flow: dict[str, list[Tensor]] = {}
    for (name, _), gradient in zip(passed, gradients, strict=True):
        norm = gradient.norm(dim=-1)
        if norm.ndim == 1:  # of one position: a cell's
            norm = norm.unsqueeze(1)
        else:
            while name in flow:  # a layer that is used again
                name += "'"
        flow.setdefault(name, []).append(norm)
    backwards = {name for name in flow if name.endswith(".back")}  # cells that read from the end
    return {
        name: torch.cat(norms[::-1] if name in backwards else norms, 1)
        for name, norms in flow.items()
    }


@dataclass(frozen=True, slots=True)
class Flow:
    """What a run has read, and how strongly its last loss pulls at each position of it."""

    pieces: list[str]
    layers: dict[str, Float[Tensor, " time"]]  # from below

    def back(self, layer: int = 0) -> list[float]:
        """The norms of one layer by distance: first that of the last position."""
        norms: list[float] = list(self.layers.values())[layer].tolist()
        return norms[::-1]
