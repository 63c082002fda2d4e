import pytest
import torch

import regard
from regard.errors import ConfigError
from regard.models.build import build_model
from regard.nn.characters import MAX_WORD_BYTES, CharacterConvolution, utf8_bytes


def test_the_vector_of_a_word_is_that_of_the_formula():
    layer = CharacterConvolution(5, embed_dim=3).double()
    words = ["Aé", "", "x" * 60]
    word_bytes = torch.tensor([[utf8_bytes(word) for word in words]], dtype=torch.uint8)
    assert word_bytes.shape == (1, 3, MAX_WORD_BYTES)
    vectors = layer(word_bytes)[0]
    weight, bias = layer.convolution.weight, layer.convolution.bias
    for word, vector in zip(words, vectors, strict=True):
        letters = list(word.encode()[:MAX_WORD_BYTES])
        embedded = [torch.zeros(3).double(), *layer.embed.weight[letters], torch.zeros(3).double()]
        best = torch.zeros(5).double()
        for i in range(len(letters)):
            window = torch.stack(embedded[i : i + 3], 1)  # (embed_dim, 3)
            best = torch.maximum(best, (weight * window).sum((1, 2)) + bias)
        torch.testing.assert_close(vector, best)


def test_padding_changes_nothing():
    layer = CharacterConvolution(5)
    word_bytes = torch.tensor([[utf8_bytes("Word")]], dtype=torch.uint8)
    torch.testing.assert_close(layer(word_bytes), layer(word_bytes[..., :4]))


@pytest.mark.parametrize("init", ["normal", "zero_init_residual", "xavier", "fan_in"])
def test_padding_is_zero_whatever_the_initialization(init):
    fields = {"vocab_size": 9, "dim": 8, "layers": 1, "heads": 2, "char_dim": 3, "init": init}
    layer = build_model(regard.preset("tiny-encoder", **fields)).characters.convolution
    assert (layer.embed.weight[0] == 0).all()
    assert (layer.embed.weight[1:] != 0).any(1).all()
    word_bytes = torch.tensor([[utf8_bytes("Word")]], dtype=torch.uint8)
    torch.testing.assert_close(layer(word_bytes), layer(word_bytes[..., :4]))


def test_an_encoder_over_lower_case_tokens_reads_the_case_of_words():
    fields = {"vocab_size": 9, "dim": 8, "layers": 1, "heads": 2, "context": 4, "char_dim": 3}
    model = build_model(regard.preset("tiny-encoder", **fields)).eval()
    ids = torch.tensor([[1, 2]])
    names, words = (
        torch.tensor([[utf8_bytes(first), utf8_bytes("x")]], dtype=torch.uint8)
        for first in ("May", "may")
    )
    assert not torch.allclose(model(ids, word_bytes=names), model(ids, word_bytes=words))
    with pytest.raises(ConfigError, match="reads the characters of words"):
        model(ids)
    with pytest.raises(
        ConfigError, match=r"char_dim=.* needs architecture=.encoder. without embed_dim"
    ):
        regard.preset("tiny-decoder", char_dim=3)
