"""How the weights begin."""

from collections.abc import Callable

from torch import nn

from regard.nn.attention import Attention
from regard.nn.ffn import FeedForward
from regard.nn.head import Head
from regard.nn.options import positive


def normal(model: nn.Module, layers: int, std: float = 0.02) -> None:
    """N(0, std), the matrices that write into the residual stream N(0, std / sqrt(2 layers)).

    Radford et al. 2019; biases begin at 0.
    """
    positive("init 'normal'", std=std)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding | Head) and hasattr(module, "weight"):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    for out in _writers(model):
        nn.init.normal_(out.weight, std=std / (2 * layers) ** 0.5)


def zero_out(model: nn.Module, layers: int, std: float = 0.02) -> None:
    """As `normal`, but the matrices that write into the residual stream 0 (Zhang et al. 2019).

    Every block begins as the identity, so a deep stack begins as a shallow one.
    """
    normal(model, layers, std)
    for out in _writers(model):
        nn.init.zeros_(out.weight)


def xavier(model: nn.Module) -> None:
    """Uniform with variance 2 / (fan in + fan out), tables N(0, 1 / dim): the 2017 Transformer."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding | Head) and hasattr(module, "weight"):
            nn.init.normal_(module.weight, std=module.weight.shape[1] ** -0.5)


def fan_in(model: nn.Module) -> None:
    r"""N(0, 1 / fan in), queries N(0, 1 / (fan in · head_dim)), tables N(0, 1): T5.

    Its scores are not divided by sqrt(head_dim); the smaller start of the queries stands for
    that (Raffel et al. 2020, as released).
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding | Head) and hasattr(module, "weight"):
            nn.init.normal_(module.weight)
    for module in model.modules():
        if isinstance(module, Attention):
            std = (module.query.in_features * module.head_dim) ** -0.5
            nn.init.normal_(module.query.weight, std=std)


def deepnorm_gain(stack: nn.Module, gain: float) -> None:
    """DeepNorm's start: Xavier, times `gain` for values, outputs and the feed-forward."""
    for module in stack.modules():
        if isinstance(module, Attention):
            for linear in (module.query, module.key):
                nn.init.xavier_normal_(linear.weight)
            for linear in (module.value, module.out):
                nn.init.xavier_normal_(linear.weight, gain=gain)
        elif isinstance(module, FeedForward):
            for part in module.children():
                if isinstance(part, nn.Linear):
                    nn.init.xavier_normal_(part.weight, gain=gain)


def _writers(model: nn.Module) -> list[nn.Linear]:
    attentions = [m.out for m in model.modules() if isinstance(m, Attention)]
    return attentions + [m.down for m in model.modules() if isinstance(m, FeedForward)]


INITS: dict[str, Callable[..., None]] = {
    "normal": normal,
    "zero_out": zero_out,
    "xavier": xavier,
    "fan_in": fan_in,
}
