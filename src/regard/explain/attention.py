"""Attention maps: how much each token looks at each other one."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.errors import RegardError, ShapeError
from regard.explain.trace import matching
from regard.nn.attention import Attention, AttentionInputs
from regard.nn.recurrent_attention import RecurrentAttention


@torch.no_grad()
def attention_maps(
    model: nn.Module, run: Callable[[], object], *, pattern: str = "*", call: int = -1
) -> dict[str, Float[Tensor, "batch heads time seen"]]:
    """The weights of every attention whose path matches `pattern`, in the last call `run` makes.

        maps = attention_maps(model, lambda: model(ids, source=source), pattern="*.cross")
        maps["decoder.blocks.3.cross"]                     # (batch, heads, target, source)

    They are recomputed from the tapped q and k by the formula, so the model runs as it always
    does, fused kernel included; a recurrent decoder has them at hand
    (`nn.recurrent_attention`). A row sums to 1, or to 0 where there was nothing to look at.
    Where layers share an attention, `call` is the number of the layer.
    """
    watched = matching(model, (Attention, RecurrentAttention), pattern, "attention")
    looks = {name: _Look() for name in watched}
    with ExitStack() as stack:
        for name, module in watched.items():
            look = looks[name]
            if isinstance(module, RecurrentAttention):

                def weights(_: nn.Module, __: object, out: Tensor, look: _Look = look) -> None:
                    look.weights = out

                stack.callback(module.weights_tap.register_forward_hook(weights).remove)
                continue
            module = cast(Attention, module)

            def began(_: nn.Module, __: object, given: dict[str, Any], look: _Look = look) -> None:
                look.calls += 1
                look.wanted = call in (-1, look.calls - 1)
                look.inputs = given["inputs"] if look.wanted else look.inputs

            def q(_: nn.Module, __: object, out: Tensor, look: _Look = look) -> None:
                look.q = out if look.wanted else look.q

            def k(_: nn.Module, __: object, out: Tensor, look: _Look = look) -> None:
                look.k = out if look.wanted else look.k

            stack.callback(module.register_forward_pre_hook(began, with_kwargs=True).remove)
            stack.callback(module.q_tap.register_forward_hook(q).remove)
            stack.callback(module.k_tap.register_forward_hook(k).remove)
        run()
    for name, look in looks.items():
        if look.inputs is not None:
            attention = cast(Attention, watched[name])
            look.weights = attention.weights(look.q, look.k, look.inputs)  # type: ignore[arg-type]
    found = {n: look.weights.float() for n, look in looks.items() if look.weights is not None}
    if not found:
        raise RegardError(f"nothing ran through {', '.join(watched)}; `run` must call this model")
    return found


@dataclass(slots=True)
class _Look:
    """What passed through one attention in the call that is wanted."""

    calls: int = 0
    wanted: bool = False
    inputs: AttentionInputs | None = None
    q: Tensor | None = None
    k: Tensor | None = None
    weights: Tensor | None = None


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
