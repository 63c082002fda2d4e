import pytest
import torch

from regard.errors import ConfigError
from regard.nn.block import Embedding


def test_an_embedding_is_a_row_of_its_table():
    embed = Embedding(7, 4)
    ids = torch.tensor([[3, 0, 3]])
    assert torch.equal(embed(ids)[0], embed.token.weight[[3, 0, 3]])


def test_a_scaled_embedding_is_multiplied_by_the_root_of_its_width():
    embed = Embedding(7, 16, scaled=True)
    ids = torch.tensor([[3, 0]])
    torch.testing.assert_close(embed(ids)[0], 4 * embed.token.weight[[3, 0]], rtol=0, atol=0)


def test_segments_are_added_and_the_first_is_meant_when_none_are_given():
    embed = Embedding(7, 4, segments=2)
    ids, segments = torch.tensor([[3, 0, 3]]), torch.tensor([[0, 1, 1]])
    expected = embed.token.weight[[3, 0, 3]] + embed.segment.weight[[0, 1, 1]]
    torch.testing.assert_close(embed(ids, segments)[0], expected)
    torch.testing.assert_close(embed(ids), embed(ids, torch.zeros_like(ids)))
    with pytest.raises(ConfigError, match="segments"):
        Embedding(7, 4)(ids, segments)


def test_a_narrow_table_is_widened():
    embed = Embedding(7, 4, embed_dim=2)
    ids = torch.tensor([[3, 0]])
    torch.testing.assert_close(embed(ids)[0], embed.token.weight[[3, 0]] @ embed.project.weight.T)
