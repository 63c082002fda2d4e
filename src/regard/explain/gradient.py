"""Gradient flow: the norm of a loss's gradient with respect to the state of each position."""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.errors import ConfigError, RegardError
from regard.explain.data_frame import data_frame
from regard.explain.render.curves import Curve, MetricPanel, draw_curves
from regard.explain.render.figure import encode, save
from regard.explain.render.token_text import visible
from regard.explain.trace import matching_modules, run_eagerly
from regard.html import html_table
from regard.nn.hook_point import CarryHookPoint
from regard.nn.state import Source

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

MAX_POINTS = 80  # points drawn per curve


def gradient_flow(
    model: nn.Module, loss: Callable[[], Float[Tensor, ""]], *, pattern: str = "*"
) -> dict[str, Float[Tensor, "batch time"]]:
    r"""The gradient norm of a loss with respect to the state of every position, per layer.

        flow_t = || d loss / d h_t ||

        flow = gradient_flow(model, lambda: F.cross_entropy(model.head(model(ids))[0, -1:], last))
        flow["layers.0"]                                   # (batch, time)

    h_t is everything that later positions can read of position t in one layer: the recurrent
    state of a cell (for an LSTM, h and c together), or the vector that attention or a convolution
    reads. For an Elman network whose loss reads the last state only,

        d loss / d h_t = U' (d loss / d h_{t+1} * f'(W x_{t+1} + U h_t + b)),

    U' the transpose of U: the gradient shrinks or grows with every step back (vanishing and
    exploding gradients). Layers are named by their path, from the input up, followed by ' for each
    further call of a shared layer; `pattern` selects among them. Recurrent cells run as explicit
    loops, since the fused kernel exposes no intermediate gradient. Bengio et al. 1994, Pascanu et
    al. 2013.
    """
    recorded: list[tuple[str, Tensor]] = []
    with ExitStack() as stack, torch.enable_grad():
        stack.enter_context(run_eagerly())
        hook_points = matching_modules(
            model, CarryHookPoint, pattern, "layer that reads earlier positions"
        )
        for name, hook_point in hook_points.items():

            def record(_: nn.Module, __: object, out: Tensor, name: str = name) -> Tensor:
                out = out if out.requires_grad else out.detach().requires_grad_()
                recorded.append((name.removesuffix(".carry_hook"), out))
                return out

            stack.callback(hook_point.register_forward_hook(record).remove)
        loss_value = loss()
    if not recorded:
        raise RegardError("the model did not run; `loss` must call this model")
    gradients = torch.autograd.grad(
        loss_value, [state for _, state in recorded], allow_unused=True, materialize_grads=True
    )
    flow: dict[str, list[Tensor]] = {}
    for (name, _), gradient in zip(recorded, gradients, strict=True):
        norm = gradient.norm(dim=-1)
        if norm.ndim == 1:  # a cell's state, recorded position by position
            norm = norm.unsqueeze(1)
        else:
            while name in flow:  # a layer that is called again
                name += "'"
        flow.setdefault(name, []).append(norm)
    # a backward layer reads from the end
    backward_layers = {name for name in flow if name.endswith(".backward_layer")}
    return {
        name: torch.cat(norms[::-1] if name in backward_layers else norms, 1)
        for name, norms in flow.items()
    }


@dataclass(frozen=True, slots=True, repr=False)
class GradientFlow:
    """The tokens that a model has read, and the gradient norm at each of them, per layer."""

    tokens: list[str]
    layers: dict[str, Float[Tensor, " time"]]  # from the input up

    def by_distance(self, layer: int = 0) -> list[float]:
        """The norms of one layer, the last position first."""
        norms: list[float] = list(self.layers.values())[layer].tolist()
        return norms[::-1]

    def __repr__(self) -> str:
        return f"GradientFlow({len(self.tokens)} tokens, {len(self.layers)} layers)"

    def _repr_html_(self) -> str:
        norms = zip(*(norms.tolist() for norms in self.layers.values()), strict=True)
        rows = zip(map(visible, self.tokens), norms, strict=True)
        cells = ((token, *(f"{norm:.3g}" for norm in row)) for token, row in rows)
        return html_table(cells, header=("token", *self.layers))

    def to_pandas(self) -> "DataFrame":
        """A row for each token, a column for each layer."""
        columns = {name: norms.tolist() for name, norms in self.layers.items()}
        return data_frame({"token": self.tokens, **columns})

    def figure(self, layer: int = 0) -> "Figure":
        """The norms of one layer over the distance, as a matplotlib figure."""
        return draw_gradients([list(self.layers)[layer]], [self], layer)

    def save(self, path: Path | str, layer: int = 0) -> None:
        """Write the figure as .svg, .png, .pdf or .html, by the suffix of `path`."""
        save(encode(self.figure(layer), Path(path).suffix), path)


def draw_gradients(names: Sequence[str], flows: Sequence[GradientFlow], layer: int = 0) -> "Figure":
    """Gradient norm over distance from the last position, without norms of zero or infinity."""
    norms = [flow.by_distance(layer) for flow in flows]
    stride = -(-max(map(len, norms)) // MAX_POINTS)
    curves = [
        Curve(
            run,
            [],
            [
                (back, values[back])
                for back in range(0, len(values), stride)
                if 0 < values[back] < math.inf
            ],
        )
        for run, values in enumerate(norms)
    ]
    panel = MetricPanel("gradient of the last token's loss", "norm", curves)
    caption = "norm of the gradient of the last token's loss at each earlier position"
    return draw_curves(names, [panel], x_label="positions back", caption=caption)


def require_gradients(model: nn.Module) -> None:
    """Raise if the model is fitted without gradients."""
    if hasattr(model, "fit"):
        raise ConfigError("this model is fitted without gradients; use a neural network")


def last_token_gradients(
    model: nn.Module,
    ids: Sequence[int],
    tokens: list[str],
    *,
    source: Source | None = None,
) -> GradientFlow:
    """The gradient flow of the cross-entropy of the last id, predicted from those before it.

    `tokens` are those at which the norm is measured: the tokens of all ids but the last, or with a
    `source` its tokens, in the order in which the encoder reads them.
    """
    if len(ids) < 2:
        raise ConfigError(
            f"the text has {len(ids)} tokens; at least 2 are needed: the last is predicted from "
            "the others"
        )
    device = next(model.parameters()).device
    context = torch.tensor([ids[:-1]], device=device)
    target = torch.tensor(ids[-1:], device=device)
    arguments = {} if source is None else {"source": source}

    def loss() -> Tensor:
        logits = cast(Any, model.head)(model(context, **arguments)[:, -1])
        return F.cross_entropy(logits.float(), target)

    flow = gradient_flow(model, loss, pattern="*" if source is None else "encoder.*")
    return GradientFlow(tokens, {name: norms[0].cpu() for name, norms in flow.items()})
