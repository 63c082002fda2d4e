"""Attention maps and recurrent states with the labels of their rows and columns."""

import pytest
import torch

from regard.errors import RegardError
from regard.explain.attention import attention_maps
from regard.explain.labelled_maps import (
    AxisLabels,
    cross_attention_path,
    encoder_decoder_attention,
    image_attention,
    recurrent_states,
    self_attention,
)
from regard.models.recurrent import RecurrentConfig, RecurrentLM
from regard.models.transformer import Transformer, TransformerConfig
from regard.models.vision import VisionConfig, VisionTransformer
from regard.nn.state import Source
from regard.text import train_tokenizer

TEXT = "The cat didn't sit, the cats sat on 12 mats.\n"


@torch.no_grad()
def test_gates_and_states_of_a_recurrent_layer_have_its_tokens():
    tokenizer = train_tokenizer("char", [TEXT])
    config = RecurrentConfig(vocab_size=tokenizer.vocab_size, dim=6, layers=2, cell="lstm")
    model = RecurrentLM(config).eval()
    ids = tokenizer.encode("the cat")
    batch = torch.tensor([ids])
    maps = recurrent_states(model, lambda _: list("the cat"), lambda: model(batch))
    first, second = maps.values()
    assert first.names == ["input_gate", "forget_gate", "candidate", "output_gate", "cell", "state"]
    assert (first.rows, first.values.shape) == (list("the cat"), (6, 7, 6))
    cell, state = second.values[4], second.values[5]
    torch.testing.assert_close(state, second.values[3] * cell.tanh())
    assert ((second.values[1] > 0) & (second.values[1] < 1)).all()


def test_one_layer_of_shared_weights_is_named_by_its_index():
    tokenizer = train_tokenizer("char", [TEXT])
    config = TransformerConfig(
        vocab_size=tokenizer.vocab_size, dim=8, layers=3, heads=2, shared_layers=True
    )
    model = Transformer(config).eval()
    ids = tokenizer.encode("the cat")
    every = self_attention(model, tokenizer, ids)
    assert list(every) == [f"decoder.blocks.0.attention#{layer}" for layer in range(3)]
    ((name, second),) = self_attention(model, tokenizer, ids, layers=[1]).items()
    assert name == "decoder.blocks.0.attention#1"
    assert torch.equal(second.weights, every[name].weights)


def test_every_layer_of_a_translator_with_shared_weights_has_its_maps():
    tokenizer = train_tokenizer("char", [TEXT])
    config = TransformerConfig(
        vocab_size=tokenizer.vocab_size,
        dim=8,
        layers=3,
        encoder_layers=2,
        heads=2,
        shared_layers=True,
        architecture="encoder-decoder",
    )
    model = Transformer(config).eval()
    ids, target = tokenizer.encode("the cat"), tokenizer.encode("mats.")
    source = Source(torch.tensor([ids]), torch.tensor([len(ids)]))
    labels = AxisLabels.of(tokenizer, ids, words=False)
    every = encoder_decoder_attention(model, source, labels, tokenizer, target)
    encoder = [f"encoder.blocks.0.attention#{n}" for n in range(2)]
    decoder = [f"decoder.blocks.0.{name}#{n}" for name in ("attention", "cross") for n in range(3)]
    assert list(every) == encoder + decoder
    assert [every[name].kind for name in decoder] == ["self"] * 3 + ["cross"] * 3
    assert every[decoder[3]].columns == list("the cat")
    inputs = torch.tensor([target[:-1]])
    for layer in range(3):
        path = cross_attention_path(model, layer)
        ((name, cross),) = encoder_decoder_attention(
            model, source, labels, tokenizer, target, pattern=path
        ).items()
        assert name == path == f"decoder.blocks.0.cross#{layer}"
        (weights,) = attention_maps(
            model, lambda: model(inputs, source=source), pattern="*.cross", call=layer
        ).values()
        assert torch.equal(cross.weights, weights[0])
        (same,) = attention_maps(
            model, lambda: model(inputs, source=source), pattern="*.cross", call=layer - 3
        ).values()
        assert torch.equal(weights, same)
    assert cross_attention_path(model) == path
    with pytest.raises(RegardError, match=r"no call matches '\*#3'; available: encoder.*#0-1, dec"):
        encoder_decoder_attention(model, source, labels, tokenizer, target, pattern=["*#0", "*#3"])
    for call in (3, -4):
        with pytest.raises(RegardError, match=f"call {call}: there are 3 calls, 0 to 2"):
            attention_maps(model, lambda: model(inputs, source=source), call=call)


def test_layers_of_a_vision_transformer_with_shared_weights_are_selected_by_their_index():
    head = {"kind": "classification", "classes": 2}
    sizes = {"image_size": 8, "patch_size": 4, "channels": 1, "dim": 8, "heads": 2, "layers": 3}
    model = VisionTransformer(VisionConfig(**sizes, head=head, shared_layers=True)).eval()
    image, pixels = torch.rand(1, 8, 8), torch.zeros(1, 8, 8, dtype=torch.uint8)
    every = image_attention(model, image, pixels)
    assert list(every) == [f"encoder.blocks.0.attention#{layer}" for layer in range(3)]
    assert every["encoder.blocks.0.attention#0"].columns == ["<cls>", "0,0", "0,1", "1,0", "1,1"]
    ((name, last),) = image_attention(model, image, pixels, layers=[2]).items()
    assert name == "encoder.blocks.0.attention#2"
    assert torch.equal(last.weights, every[name].weights)
