import torch

from regard.nn.embed import Embedding


def test_an_embedding_is_a_row_of_its_table():
    embed = Embedding(7, 4)
    ids = torch.tensor([[3, 0, 3]])
    assert torch.equal(embed(ids)[0], embed.token.weight[[3, 0, 3]])


def test_a_scaled_embedding_is_multiplied_by_the_root_of_its_width():
    embed = Embedding(7, 16, scaled=True)
    ids = torch.tensor([[3, 0]])
    torch.testing.assert_close(embed(ids)[0], 4 * embed.token.weight[[3, 0]], rtol=0, atol=0)
