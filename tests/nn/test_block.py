from typing import get_args

import pytest
import torch
from torch import nn

from regard.errors import ConfigError
from regard.models.transformer import Transformer, TransformerConfig
from regard.nn.attention import AttentionInputs, Mask
from regard.nn.block import NormPlacement, NormPlacementKind, deepnorm_constants, residual
from regard.nn.norm import LayerNorm

PLACEMENTS = {
    "pre": lambda x, f, n, m, a: x + f(n(x)),
    "post": lambda x, f, n, m, a: n(x + f(x)),
    "sandwich": lambda x, f, n, m, a: x + m(f(n(x))),
    "deepnorm": lambda x, f, n, m, a: n(a * x + f(x)),
    "no_residual": lambda x, f, n, m, a: f(n(x)),
}


def test_every_placement_has_a_formula_here():
    parallel = {"parallel", "parallel_norms"}  # in `test_parallel_branches_read_the_same_stream`
    assert PLACEMENTS.keys() | parallel == set(get_args(NormPlacementKind))


@pytest.mark.parametrize("kind", PLACEMENTS)
def test_every_placement_computes_its_formula(kind):
    f, n, m = nn.Linear(6, 6), LayerNorm(6), LayerNorm(6)
    for norm in (n, m):
        nn.init.normal_(norm.weight)
    x = torch.randn(2, 3, 6)
    y = residual(x, f, n, NormPlacement(kind, 1.7), m)
    torch.testing.assert_close(y, PLACEMENTS[kind](x, f, n, m, 1.7), rtol=0, atol=0)


@pytest.mark.parametrize("kind", PLACEMENTS)
def test_the_output_of_a_stack_is_normalized_exactly_once(kind):
    stack = Transformer(
        TransformerConfig(vocab_size=5, dim=8, layers=1, heads=2, norm_placement=kind)
    ).decoder
    assert (stack.norm is not None) == (kind not in ("post", "deepnorm"))


@pytest.mark.parametrize(
    ("side", "depths", "weight", "gain"),
    [
        ("encoder", (12, 0), 24**0.25, 96**-0.25),
        ("decoder", (0, 12), 24**0.25, 96**-0.25),
        ("encoder", (6, 3), 0.81 * (6**4 * 3) ** (1 / 16), 0.87 * (6**4 * 3) ** (-1 / 16)),
        ("decoder", (6, 3), 9**0.25, 36**-0.25),
    ],
)
def test_deepnorm_has_the_constants_of_the_paper(side, depths, weight, gain):
    assert deepnorm_constants(side, *depths) == pytest.approx((weight, gain), rel=1e-12)


def test_a_deepnorm_model_weighs_its_stream_by_its_own_depth():
    config = TransformerConfig(
        vocab_size=5,
        dim=8,
        heads=2,
        layers=3,
        encoder_layers=6,
        architecture="encoder-decoder",
        norm_placement="deepnorm",
    )
    model = Transformer(config)
    assert model.encoder.blocks[0].norm_placement.residual_scale == pytest.approx(
        0.81 * (6**4 * 3) ** (1 / 16)
    )
    assert model.decoder.blocks[0].norm_placement.residual_scale == pytest.approx(9**0.25)


@pytest.mark.parametrize("kind", ["parallel", "parallel_norms"])
def test_parallel_branches_read_the_same_stream(kind):
    stack = Transformer(
        TransformerConfig(
            vocab_size=5,
            dim=8,
            layers=1,
            heads=2,
            norm_placement=kind,
            position="none",
            architecture="encoder",
        )
    ).encoder.double()
    (block,) = stack.blocks
    for norm in (block.attention_norm, block.ffn_norm):
        if norm is not None:
            nn.init.normal_(norm.weight)
    x, at = torch.randn(2, 3, 8).double(), torch.arange(3).unsqueeze(0)
    inputs = AttentionInputs.of(Mask(), at)
    other = block.attention_norm if kind == "parallel" else block.ffn_norm
    expected = x + block.attention(block.attention_norm(x), inputs=inputs) + block.ffn(other(x))
    torch.testing.assert_close(block(x, inputs=inputs), expected, rtol=0, atol=1e-12)


def test_parallel_branches_exclude_cross_attention():
    with pytest.raises(ConfigError, match="no cross-attention"):
        Transformer(
            TransformerConfig(
                vocab_size=5,
                dim=8,
                layers=1,
                heads=2,
                norm_placement="parallel",
                architecture="encoder-decoder",
            )
        )
