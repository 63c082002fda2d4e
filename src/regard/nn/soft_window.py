"""Graves' soft window over a text, the first differentiable attention."""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.nn.hook_point import StepHookPoint
from regard.nn.options import require_positive

LOG_LIMIT = 8.0  # a, b and d are clamped to ± this before exp, so that nothing overflows
INITIAL_LOG_STEP = -3.0  # initial d: about twenty points per character


class SoftWindow(nn.Module):
    r"""A weighted sum of the characters c_u of a text, by a window that moves over it.

        (a, b, d) = W h_t + v,        kappa_t = kappa_{t-1} + exp(d)
        phi(t, u) = sum_k exp(a_k) exp(-exp(b_k) (kappa_{t,k} - u)^2)
        w_t = sum_u phi(t, u) c_u

    Each of the K mixture components has an importance exp(a), an inverse width exp(b) and a
    location kappa, which only moves forward. The alignment of points and characters is learned
    end to end. The weights phi depend on locations, not on the characters, and need not sum to 1.
    Graves 2013, section 5.1; a, b and d are clamped here.
    """

    def __init__(self, dim: int, *, components: int = 10) -> None:
        super().__init__()
        require_positive("soft window", components=components)
        self.components = components
        self.out = nn.Linear(dim, 3 * components)  # W, v
        nn.init.zeros_(self.out.bias)
        nn.init.constant_(self.out.bias[2 * components :], INITIAL_LOG_STEP)
        self.weights_hook = StepHookPoint()

    def forward(
        self,
        h: Float[Tensor, "batch dim"],
        kappa: Float[Tensor, "batch components"],
        text: Float[Tensor, "batch source vocab"],
        lengths: Int[Tensor, " batch"],
        *,
        first: int = 0,
        steps: int | None = None,
    ) -> tuple[Float[Tensor, "batch vocab"], Float[Tensor, "batch components"]]:
        """w_t and kappa_t, from h_t; `lengths` holds the number of characters of each text.

        `first` is the index of this step and `steps` the number of all steps, for the hook point.
        """
        compute_dtype = torch.promote_types(h.dtype, torch.float32)
        log_parameters = self.out(h).to(compute_dtype).clamp(-LOG_LIMIT, LOG_LIMIT)
        alpha, beta, step = log_parameters.exp().split(self.components, -1)
        kappa = kappa + step
        u = torch.arange(text.shape[1], device=h.device)
        squared_distance = (kappa.unsqueeze(-1) - u).square()  # (batch, components, source)
        phi = (alpha.unsqueeze(-1) * torch.exp(-beta.unsqueeze(-1) * squared_distance)).sum(1)
        phi = phi.masked_fill(u >= lengths.unsqueeze(1), 0.0)  # (batch, source)
        if self.weights_hook.has_hooks:
            phi = self.weights_hook(phi[:, None, None], first, steps)[:, 0, 0]
        w = (phi.unsqueeze(1) @ text.to(compute_dtype)).squeeze(1)
        return w.to(h.dtype), kappa

    if TYPE_CHECKING:
        __call__ = forward
