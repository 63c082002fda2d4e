"""Against other people's implementations: torch's layers and the `transformers` library.

The latter is imported inside the tests: it is slow, and nobody else needs it.
"""

import pytest
import torch
from torch import nn

from regard.models.build import load_weights
from regard.models.transformer import Transformer, TransformerConfig
from regard.nn.attention import Attention, AttentionInputs, Mask
from regard.nn.position import SCALINGS, Rotary, T5Bias, alibi_slopes

pytestmark = pytest.mark.parity

LENGTHS = torch.tensor([6, 3])
PADDING = torch.arange(6) >= LENGTHS.unsqueeze(1)  # torch's sense: True may not be looked at
FUTURE = torch.ones(5, 5, dtype=torch.bool).triu(1)


def at(time):
    return torch.arange(time).unsqueeze(0)


def attention_weights(theirs):
    """The state dict of torch's attention, by our names."""
    weights, biases = theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3)
    named = {"out.weight": theirs.out_proj.weight, "out.bias": theirs.out_proj.bias}
    for name, weight, bias in zip(("query", "key", "value"), weights, biases, strict=True):
        named |= {f"{name}.weight": weight, f"{name}.bias": bias}
    return named


@pytest.fixture
def pair():
    """torch's attention and ours, with the same weights."""
    theirs = nn.MultiheadAttention(16, 4, batch_first=True)
    nn.init.normal_(theirs.in_proj_bias)
    nn.init.normal_(theirs.out_proj.bias)
    ours = Attention(16, 4, bias=True)
    ours.load_state_dict(attention_weights(theirs))
    return theirs.double(), ours.double()


def test_self_attention_is_that_of_torch(pair):
    theirs, ours = pair
    x = torch.randn(2, 5, 16).double()
    expected, _ = theirs(x, x, x)
    torch.testing.assert_close(
        ours(x, inputs=AttentionInputs.of(Mask.none(), at(5))), expected, rtol=0, atol=1e-10
    )


def test_causal_attention_is_that_of_torch(pair):
    theirs, ours = pair
    x = torch.randn(2, 5, 16).double()
    expected, weights = theirs(x, x, x, attn_mask=FUTURE, average_attn_weights=False)
    inputs = AttentionInputs.of(Mask.causal(), at(5))
    torch.testing.assert_close(ours(x, inputs=inputs), expected, rtol=0, atol=1e-10)
    q, k = (layer(x).unflatten(-1, (4, 4)).transpose(1, 2) for layer in (ours.query, ours.key))
    torch.testing.assert_close(ours.weights(q, k, inputs), weights, rtol=0, atol=1e-10)


def test_attention_over_a_padded_memory_is_that_of_torch(pair):
    theirs, ours = pair
    x, memory = torch.randn(2, 5, 16).double(), torch.randn(2, 6, 16).double()
    expected, _ = theirs(x, memory, memory, key_padding_mask=PADDING)
    inputs = AttentionInputs.of(Mask.lengths(LENGTHS), at(5), at(6))
    torch.testing.assert_close(ours(x, memory, inputs=inputs), expected, rtol=0, atol=1e-10)


def copy_layers(theirs, stack):
    """torch's layers and final norm into a stack of ours, by name, none left out."""
    named = {}
    for number, layer in enumerate(theirs.layers):
        parts = {"attention": layer.self_attn, "ffn.up": layer.linear1, "ffn.down": layer.linear2}
        norms = ["attention_norm", "ffn_norm"]
        if hasattr(layer, "multihead_attn"):
            parts["cross"] = layer.multihead_attn
            norms.insert(1, "cross_norm")
        parts |= {name: getattr(layer, f"norm{place}") for place, name in enumerate(norms, 1)}
        for name, part in parts.items():
            attention = isinstance(part, nn.MultiheadAttention)
            own = attention_weights(part) if attention else part.state_dict()
            named |= {f"blocks.{number}.{name}.{key}": value for key, value in own.items()}
    if theirs.norm is not None:
        named |= {f"norm.{key}": value for key, value in theirs.norm.state_dict().items()}
    stack.load_state_dict(named)


def randomise(module):
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


PLACEMENTS = pytest.mark.parametrize("norm_placement", ["pre", "post"])
FFNS = pytest.mark.parametrize("ffn", ["relu", "gelu"])
SIZES = {"vocab_size": 7, "dim": 16, "layers": 2, "heads": 4, "ffn_dim": 24, "position": "none"}


def theirs_like(layer, stack, norm_placement, ffn):
    """Two of torch's layers, with the norm at the end that the order needs."""
    one = layer(
        16, 4, 24, 0.0, activation=ffn, batch_first=True, norm_first=norm_placement == "pre"
    )
    norm = nn.LayerNorm(16) if norm_placement == "pre" else None
    nested = {"enable_nested_tensor": False} if stack is nn.TransformerEncoder else {}
    return randomise(stack(one, 2, norm=norm, **nested)).double()


@PLACEMENTS
@FFNS
def test_an_encoder_is_that_of_torch(norm_placement, ffn):
    theirs = theirs_like(nn.TransformerEncoderLayer, nn.TransformerEncoder, norm_placement, ffn)
    config = TransformerConfig(
        **SIZES, architecture="encoder", norm_placement=norm_placement, ffn=ffn
    )
    ours = Transformer(config).encoder.double()
    copy_layers(theirs, ours)
    x = torch.randn(2, 6, 16).double()
    real = ~PADDING
    expected = theirs(x, src_key_padding_mask=PADDING)
    y = ours(x, positions=at(6), mask=Mask.lengths(LENGTHS))
    torch.testing.assert_close(y[real], expected[real], rtol=0, atol=1e-10)


@PLACEMENTS
@FFNS
def test_a_decoder_is_that_of_torch(norm_placement, ffn):
    theirs = theirs_like(nn.TransformerDecoderLayer, nn.TransformerDecoder, norm_placement, ffn)
    config = TransformerConfig(
        **SIZES, architecture="encoder-decoder", norm_placement=norm_placement, ffn=ffn
    )
    ours = Transformer(config).decoder.double()
    copy_layers(theirs, ours)
    x, memory = torch.randn(2, 5, 16).double(), torch.randn(2, 6, 16).double()
    expected = theirs(x, memory, tgt_mask=FUTURE, memory_key_padding_mask=PADDING)
    y = ours(
        x, positions=at(5), mask=Mask.causal(), memory=memory, memory_mask=Mask.lengths(LENGTHS)
    )
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-10)


def test_gpt2_gives_the_logits_of_transformers():
    import transformers

    sizes = {"n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 16, "vocab_size": 61}
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    randomise(theirs)
    config = TransformerConfig(
        vocab_size=61, dim=24, layers=2, heads=3, context=16, ffn="gelu_tanh"
    )
    ours = Transformer(config)
    body = theirs.transformer
    named = {
        "embed.token.weight": body.wte.weight,
        "decoder.position.table.weight": body.wpe.weight,
        "decoder.norm.weight": body.ln_f.weight,
        "decoder.norm.bias": body.ln_f.bias,
    }
    for number, layer in enumerate(body.h):
        at_block = f"decoder.blocks.{number}"
        for name, norm in (("attention_norm", layer.ln_1), ("ffn_norm", layer.ln_2)):
            named |= {f"{at_block}.{name}.{key}": value for key, value in norm.state_dict().items()}
        weights, biases = layer.attn.c_attn.weight.chunk(3, 1), layer.attn.c_attn.bias.chunk(3)
        linears = {
            "attention.query": (weights[0], biases[0]),
            "attention.key": (weights[1], biases[1]),
            "attention.value": (weights[2], biases[2]),
            "attention.out": (layer.attn.c_proj.weight, layer.attn.c_proj.bias),
            "ffn.up": (layer.mlp.c_fc.weight, layer.mlp.c_fc.bias),
            "ffn.down": (layer.mlp.c_proj.weight, layer.mlp.c_proj.bias),
        }
        for name, (weight, bias) in linears.items():  # their linear layers are transposed
            named |= {f"{at_block}.{name}.weight": weight.T, f"{at_block}.{name}.bias": bias}
    load_weights(ours, named, "GPT2LMHeadModel")
    ids = torch.randint(0, 61, (2, 16))
    with torch.no_grad():
        torch.testing.assert_close(ours.head(ours(ids)), theirs(ids).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("heads", [1, 3, 8, 12, 20])
def test_alibi_slopes_are_those_of_bloom(heads):
    from transformers.models.bloom import modeling_bloom as bloom

    # a key at distance 1 from the first one has as its bias the slope itself
    table = bloom.build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)
    torch.testing.assert_close(alibi_slopes(heads), table[:, 0, 1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("causal", [True, False])
def test_t5_buckets_are_those_of_t5(causal):
    from transformers.models.t5 import modeling_t5 as t5

    distance = torch.arange(-300, 301)
    expected = t5.T5Attention._relative_position_bucket(
        distance, bidirectional=not causal, num_buckets=32, max_distance=128
    )
    assert torch.equal(T5Bias(2, causal=causal).bucket(distance), expected)


def llama_config(**rope):
    import transformers

    return transformers.LlamaConfig(
        hidden_size=32,
        num_attention_heads=2,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, **rope},
    )


def test_rotary_turns_as_llama_does():
    from transformers.models.llama import modeling_llama as llama

    q, k = torch.randn(2, 2, 5, 16), torch.randn(2, 2, 5, 16)
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 20, 33, 60, 61]])
    cos, sin = llama.LlamaRotaryEmbedding(llama_config())(q, positions)
    rotation = Rotary(16).rotation(positions)
    for ours, theirs in zip(
        (rotation.apply(q), rotation.apply(k)),
        llama.apply_rotary_pos_emb(q, k, cos, sin),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"kind": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        # their dynamic form at twice the trained length raises the base by 2 factor - (factor - 1)
        ({"kind": "ntk", "factor": 5.0}, {"rope_type": "dynamic", "factor": 4.0}),
        (
            {
                "kind": "llama3",
                "factor": 8.0,
                "original_context": 32,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        ),
    ],
    ids=["linear", "ntk", "llama3"],  # the others: tests/hub/test_parity.py
)
def test_rotary_scalings_are_those_of_transformers(ours, theirs):
    from transformers import modeling_rope_utils as rope

    compute = rope.ROPE_INIT_FUNCTIONS[theirs["rope_type"]]
    frequency, scale = compute(llama_config(**theirs), torch.device("cpu"), seq_len=128)
    assert scale == 1
    options = {key: value for key, value in ours.items() if key != "kind"}
    plain = 10_000.0 ** (-torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(
        SCALINGS[ours["kind"]](plain, **options), frequency, rtol=1e-5, atol=0
    )
