"""Scheduled sampling: in training, read now and then what the model itself would have written."""

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.accel.compile import run_eagerly
from regard.config import Choice, make
from regard.errors import ConfigError
from regard.models.base import Language
from regard.models.transformer import Transformer
from regard.nn.state import Source

Share = Callable[[int], float]  # of a step: how likely a token is the model's own


def linear(steps: int, most: float = 0.5, over: float = 1.0) -> Share:
    """A line from 0 to `most` in the first `over` of all steps: most · min(1, s / (over steps))."""
    if not (0 <= most <= 1 and 0 < over <= 1):
        raise ConfigError(
            f"task.scheduled_sampling: most={most} and over={over} must lie between 0 and 1"
        )
    return lambda step: most * min(1.0, step / (over * steps))


def exponential(steps: int, k: float = 0.999) -> Share:
    """1 - k^s at step s: early and fast."""
    if not 0 < k < 1:
        raise ConfigError(f"task.scheduled_sampling: k={k} must lie between 0 and 1, as in 0.999")
    return lambda step: 1.0 - k**step


def sigmoid(steps: int, k: float = 100.0) -> Share:
    """1 - k / (k + exp(s / k)) at step s: the truth at first, then a turn around s = k log k."""
    if k < 1:
        raise ConfigError(f"task.scheduled_sampling: k={k} must be at least 1, as in 100")
    return lambda step: 1.0 - k / (k + math.exp(min(step / k, 700.0)))


SAMPLINGS: dict[str, Callable[..., Share]] = {
    "linear": linear,
    "exponential": exponential,
    "sigmoid": sigmoid,
}


def sampling(choice: float | Choice, steps: int) -> Share:
    """How likely a token is the model's own at each of so many steps: always alike, or growing.

    Bengio et al. 2015, whose epsilon is the share of the truth, 1 minus ours.
    """
    if not isinstance(choice, int | float):
        return make(choice, SAMPLINGS, "task.scheduled_sampling", steps=steps)
    if not 0 <= choice <= 1:
        raise ConfigError(f"task.scheduled_sampling={choice} must be at least 0 and at most 1")
    return lambda step: float(choice)


def mixed(
    model: nn.Module,
    ids: Int[Tensor, "batch time"],
    own: Bool[Tensor, "batch time"] | None,
    source: Source | None = None,
) -> Int[Tensor, "batch time"]:
    r"""What is read to learn from: the truth, and in places what the model makes of the rest.

        x_t = y_t,  or where own_t  a draw from P(. | x_1 ... x_{t-1})       x_1 = y_1

    A model that only sees the truth never learns to go on after a mistake of its own. A recurrent
    one goes from step to step, so x is what it would have read while writing. A Transformer would
    need a pass for each; it makes two: the first reads the truth and draws at every position, the
    second learns from the mix, so its draws are from P(. | y_1 ... y_{t-1}). Nothing is learned
    through the draws. Bengio et al. 2015; Mihaylova & Martins 2019.
    """
    if own is None:
        return ids
    draw = _in_one_pass if isinstance(model, Transformer) else free_running
    with torch.no_grad():
        return run_eagerly(draw)(model, ids, own, source)


def free_running(
    model: nn.Module,
    ids: Int[Tensor, "batch time"],
    own: Bool[Tensor, "batch time"],
    source: Source | None = None,
) -> Int[Tensor, "batch time"]:
    """What a model reads when it goes from step to step, and takes its own words where it should.

    A draw follows all that was read before it, be it true or drawn.
    """
    language = cast(Language, model)
    state = language.start(len(ids), ids.shape[1], source)
    read = [ids[:, 0]]
    for true, chosen in zip(ids.unbind(1)[1:], own.unbind(1)[1:], strict=True):
        logits, state = language.step(read[-1].unsqueeze(1), state)
        read.append(_drawn(logits[:, 0]).where(chosen, true))
    return torch.stack(read, 1)


def _in_one_pass(model: nn.Module, ids: Tensor, own: Tensor, source: Source | None) -> Tensor:
    given: dict[str, Any] = {} if source is None else {"source": source}
    hidden, head = model(ids, **given), cast(Any, model.head)
    drawn = torch.stack([_drawn(head(row)) for row in hidden[:, :-1]])  # the logits of a row only
    return torch.cat([ids[:, :1], drawn.where(own[:, 1:], ids[:, 1:])], 1)


def _drawn(logits: Float[Tensor, "rows vocab"]) -> Int[Tensor, " rows"]:
    """An id for each row. By a race of exponentials, which a CUDA graph can replay."""
    chances = logits.float().softmax(-1)
    return (chances / torch.empty_like(chances).exponential_()).argmax(-1)
