"""Access to the parts of a model whose FLOPs and memory are estimated."""

from torch import nn

from regard.nn.attention import Attention
from regard.nn.block import Stack
from regard.nn.recurrent_attention import RecurrentAttention

FLOAT32_BYTES, BFLOAT16_BYTES = 4, 2  # bytes of a value


def stacks(model: nn.Module) -> list[Stack]:
    """The Transformer stacks: encoder, decoder or both; none in other models."""
    return [module for module in model.children() if isinstance(module, Stack)]


def decoder_stack(model: nn.Module) -> Stack | None:
    """The Transformer decoder, if there is one."""
    decoder = getattr(model, "decoder", None)
    return decoder if isinstance(decoder, Stack) else None


def non_transformer_body(model: nn.Module) -> nn.Module | None:
    """All modules but the head of a model without Transformer stacks; None for a Transformer."""
    modules = [module for name, module in model.named_children() if name != "head"]
    return None if stacks(model) else nn.ModuleList(modules)


def recurrent_attentions(model: nn.Module) -> list[RecurrentAttention]:
    """The attention layers of a recurrent encoder-decoder."""
    return [module for module in model.modules() if isinstance(module, RecurrentAttention)]


def qkv_widths(attention: Attention) -> tuple[int, int, int]:
    """The widths of the query, key and value projections, over all heads."""
    query, key, value = attention.query, attention.key, attention.value
    return query.out_features, key.out_features, value.out_features


def visible_keys(time: int, window: int | None, *, bidirectional: bool = False) -> int:
    """The maximum number of keys that a query attends to in a row of `time` tokens."""
    if window is None:
        return time
    return min(time, 2 * window - 1 if bidirectional else window)
