"""Attention maps: the attention weights of each query token over the key tokens."""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from regard.errors import ConfigError, RegardError
from regard.explain.token_map import (
    AttentionMap,
    AttentionMaps,
    Kind,
    ShownImage,
    StateMap,
    StateMaps,
)
from regard.explain.trace import check_indices, matching_modules, record, run_eagerly, trace
from regard.explain.words import Groups, merge_words, word_groups, words_of
from regard.nn.attention import Attention, AttentionInputs
from regard.nn.block import Stack
from regard.nn.recurrent import RecurrentLayer
from regard.nn.recurrent_attention import RecurrentAttention
from regard.nn.score import Dot
from regard.nn.soft_window import SoftWindow
from regard.nn.state import Source
from regard.tasks.vocab_info import encode_with_masks
from regard.text import PairTokenizers, Tokenizer

CHUNK_CELLS = 2**19  # weights that are computed at a time: they stay in the cache
MAX_VALUES = 2**30  # weights of one call of `attention_maps`: 4 GiB
NEEDS_ATTENTION = "explain needs a transformer, or a seq2seq model with model.score"


def has_attention(model: nn.Module) -> bool:
    """Whether any module of a model is an attention."""
    kinds = Attention | RecurrentAttention | SoftWindow
    return any(isinstance(module, kinds) for module in model.modules())


@torch.no_grad()
def attention_maps(
    model: nn.Module,
    run: Callable[[], object],
    *,
    pattern: str | Sequence[str] = "*",
    call: int | None = -1,
    heads: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
) -> dict[str, Float[Tensor, "batch heads time seen"]]:
    """The weights of every attention whose path matches `pattern`, in the last call `run` makes.

    >>> ids = torch.tensor([[1, 2, 3]])
    >>> maps = attention_maps(run.model, lambda: run.model(ids), pattern="decoder.*")
    >>> maps["decoder.blocks.0.attention"].shape  # (batch, heads, time, seen)
    torch.Size([1, 2, 3, 3])

    They are recomputed from the recorded q and k, so the model itself runs unchanged, with its
    fused kernel; a recurrent decoder computes them in its forward pass (`nn.recurrent_attention`).
    A row sums to 1, or to 0 where every key is masked. `heads` and `rows` (queries) choose some of
    them: computing one row costs only that row. Where layers share one attention module, `call` is
    the index of the layer; None keeps all calls, named `path#0`, `path#1` … if there are several.
    """
    modules: dict[str, nn.Module] = {}
    for each in [pattern] if isinstance(pattern, str) else pattern:
        kinds = (Attention, RecurrentAttention, SoftWindow)
        modules |= matching_modules(model, kinds, each, "attention")
    recordings: dict[str, list[_Recording]] = {name: [] for name in modules}
    with ExitStack() as stack:
        stack.enter_context(run_eagerly())
        for name, module in modules.items():
            for handle in _record(module, recordings[name], call):
                stack.callback(handle.remove)
        run()
    chosen: dict[str, tuple[nn.Module, _Recording]] = {}
    for name, calls in recordings.items():
        if call is None and len(calls) > 1:
            chosen |= {f"{name}#{index}": (modules[name], c) for index, c in enumerate(calls)}
        elif calls and (call is None or call < len(calls)):
            chosen[name] = (modules[name], calls[-1 if call is None else call])
    if not chosen:
        raise RegardError(f"`run` did not call {', '.join(modules)}; `run` must call this model")
    _check_memory([recording for _, recording in chosen.values()], heads, rows)
    return {
        name: _weights(module, recording, heads, rows).float()
        for name, (module, recording) in chosen.items()
    }


@dataclass(slots=True)
class _Recording:
    """The tensors that forward hooks recorded of one call of an attention module."""

    inputs: AttentionInputs | None = None
    q: Tensor | None = None
    k: Tensor | None = None
    weights: Tensor | None = None  # of a recurrent decoder, instead of the others

    @property
    def size(self) -> tuple[int, int, int, int]:
        """Batch, heads, queries and keys."""
        if self.weights is not None:
            return cast(tuple[int, int, int, int], tuple(self.weights.shape))
        assert self.q is not None and self.k is not None  # noqa: PT018
        return (*self.q.shape[:3], self.k.shape[2])


def _record(module: nn.Module, calls: list[_Recording], call: int | None) -> list[RemovableHandle]:
    """Register the hooks that record an attention module; with `call` -1 only the last call."""
    if isinstance(module, RecurrentAttention | SoftWindow):
        return [record(module.weights_hook, lambda out: calls.append(_Recording(weights=out)))]
    module = cast(Attention, module)

    def record_inputs(_: nn.Module, __: object, arguments: dict[str, Any]) -> None:
        if call == -1:
            calls.clear()
        calls.append(_Recording(inputs=arguments["inputs"]))

    def record_q(_: nn.Module, __: object, out: Tensor) -> None:
        calls[-1].q = out

    def record_k(_: nn.Module, __: object, out: Tensor) -> None:
        calls[-1].k = out

    return [
        module.register_forward_pre_hook(record_inputs, with_kwargs=True),
        module.q_hook.register_forward_hook(record_q),
        module.k_hook.register_forward_hook(record_k),
    ]


def _weights(
    module: nn.Module,
    recording: _Recording,
    heads: Sequence[int] | None,
    rows: Sequence[int] | None,
) -> Tensor:
    """The weights of some heads and rows, a few rows at a time: (batch, heads, rows, seen)."""
    batch, head_count, time, seen = recording.size
    check_indices(heads or (), head_count, "head")
    check_indices(rows or (), time, "row")
    chosen = list(range(head_count)) if heads is None else list(heads)
    queries = list(range(time)) if rows is None else list(rows)
    if recording.weights is not None:
        return recording.weights[:, chosen][:, :, queries]
    attention, q, k, inputs = cast(Attention, module), recording.q, recording.k, recording.inputs
    assert q is not None and k is not None and inputs is not None  # noqa: PT018
    last, group = list[int](), attention.heads // attention.kv_heads
    if not isinstance(attention.score, Dot):
        last, chosen = chosen, list(range(head_count))  # the score has parameters per head
    q, k = q[:, chosen], k[:, [head // group for head in chosen]]
    cells = batch * len(chosen) * seen * (1 if attention.score.fused else attention.head_dim)
    step = max(1, CHUNK_CELLS // max(cells, 1))
    out = q.new_zeros(batch, len(last or chosen), len(queries), seen)
    for first in range(0, len(queries), step):
        part = torch.tensor(queries[first : first + step], device=q.device)
        keys = seen
        if inputs.causal and not last:  # later keys have no weight; they are left out
            latest = inputs.query_positions[:, part].max()
            keys = int((inputs.key_positions <= latest).nonzero()[:, 1].max()) + 1
        some = _some_rows(inputs, part, chosen, keys)
        weights = attention.weights(q[:, :, part], k[:, :, :keys], some)
        out[:, :, first : first + step, :keys] = weights[:, last] if last else weights
    return out


def _some_rows(
    inputs: AttentionInputs, rows: Tensor, heads: list[int], keys: int
) -> AttentionInputs:
    """The inputs of attention for some queries and heads and, if causal, the first keys only."""
    positions, allowed, bias = inputs.query_positions[:, rows], inputs.allowed, inputs.bias
    key_positions = inputs.key_positions
    if inputs.causal:
        key_positions = key_positions[:, :keys]
        allowed = inputs.mask.dense(positions, key_positions)
    elif allowed is not None and allowed.shape[2] > 1:
        allowed = allowed[:, :, rows]
    if bias is not None:
        bias = (bias if bias.shape[1] == 1 else bias[:, heads])[:, :, rows]
    return replace(
        inputs,
        query_positions=positions,
        key_positions=key_positions,
        causal=False,
        allowed=allowed,
        bias=bias,
    )


def _check_memory(
    recordings: list[_Recording], heads: Sequence[int] | None, rows: Sequence[int] | None
) -> None:
    sizes = [
        (batch, count if heads is None else len(heads), time if rows is None else len(rows), seen)
        for batch, count, time, seen in (recording.size for recording in recordings)
    ]
    values = sum(math.prod(size) for size in sizes)
    if values > MAX_VALUES:
        raise ConfigError(
            f"{len(sizes)} maps of {' × '.join(map(str, sizes[0]))} weights (batch, heads, rows, "
            f"columns) need {4 * values / 2**30:.1f} GiB; choose layers, heads or rows"
        )


def text_stack(model: nn.Module) -> tuple[str, Stack]:
    """The stack of a Transformer that reads one text: its decoder, or else its encoder."""
    for side in ("decoder", "encoder"):
        stack = getattr(model, side, None)
        if isinstance(stack, Stack):
            return side, stack
    raise ConfigError(f"this model has no attention to show; {NEEDS_ATTENTION}")


def read_ids(model: nn.Module, tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text as the model reads them: with <cls> and <sep> for an encoder."""
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
    """The self-attention of a Transformer that reads `ids`: of some layers, or of all.

    `pattern` selects modules by path instead, as in "encoder.blocks.*". `segments` are those of
    two texts.
    """
    side, stack = text_stack(model)
    indices = list(range(len(stack.layers))) if layers is None else list(layers)
    check_indices(indices, len(stack.layers), "layer")
    batch = torch.tensor([ids], device=next(model.parameters()).device)
    inputs = {} if segments is None else {"segments": segments}
    shared = len(stack.blocks) < len(stack.layers)
    paths = [f"{side}.blocks.{index % len(stack.blocks)}.attention" for index in indices]
    maps = attention_maps(
        model,
        lambda: model(batch, **inputs),
        pattern=pattern or list(dict.fromkeys(paths)),
        call=indices[0] // len(stack.blocks) if len(indices) == 1 and shared else None,
        heads=heads,
        rows=rows,
    )
    if shared and pattern is None and len(indices) > 1:
        wanted = {
            f"{path}#{index // len(stack.blocks)}"
            for path, index in zip(paths, indices, strict=True)
        }
        maps = {name: weights for name, weights in maps.items() if name in wanted}
    sides = _Sides.of(tokenizer, ids, words)
    return _label(maps, lambda _: (sides, sides, "self"), heads, rows)


def cross_attention_path(model: nn.Module, layer: int | None = None) -> str:
    """The path of the module by which a decoder attends to the source, in one layer or hop."""
    hops = getattr(model, "attention", None)
    if isinstance(hops, nn.ModuleList) and len(hops):  # of a recurrent encoder-decoder
        index = len(hops) - 1 if layer is None else layer
        check_indices([index], len(hops), "hop")
        return f"attention.{index}"
    _, stack = text_stack(model)
    index = len(stack.layers) - 1 if layer is None else layer
    check_indices([index], len(stack.layers), "layer")
    return f"decoder.blocks.{index}.cross"


def pair_attention(
    model: nn.Module,
    tokenizers: PairTokenizers,
    source: Source,
    target: Sequence[int],
    *,
    pattern: str | Sequence[str] = "*",
    heads: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
    words: bool = False,
) -> AttentionMaps:
    """The attention of an encoder-decoder that predicts `target` from `source`: self and cross.

    `target` includes BOS and EOS. Rows of cross-attention are the predicted tokens;
    the decoder attends from and to the tokens that it has read.
    """
    ids = torch.tensor([target[:-1]], device=source.ids.device)
    maps = attention_maps(
        model,
        lambda: model(ids, source=source),
        pattern=pattern,
        heads=heads,
        rows=rows,
    )
    read = _Sides.of(tokenizers.target, target[:-1], words)
    predicted = _Sides.of(tokenizers.target, target[1:], words)
    encoded = _Sides.of(tokenizers.source, source.ids[0].tolist(), words)
    modules = dict(model.named_modules())

    def sides(name: str) -> tuple[_Sides, _Sides, Kind]:
        module = modules[name]
        if name.endswith(".cross") or isinstance(module, RecurrentAttention):
            return predicted, encoded, "cross"
        return (encoded, encoded, "self") if name.startswith("encoder") else (read, read, "self")

    return _label(maps, sides, heads, rows)


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
    config, stack = cast(Any, model).config, cast(Stack, model.encoder)
    indices = range(len(stack.layers)) if layers is None else layers
    check_indices(indices, len(stack.layers), "layer")
    maps = attention_maps(
        model,
        lambda: model(image.unsqueeze(0)),
        pattern=[f"encoder.blocks.{index}.attention" for index in indices],
        heads=heads,
        rows=rows,
    )
    height, width = (
        side // patch for side, patch in zip(image.shape[1:], config.patch_sides, strict=True)
    )
    patches = [f"{row},{column}" for row in range(height) for column in range(width)]
    side = _Sides(["<cls>"] * config.cls + patches, None)
    labelled = _label(maps, lambda _: (side, side, "self"), heads, rows)
    shown = ShownImage(pixels, (height, width), int(config.cls))
    return AttentionMaps({name: replace(each, image=shown) for name, each in labelled.items()})


@torch.no_grad()
def recurrent_states(
    model: nn.Module,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    run: Callable[[], object],
    *,
    pattern: str = "*",
) -> StateMaps:
    """The gates and the state of every recurrent layer at each token: tokens × units.

    One `StateMap` for each cell, with a matrix for each gate and one for the hidden state;
    `run` calls the model on `ids`. Cells run as explicit loops: the fused kernel has no gates.
    """
    cells = matching_modules(model, RecurrentLayer, pattern, "recurrent layer")
    hook_points = {
        name: [f"{name}.{gate}_hook" for gate in (*cell.hook_names, "state")]
        for name, cell in cells.items()
    }
    with trace(model, [path for names in hook_points.values() for path in names]) as activations:
        run()
    pieces, maps = list(map(tokenizer.piece, ids)), StateMaps()
    for name, names in hook_points.items():
        values = torch.stack([activations[path][0].float() for path in names])
        backward = name.endswith(".backward_layer")  # a backward cell reads the last token first
        gates = [path.removeprefix(f"{name}.").removesuffix("_hook") for path in names]
        units = [str(unit) for unit in range(values.shape[-1])]
        values = values.flip(1) if backward else values
        maps[name] = StateMap(pieces, units, values.cpu(), gates)
    return maps


@dataclass(frozen=True, slots=True)
class _Sides:
    """The labels of the rows or columns of a map; `groups`: the tokens of each word."""

    labels: list[str]
    groups: Groups | None

    @classmethod
    def of(cls, tokenizer: Tokenizer, ids: Sequence[int], words: bool) -> "_Sides":
        """Tokens, or words."""
        if not words:
            return cls(list(map(tokenizer.piece, ids)), None)
        groups = word_groups(tokenizer, ids)
        return cls(words_of(tokenizer, ids, groups), groups)


def _label(
    maps: dict[str, Tensor],
    sides: Callable[[str], tuple[_Sides, _Sides, Kind]],
    heads: Sequence[int] | None,
    rows: Sequence[int] | None,
) -> AttentionMaps:
    """Maps with the labels of their rows and columns, of the first sequence of the batch."""
    labelled = AttentionMaps()
    for name, weights in maps.items():
        row, column, kind = sides(name)
        weights = weights[0].cpu()
        labels = row.labels
        if row.groups is not None and column.groups is not None:
            if rows is not None:
                raise ConfigError("rows are indices of tokens; leave out words=True or rows")
            weights = merge_words(weights, row.groups, column.groups)
        elif rows is not None:
            labels = [labels[index] for index in rows]
        names = None if heads is None else [f"head {head}" for head in heads]
        labelled[name] = AttentionMap(labels, column.labels, weights, names, kind)
    return labelled
