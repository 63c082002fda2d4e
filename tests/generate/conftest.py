"""A small language model whose next token depends on every id it has taken in."""

from dataclasses import dataclass

import pytest
import torch

CELLS = 97


@dataclass
class TableState:
    cell: torch.Tensor  # what a row's whole history hashes to
    lengths: torch.Tensor
    capacity: int

    def select(self, rows):
        return TableState(self.cell[rows], self.lengths[rows], self.capacity)

    def rewind(self, lengths):
        assert (lengths == self.lengths).all()  # the only case that searches need
        return self


class TableModel:
    """logits = table[hash(source, ids)]: integer arithmetic, so batching changes not one bit."""

    def __init__(self, vocab_size=6, context=None, spread=1.5, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.table = spread * torch.randn(CELLS, vocab_size, generator=generator)
        self.context, self.vocab_size, self.device = context, vocab_size, self.table.device
        self.fed = []  # shape of ids in each call

    def start(self, rows, capacity, source=None):
        assert self.context is None or capacity <= self.context
        cell = torch.zeros(rows, dtype=torch.long)
        if source is not None:
            real = torch.arange(source.ids.shape[1]) < source.lengths[:, None]
            cell = (source.ids * real).sum(1) % CELLS
        return TableState(cell, torch.zeros(rows, dtype=torch.long), capacity)

    def step(self, ids, state, *, counts=None, all_logits=False):
        assert not all_logits
        rows, time = ids.shape
        self.fed.append((rows, time))
        counts = torch.full((rows,), time) if counts is None else counts
        cell = state.cell
        for column in range(time):
            cell = torch.where(column < counts, (cell * 31 + ids[:, column] + 7) % CELLS, cell)
        lengths = state.lengths + counts
        assert int(lengths.max()) <= state.capacity
        return self.table[cell].unsqueeze(1), TableState(cell, lengths, state.capacity)


@pytest.fixture
def table_model():
    return TableModel
