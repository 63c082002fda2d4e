"""Prefix caching: the KV cache of earlier prompts, in pages that equal prefixes share."""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import takewhile

import torch
from torch import Tensor

from regard.nn.state import TransformerState

PAGE = 16  # tokens


@dataclass(frozen=True, slots=True, eq=False)
class PageGroup:
    """The pages that one prompt has added, in one copy of its keys and values."""

    keys: Tensor  # (layers, kv_heads, tokens, head_dim)
    values: Tensor
    hashes: list[bytes]  # of the pages

    @property
    def bytes(self) -> int:
        """The size of keys and values."""
        return self.keys.nbytes + self.values.nbytes


class PrefixCache:
    """The keys and values of earlier prompts, in pages.

    A page is found by a SHA-256 digest of all ids up to its end, so it is used only after exactly
    these ids. The least recently used groups are evicted when they exceed `budget` bytes.
    """

    def __init__(self, budget: int) -> None:
        self.budget, self.bytes = budget, 0
        self.pages: dict[bytes, tuple[PageGroup, int]] = {}  # the group and the index in it
        self.groups: OrderedDict[int, PageGroup] = OrderedDict()
        self.hits = self.lookups = 0  # tokens

    def load(self, ids: Sequence[int], state: TransformerState, row: int) -> int:
        """Copy the longest cached prefix of `ids` into a row; return its length.

        The last id is never loaded, since its logits predict the next token.
        """
        pages: list[tuple[PageGroup, int]] = []
        for key in _page_hashes(ids[:-1]):
            if key not in self.pages:
                break
            pages.append(self.pages[key])
            self.groups.move_to_end(id(pages[-1][0]))
        length = len(pages) * PAGE
        self.lookups += len(ids)
        self.hits += length
        if pages:
            for name in ("keys", "values"):
                parts = [
                    getattr(group, name).narrow(2, index * PAGE, PAGE) for group, index in pages
                ]
                for cache, prefix in zip(state.layers, torch.cat(parts, 2), strict=True):
                    getattr(cache, name)[row, :, :length] = prefix
        return length

    def has_prefix(self, ids: Sequence[int]) -> bool:
        """Whether a prefix of `ids` is cached."""
        return next(_page_hashes(ids[:-1]), None) in self.pages

    def save(self, ids: Sequence[int], read: Callable[[slice], tuple[Tensor, Tensor]]) -> None:
        """Store the full pages of the prompt `ids` that are not cached yet.

        `read` returns copies of the keys and values of a span, for all layers.
        """
        hashes = list(_page_hashes(ids))
        cached = sum(1 for _ in takewhile(self.pages.__contains__, hashes))
        if cached == len(hashes):
            return
        keys, values = read(slice(cached * PAGE, len(hashes) * PAGE))
        group = PageGroup(keys, values, hashes[cached:])
        if group.bytes > self.budget:
            return
        self.groups[id(group)] = group
        self.bytes += group.bytes
        for index, key in enumerate(group.hashes):
            self.pages[key] = group, index
        while self.bytes > self.budget:
            _, evicted = self.groups.popitem(last=False)
            self.bytes -= evicted.bytes
            for key in evicted.hashes:
                if self.pages.get(key, (None,))[0] is evicted:
                    del self.pages[key]


def read_row(state: TransformerState, row: int, span: slice) -> tuple[Tensor, Tensor]:
    """Copies of the keys and values of a row of a state: (layers, kv_heads, tokens, head_dim)."""
    keys = torch.stack([cache.keys[row, :, span] for cache in state.layers])
    return keys, torch.stack([cache.values[row, :, span] for cache in state.layers])


def _page_hashes(ids: Sequence[int]) -> Iterator[bytes]:
    """The hash of each full page."""
    digest = sha256()
    for start in range(0, len(ids) - PAGE + 1, PAGE):
        digest.update(array("q", ids[start : start + PAGE]).tobytes())
        yield digest.digest()
