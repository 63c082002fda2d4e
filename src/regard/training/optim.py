"""Optimizers: AdamW for everything, or Muon for the matrices between the layers."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.config import Choice, make
from regard.errors import ConfigError

Parameters = list[tuple[str, nn.Parameter]]


class Parts(Protocol):
    """Matrices of which this process has some rows, and others the rest."""

    def shape(self, param: nn.Parameter) -> torch.Size:
        """The shape of the whole."""

    def gather(
        self, rows: Float[Tensor, "many own columns"], shape: torch.Size
    ) -> Float[Tensor, "many rows columns"]:
        """All rows of matrices of one shape."""

    def own(self, whole: Float[Tensor, "many rows columns"]) -> Float[Tensor, "many own columns"]:
        """This process's rows of them."""


class Muon(torch.optim.Optimizer):
    r"""Momentum whose update is made orthogonal (Jordan et al. 2024).

        M <- m M + (1 - m) G,    U = (1 - m) G + m M,    W <- (1 - lr decay) W - lr s orth(U)

    orth replaces the singular values by about 1, by five Newton–Schulz steps; s = 0.2 sqrt(max
    side), so that an update is as large as AdamW's and both share one lr (Liu et al. 2025).
    With `found_inf` set on the optimizer the step is skipped on the device, as torch's fused
    AdamW does: nobody has to wait to learn whether the gradient was finite. Where a rank has
    only rows of each matrix, `parts` puts U together, and every rank makes all of it orthogonal.
    """

    found_inf: Tensor | None = None
    parts: Parts | None = None

    def __init__(
        self,
        params: list[nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every matrix; those of one shape are made orthogonal together."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for param in group["params"]:
                if param.grad is not None:
                    shape = param.shape if self.parts is None else self.parts.shape(param)
                    by_shape.setdefault(shape, []).append(param)
            for shape, params in by_shape.items():
                self._step_alike(params, shape, group)

    def _step_alike(
        self, params: list[nn.Parameter], shape: torch.Size, group: dict[str, Any]
    ) -> None:
        states = [self.state[param] for param in params]
        for state, param in zip(states, params, strict=True):
            if not state:
                state["momentum"] = torch.zeros_like(param)
        grads = [param.grad for param in params if param.grad is not None]
        keep = 1.0 if self.found_inf is None else 1.0 - self.found_inf
        if self.found_inf is not None:  # NaN times 0 is NaN: choose, do not multiply
            grads = [torch.where(self.found_inf > 0, 0.0, grad) for grad in grads]
        rest = (1 - group["momentum"]) * keep
        momenta = [state["momentum"] for state in states]
        for momentum, grad in zip(momenta, grads, strict=True):
            momentum.lerp_(grad, rest)
        update = torch.stack(
            [g.lerp(m, group["momentum"]) for g, m in zip(grads, momenta, strict=True)]
        )
        if self.parts is None:
            update = orthogonal(update)
        else:
            update = self.parts.own(orthogonal(self.parts.gather(update, shape)))
        update = update * (0.2 * max(shape) ** 0.5 * group["lr"] * keep)
        decay = 1 - group["lr"] * group["weight_decay"] * keep
        for param, change in zip(params, update, strict=True):
            param.mul_(decay).sub_(change)


def orthogonal(x: Float[Tensor, "many rows columns"], steps: int = 5) -> Tensor:
    r"""The nearest matrices with singular values near 1, by Newton–Schulz: X <- aX + (bA + cA²)X.

    A = X Xᵀ; a, b, c are those of Jordan et al. 2024, tuned for speed rather than exactness:
    singular values end between about 0.7 and 1.2, but for those below a 500th of the norm.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    dtype = x.dtype
    x = x.bfloat16() if x.is_cuda else x
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(dtype)


def adamw(
    parameters: Parameters,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.99,
    decay: float = 0.1,
) -> list[torch.optim.Optimizer]:
    """AdamW (Loshchilov & Hutter 2019), fused; vectors are not decayed."""
    matrices = [p for _, p in parameters if p.dim() >= 2]
    vectors = [p for _, p in parameters if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    return [
        torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=lr,
            betas=(beta1, beta2),
            fused=True,
            capturable=parameters[0][1].is_cuda,  # in a graph
        )
    ]


def muon(
    parameters: Parameters,
    lr: float,
    momentum: float = 0.95,
    beta1: float = 0.9,
    beta2: float = 0.99,
    decay: float = 0.1,
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, AdamW for tables, head, norms and biases."""
    hidden = [p for n, p in parameters if p.dim() == 2 and is_hidden(n)]
    others = [(n, p) for n, p in parameters if not (p.dim() == 2 and is_hidden(n))]
    return [
        *([Muon(hidden, lr=lr, momentum=momentum, weight_decay=decay)] if hidden else []),
        *(adamw(others, lr, beta1, beta2, decay) if others else []),
    ]


def is_hidden(name: str) -> bool:
    """Whether a parameter is a matrix between two hidden layers, by its name."""
    inside = ".blocks." in name or name.startswith("layers.")
    return inside and name.endswith(".weight") and "relative" not in name


OPTIMIZERS: dict[str, Callable[..., list[torch.optim.Optimizer]]] = {"adamw": adamw, "muon": muon}


def optimizers(choice: Choice, model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """The optimizers of this name for all that learns in a model."""
    parameters = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    try:
        return make(choice, OPTIMIZERS, "optimizer", parameters=parameters, lr=lr)
    except ConfigError:
        raise
    except ValueError as error:  # torch's own checks of betas and decay
        raise ConfigError(f"train.optimizer: {error}") from None


def state_tensors(
    model: nn.Module, all_optimizers: list[torch.optim.Optimizer]
) -> Iterator[tuple[str, Tensor]]:
    """Everything the optimizers remember, as named tensors."""
    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    for optimizer in all_optimizers:
        for param, state in optimizer.state.items():
            for key, value in state.items():
                yield f"{names[param]}/{key}", value


def load_state_tensors(
    model: nn.Module, all_optimizers: list[torch.optim.Optimizer], tensors: dict[str, Tensor]
) -> None:
    """Give the optimizers back what `state_tensors` saved."""
    names = {param: name for name, param in model.named_parameters()}
    saved: dict[str, dict[str, Tensor]] = {}
    for full, value in tensors.items():
        name, _, key = full.rpartition("/")
        saved.setdefault(name, {})[key] = value
    for optimizer in all_optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                for key, value in saved.get(names[param], {}).items():
                    device = "cpu" if value.dim() == 0 and not group.get("fused") else param.device
                    optimizer.state[param][key] = value.to(device)
