import pytest
import torch

from regard.models.transformer import Transformer, TransformerConfig
from regard.nn.attention import AttentionInputs, Mask

SIZES = {"vocab_size": 400, "dim": 64, "layers": 4, "heads": 4, "context": 64}


def deviation(weight):
    return weight.std().item()


def test_normal_init_starts_writers_into_the_stream_smaller():
    model = Transformer(TransformerConfig(**SIZES, tied=False))
    block = model.decoder.blocks[0]
    for weight in (
        model.embed.token.weight,
        model.decoder.position.table.weight,
        model.head.weight,
        block.attention.query.weight,
        block.attention.value.weight,
        block.ffn.up.weight,
    ):
        assert deviation(weight) == pytest.approx(0.02, rel=0.05)
    for weight in (block.attention.out.weight, block.ffn.down.weight):
        assert deviation(weight) == pytest.approx(0.02 / 8**0.5, rel=0.05)
    assert (block.ffn.up.bias == 0).all()


def test_normal_init_takes_its_deviation_from_the_config():
    model = Transformer(TransformerConfig(**SIZES, init={"kind": "normal", "std": 0.1}))
    assert deviation(model.embed.token.weight) == pytest.approx(0.1, rel=0.05)


def test_zero_out_makes_every_block_begin_as_the_identity():
    model = Transformer(
        TransformerConfig(**SIZES, init="zero_init_residual", norm_placement="pre")
    ).eval()
    plain = Transformer(TransformerConfig(**SIZES)).eval()
    x, at = torch.randn(2, 5, 64), torch.arange(5).unsqueeze(0)
    for each, begins in ((model, True), (plain, False)):
        block = each.decoder.blocks[1]
        assert torch.equal(block(x, inputs=AttentionInputs.of(Mask.causal(), at)), x) is begins
    for weight in (model.decoder.blocks[1].ffn.up.weight, model.embed.token.weight):
        assert deviation(weight) == pytest.approx(0.02, rel=0.05)


def test_xavier_init_has_the_variance_of_the_mean_fan():
    model = Transformer(TransformerConfig(**SIZES, init="xavier", tied=False))
    up = model.decoder.blocks[0].ffn.up.weight
    assert deviation(up) == pytest.approx((2 / (64 + 256)) ** 0.5, rel=0.05)
    assert up.abs().max() <= (6 / (64 + 256)) ** 0.5
    assert deviation(model.embed.token.weight) == pytest.approx(64**-0.5, rel=0.05)
    assert deviation(model.head.weight) == pytest.approx(64**-0.5, rel=0.05)


def test_deepnorm_starts_values_outputs_and_feed_forwards_smaller():
    model = Transformer(TransformerConfig(**SIZES, norm_placement="deepnorm"))
    gain = (8 * 4) ** -0.25
    block = model.decoder.blocks[2]
    square, wide = (2 / (64 + 64)) ** 0.5, (2 / (64 + 256)) ** 0.5
    for weight, expected in (
        (block.attention.query.weight, square),
        (block.attention.key.weight, square),
        (block.attention.value.weight, square * gain),
        (block.attention.out.weight, square * gain),
        (block.ffn.up.weight, wide * gain),
        (block.ffn.down.weight, wide * gain),
    ):
        assert deviation(weight) == pytest.approx(expected, rel=0.05)


def test_a_tied_head_has_no_matrix_of_its_own():
    model = Transformer(TransformerConfig(**SIZES))
    assert model.head.matrix is model.embed.token.weight
    assert not any(name.startswith("head") for name, _ in model.named_parameters())
    with torch.no_grad():
        model.embed.token.weight.zero_()
    assert (model.head(torch.randn(2, 64)) == 0).all()


def test_fan_in_init_goes_by_the_fan_in_and_starts_queries_smaller():
    model = Transformer(TransformerConfig(**SIZES, init="fan_in", tied=False))
    attention, ffn = model.decoder.blocks[0].attention, model.decoder.blocks[0].ffn
    assert deviation(model.embed.token.weight) == pytest.approx(1, rel=0.05)
    assert deviation(attention.key.weight) == pytest.approx(64**-0.5, rel=0.05)
    assert deviation(attention.query.weight) == pytest.approx((64 * 16) ** -0.5, rel=0.05)
    assert deviation(ffn.down.weight) == pytest.approx(256**-0.5, rel=0.05)
