"""Attention maps: how much each token looks at each other one."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.errors import RegardError, ShapeError
from regard.explain.trace import matching, trace
from regard.nn.attention import Attention, View


@torch.no_grad()
def attention_maps(
    model: nn.Module, run: Callable[[], object], *, pattern: str = "*"
) -> dict[str, Float[Tensor, "batch heads time seen"]]:
    """The weights of every attention whose path matches `pattern`, in the last call `run` makes.

        maps = attention_maps(model, lambda: model(ids, source=source), pattern="*.cross")
        maps["decoder.blocks.3.cross"]                     # (batch, heads, target, source)

    They are recomputed from the tapped q and k by the formula, so the model runs as it always
    does, fused kernel included. A row sums to 1, or to 0 where there was nothing to look at.
    """
    watched = matching(model, Attention, pattern, "attention")
    views: dict[str, View] = {}
    with ExitStack() as stack:
        taps = {
            name: stack.enter_context(trace(module, "[qk]_tap")) for name, module in watched.items()
        }
        for name, module in watched.items():

            def look(_: nn.Module, __: object, given: dict[str, Any], name: str = name) -> None:
                views[name] = given["view"]

            hook = module.register_forward_pre_hook(look, with_kwargs=True)
            stack.callback(hook.remove)
        run()
    if not views:
        raise RegardError(f"nothing ran through {', '.join(watched)}; `run` must call this model")
    return {
        name: watched[name].weights(taps[name]["q_tap"], taps[name]["k_tap"], view).float()
        for name, view in views.items()
    }


@dataclass(frozen=True, slots=True)
class AttentionMap:
    """One sentence's attention with its words: rows look at columns."""

    rows: list[str]
    columns: list[str]
    weights: Float[Tensor, "heads rows columns"]

    def __post_init__(self) -> None:
        size = (len(self.rows), len(self.columns))
        if self.weights.shape[1:] != size:
            raise ShapeError(
                f"{size[0]} row and {size[1]} column labels do not fit weights of "
                f"{tuple(self.weights.shape)}"
            )

    @classmethod
    def of(
        cls,
        weights: Float[Tensor, "batch heads time seen"],
        rows: Sequence[str],
        columns: Sequence[str],
        *,
        sentence: int = 0,
    ) -> "AttentionMap":
        """The map of one sentence of a batch, without the padding beyond its labels."""
        own = weights[sentence, :, : len(rows), : len(columns)]
        return cls(list(rows), list(columns), own)

    def mean(self) -> Float[Tensor, "rows columns"]:
        """The average over heads."""
        return self.weights.mean(0)
