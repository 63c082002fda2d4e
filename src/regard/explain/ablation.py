"""Ablation of attention heads: the change of a loss without each head."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.explain.trace import ablate, matching_modules, trace
from regard.nn.attention import Attention
from regard.nn.state import Source


@torch.no_grad()
def head_effects(
    model: nn.Module,
    loss: Callable[[], Float[Tensor, ""]],
    *,
    pattern: str = "*",
    mean: bool = False,
) -> dict[str, Float[Tensor, " heads"]]:
    """Head ablation: the change in a loss when each head's output is replaced by 0 or its mean.

        effect_h = loss(without head h) - loss

    `loss` runs the model and returns a scalar; it is called once, and then once per head.
    """
    attentions = matching_modules(model, Attention, pattern, "attention module")
    original_loss = float(loss())
    effects = {}
    for name, attention in attentions.items():
        losses = []
        for head in range(attention.heads):
            with trace(model, (), edit={f"{name}.heads_hook": ablate(heads=[head], mean=mean)}):
                losses.append(float(loss()))
        effects[name] = torch.tensor(losses) - original_loss
    return effects


def next_token_loss(
    model: nn.Module, ids: Sequence[int], *, source: Source | None = None
) -> Callable[[], Float[Tensor, ""]]:
    """A loss for `head_effects`: the mean cross-entropy of every id but the first."""
    row = torch.tensor([ids], device=next(model.parameters()).device)
    arguments = {} if source is None else {"source": source}

    def loss() -> Tensor:
        logits = cast(Any, model.head)(model(row[:, :-1], **arguments)[0])
        return F.cross_entropy(logits.float(), row[0, 1:])

    return loss
