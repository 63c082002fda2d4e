import torch

from regard.nn.characters import BYTES, CharacterConvolution, word_bytes


def test_the_vector_of_a_word_is_that_of_the_formula():
    layer = CharacterConvolution(5, embed_dim=3).double()
    words = ["Aé", "", "x" * 60]
    characters = torch.tensor([[word_bytes(word) for word in words]], dtype=torch.uint8)
    assert characters.shape == (1, 3, BYTES)
    vectors = layer(characters)[0]
    weight, bias = layer.convolution.weight, layer.convolution.bias
    for word, vector in zip(words, vectors, strict=True):
        letters = list(word.encode()[:BYTES])
        embedded = [torch.zeros(3).double(), *layer.embed.weight[letters], torch.zeros(3).double()]
        best = torch.zeros(5).double()
        for i in range(len(letters)):
            window = torch.stack(embedded[i : i + 3], 1)  # (embed_dim, 3)
            best = torch.maximum(best, (weight * window).sum((1, 2)) + bias)
        torch.testing.assert_close(vector, best)


def test_padding_changes_nothing():
    layer = CharacterConvolution(5)
    characters = torch.tensor([[word_bytes("Word")]], dtype=torch.uint8)
    torch.testing.assert_close(layer(characters), layer(characters[..., :4]))
