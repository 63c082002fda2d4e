"""Low-rank adaptation (LoRA) of linear layers: a frozen weight and a trained low-rank update."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.errors import ConfigError
from regard.nn.options import require_positive

LORA_PARAMETERS = ("lora_A", "lora_B")
ATTENTION_TARGETS = ("*.query", "*.value")  # as in the paper


class LoRALinear(nn.Module):
    r"""A linear layer whose weight is frozen, with a trained update of rank r.

        y = W x + b + alpha / r B A dropout(x),      A (r, in) random, B (out, r) zero at first

    Hu et al. 2021. `weight` is the merged matrix W + alpha / r B A, for callers that compute the
    matmul themselves, without dropout.
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float, dropout: float = 0.0) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.scale, self.dropout = alpha / rank, dropout
        device = base.weight.device
        self.lora_A = nn.Parameter(torch.empty(rank, self.in_features, device=device))
        self.lora_B = nn.Parameter(torch.zeros(self.out_features, rank, device=device))
        if device.type != "meta":
            nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    @property
    def rank(self) -> int:
        """The number of rows of A."""
        return len(self.lora_A)

    @property
    def alpha(self) -> float:
        """LoRA's alpha: the update is scaled by alpha / rank."""
        return self.scale * self.rank

    @property
    def weight(self) -> Float[Tensor, "outputs inputs"]:
        """The merged weight, computed in float32 at least."""
        return merge_weights(self.base.weight, self.lora_A, self.lora_B, self.scale)

    @property
    def bias(self) -> Float[Tensor, " outputs"] | None:
        """The frozen bias."""
        return self.base.bias

    def forward(self, x: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows outputs"]:
        """W x + b plus the update, without computing the product B A."""
        lora_input = F.dropout(x, self.dropout, self.training) if self.dropout else x
        low_rank = F.linear(lora_input, self.lora_A)
        return self.base(x) + F.linear(low_rank * self.scale, self.lora_B)


def merge_weights(
    weight: Float[Tensor, "outputs inputs"],
    a: Float[Tensor, "rank inputs"],
    b: Float[Tensor, "outputs rank"],
    scale: float,
) -> Float[Tensor, "outputs inputs"]:
    """W + scale B A, in the dtype of W."""
    compute_dtype = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(compute_dtype) + scale * (b.to(compute_dtype) @ a.to(compute_dtype))).to(
        weight.dtype
    )


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """The trained parameters of a model with LoRA.

    `layers` holds A, B and the scale alpha / r by the name of the linear layer, `others` the
    parameters that are trained in full, such as those of a new head, by their name.
    """

    layers: dict[str, tuple[Tensor, Tensor, float]]
    others: dict[str, Tensor]

    @classmethod
    def of(cls, tensors: dict[str, Tensor], alpha: float) -> "Adapter":
        """From the saved parameters of a model whose `LoRALinear` layers all have this alpha."""
        a, b = (
            {n.removesuffix(f".{p}"): t for n, t in tensors.items() if n.endswith(f".{p}")}
            for p in LORA_PARAMETERS
        )
        others = {n: t for n, t in tensors.items() if not n.endswith(LORA_PARAMETERS)}
        return cls({n: (a[n], b[n], alpha / len(a[n])) for n in a}, others)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its tensors."""
        return next(iter(self.layers.values()))[0].dtype

    def merge(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights of a base model with this adapter merged into them; `tensors` is unchanged.

        Layers of the adapter that the base model does not have are an error.
        """
        names = {f"{layer}.weight": layer for layer in self.layers}
        if missing := [layer for name, layer in names.items() if name not in tensors]:
            raise ConfigError(
                f"the adapter has the layer {missing[0]!r}, which the model does not have;\n"
                "use the adapter with the model that it was trained on"
            )
        result = {**tensors, **self.others}
        for name, layer in names.items():
            a, b, scale = self.layers[layer]
            if (len(b), a.shape[1]) != tensors[name].shape:
                raise ConfigError(
                    f"the adapter's update of {layer!r} is {len(b)} × {a.shape[1]}, but the weight "
                    f"is {' × '.join(map(str, tensors[name].shape))};\n"
                    "use the adapter with the model that it was trained on"
                )
            device = tensors[name].device
            result[name] = merge_weights(tensors[name], a.to(device), b.to(device), scale)
        return result


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers to which LoRA can be added, by name: all but those of the head."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not name.startswith("head.")
    }


def default_targets(model: nn.Module) -> list[str]:
    """Queries and values; all linear layers of a model that does not have both."""
    # `base` is the frozen linear layer inside a `LoRALinear`
    names = [name.removesuffix(".base") for name in linear_layers(model)]
    has_both = all(_matches(pattern, names) for pattern in ATTENTION_TARGETS)
    return [*ATTENTION_TARGETS] if has_both else ["*"]


def check_options(rank: int, alpha: float, dropout: float) -> None:
    """Raise if an option of LoRA is out of range."""
    if not rank >= 1:
        raise ConfigError(f"lora: rank={rank} must be at least 1")
    require_positive("lora", alpha=alpha)
    if not 0 <= dropout < 1:
        raise ConfigError(f"lora: dropout={dropout} must lie in [0, 1)")


def add_lora(
    model: nn.Module, targets: Iterable[str], *, rank: int, alpha: float, dropout: float = 0.0
) -> list[str]:
    """Freeze a model and add LoRA to its linear layers whose names match one of the globs.

    Returns the names of these layers. They are replaced in the model; no other parameter changes.
    """
    targets, layers = list(targets), linear_layers(model)
    check_options(rank, alpha, dropout)
    if not targets:
        raise ConfigError("lora: targets=[] chooses no linear layer; leave out targets")
    names = [n for n in layers if any(fnmatchcase(n, pattern) for pattern in targets)]
    for pattern in targets:
        if not _matches(pattern, layers):
            patterns = dict.fromkeys(f"*.{name.rpartition('.')[2]}" for name in layers)
            raise ConfigError(
                f"lora: no linear layer matches targets={pattern!r}; this model has "
                f"{', '.join(patterns) or 'none'}"
            )
    model.requires_grad_(False)
    for name in names:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, LoRALinear(layers[name], rank, alpha, dropout))
    return names


def _matches(pattern: str, names: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def has_lora(model: nn.Module) -> bool:
    """Whether LoRA was added to a model."""
    return any(isinstance(module, LoRALinear) for module in model.modules())
