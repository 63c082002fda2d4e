"""Attention maps: the attention weights of each query token over the key tokens."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.errors import ConfigError, RegardError, ShapeError
from regard.explain.render.figure import check_suffix, encode, page, save
from regard.explain.render.maps import draw_maps, head_names, html_maps
from regard.explain.tables import data_frame
from regard.explain.trace import matching_modules
from regard.nn.attention import Attention, AttentionInputs
from regard.nn.block import Stack
from regard.nn.recurrent_attention import RecurrentAttention
from regard.nn.state import Source
from regard.tasks.vocab_info import encode_with_masks
from regard.text import PairTokenizers, Tokenizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


NEEDS_ATTENTION = "explain needs a transformer, or a seq2seq model with model.score"


def has_attention(model: nn.Module) -> bool:
    """Whether any module of a model is an attention."""
    return any(isinstance(module, Attention | RecurrentAttention) for module in model.modules())


@torch.no_grad()
def attention_maps(
    model: nn.Module, run: Callable[[], object], *, pattern: str = "*", call: int = -1
) -> dict[str, Float[Tensor, "batch heads time seen"]]:
    """The weights of every attention whose path matches `pattern`, in the last call `run` makes.

    >>> ids = torch.tensor([[1, 2, 3]])
    >>> maps = attention_maps(run.model, lambda: run.model(ids), pattern="decoder.*")
    >>> maps["decoder.blocks.0.attention"].shape  # (batch, heads, time, seen)
    torch.Size([1, 2, 3, 3])

    They are recomputed from the tapped q and k, so the model itself runs unchanged, with its fused
    kernel; a recurrent decoder computes them in its forward pass (`nn.recurrent_attention`). A row
    sums to 1, or to 0 where every key is masked. Where layers share one attention module, `call`
    is the index of the layer.
    """
    modules = matching_modules(model, (Attention, RecurrentAttention), pattern, "attention")
    recordings = {name: _Recording() for name in modules}
    with ExitStack() as stack:
        for name, module in modules.items():
            recording = recordings[name]
            if isinstance(module, RecurrentAttention):

                def record_weights(
                    _: nn.Module, __: object, out: Tensor, recording: _Recording = recording
                ) -> None:
                    recording.weights = out

                stack.callback(module.weights_tap.register_forward_hook(record_weights).remove)
                continue
            module = cast(Attention, module)

            def record_inputs(
                _: nn.Module,
                __: object,
                arguments: dict[str, Any],
                recording: _Recording = recording,
            ) -> None:
                recording.calls += 1
                recording.active = call in (-1, recording.calls - 1)
                if recording.active:
                    recording.inputs = arguments["inputs"]

            def record_q(
                _: nn.Module, __: object, out: Tensor, recording: _Recording = recording
            ) -> None:
                recording.q = out if recording.active else recording.q

            def record_k(
                _: nn.Module, __: object, out: Tensor, recording: _Recording = recording
            ) -> None:
                recording.k = out if recording.active else recording.k

            stack.callback(module.register_forward_pre_hook(record_inputs, with_kwargs=True).remove)
            stack.callback(module.q_tap.register_forward_hook(record_q).remove)
            stack.callback(module.k_tap.register_forward_hook(record_k).remove)
        run()
    for name, recording in recordings.items():
        if recording.inputs is not None:
            assert recording.q is not None and recording.k is not None  # noqa: PT018
            attention = cast(Attention, modules[name])
            recording.weights = attention.weights(recording.q, recording.k, recording.inputs)
    maps = {
        name: recording.weights.float()
        for name, recording in recordings.items()
        if recording.weights is not None
    }
    if not maps:
        raise RegardError(f"`run` did not call {', '.join(modules)}; `run` must call this model")
    return maps


@dataclass(slots=True)
class _Recording:
    """The tensors that forward hooks recorded of one attention module."""

    calls: int = 0
    active: bool = False  # whether the current call is recorded
    inputs: AttentionInputs | None = None
    q: Tensor | None = None
    k: Tensor | None = None
    weights: Tensor | None = None


@dataclass(frozen=True, slots=True, repr=False)
class AttentionMap:
    """The attention weights of one sequence with its tokens: rows attend to columns."""

    rows: list[str]
    columns: list[str]
    weights: Float[Tensor, "heads rows columns"]

    def __post_init__(self) -> None:
        size = (len(self.rows), len(self.columns))
        if self.weights.shape[1:] != size:
            raise ShapeError(
                f"{size[0]} row and {size[1]} column labels do not match weights of shape "
                f"{tuple(self.weights.shape)}"
            )

    @classmethod
    def from_batch(
        cls,
        weights: Float[Tensor, "batch heads time seen"],
        rows: Sequence[str],
        columns: Sequence[str],
        *,
        index: int = 0,
    ) -> "AttentionMap":
        """The map of sequence `index` of a batch, without the padding beyond its labels."""
        unpadded = weights[index, :, : len(rows), : len(columns)]
        return cls(list(rows), list(columns), unpadded)

    def __repr__(self) -> str:
        heads, rows, columns = self.weights.shape
        return f"AttentionMap({heads} heads, {rows} × {columns} tokens)"

    def _repr_html_(self) -> str:
        return html_maps(self.weights, self.rows, self.columns)

    def mean(self) -> Float[Tensor, "rows columns"]:
        """The average over heads."""
        return self.weights.mean(0)

    def figure(self, head: int | None = None) -> "Figure":
        """All heads side by side, or one of them, as a matplotlib figure."""
        weights, headings = self._heads(head)
        return draw_maps(weights, self.rows, self.columns, headings=headings)

    def save(self, path: Path | str, head: int | None = None) -> None:
        """Write all heads or one of them as .svg, .png, .pdf or .html, by the suffix of `path`."""
        suffix = Path(path).suffix
        check_suffix(suffix)
        if suffix != ".html":
            save(encode(self.figure(head), suffix), path)
            return
        weights, headings = self._heads(head)
        maps = html_maps(weights, self.rows, self.columns, headings=headings)
        save(page("attention", maps).encode(), path)

    def to_pandas(self, head: int | None = None) -> "DataFrame":
        """The weights of one head, or their mean, as a table of row tokens × column tokens."""
        weights = self.mean() if head is None else self._heads(head)[0][0]
        return data_frame(weights.tolist(), index=self.rows, columns=self.columns)

    def _heads(self, head: int | None) -> tuple[Tensor, list[str]]:
        """The weights of all heads or of one, and their headings."""
        names = head_names(len(self.weights))
        if head is None:
            return self.weights, names
        if not 0 <= head < len(names):
            raise ConfigError(f"head {head}: there are {len(names)} heads, 0 to {len(names) - 1}")
        return self.weights[head : head + 1], names[head : head + 1]


class AttentionMaps(dict[str, AttentionMap]):
    """The attention maps of several modules by path; a notebook shows each."""

    def _repr_html_(self) -> str:
        parts = (f"<p>{escape(name)}</p>{each._repr_html_()}" for name, each in self.items())
        return "".join(parts)


def self_attention(
    model: nn.Module,
    tokenizer: Tokenizer,
    text: str,
    *,
    layer: int | None = None,
    pattern: str | None = None,
) -> AttentionMaps:
    """The self-attention of a Transformer that reads `text`: of one layer, by default the last.

    `pattern` selects modules by path instead, as in "encoder.blocks.*".
    """
    side, stack = _main_stack(model)
    number = _check_index(layer, len(stack.layers), "layers")
    if not text:
        raise ConfigError("the text is empty; attention maps need at least one token")
    if side == "encoder":
        ids, _ = encode_with_masks(tokenizer, text)
    else:
        ids = [*tokenizer.prefix_ids, *tokenizer.encode(text)]
    batch = torch.tensor([ids], device=next(model.parameters()).device)
    shared = len(stack.blocks) == 1
    maps = attention_maps(
        model,
        lambda: model(batch),
        pattern=pattern or f"{side}.blocks.{0 if shared else number}.attention",
        call=number if shared else -1,
    )
    pieces = [tokenizer.piece(id) for id in ids]
    return AttentionMaps(
        {name: AttentionMap(pieces, pieces, weights[0]) for name, weights in maps.items()}
    )


def cross_attention_path(model: nn.Module, layer: int | None = None) -> str:
    """The path of the module by which a decoder attends to the source, in one layer or hop."""
    hops = getattr(model, "attention", None)
    if isinstance(hops, nn.ModuleList) and len(hops):  # of a recurrent encoder-decoder
        return f"attention.{_check_index(layer, len(hops), 'hops')}"
    _, stack = _main_stack(model)
    return f"decoder.blocks.{_check_index(layer, len(stack.layers), 'layers')}.cross"


def pair_attention(
    model: nn.Module,
    tokenizers: PairTokenizers,
    source: Source,
    target: Sequence[int],
    *,
    pattern: str,
) -> AttentionMaps:
    """The attention of an encoder-decoder that predicts `target` from `source`.

    `target` includes the start and stop tokens. Rows of cross-attention are the predicted tokens.
    """
    ids = torch.tensor([target[:-1]], device=source.ids.device)
    maps = attention_maps(model, lambda: model(ids, source=source), pattern=pattern)
    target_pieces = list(map(tokenizers.target.piece, target[1:]))
    source_pieces = list(map(tokenizers.source.piece, source.ids[0].tolist()))
    modules = dict(model.named_modules())
    labelled = AttentionMaps()
    for name, weights in maps.items():
        cross = ".cross" in name or isinstance(modules[name], RecurrentAttention)
        in_encoder = name.startswith("encoder")
        rows = source_pieces if in_encoder and not cross else target_pieces
        columns = source_pieces if in_encoder or cross else target_pieces
        labelled[name] = AttentionMap(rows, columns, weights[0])
    return labelled


def _main_stack(model: nn.Module) -> tuple[str, Stack]:
    """The decoder of a Transformer, or its encoder where it has no decoder."""
    for side in ("decoder", "encoder"):
        stack = getattr(model, side, None)
        if isinstance(stack, Stack):
            return side, stack
    raise ConfigError(f"this model has no attention to show; {NEEDS_ATTENTION}")


def _check_index(index: int | None, count: int, what: str) -> int:
    """`index`, by default the last, if there is such a layer or hop."""
    number = count - 1 if index is None else index
    if not 0 <= number < count:
        raise ConfigError(f"layer {number}: the model has {count} {what}, 0 to {count - 1}")
    return number
