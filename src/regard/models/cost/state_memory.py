"""The size of a decoding state: the KV cache of a Transformer, the hidden state of other models."""

from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from regard.models.cost.parts import (
    decoder_stack,
    non_transformer_body,
    qkv_widths,
    recurrent_attentions,
    visible_keys,
)
from regard.models.seq2seq import RecurrentEncoderDecoder
from regard.nn.head import ForecastHead, LMHead, LogProbHead
from regard.nn.recurrent import RecurrentLayer
from regard.nn.state import RecurrentState


@dataclass(frozen=True, slots=True)
class StateSize:
    """Floating-point values in the state of one row."""

    per_token: int = 0  # by which the KV cache grows; 0 for a state of fixed size
    full: int = 0  # at the whole context, with the keys and values of the source
    in_window: int = 0  # the part of `full` that sliding windows still attend to


def state_size(model: nn.Module, time: int) -> StateSize:
    """The state of a row of `time` tokens; all zeros for a model that does not generate."""
    decoder = decoder_stack(model)
    if isinstance(getattr(model, "head", None), ForecastHead):  # windows are read as a whole
        return StateSize()
    if decoder is None:
        fixed = _fixed_size(model, time)
        return StateSize(full=fixed, in_window=fixed)
    layers = [sum(qkv_widths(block.attention)[1:]) for block in decoder.layers]
    cross = time * sum(
        sum(qkv_widths(block.cross)[1:]) for block in decoder.layers if block.cross is not None
    )
    visible = [visible_keys(time, window) for window in decoder.windows]
    return StateSize(
        per_token=sum(layers),
        full=time * sum(layers) + cross,
        in_window=sum(size * keys for size, keys in zip(layers, visible, strict=True)) + cross,
    )


def _fixed_size(model: nn.Module, time: int) -> int:
    if isinstance(model, RecurrentEncoderDecoder):
        cells = sum(
            cell.state_vectors * cell.dim
            for cell in model.decoder
            if isinstance(cell, RecurrentLayer)
        )
        memory = time * sum(2 * attention.dim for attention in recurrent_attentions(model))
        return cells + model.config.dim * model.config.input_feeding + memory
    generates = isinstance(getattr(model, "head", None), LMHead | LogProbHead)
    if not generates or not hasattr(model, "start") or not non_transformer_body(model):
        return 0
    state = cast(Any, model).start(1, time)
    layers = state.layers if isinstance(state, RecurrentState) else []
    vectors = [vector for layer in layers for vector in layer]
    return sum(vector.numel() for vector in vectors if vector.is_floating_point())
