"""Optimizers (AdamW, Muon), learning-rate schedules, and the EMA of the weights."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.accel import onednn_matmul
from regard.config import Choice, make
from regard.errors import ConfigError
from regard.nn.lora import has_lora

Parameters = list[tuple[str, nn.Parameter]]
Schedule = Callable[[float], float]  # step (counted from 0) -> factor of the learning rate


class ShardedMatrices(Protocol):
    """Matrices whose rows are sharded over the ranks."""

    def full_shape(self, param: nn.Parameter) -> torch.Size:
        """The shape of the unsharded matrix."""

    def all_gather(
        self, rows: Float[Tensor, "matrices local_rows columns"], shape: torch.Size
    ) -> Float[Tensor, "matrices rows columns"]:
        """All rows of several matrices of one shape."""

    def local_shard(
        self, full: Float[Tensor, "matrices rows columns"]
    ) -> Float[Tensor, "matrices local_rows columns"]:
        """The rows of this rank."""


class Muon(torch.optim.Optimizer):
    r"""Muon: SGD with momentum and an orthogonalized update (Jordan et al. 2024).

        M <- m M + (1 - m) G,    U = (1 - m) G + m M,    W <- (1 - lr wd) W - lr s orth(U)

    orth replaces the singular values by about 1, by five Newton–Schulz steps; wd is `weight_decay`;
    s = 0.2 sqrt(max(rows, columns)), so that the RMS of an update matches AdamW's and both share
    one learning rate (Liu et al. 2025). With `found_inf` set on the optimizer the step is skipped
    on the device, as torch's fused AdamW does: no host synchronization is needed.
    Where a rank has only some rows of each matrix, `shards` gathers U, and every rank
    orthogonalizes all of it.
    """

    found_inf: Tensor | None = None
    shards: ShardedMatrices | None = None

    def __init__(
        self,
        params: list[nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum={momentum} must be at least 0 and below 1")
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every matrix; those of one shape are orthogonalized in one batch."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for param in group["params"]:
                if param.grad is not None:
                    shape = param.shape if self.shards is None else self.shards.full_shape(param)
                    by_shape.setdefault(shape, []).append(param)
            for shape, params in by_shape.items():
                self._step_one_shape(params, shape, group)

    def _step_one_shape(
        self, params: list[nn.Parameter], shape: torch.Size, group: dict[str, Any]
    ) -> None:
        states = [self.state[param] for param in params]
        for state, param in zip(states, params, strict=True):
            if not state:
                state["momentum"] = torch.zeros_like(param)
        grads = [param.grad for param in params if param.grad is not None]
        update_scale = 1.0 if self.found_inf is None else 1.0 - self.found_inf  # 0 skips the step
        if self.found_inf is not None:  # where, since NaN times 0 is NaN
            grads = [torch.where(self.found_inf > 0, 0.0, grad) for grad in grads]
        lerp_weight = (1 - group["momentum"]) * update_scale
        momenta = [state["momentum"] for state in states]
        for momentum, grad in zip(momenta, grads, strict=True):
            momentum.lerp_(grad, lerp_weight)
        update = torch.stack(
            [g.lerp(m, group["momentum"]) for g, m in zip(grads, momenta, strict=True)]
        )
        if self.shards is None:
            update = orthogonalize(update)
        else:
            update = self.shards.local_shard(orthogonalize(self.shards.all_gather(update, shape)))
        update = update * (0.2 * max(shape) ** 0.5 * group["lr"] * update_scale)
        decay = 1 - group["lr"] * group["weight_decay"] * update_scale
        for param, change in zip(params, update, strict=True):
            param.mul_(decay).sub_(change)


def orthogonalize(x: Float[Tensor, "matrices rows columns"], steps: int = 5) -> Tensor:
    r"""Approximately orthogonalize matrices by Newton–Schulz iterations: X <- aX + (bA + cA²)X.

    A = X Xᵀ; a, b, c are those of Jordan et al. 2024, tuned for speed rather than exactness:
    singular values end between about 0.7 and 1.2, except those below a 500th of the norm.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    dtype = x.dtype
    x = x.bfloat16() if x.is_cuda else x
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    matmuls: Any = onednn_matmul if onednn_matmul.is_onednn_faster() else torch
    for _ in range(steps):
        gram = matmuls.bmm(x, x.mT)
        polynomial = matmuls.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = matmuls.baddbmm(x, polynomial, x, beta=a)
    return (x.mT if tall else x).to(dtype)


def adamw(
    parameters: Parameters,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.99,
    weight_decay: float = 0.1,
) -> list[torch.optim.Optimizer]:
    """AdamW (Loshchilov & Hutter 2019), fused; no weight decay for biases and norm gains."""
    matrices = [p for _, p in parameters if p.dim() >= 2]
    vectors = [p for _, p in parameters if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [
        torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=lr,
            betas=(beta1, beta2),
            fused=True,
            capturable=parameters[0][1].is_cuda,  # in a CUDA graph
        )
    ]


def muon(
    parameters: Parameters,
    lr: float,
    momentum: float = 0.95,
    beta1: float = 0.9,
    beta2: float = 0.99,
    weight_decay: float = 0.1,
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, AdamW for embeddings, head, norms and biases."""
    hidden = [p for n, p in parameters if p.dim() == 2 and is_hidden(n)]
    non_hidden = [(n, p) for n, p in parameters if not (p.dim() == 2 and is_hidden(n))]
    return [
        *([Muon(hidden, lr=lr, momentum=momentum, weight_decay=weight_decay)] if hidden else []),
        *(adamw(non_hidden, lr, beta1, beta2, weight_decay) if non_hidden else []),
    ]


def is_hidden(name: str) -> bool:
    """Whether this is the name of a weight in a hidden layer, not of an embedding or a head."""
    in_layer = ".blocks." in name or name.startswith("layers.")
    return in_layer and name.endswith(".weight") and "relative" not in name


# The state tensors of each parameter: `step` is a scalar, the others have its shape and dtype.
STATE_KEYS: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.AdamW: ("step", "exp_avg", "exp_avg_sq"),
    Muon: ("momentum",),
}
OPTIMIZERS: dict[str, Callable[..., list[torch.optim.Optimizer]]] = {"adamw": adamw, "muon": muon}


def optimizers(
    choice: Choice, model: nn.Module, lr: float, lr_scales: Mapping[str, float] | None = None
) -> list[torch.optim.Optimizer]:
    """Build the optimizers that `choice` names for the trainable parameters of a model.

    `lr_scales` are factors of the learning rate, by the names of the parameters.
    """
    parameters = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    try:
        result = make(choice, OPTIMIZERS, "optimizer", parameters=parameters, lr=lr)
        if lr_scales:
            for optimizer in result:
                _split_by_scale(optimizer, {p: lr_scales[n] for n, p in parameters})
        return result
    except ConfigError:
        raise
    except ValueError as error:  # torch checks the betas and the weight decay
        raise ConfigError(f"train.optimizer: {error}") from None


def _split_by_scale(optimizer: torch.optim.Optimizer, scales: Mapping[nn.Parameter, float]) -> None:
    """Split the groups of an optimizer, so that all parameters of one have the same `lr_scale`."""
    groups = []
    for group in optimizer.param_groups:
        for scale in dict.fromkeys(scales[p] for p in group["params"]):
            params = [p for p in group["params"] if scales[p] == scale]
            groups.append({**group, "params": params, "lr_scale": scale})
    optimizer.param_groups = groups


def state_tensors(
    model: nn.Module, all_optimizers: list[torch.optim.Optimizer]
) -> Iterator[tuple[str, Tensor]]:
    """The state of the optimizers as named tensors: PARAMETER/KEY."""
    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    for optimizer in all_optimizers:
        for param, state in optimizer.state.items():
            for key, value in state.items():
                yield f"{names[param]}/{key}", value


def parameters_without_state(
    model: nn.Module, all_optimizers: list[torch.optim.Optimizer]
) -> list[str]:
    """The parameters without optimizer state, since they never had a gradient."""
    names = {param: name for name, param in model.named_parameters()}
    groups = [(o.state, group) for o in all_optimizers for group in o.param_groups]
    return [names[p] for state, group in groups for p in group["params"] if not state.get(p)]


def expected_state(
    model: nn.Module,
    all_optimizers: list[torch.optim.Optimizer],
    tensors: Mapping[str, Tensor],
    stateless: Collection[str],
) -> dict[str, Tensor]:
    """Meta tensors with the names, shapes and dtypes that the saved state `tensors` must have.

    The parameters `stateless` have no state. For an optimizer that is not in `STATE_KEYS`, any
    saved state of its parameters is accepted.
    """
    names = {param: name for name, param in model.named_parameters()}
    expected: dict[str, Tensor] = {}
    for optimizer in all_optimizers:
        keys = STATE_KEYS.get(type(optimizer))
        params = [p for group in optimizer.param_groups for p in group["params"]]
        names_with_state = {names[p] for p in params} - set(stateless)
        if keys is None:
            expected |= {
                n: t for n, t in tensors.items() if n.rpartition("/")[0] in names_with_state
            }
            continue
        for param in params:
            if names[param] in names_with_state:
                for key in keys:
                    meta = torch.empty_like(param, device="meta")
                    step = torch.zeros((), device="meta")
                    expected[f"{names[param]}/{key}"] = step if key == "step" else meta
    return expected


def load_state_tensors(
    model: nn.Module, all_optimizers: list[torch.optim.Optimizer], tensors: dict[str, Tensor]
) -> None:
    """Restore the state that `state_tensors` saved."""
    names = {param: name for name, param in model.named_parameters()}
    saved: dict[str, dict[str, Tensor]] = {}
    for full_name, value in tensors.items():
        name, _, key = full_name.rpartition("/")
        saved.setdefault(name, {})[key] = value
    for optimizer in all_optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                for key, value in saved.get(names[param], {}).items():
                    device = "cpu" if value.dim() == 0 and not group.get("fused") else param.device
                    optimizer.state[param][key] = value.to(device)


def _check_options(warmup: int, **fractions: float) -> None:
    """Raise unless the warm-up is at least 0 and all fractions lie between 0 and 1."""
    if warmup < 0:
        raise ConfigError(f"schedule: warmup={warmup} must be at least 0")
    for name, value in fractions.items():
        if not 0 <= value <= 1:
            raise ConfigError(f"schedule: {name}={value} must be at least 0 and at most 1")


def _with_warmup(warmup: int, decay: Schedule) -> Schedule:
    """Linear warm-up, followed by the schedule `decay`."""
    return lambda step: (step + 1) / warmup if step < warmup else decay(step)


def constant(steps: int, warmup: int = 0) -> Schedule:
    """Constant 1 after a linear warm-up: (s + 1) / warmup at step s, counted from 0."""
    _check_options(warmup)
    return _with_warmup(warmup, lambda step: 1.0)


def linear(steps: int, warmup: int = 0, min_lr_factor: float = 0.0) -> Schedule:
    """Linear decay after warm-up: 1 - (1 - m) u, u from 0 to 1 at the end, m = `min_lr_factor`.

        u = (s - warmup) / (steps - warmup)

    at step s, counted from 0.
    """
    _check_options(warmup, min_lr_factor=min_lr_factor)
    decay_steps = max(steps - warmup, 1)
    return _with_warmup(
        warmup, lambda step: 1 - (1 - min_lr_factor) * min((step - warmup) / decay_steps, 1)
    )


def cosine(steps: int, warmup: int = 0, min_lr_factor: float = 0.1) -> Schedule:
    """Cosine decay after warm-up: m + (1 - m) (1 + cos(pi u)) / 2, u and m as in `linear`.

    Loshchilov & Hutter 2017, without their restarts.
    """
    _check_options(warmup, min_lr_factor=min_lr_factor)
    decay_steps = max(steps - warmup, 1)

    def decay(step: float) -> float:
        u = min((step - warmup) / decay_steps, 1)
        return min_lr_factor + (1 - min_lr_factor) * 0.5 * (1 + math.cos(math.pi * u))

    return _with_warmup(warmup, decay)


def inverse_sqrt(steps: int, warmup: int = 4000) -> Schedule:
    """min(t / warmup, sqrt(warmup / t)), t = s + 1 (Vaswani et al. 2017), with a peak of 1."""
    _check_options(warmup)
    peak = max(warmup, 1)
    return lambda step: min((step + 1) / peak, math.sqrt(peak / (step + 1)))


def warmup_stable_decay(
    steps: int, warmup: int = 0, decay_fraction: float = 0.2, min_lr_factor: float = 0.0
) -> Schedule:
    """Warmup-stable-decay (WSD): constant, then linear decay in the last `decay_fraction` of steps.

    Hu et al. 2024.
    """
    _check_options(warmup, decay_fraction=decay_fraction, min_lr_factor=min_lr_factor)
    start = steps - int(decay_fraction * steps)
    decay_steps = max(steps - start, 1)
    return _with_warmup(
        warmup, lambda step: 1 - (1 - min_lr_factor) * min(max(step - start, 0) / decay_steps, 1)
    )


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "constant": constant,
    "linear": linear,
    "cosine": cosine,
    "inverse_sqrt": inverse_sqrt,
    "warmup_stable_decay": warmup_stable_decay,
}


def schedule(choice: Choice, steps: int) -> Schedule:
    """Build the learning-rate schedule that `choice` names for a run of `steps` steps."""
    return make(choice, SCHEDULES, "schedule", steps=steps)


class EMA:
    r"""The exponential moving average (EMA) of the weights.

        a <- d a + (1 - d) w  after every step,      d = min(decay, (1 + n) / (10 + n)) at step n

    d increases with n, so that a short run forgets its initial weights (as in the released code
    of Szegedy et al. 2016). With decay 0 there is no EMA: `tensors` is empty and
    `average_parameters` changes nothing.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        parameters = list(model.named_parameters())
        if has_lora(model):
            parameters = [(name, param) for name, param in parameters if param.requires_grad]
        self.names = [name for name, _ in parameters]
        self.weights: list[Tensor] = [param.detach() for _, param in parameters]
        self.averages = [weight.clone() for weight in self.weights] if decay else []

    def update(self, step: int) -> None:
        """Update the average with the weights after `step`."""
        if self.decay:
            decay = min(self.decay, (1 + step) / (10 + step))
            torch._foreach_lerp_(self.averages, self.weights, 1 - decay)

    @contextmanager
    def average_parameters(self) -> Iterator[None]:
        """A context in which the model has the averaged weights."""
        if not self.decay:
            yield
            return
        backup = [weight.clone() for weight in self.weights]
        torch._foreach_copy_(self.weights, self.averages)
        try:
            yield
        finally:
            torch._foreach_copy_(self.weights, backup)

    def tensors(self) -> dict[str, Tensor]:
        """The averages by parameter name; empty with decay 0."""
        return dict(zip(self.names, self.averages, strict=True)) if self.decay else {}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore saved averages; a parameter without one restarts from its weights."""
        for name, average, weight in zip(self.names, self.averages, self.weights, strict=False):
            average.copy_(tensors.get(name, weight))
