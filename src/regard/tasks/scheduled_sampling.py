"""Scheduled sampling: in training, replace some of the input tokens by the model's predictions."""

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
from regard.models.build import family_of, is_fitted_without_gradients
from regard.models.presets import ModelConfig
from regard.models.transformer import Transformer
from regard.nn.state import Source

Schedule = Callable[[int], float]  # step → probability that an input token is a prediction


def linear(steps: int, max_probability: float = 0.5, ramp_fraction: float = 1.0) -> Schedule:
    """max_probability · min(1, s / (ramp_fraction · steps)) at step s: rises linearly from 0."""
    if not (0 <= max_probability <= 1 and 0 < ramp_fraction <= 1):
        raise ConfigError(
            f"task.scheduled_sampling: max_probability={max_probability} and "
            f"ramp_fraction={ramp_fraction} must lie between 0 and 1"
        )
    return lambda step: max_probability * min(1.0, step / (ramp_fraction * steps))


def exponential(steps: int, k: float = 0.999) -> Schedule:
    """1 - k^s at step s: rises fastest at the beginning."""
    if not 0 < k < 1:
        raise ConfigError(f"task.scheduled_sampling: k={k} must lie between 0 and 1, such as 0.999")
    return lambda step: 1.0 - k**step


def sigmoid(steps: int, k: float = 100.0) -> Schedule:
    """1 - k / (k + exp(s / k)) at step s: near 0 at first, steepest at s = k log k."""
    if not 1 <= k < math.inf:
        raise ConfigError(f"task.scheduled_sampling: k={k} must be at least 1, such as 100")
    return lambda step: 1.0 - k / (k + math.exp(min(step / k, 700.0)))


SAMPLING_SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "linear": linear,
    "exponential": exponential,
    "sigmoid": sigmoid,
}


def sampling_schedule(choice: float | Choice, steps: int) -> Schedule:
    """The probability of a prediction at each step: a constant, or one of SAMPLING_SCHEDULES.

    In Bengio et al. 2015 epsilon is the probability of the true token, 1 minus this one.
    """
    if not isinstance(choice, int | float):
        return make(choice, SAMPLING_SCHEDULES, "task.scheduled_sampling", steps=steps)
    if not 0 <= choice <= 1:
        raise ConfigError(f"task.scheduled_sampling={choice} must be at least 0 and at most 1")
    return lambda step: float(choice)


def check_scheduled_sampling(choice: float | Choice, model: ModelConfig) -> None:
    """Raise `ConfigError` for scheduled sampling with a model that has no training steps."""
    if choice and is_fitted_without_gradients(family_of(model)):
        raise ConfigError(
            "task.scheduled_sampling lets a model read its own predictions in training; "
            f"{family_of(model)!r} is fitted without gradients and has no training steps;\n"
            "remove task.scheduled_sampling, or choose another model"
        )


def mix_predictions(
    model: nn.Module,
    ids: Int[Tensor, "batch time"],
    use_prediction: Bool[Tensor, "batch time"],
    source: Source | None = None,
) -> Int[Tensor, "batch time"]:
    r"""The input of a training step: true tokens, or predictions where `use_prediction` is True.

        x_t = y_t,  or a sample from P(. | x_1 ... x_{t-1}) where `use_prediction`,     x_1 = y_1

    With teacher forcing alone, a model is never trained on inputs with its own errors (exposure
    bias). A recurrent model runs step by step, so x is the sequence that it would have read while
    generating. A Transformer would need one pass per step; it makes two passes instead: the first
    reads the true tokens and samples at every position, the second is trained on the mix, so its
    samples are from P(. | y_1 ... y_{t-1}). No gradient flows through the samples.
    Bengio et al. 2015; Mihaylova & Martins 2019.
    """
    sample = _sample_in_one_pass if isinstance(model, Transformer) else free_running_inputs
    with torch.no_grad():
        return run_eagerly(sample)(model, ids, use_prediction, source)


def free_running_inputs(
    model: nn.Module,
    ids: Int[Tensor, "batch time"],
    use_prediction: Bool[Tensor, "batch time"],
    source: Source | None = None,
) -> Int[Tensor, "batch time"]:
    """Free-running inputs: `ids` with the model's own predictions where `use_prediction`.

    A sample is conditioned on all inputs before it, true or sampled.
    """
    language = cast(Language, model)
    state = language.start(len(ids), ids.shape[1], source)
    inputs = [ids[:, 0]]
    for true, use in zip(ids.unbind(1)[1:], use_prediction.unbind(1)[1:], strict=True):
        logits, state = language.step(inputs[-1].unsqueeze(1), state)
        inputs.append(_sample_ids(logits[:, 0]).where(use, true))
    return torch.stack(inputs, 1)


def _sample_in_one_pass(
    model: nn.Module, ids: Tensor, use_prediction: Tensor, source: Source | None
) -> Tensor:
    inputs: dict[str, Any] = {} if source is None else {"source": source}
    hidden, head = model(ids, **inputs), cast(Any, model.head)
    # the logits of one row at a time, to save memory
    samples = torch.stack([_sample_ids(head(row)) for row in hidden[:, :-1]])
    return torch.cat([ids[:, :1], samples.where(use_prediction[:, 1:], ids[:, 1:])], 1)


def _sample_ids(logits: Float[Tensor, "rows vocab"]) -> Int[Tensor, " rows"]:
    """Sample one id per row: argmax p / E with E ~ Exp(1), a form of the Gumbel-max trick.

    Unlike `torch.multinomial`, it can be captured in a CUDA graph.
    """
    probabilities = logits.float().softmax(-1)
    return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(-1)
