"""One layer of a Transformer."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.errors import ConfigError
from regard.nn.attention import Attention, AttentionInputs
from regard.nn.residual import NormOrder, residual
from regard.nn.state import KVCache
from regard.nn.tap import Carry, Tap


class Block(nn.Module):
    """One layer: self-attention, cross-attention to `memory` if there is one, feed-forward.

    `norm_order` places the norms; see `nn.residual`.
    """

    def __init__(
        self,
        attention: Attention,
        ffn: nn.Module,
        norm: Callable[[], nn.Module],
        norm_order: NormOrder,
        cross: Attention | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if norm_order.parallel and cross is not None:
            raise ConfigError(
                f"norm_order={norm_order.kind!r} does not support cross-attention; "
                "an encoder-decoder needs pre, post, sandwich, deepnorm or none"
            )
        after = norm if norm_order.kind == "sandwich" else lambda: None
        self.attention, self.attention_norm, self.attention_after = attention, norm(), after()
        if cross is not None:
            self.cross_norm, self.cross_after = norm(), after()
        self.cross = cross
        self.ffn, self.ffn_after = ffn, after()
        self.ffn_norm = None if norm_order.kind == "parallel" else norm()
        self.norm_order, self.dropout = norm_order, dropout
        self.carry, self.out_tap = Carry(), Tap()

    def forward(
        self,
        x: Float[Tensor, "batch time dim"],
        memory: Float[Tensor, "batch seen dim"] | None = None,
        *,
        inputs: AttentionInputs,
        memory_inputs: AttentionInputs | None = None,
        state: KVCache | None = None,
        memory_kv: tuple[Tensor, Tensor] | None = None,
    ) -> Float[Tensor, "batch time dim"]:
        """The residual stream after this layer."""
        x, drop = self.carry(x), self._drop
        if self.norm_order.parallel:
            normed = self.attention_norm(x)
            attended = self.attention(normed, inputs=inputs, state=state)
            ffn = self.ffn(normed if self.ffn_norm is None else self.ffn_norm(x))
            return self.out_tap(x + drop(attended) + drop(ffn))
        assert self.ffn_norm is not None
        x = residual(
            x,
            lambda x: drop(self.attention(x, inputs=inputs, state=state)),
            self.attention_norm,
            self.norm_order,
            self.attention_after,
        )
        if self.cross is not None:
            cross = self.cross
            assert memory_inputs is not None
            x = residual(
                x,
                lambda x: drop(cross(x, memory, inputs=memory_inputs, memory_kv=memory_kv)),
                self.cross_norm,
                self.norm_order,
                self.cross_after,
            )
        x = residual(x, lambda x: drop(self.ffn(x)), self.ffn_norm, self.norm_order, self.ffn_after)
        return self.out_tap(x)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x

    if TYPE_CHECKING:
        __call__ = forward
