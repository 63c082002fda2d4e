"""A stack of blocks with its position encoding: an encoder or a decoder without embedding."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.nn.attention import AttentionInputs
from regard.nn.block import Block
from regard.nn.mask import Mask
from regard.nn.position import Position
from regard.nn.state import TransformerState


class Stack(nn.Module):
    """Add positions, apply the blocks, and the final norm where `norm_order` needs one.

    `windows` holds the sliding window of each layer (None: all positions), and so the number of
    layers; with fewer blocks, they are reused in order (ALBERT has one). `project` maps embeddings
    of another width to dim.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        position: Position,
        *,
        windows: Sequence[int | None],
        embed_norm: nn.Module | None = None,
        project: nn.Module | None = None,
        norm: nn.Module | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.position = position
        self.embed_norm = embed_norm
        self.project = project
        self.blocks = nn.ModuleList(blocks)
        self.windows = tuple(windows)
        self.norm = norm
        self.dropout = dropout

    @property
    def layers(self) -> list[Block]:
        """The block of each layer, in order."""
        blocks = cast(list[Block], list(self.blocks))
        return [blocks[number % len(blocks)] for number in range(len(self.windows))]

    def forward(
        self,
        x: Float[Tensor, "batch time width"],
        *,
        positions: Int[Tensor, "#batch time"],
        mask: Mask,
        memory: Float[Tensor, "batch source dim"] | None = None,
        memory_mask: Mask | None = None,
        state: TransformerState | None = None,
    ) -> Float[Tensor, "batch time dim"]:
        """The output of the last layer. `state` holds the KV cache of earlier tokens."""
        embedded = None if self.position.each_layer else self.position.embed(positions)
        if embedded is not None:
            x = x + embedded.to(x.dtype)
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        x = F.dropout(x, self.dropout, self.training)
        if torch.is_autocast_enabled(x.device.type):  # the residual stream too
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if self.project is not None:
            x = self.project(x)

        key_positions = None
        if state is not None and (seen := state.length_after(x.shape[1])) > x.shape[1]:
            key_positions = torch.arange(seen, device=x.device).unsqueeze(0)
        inputs_by_window = {
            window: AttentionInputs.of(
                _in_window(mask, window), positions, key_positions, self.position
            )
            for window in set(self.windows)
        }
        memory_inputs = None
        if memory_mask is not None:
            seen = memory.shape[1] if memory is not None else state.memory[0][0].shape[2]  # type: ignore[union-attr, index]
            memory_inputs = AttentionInputs.of(
                memory_mask, positions, torch.arange(seen, device=x.device).unsqueeze(0)
            )
        for number, block in enumerate(self.layers):
            x = block(
                x,
                memory,
                inputs=inputs_by_window[self.windows[number]],
                memory_inputs=memory_inputs,
                state=None if state is None else state.layers[number],
                memory_kv=None if state is None or state.memory is None else state.memory[number],
            )
        if self.norm is not None:
            x = self.norm(x)
        return x

    if TYPE_CHECKING:
        __call__ = forward


def _in_window(mask: Mask, window: int | None) -> Mask:
    return mask if window is None else mask & Mask.window(window)
