"""Attention maps: the attention weights of each query token over the key tokens."""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from regard.errors import ConfigError, RegardError
from regard.explain.trace import (
    check_indices,
    list_available,
    matching_modules,
    record,
    run_eagerly,
)
from regard.nn.attention import Attention, AttentionInputs
from regard.nn.block import Stack
from regard.nn.recurrent_attention import RecurrentAttention
from regard.nn.soft_window import SoftWindow

ATTENTION_MODULES = (Attention, RecurrentAttention, SoftWindow)
CHUNK_WEIGHTS = 2**22  # weights computed at a time (16 MiB); smaller chunks leave threads idle
MAX_WEIGHTS = 2**30  # weights that one call of `attention_maps` may return (4 GiB)


def has_attention(model: nn.Module) -> bool:
    """Whether a model has an attention module."""
    return any(isinstance(module, ATTENTION_MODULES) for module in model.modules())


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
    """Call `run` and return the weights of the attention modules whose paths match `pattern`.

    >>> ids = torch.tensor([[1, 2, 3]])
    >>> maps = attention_maps(run.model, lambda: run.model(ids), pattern="decoder.*")
    >>> maps["decoder.blocks.0.attention"].shape  # (batch, heads, time, seen)
    torch.Size([1, 2, 3, 3])

    The weights are recomputed from the recorded q and k, so the model itself runs unchanged, with
    its fused kernel; a recurrent decoder computes them in its forward pass
    (`nn.recurrent_attention`). A row sums to 1, or to 0 where every key is masked. `heads` and
    `rows` (queries) select some of them: computing one row costs only that row. `call` is the index
    of the call whose weights are returned, by default the last; where layers share one attention
    module, it is the index of the layer. None returns all calls, named `path#0`, `path#1` … if
    there are several, or those whose names match, as in `decoder.blocks.0.attention#10`.
    """
    patterns = [pattern] if isinstance(pattern, str) else pattern
    modules: dict[str, nn.Module] = {}
    for path in patterns:
        modules |= matching_modules(
            model, ATTENTION_MODULES, path.partition("#")[0], "attention module"
        )
    recordings: dict[str, list[_Recording]] = {name: [] for name in modules}
    with ExitStack() as stack:
        stack.enter_context(run_eagerly())
        for name, module in modules.items():
            for handle in _record(module, recordings[name], call):
                stack.callback(handle.remove)
        run()
    if not any(recordings.values()):
        raise RegardError(f"`run` did not call {', '.join(modules)}; `run` must call this model")
    if call is None:
        selected = _matching_calls(recordings, patterns)
    else:
        count = max(map(len, recordings.values()))
        if call < -count or call >= 0:  # a negative one counts from the last call
            check_indices([call], count, "call")
        selected = {
            name: (name, calls[call])
            for name, calls in recordings.items()
            if -len(calls) <= call < len(calls)
        }
    _check_memory([recording for _, recording in selected.values()], heads, rows)
    return {
        key: _weights(modules[name], recording, heads, rows).float()
        for key, (name, recording) in selected.items()
    }


def _matching_calls(
    recordings: dict[str, "list[_Recording]"], patterns: Sequence[str]
) -> dict[str, tuple[str, "_Recording"]]:
    """The path of the module and the recording of each call that matches, by the call's name."""
    calls = {
        f"{path}#{index}": (path, recording)
        for path, all_calls in recordings.items()
        for index, recording in enumerate(all_calls)
    }
    selected: dict[str, tuple[str, _Recording]] = {}
    for pattern in patterns:
        matches = {
            name if len(recordings[path]) > 1 else path: (path, recording)
            for name, (path, recording) in calls.items()
            if fnmatchcase(path, pattern) or fnmatchcase(name, pattern)
        }
        if "#" in pattern and not matches:
            raise RegardError(f"no call matches {pattern!r}; {list_available(calls)}")
        selected |= matches
    return selected


@dataclass(slots=True)
class _Recording:
    """The tensors that forward hooks recorded of one call of an attention module."""

    inputs: AttentionInputs | None = None
    q: Tensor | None = None
    k: Tensor | None = None
    weights: Tensor | None = None  # a recurrent decoder's weights, instead of inputs, q and k

    @property
    def size(self) -> tuple[int, int, int, int]:
        """Batch, heads, queries and keys."""
        if self.weights is not None:
            return cast(tuple[int, int, int, int], tuple(self.weights.shape))
        assert self.q is not None and self.k is not None  # noqa: PT018
        return (*self.q.shape[:3], self.k.shape[2])


def _record(module: nn.Module, calls: list[_Recording], call: int | None) -> list[RemovableHandle]:
    """Register hooks that record the calls of an attention module; with `call` -1, the last one."""
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
    """The weights of some heads and rows, in chunks of rows: (batch, heads, rows, seen)."""
    batch, head_count, time, seen = recording.size
    check_indices(heads or (), head_count, "head")
    check_indices(rows or (), time, "row")
    output_heads = list(range(head_count)) if heads is None else list(heads)
    queries = list(range(time)) if rows is None else list(rows)
    if recording.weights is not None:
        return recording.weights[:, output_heads][:, :, queries]
    attention, q, k, inputs = cast(Attention, module), recording.q, recording.k, recording.inputs
    assert q is not None and k is not None and inputs is not None  # noqa: PT018
    score_heads, group = output_heads, attention.heads // attention.kv_heads
    if attention.score.per_head:
        score_heads = list(range(head_count))
    q, k = q[:, score_heads], k[:, [head // group for head in score_heads]]
    out = q.new_zeros(batch, len(output_heads), len(queries), seen)
    if not out.numel():
        return out
    values_per_row = batch * len(score_heads) * seen * attention.score.hidden_dim
    size = max(1, CHUNK_WEIGHTS // values_per_row)
    for first in range(0, len(queries), size):
        chunk = torch.tensor(queries[first : first + size], device=q.device)
        keys = seen
        if inputs.causal and score_heads is output_heads:
            # skip the keys after the last query: the causal mask excludes them
            latest = inputs.query_positions[:, chunk].max()
            keys = int((inputs.key_positions <= latest).nonzero()[:, 1].max()) + 1
        selected = _select_rows(inputs, chunk, score_heads, keys)
        weights = attention.weights(q[:, :, chunk], k[:, :, :keys], selected)
        if score_heads is not output_heads:
            weights = weights[:, output_heads]
        out[:, :, first : first + size, :keys] = weights
    return out


def _select_rows(
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
        bias = bias[:, :, rows]  # rows before heads, so that the copy is small
        bias = bias if bias.shape[1] == 1 else bias[:, heads]
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
    weights = sum(math.prod(size) for size in sizes)
    if weights > MAX_WEIGHTS:
        raise ConfigError(
            f"{len(sizes)} maps of {' × '.join(map(str, sizes[0]))} weights (batch, heads, rows, "
            f"columns) need {4 * weights / 2**30:.1f} GiB; choose layers, heads or rows"
        )


def text_stack(model: nn.Module) -> tuple[str, Stack]:
    """The stack of a Transformer that reads one text: its decoder, or else its encoder."""
    for side in ("decoder", "encoder"):
        stack = getattr(model, side, None)
        if isinstance(stack, Stack):
            return side, stack
    raise ConfigError(f"{type(model).__name__} has no Transformer layers; use a Transformer")


def layer_path(side: str, stack: Stack, layer: int, module: str = "attention") -> str:
    """The path of a layer's module, with the index of the call if layers share weights.

    `attention_maps` takes it as a pattern with call=None.
    """
    check_indices([layer], len(stack.layers), "layer")
    blocks = len(stack.blocks)
    call = f"#{layer // blocks}" if blocks < len(stack.layers) else ""
    return f"{side}.blocks.{layer % blocks}.{module}{call}"
