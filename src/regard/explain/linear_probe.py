"""Linear probes: how well a linear classifier predicts a label from the activations of a layer."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from regard.errors import ConfigError, ShapeError


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """How well a linear classifier predicts a label from a layer, on data it was not fitted to."""

    accuracy: float
    low: float  # 95 % confidence interval of the accuracy
    high: float
    majority: float  # the accuracy of always predicting the most frequent label


def probe(
    x: Float[Tensor, "examples dim"],
    labels: Int[Tensor, " examples"],
    *,
    folds: int = 5,
    l2: float = 1e-3,
    seed: int = 0,
) -> ProbeResult:
    r"""The accuracy of a linear probe by cross-validation.

        min_W,b  mean_n -log softmax(W x_n + b)_{y_n} + l2 |W|^2

    fitted with L-BFGS on standardized x, on all folds but the one that is predicted. The interval
    is Wilson's. Compare with `majority`. Alain & Bengio 2016.
    """
    if folds < 2:
        raise ConfigError(f"folds={folds} must be at least 2: each is predicted from the others")
    if len(x) != len(labels):
        raise ShapeError(f"{len(x)} activations do not match {len(labels)} labels")
    count, distinct = len(labels), len(labels.unique())
    fewest = 4 if folds == 2 else folds  # so that the probe is fitted to at least 2
    if distinct < 2 or count < fewest:
        raise ConfigError(
            f"a probe needs at least 2 classes and {fewest} examples; there are {count} examples "
            f"of {distinct} class{'es' * (distinct != 1)}"
        )
    if labels.is_floating_point() or int(labels.min()) < 0:
        raise ConfigError("the labels of a probe must be integers of at least 0")
    if not x.isfinite().all():
        raise ConfigError(
            "the activations of a probe must be finite; these contain NaN or infinity"
        )
    x, labels = x.detach().double(), labels.to(x.device, torch.long)
    classes = int(labels.max()) + 1
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    fold_of = torch.empty(count, dtype=torch.long)
    fold_of[order] = torch.arange(count) % folds
    fold_of = fold_of.to(x.device)
    correct = 0
    for fold in range(folds):
        train, test = fold_of != fold, fold_of == fold
        centre, scale = x[train].mean(0), x[train].std(0).clamp_min(1e-8)
        weight, bias = _fit_probe((x[train] - centre) / scale, labels[train], classes, l2)
        predicted = ((x[test] - centre) / scale @ weight + bias).argmax(-1)
        correct += int((predicted == labels[test]).sum())
    accuracy = correct / count
    low, high = wilson(correct, count)
    return ProbeResult(accuracy, low, high, float(labels.bincount().max()) / count)


def _fit_probe(x: Tensor, labels: Tensor, classes: int, l2: float) -> tuple[Tensor, Tensor]:
    weight = x.new_zeros(x.shape[1], classes, requires_grad=True)
    bias = x.new_zeros(classes, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(x @ weight + bias, labels) + l2 * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return weight.detach(), bias.detach()


def wilson(successes: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's 95 % confidence interval of a proportion (1927).

    >>> [round(end, 3) for end in wilson(90, 100)]
    [0.826, 0.945]
    """
    p = successes / count
    centre = p + z * z / (2 * count)
    half_width = z * math.sqrt(p * (1 - p) / count + z * z / (4 * count * count))
    denominator = 1 + z * z / count
    return (centre - half_width) / denominator, (centre + half_width) / denominator
