"""Weight initialization."""

from collections.abc import Callable

from torch import nn

from regard.nn.attention import Attention
from regard.nn.block import FeedForward
from regard.nn.head import LMHead
from regard.nn.options import require_positive


def normal(model: nn.Module, layers: int, std: float = 0.02) -> None:
    """N(0, std^2); output projections of attention and FFN N(0, std^2 / (2 layers)); biases 0.

    Radford et al. 2019.
    """
    require_positive("init 'normal'", std=std)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding | LMHead) and hasattr(module, "weight"):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    for out in _output_projections(model):
        nn.init.normal_(out.weight, std=std / (2 * layers) ** 0.5)
    _zero_padding(model)


def zero_init_residual(model: nn.Module, layers: int, std: float = 0.02) -> None:
    """As `normal`, but output projections of attention and FFN are 0 (Fixup, Zhang et al. 2019).

    Residual branches then add nothing: with pre-norm every block is the identity at initialization.
    """
    normal(model, layers, std)
    for out in _output_projections(model):
        nn.init.zeros_(out.weight)


def xavier(model: nn.Module) -> None:
    """Xavier uniform: variance 2 / (fan in + fan out); embeddings N(0, 1 / dim); biases 0.

    Glorot & Bengio 2010; as in the code of Vaswani et al. 2017.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding | LMHead) and hasattr(module, "weight"):
            nn.init.normal_(module.weight, std=module.weight.shape[1] ** -0.5)
    _zero_padding(model)


def fan_in(model: nn.Module) -> None:
    r"""LeCun normal, N(0, 1 / fan in); queries N(0, 1 / (fan in · head_dim)), embeddings N(0, 1).

    T5's scores are not divided by sqrt(head_dim); the smaller initial queries replace that
    (Raffel et al. 2020, as released).
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding | LMHead) and hasattr(module, "weight"):
            nn.init.normal_(module.weight)
    for module in model.modules():
        if isinstance(module, Attention):
            std = (module.query.in_features * module.head_dim) ** -0.5
            nn.init.normal_(module.query.weight, std=std)
    _zero_padding(model)


def init_deepnorm(stack: nn.Module, gain: float) -> None:
    """DeepNorm: Xavier normal; values, output projections and the FFN have the gain `gain`."""
    for module in stack.modules():
        if isinstance(module, Attention):
            for linear in (module.query, module.key):
                nn.init.xavier_normal_(linear.weight)
            for linear in (module.value, module.out):
                nn.init.xavier_normal_(linear.weight, gain=gain)
        elif isinstance(module, FeedForward):
            for layer in module.children():
                if isinstance(layer, nn.Linear):
                    nn.init.xavier_normal_(layer.weight, gain=gain)


def _zero_padding(model: nn.Module) -> None:
    """Set the embeddings of padding (`padding_idx`) to 0, as `torch.nn.Embedding` does."""
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            nn.init.zeros_(module.weight.data[module.padding_idx])


def _output_projections(model: nn.Module) -> list[nn.Linear]:
    attentions = [m.out for m in model.modules() if isinstance(m, Attention)]
    return attentions + [m.down for m in model.modules() if isinstance(m, FeedForward)]


INITS: dict[str, Callable[..., None]] = {
    "normal": normal,
    "zero_init_residual": zero_init_residual,
    "xavier": xavier,
    "fan_in": fan_in,
}
