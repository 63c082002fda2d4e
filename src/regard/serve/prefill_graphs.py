"""CUDA graphs that prefill concatenated prompts directly in the rows of the engine."""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from jaxtyping import Float
from torch import Tensor

from regard.accel.packed_decoder import ConcatenatedPrompts, PackedDecoder
from regard.models.base import Language
from regard.serve.rows import GraphRows, Rows

if TYPE_CHECKING:
    from regard.accel.triton_decoder import TritonDecoder

MAX_PROMPTS = 32  # of one graph
SIZES = (128, 256, 384, 512, 768, 1024, 1280, 1536, 2048, 3072, 4096)  # in tokens


class PrefillGraphs:
    """Prefills several prompts at once, without padding between them.

    There is a CUDA graph for each size in `SIZES`; prompts are padded at the end to the next size,
    and the padding is not written to the KV cache. On a CPU the same function runs uncaptured.
    """

    def __init__(self, language: "TritonDecoder", rows: GraphRows) -> None:
        self.language, self.rows = language, rows
        self.graphs: dict[int, tuple[Tensor, Callable[[], Tensor]]] = {}

    def fits(self, lengths: Sequence[int]) -> bool:
        """Whether prompts of these lengths can be prefilled together."""
        return len(lengths) <= MAX_PROMPTS and sum(lengths) <= SIZES[-1]

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Float[Tensor, "prompts vocab"]:
        """Prefill the rows after those in use; return the next logits of each prompt."""
        first, tokens = len(self.rows.lengths), sum(map(len, prompts))
        size = SIZES[bisect_left(SIZES, tokens)]
        packed = array("q")
        for prompt in prompts:
            packed.extend(prompt)
        packed.extend([0] * (size - tokens))
        cu_seqlens = [0]
        for row, prompt in enumerate(prompts):
            packed.extend([first + row] * len(prompt))
            cu_seqlens.append(cu_seqlens[-1] + len(prompt))
        packed.extend([-1] * (size - tokens))
        for prompt in prompts:
            packed.extend(range(len(prompt)))
        packed.extend([0] * (size - tokens))
        packed.extend(cu_seqlens + [tokens] * (MAX_PROMPTS + 1 - len(cu_seqlens)))
        values = torch.frombuffer(packed, dtype=torch.long)
        if size in self.graphs:
            inputs, replay = self.graphs[size]
            inputs.copy_(values.pin_memory() if inputs.is_cuda else values, non_blocking=True)
            return replay()[: len(prompts)]
        inputs = values.to(self.rows.last_ids.device)
        run = partial(self._run, inputs, size)
        logits = run()  # compiles kernels, which a capture cannot
        self.graphs[size] = inputs, self.rows.capture(run)
        return logits[: len(prompts)]

    def _run(self, inputs: Tensor, size: int) -> Tensor:
        ids, rows, positions, cu_seqlens = inputs.split([size, size, size, MAX_PROMPTS + 1])
        prompts = ConcatenatedPrompts(ids, rows, positions, cu_seqlens)
        return self.language.prefill_concatenated(prompts, self.rows.caches)


def make_prefill_graphs(language: Language, rows: Rows) -> PrefillGraphs | None:
    """The graphs of a model, where its kernels can prefill concatenated prompts."""
    supported = isinstance(language, PackedDecoder) and language.supports_concatenated_prompts
    if not supported or not isinstance(rows, GraphRows):
        return None
    return PrefillGraphs(cast("TritonDecoder", language), rows)
