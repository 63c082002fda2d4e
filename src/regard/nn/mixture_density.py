"""The output layer of a mixture density network (MDN) for pen strokes: offset and pen state."""

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.nn.options import require_positive

DOWN, LIFT, END = 0, 1, 2  # the pen after a point: down, lifted, or the drawing ends
PEN_STATES = 3
LOG_SIGMA_RANGE = (-6.0, 6.0)  # log sigma is clamped to it, so that no density overflows
MAX_RHO = 0.99  # bound of |rho|, the correlation, so that 1 - rho^2 stays away from 0


class Mixture(NamedTuple):
    """The parameters of the distribution of the next point."""

    log_weights: Float[Tensor, "*rows components"]
    mean: Float[Tensor, "*rows components 2"]
    log_sigma: Float[Tensor, "*rows components 2"]
    rho: Float[Tensor, "*rows components"]
    pen: Float[Tensor, "*rows 3"]  # logits of DOWN, LIFT and END


class MixtureDensityHead(nn.Module):
    r"""The next point of a drawing: a mixture of normal distributions, and the pen state.

        P(dx, dy, pen | x) = sum_m pi_m N(dx, dy; mu_m, sigma_m, rho_m) · P(pen)

    Computed in log space: log_softmax for pi, logsumexp over the components. log sigma is clamped
    to [-6, 6] and |rho| is at most 0.99, so that neither can make the loss infinite.
    With a bias b, sampling uses sigma exp(-b) and pi^(1 + b): neater drawings (Graves 2013). The
    paper has a Bernoulli variable for the pen; here a third pen state ends the drawing (Ha & Eck
    2018).
    """

    def __init__(self, dim: int, *, components: int = 20) -> None:
        super().__init__()
        require_positive("head 'mixture'", components=components)
        self.components = components
        self.out = nn.Linear(dim, 6 * components + PEN_STATES)

    def forward(self, x: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows parameters"]:
        """The parameters of the distribution in one tensor, which `mixture` splits."""
        parameters: Tensor = self.out(x)
        return parameters

    def mixture(self, parameters: Float[Tensor, "*rows parameters"]) -> Mixture:
        """The distribution that the output of `forward` describes, in float32 at least."""
        m = self.components
        compute_dtype = torch.promote_types(parameters.dtype, torch.float32)
        weights, mean, log_sigma, rho, pen = parameters.to(compute_dtype).split(
            [m, 2 * m, 2 * m, m, PEN_STATES], -1
        )
        return Mixture(
            weights.log_softmax(-1),
            mean.unflatten(-1, (m, 2)),
            log_sigma.unflatten(-1, (m, 2)).clamp(*LOG_SIGMA_RANGE),
            MAX_RHO * rho.tanh(),
            pen,
        )

    def loss(
        self,
        x: Float[Tensor, "batch time dim"],
        targets: Float[Tensor, "batch time 3"],
        scored: Bool[Tensor, "batch time"],
    ) -> Float[Tensor, ""]:
        """The summed negative log-likelihood of the points that are `scored`."""
        mixture = self.mixture(self(x))
        offset_log_prob = log_density(mixture, targets[..., :2])
        pen_loss = F.cross_entropy(
            mixture.pen.flatten(0, -2), targets[..., 2].flatten().long(), reduction="none"
        )
        return ((pen_loss.view_as(offset_log_prob) - offset_log_prob) * scored).sum()

    def sample(
        self,
        parameters: Float[Tensor, "rows parameters"],
        bias: float,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "rows 3"]:
        """Sample a point for each row: dx, dy and the pen state; `bias` makes drawings neater."""
        mixture = self.mixture(parameters)
        max_log_weight = mixture.log_weights.amax(-1, keepdim=True)
        weights = ((mixture.log_weights - max_log_weight) * (1 + bias)).softmax(-1)
        component = torch.multinomial(weights, 1, generator=generator)  # (rows, 1)
        index = component.unsqueeze(-1).expand(-1, 1, 2)
        mean = mixture.mean.gather(1, index).squeeze(1)
        sigma = (mixture.log_sigma.gather(1, index).squeeze(1) - bias).exp()
        rho = mixture.rho.gather(1, component)
        noise = torch.randn(mean.shape, generator=generator, device=mean.device)
        first, second = noise[:, :1], noise[:, 1:]
        second = rho * first + (1 - rho.square()).sqrt() * second
        offset = mean + sigma * torch.cat([first, second], 1)
        pen = torch.multinomial(mixture.pen.softmax(-1), 1, generator=generator)
        return torch.cat([offset, pen.to(offset)], 1)

    if TYPE_CHECKING:
        __call__ = forward


def log_density(mixture: Mixture, offsets: Float[Tensor, "*rows 2"]) -> Float[Tensor, "*rows"]:
    r"""log sum_m pi_m N(dx, dy; mu_m, sigma_m, rho_m)

    log N = -(u^2 + v^2 - 2 rho u v) / (2 (1 - rho^2)) - log(2 pi sigma_1 sigma_2 sqrt(1 - rho^2))
    with u, v = (offset - mu) / sigma.
    """
    deviation = offsets.to(mixture.mean.dtype).unsqueeze(-2) - mixture.mean
    u, v = (deviation * (-mixture.log_sigma).exp()).unbind(-1)
    determinant = 1 - mixture.rho.square()  # of the correlation matrix
    exponent = -(u.square() + v.square() - 2 * mixture.rho * u * v) / (2 * determinant)
    log_scale = mixture.log_sigma.sum(-1) + 0.5 * determinant.log() + math.log(2 * math.pi)
    return (mixture.log_weights + exponent - log_scale).logsumexp(-1)
