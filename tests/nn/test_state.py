import pytest
import torch

from regard.errors import ShapeError
from regard.nn.state import KVCache, RecurrentState, Source, TransformerState


def empty(rows=2, capacity=5):
    layers = [KVCache(torch.zeros(rows, 1, capacity, 2), torch.zeros(rows, 1, capacity, 2))]
    return TransformerState(layers, torch.zeros(rows, dtype=torch.long), capacity)


def test_new_keys_are_written_at_the_length_of_each_row():
    layer = empty().layers[0]
    k = torch.arange(1.0, 9.0).view(2, 1, 2, 2)
    keys, values = layer.write(k, -k, torch.tensor([[0, 1], [2, 3]]), 4)
    assert keys.shape == (2, 1, 4, 2)
    assert torch.equal(keys[0, 0, :2], k[0, 0])
    assert torch.equal(keys[1, 0, 2:4], k[1, 0])
    assert (keys[1, 0, :2] == 0).all()
    assert torch.equal(values, -keys)


def test_a_state_counts_the_real_ids_of_each_row():
    state = empty().advance(None, 2).advance(torch.tensor([1, 2]), 2)
    assert state.lengths.tolist() == [3, 4]
    assert state.max_length == 4
    assert state.rewind(torch.tensor([0, 1])).max_length == 1


def test_ids_beyond_the_capacity_are_refused():
    state = empty().advance(None, 4)
    assert state.length_after(1) == 5
    with pytest.raises(ShapeError, match="4 ids and 2 more do not fit the KV cache"):
        state.length_after(2)


def test_selected_rows_are_copies():
    state = empty()
    state.layers[0].keys[1] = 1.0
    chosen = state.select(torch.tensor([1, 1, 0]))
    assert chosen.layers[0].keys[:, 0, 0, 0].tolist() == [1, 1, 0]
    state.layers[0].keys.zero_()
    assert chosen.layers[0].keys[:, 0, 0, 0].tolist() == [1, 1, 0]


def test_a_source_moves_whole():
    source = Source(torch.zeros(2, 3, dtype=torch.long), torch.tensor([3, 1])).to("meta")
    assert source.ids.device.type == source.lengths.device.type == "meta"


def test_values_may_be_wider_than_keys():
    state = KVCache(torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4, 3))
    k, v = torch.randn(1, 1, 2, 2), torch.randn(1, 1, 2, 3)
    seen_k, seen_v = state.write(k, v, torch.tensor([[1, 2]]), 3)
    torch.testing.assert_close(seen_k[:, :, 1:], k)
    torch.testing.assert_close(seen_v[:, :, 1:], v)


def test_snapshots_stand_where_each_row_has_come_to():
    state = RecurrentState.initial([(torch.zeros(2, 1),)])
    seen = torch.tensor([[0.0, 1, 2, 3], [0, 10, 20, 30]]).unsqueeze(-1)
    state = state.advance([(seen,)], torch.tensor([3, 1]))
    assert state.lengths.tolist() == [3, 1]
    assert state.current()[0][0].tolist() == [[3], [10]]
    back = state.rewind(torch.tensor([1, 0]))
    assert back.current()[0][0].tolist() == [[1], [0]]
    assert back.select(torch.tensor([1, 0, 0])).current()[0][0].tolist() == [[0], [1], [1]]
    with pytest.raises(ShapeError, match=r"from lengths \[1, 0\] to \[1, -1\]"):
        back.rewind(torch.tensor([1, -1]))
