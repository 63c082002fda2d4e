"""The KV cache of earlier prompts, in pages that prompts with equal beginnings share."""

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import sha256

import torch
from torch import Tensor

from regard.nn.state import TransformerState

PAGE = 16  # ids
Page = tuple[Tensor, Tensor]  # keys and values of all layers: (layers, kv_heads, PAGE, head_dim)


class PrefixCache:
    """Pages of keys and values by the ids of the text up to their end.

    A page is found by a SHA-256 digest of all ids up to its end, so it is used only after exactly
    these ids. The least recently used pages are dropped when they exceed `budget` bytes.
    """

    def __init__(self, budget: int) -> None:
        self.budget, self.bytes = budget, 0
        self.pages: OrderedDict[bytes, Page] = OrderedDict()
        self.hits = self.lookups = 0  # ids

    def load(self, ids: Sequence[int], state: TransformerState, row: int) -> int:
        """Copy the longest known beginning of `ids` into a row; return its number of ids.

        At least one id is left to read, whose logits predict the next.
        """
        pages: list[Page] = []
        for key in _keys(ids[:-1]):
            if key not in self.pages:
                break
            self.pages.move_to_end(key)
            pages.append(self.pages[key])
        self.lookups += len(ids)
        length = len(pages) * PAGE
        self.hits += length
        if pages:
            keys, values = (torch.cat(part, 2) for part in zip(*pages, strict=True))
            for layer, cache in enumerate(state.layers):
                cache.keys[row, :, :length] = keys[layer]
                cache.values[row, :, :length] = values[layer]
        return length

    def save(self, ids: Sequence[int], state: TransformerState, row: int) -> None:
        """Store the full pages of a row that has read `ids`."""
        new = [(number, key) for number, key in enumerate(_keys(ids)) if key not in self.pages]
        if not new:
            return
        length = len(ids) // PAGE * PAGE
        keys = torch.stack([cache.keys[row, :, :length] for cache in state.layers])
        values = torch.stack([cache.values[row, :, :length] for cache in state.layers])
        for number, key in new:
            page = tuple(part.narrow(2, number * PAGE, PAGE).clone() for part in (keys, values))
            size = sum(part.nbytes for part in page)
            if size > self.budget:
                return
            self.pages[key] = page  # type: ignore[assignment]
            self.bytes += size
        while self.bytes > self.budget:
            _, dropped = self.pages.popitem(last=False)
            self.bytes -= sum(part.nbytes for part in dropped)


def _keys(ids: Sequence[int]) -> Iterator[bytes]:
    """The key of each full page."""
    digest = sha256()
    for start in range(0, len(ids) - PAGE + 1, PAGE):
        digest.update(array("q", ids[start : start + PAGE]).tobytes())
        yield digest.digest()
