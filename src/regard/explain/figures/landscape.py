"""The loss around the weights of a model, over two random directions."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import ConfigError
from regard.explain.figures.figure_model import FigureModel, untrained_note
from regard.explain.figures.panels import FigureData, Panel, Surface
from regard.explain.gradient import require_gradients

MAX_WINDOW, MAX_ROWS = 32, 16  # tokens in a window, and windows
LR = 3e-3  # for training a preset


def loss_landscape(
    models: list[FigureModel],
    text: str,
    *,
    grid: int = 15,
    span: float = 1.0,
    steps: int = 150,
    seed: int = 1,
) -> FigureData:
    r"""The loss over two random directions around the weights, with and without residuals.

        L(a, b) = loss(w + a d + b e),     each row of d and e with the norm of that row of w

    Filter normalization (Li et al. 2018); norm layers and biases are not changed. A preset is first
    trained on the text for `steps` steps. If no run is given, two small decoders are compared, with
    and without residual connections.
    """
    if grid < 3 or not 0 < span < math.inf or steps < 0:
        raise ConfigError(
            f"grid={grid} must be at least 3, span={span} finite and above 0, and steps={steps} at "
            "least 0"
        )
    grid += 1 - grid % 2  # so that the weights themselves are in the middle
    coordinates = [span * (2 * n / (grid - 1) - 1) for n in range(grid)]
    surfaces = {}
    for model in models:
        model.require_language_model("loss-landscape")
        require_gradients(model.module)
        windows = windows_of(model, text)
        if not model.trained and steps:
            train(model.module, windows, steps)
        surfaces[model.name] = surface(model.module, windows, coordinates, seed)
    middle = grid // 2
    panels: list[Panel] = [
        Surface(
            title=f"{name}: loss {values[middle][middle]:.2f} in the middle",
            x=coordinates,
            y=coordinates,
            values=values,
            low=min(min(map(min, losses)) for losses in surfaces.values()),
            high=max(max(map(max, losses)) for losses in surfaces.values()),
            scale_label="loss (nats per token)",
            x_label="first direction",
            y_label="second direction",
        )
        for name, values in surfaces.items()
    ]
    numbers = {}
    for name, values in surfaces.items():
        numbers[f"{name}: loss in the middle"] = values[middle][middle]
        numbers[f"{name}: largest loss"] = max(map(max, values))
    untrained = [model for model in models if not model.trained]
    trained = f" Presets were trained on the text for {steps} steps." if untrained and steps else ""
    return FigureData(
        title="Loss landscape",
        caption="The loss where the weights are moved along two random directions, in units "
        "of the norm of each row of a matrix; in the middle are the weights themselves."
        f"{trained or untrained_note(models)}",
        panels=panels,
        numbers=numbers,
    )


def windows_of(model: FigureModel, text: str) -> Int[Tensor, "rows time"]:
    """The first windows of a text, each at most as long as the context of the model."""
    tokenizer = model.require_tokenizer()
    ids = [*tokenizer.prefix_ids, *tokenizer.encode(model.normalize(text))]
    if len(ids) < 2:
        raise ConfigError(f"the text has {len(ids)} tokens; loss-landscape needs at least 2")
    context = getattr(model.module, "context", None)
    size = min(MAX_WINDOW, len(ids) - 1, context or MAX_WINDOW) + 1
    rows = min(MAX_ROWS, len(ids) // size)
    return torch.tensor(ids[: rows * size], device=model.device).view(rows, size)


def loss_of(model: nn.Module, windows: Int[Tensor, "rows time"]) -> Float[Tensor, ""]:
    """The mean cross-entropy of every token after the first."""
    head: nn.Module = model.head  # type: ignore[assignment]
    logits = head(model(windows[:, :-1]))
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


def train(model: nn.Module, windows: Int[Tensor, "rows time"], steps: int) -> None:
    """Train a model on the windows, with all windows in every step."""
    optimizer = torch.optim.AdamW(model.parameters(), LR)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, windows).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@torch.no_grad()
def surface(
    model: nn.Module, windows: Int[Tensor, "rows time"], coordinates: list[float], seed: int
) -> list[list[float]]:
    """The loss at every pair of coordinates; the weights are restored at the end."""
    generator = torch.Generator().manual_seed(seed)
    weights = [
        (parameter, parameter.clone(), *(direction(parameter, generator) for _ in range(2)))
        for parameter in model.parameters()
    ]
    values: list[list[float]] = []
    try:
        for y in coordinates:
            values.append([])
            for x in coordinates:
                for parameter, start, first, second in weights:
                    parameter.copy_(start + x * first + y * second)
                values[-1].append(loss_of(model, windows).item())
    finally:
        for parameter, start, _, _ in weights:
            parameter.copy_(start)
    return values


def direction(parameter: Tensor, generator: torch.Generator) -> Tensor:
    """A random direction whose rows have the norms of the parameter's; zero for a vector."""
    if parameter.ndim < 2:
        return torch.zeros_like(parameter)
    random = torch.randn(parameter.shape, generator=generator).to(parameter)
    rows = random.flatten(1)
    scale = parameter.flatten(1).norm(dim=1) / rows.norm(dim=1).clamp_min(1e-12)
    return (rows * scale[:, None]).view_as(parameter)
