"""Attention maps and recurrent states with the tokens, words or patches that they belong to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from regard.errors import ConfigError
from regard.explain.attention import attention_maps, layer_path, text_stack
from regard.explain.image_attention import ImageAttentionMap
from regard.explain.render.token_text import head_names
from regard.explain.token_map import (
    AttentionMap,
    AttentionMaps,
    Kind,
    PatchGridImage,
    StateMap,
    StateMaps,
)
from regard.explain.trace import check_indices, matching_modules, trace
from regard.explain.words import Groups, merge_words, word_groups, words_of
from regard.models.base import is_prefix_lm
from regard.nn.attention import Mask
from regard.nn.block import Stack
from regard.nn.recurrent import RecurrentLayer
from regard.nn.recurrent_attention import RecurrentAttention
from regard.nn.state import ImageSource, Source
from regard.tasks.vocab_info import encode_with_masks
from regard.text import Tokenizer


@dataclass(frozen=True, slots=True)
class AxisLabels:
    """The labels of the rows or columns of a map; `groups` are the positions of each label."""

    labels: list[str]
    groups: Groups

    @classmethod
    def of(cls, tokenizer: Tokenizer, ids: Sequence[int], words: bool) -> "AxisLabels":
        """The labels of tokens, or of words."""
        if not words:
            return cls.per_position(list(map(tokenizer.piece, ids)))
        groups = word_groups(tokenizer, ids)
        return cls(words_of(tokenizer, ids, groups), groups)

    @classmethod
    def of_patches(cls, grid: tuple[int, int], class_token: bool = False) -> "AxisLabels":
        """The row and column of each patch of an image, after a class token."""
        height, width = grid
        patches = [f"{row},{column}" for row in range(height) for column in range(width)]
        return cls.per_position(["<cls>"] * class_token + patches)

    @classmethod
    def per_position(cls, labels: list[str]) -> "AxisLabels":
        """One label for each position."""
        return cls(labels, [[index] for index in range(len(labels))])


def encode_input(model: nn.Module, tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode a text as input of the model: with <cls> and <sep> for an encoder."""
    if not text:
        raise ConfigError("the text is empty; give at least one token")
    if getattr(model, "decoder", None) is None and isinstance(
        getattr(model, "encoder", None), Stack
    ):
        return encode_with_masks(tokenizer, text)[0]
    return [*tokenizer.prefix_ids, *tokenizer.encode(text)]


def self_attention(
    model: nn.Module,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    *,
    layers: Sequence[int] | None = None,
    pattern: str | None = None,
    heads: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
    words: bool = False,
    segments: Int[Tensor, "1 time"] | None = None,
) -> AttentionMaps:
    """The self-attention of a Transformer that reads `ids`, in all layers or some of them.

    `pattern` selects modules by path instead, as in "encoder.blocks.*". `segments` are the segment
    ids of a pair of texts. A prefix LM reads the ids as it reads a prompt, bidirectionally.
    """
    paths = _layer_paths(*text_stack(model), layers)
    batch = torch.tensor([ids], device=next(model.parameters()).device)
    inputs: dict[str, Any] = {} if segments is None else {"segments": segments}
    if is_prefix_lm(model):
        inputs["mask"] = Mask.prefix(torch.tensor([len(ids)], device=batch.device))
    maps = attention_maps(
        model,
        lambda: model(batch, **inputs),
        pattern=pattern or paths,
        call=None,
        heads=heads,
        rows=rows,
    )
    labels = AxisLabels.of(tokenizer, ids, words)
    return _label(maps, lambda _: (labels, labels, "self"), heads, rows, words)


def _layer_paths(side: str, stack: Stack, layers: Sequence[int] | None) -> list[str]:
    """The paths of the self-attention modules of some layers; None: all layers."""
    indices = range(len(stack.layers)) if layers is None else layers
    return [layer_path(side, stack, index) for index in indices]


def cross_attention_path(model: nn.Module, layer: int | None = None) -> str:
    """The path of the cross-attention of one layer or hop of a decoder, by default the last."""
    hops = getattr(model, "attention", None)
    if isinstance(hops, nn.ModuleList) and len(hops):  # a recurrent encoder-decoder
        index = len(hops) - 1 if layer is None else layer
        check_indices([index], len(hops), "hop")
        return f"attention.{index}"
    side, stack = text_stack(model)
    return layer_path(side, stack, len(stack.layers) - 1 if layer is None else layer, "cross")


def encoder_decoder_attention(
    model: nn.Module,
    source: Source | ImageSource,
    source_labels: AxisLabels,
    tokenizer: Tokenizer,
    target: Sequence[int],
    *,
    pattern: str | Sequence[str] = "*",
    heads: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
    words: bool = False,
    image: PatchGridImage | None = None,
) -> AttentionMaps:
    """The self- and cross-attention of an encoder-decoder that predicts `target` from `source`.

    `target` includes BOS and EOS; `source_labels` are the labels of the encoder's outputs.
    `image` is drawn under the maps whose columns are its regions. The rows of cross-attention are
    the predicted tokens; the rows and columns of the decoder's self-attention are its input tokens.
    """
    ids = torch.tensor([target[:-1]], device=next(model.parameters()).device)
    maps = attention_maps(
        model,
        lambda: model(ids, source=source),
        pattern=pattern,
        call=None,
        heads=heads,
        rows=rows,
    )
    inputs = AxisLabels.of(tokenizer, target[:-1], words)
    predicted = AxisLabels.of(tokenizer, target[1:], words)
    modules = dict(model.named_modules())

    def axis_labels(name: str) -> tuple[AxisLabels, AxisLabels, Kind]:
        path, _, _ = name.partition("#")
        if path.endswith(".cross") or isinstance(modules[path], RecurrentAttention):
            return predicted, source_labels, "cross"
        labels = source_labels if path.startswith("encoder") else inputs
        return labels, labels, "self"

    labelled = _label(maps, axis_labels, heads, rows, words)
    if image is not None:
        for name, token_map in labelled.items():
            if token_map.kind == "cross" or name.startswith("encoder"):
                labelled[name] = on_image(token_map, image)
    return labelled


def image_attention(
    model: nn.Module,
    image: Float[Tensor, "channels height width"],
    pixels: UInt8[Tensor, "channels height width"],
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
) -> AttentionMaps:
    """The self-attention of a Vision Transformer between the patches of an image.

    `image` is normalized as the model reads it, `pixels` is shown. A patch is named by its row and
    column in the grid of patches.
    """
    config = cast(Any, model).config
    maps = attention_maps(
        model,
        lambda: model(image.unsqueeze(0)),
        pattern=_layer_paths("encoder", cast(Stack, model.encoder), layers),
        call=None,
        heads=heads,
        rows=rows,
    )
    height, width = (
        side // patch for side, patch in zip(image.shape[1:], config.patch_sides, strict=True)
    )
    labels = AxisLabels.of_patches((height, width), config.cls)
    labelled = _label(maps, lambda _: (labels, labels, "self"), heads, rows)
    shown_image = PatchGridImage(pixels, (height, width), int(config.cls))
    for name, token_map in labelled.items():
        labelled[name] = on_image(token_map, shown_image)
    return labelled


def on_image(token_map: AttentionMap, image: PatchGridImage) -> ImageAttentionMap:
    """The map with the image whose regions are its columns."""
    fields = (token_map.rows, token_map.columns, token_map.values, token_map.names)
    return ImageAttentionMap(*fields, token_map.kind, image)


@torch.no_grad()
def recurrent_states(
    model: nn.Module,
    tokens_of: Callable[[str], list[str]],
    run: Callable[[], object],
    *,
    pattern: str = "*",
) -> StateMaps:
    """The gates and the state of every recurrent layer at each token: tokens × units.

    One `StateMap` for each cell, with a matrix for each gate and one for the hidden state. `run`
    calls the model; `tokens_of` returns the tokens that the cell at a path reads, in their order.
    Cells run as explicit loops, since the fused kernel does not expose the gates.
    """
    cells = matching_modules(model, RecurrentLayer, pattern, "recurrent layer")
    hook_points = {
        name: [f"{name}.{gate}_hook" for gate in (*cell.hook_names, "state")]
        for name, cell in cells.items()
    }
    with trace(model, [path for names in hook_points.values() for path in names]) as activations:
        run()
    maps = StateMaps()
    for name, names in hook_points.items():
        values = torch.stack([activations[path][0].float() for path in names])
        backward = name.endswith(".backward_layer")  # a backward cell reads the last token first
        gates = [path.removeprefix(f"{name}.").removesuffix("_hook") for path in names]
        units = [str(unit) for unit in range(values.shape[-1])]
        values = values.flip(1) if backward else values
        maps[name] = StateMap(tokens_of(name), units, values.cpu(), gates)
    return maps


def _label(
    maps: dict[str, Tensor],
    axis_labels: Callable[[str], tuple[AxisLabels, AxisLabels, Kind]],
    heads: Sequence[int] | None,
    rows: Sequence[int] | None,
    words: bool = False,
) -> AttentionMaps:
    """The maps of the first sequence of the batch, with the labels of their rows and columns."""
    if words and rows is not None:
        raise ConfigError("rows are indices of tokens; leave out words=True or rows")
    labelled = AttentionMaps()
    for name, weights in maps.items():
        row, column, kind = axis_labels(name)
        weights = weights[0].cpu()
        row_labels = row.labels if rows is None else [row.labels[index] for index in rows]
        if words:
            weights = merge_words(weights, row.groups, column.groups)
        names = None if heads is None else head_names(heads)
        labelled[name] = AttentionMap(row_labels, column.labels, weights, names, kind)
    return labelled
