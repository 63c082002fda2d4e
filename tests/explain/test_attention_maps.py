import re
from functools import partial
from itertools import product

import pytest
import torch

from regard.errors import RegardError, ShapeError
from regard.explain import AttentionMap, attention, attention_maps, trace
from regard.models.transformer import Transformer, TransformerConfig
from regard.nn.attention import Mask
from regard.nn.position import POSITIONS
from regard.nn.score import SCORES
from regard.nn.state import Source

IDS = torch.tensor([[1, 2, 3, 4, 5], [5, 4, 3, 2, 1]])
SOURCE = Source(torch.tensor([[4, 2, 8, 1], [7, 3, 0, 0]]), torch.tensor([4, 2]))


def small(**choices):
    torch.manual_seed(0)
    config = {"vocab_size": 9, "dim": 16, "layers": 2, "heads": 4, "context": 16} | choices
    return Transformer(TransformerConfig(**config)).double().eval()


def hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_cross_attention_maps_have_a_row_per_target_and_a_column_per_source():
    model = small(architecture="encoder-decoder")
    maps = attention_maps(model, lambda: model(IDS, source=SOURCE), pattern="*.cross")
    assert list(maps) == ["decoder.blocks.0.cross", "decoder.blocks.1.cross"]
    for weights in maps.values():
        assert weights.shape == (2, 4, 5, 4)
        assert weights.dtype == torch.float32
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 5))
        assert (weights[1, ..., 2:] == 0).all()  # padding of the second source


@pytest.mark.parametrize("position", ["learned", "rotary", "alibi"])
@pytest.mark.parametrize("kv_heads", [None, 2])
def test_the_maps_are_the_weights_that_made_the_output(position, kv_heads):
    model = small(position=position, kv_heads=kv_heads, bias=False)
    layer = model.decoder.blocks[1].attention
    calls = []
    layer.register_forward_hook(lambda _, given, out: calls.append((given[0], out)))
    maps = attention_maps(model, lambda: model(IDS), pattern="decoder.blocks.1.attention")
    weights = maps["decoder.blocks.1.attention"].double()
    [(x, out)] = calls
    v = layer.value(x).unflatten(-1, (layer.kv_heads, -1)).transpose(1, 2)
    v = v.repeat_interleave(layer.heads // layer.kv_heads, 1)
    y = layer.out((weights @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(y, out, rtol=0, atol=1e-6)  # the maps are float32


def test_a_decoder_attends_to_no_later_position():
    model = small()
    for weights in attention_maps(model, lambda: model(IDS)).values():
        assert (weights.triu(1) == 0).all()


def test_recording_changes_no_output_and_removes_its_hooks():
    model = small()
    before, outputs = model(IDS), []
    attention_maps(model, lambda: outputs.append(model(IDS)))
    assert torch.equal(before, outputs[0])
    assert hooks(model) == 0


def test_a_decode_step_has_the_row_of_its_token():
    model = small()
    whole = attention_maps(model, lambda: model(IDS))

    def stepwise():
        state = model.start(2, 5)
        for column in range(5):
            _, state = model.step(IDS[:, column : column + 1], state)

    for name, weights in attention_maps(model, stepwise).items():
        torch.testing.assert_close(weights, whole[name][:, :, -1:], rtol=0, atol=1e-6)


def test_an_attention_that_is_not_there_is_named_with_those_that_are():
    model = small()
    with pytest.raises(
        RegardError, match=r"no attention module matches '\*.cross'; available: decoder"
    ):
        attention_maps(model, lambda: model(IDS), pattern="*.cross")


def test_a_run_that_never_calls_the_model_is_an_error():
    with pytest.raises(RegardError, match="`run` must call this model"):
        attention_maps(small(), lambda: None)


def test_hooks_are_gone_after_an_error():
    model = small()
    with pytest.raises(ZeroDivisionError):
        attention_maps(model, lambda: 1 / 0)
    assert hooks(model) == 0


def test_labels_must_fit_the_weights():
    with pytest.raises(ShapeError, match="2 row and 3 column labels do not match"):
        AttentionMap(["a", "b"], ["x", "y", "z"], torch.rand(4, 3, 3))


def test_every_call_of_a_shared_layer_has_its_map():
    fields = {"vocab_size": 11, "dim": 16, "layers": 3, "heads": 2, "architecture": "encoder"}
    shared = Transformer(TransformerConfig(**fields, shared_layers=True)).eval()
    apart = Transformer(TransformerConfig(**fields)).eval()
    own = shared.state_dict()
    apart.load_state_dict(
        {name: own[re.sub(r"blocks\.\d", "blocks.0", name)] for name in apart.state_dict()}
    )
    ids = torch.randint(0, 11, (2, 5))
    expected = attention_maps(apart, lambda: apart(ids))
    for layer in range(3):
        (weights,) = attention_maps(shared, lambda: shared(ids), call=layer).values()
        torch.testing.assert_close(weights, expected[f"encoder.blocks.{layer}.attention"])
    (last,) = attention_maps(shared, lambda: shared(ids)).values()
    torch.testing.assert_close(last, weights)


LENGTH = 6
TOKENS = torch.tensor([[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]])
MASKS = {
    "none": lambda: Mask.none(),
    "causal": lambda: Mask.causal(),
    "prefix": lambda: Mask.prefix(torch.tensor([2, 3])),
    "window": lambda: Mask.window(2),
    "lengths": lambda: Mask.lengths(torch.tensor([LENGTH, 3])),
    "documents": lambda: Mask.documents(torch.tensor([[0, 0, 1, 1, 1, 1], [0, 1, 1, 2, 2, 2]])),
    "several": lambda: Mask.causal() & Mask.window(3) & Mask.lengths(torch.tensor([LENGTH, 3])),
}
YARN = {"kind": "yarn", "factor": 2.0, "original_context": 16}
SCHEMES = [{"position": position} for position in POSITIONS] + [
    {"score": score, "position": "none"} for score in SCORES if score != "location"
]
SCHEMES += [  # options of the entries of the tables
    {"position": {"kind": "rotary", "interleaved": True, "partial_rotary_factor": 0.67}},
    {"position": {"kind": "rotary", "scaling": YARN}},
    {"position": {"kind": "rotary", "window_base": 100.0}, "window": 2, "global_every": 2},
    {"position": {"kind": "sinusoidal", "each_layer": True}},
    {"position": {"kind": "learned", "each_layer": True, "after_projection": True}},
    {"score": {"kind": "scaled_dot", "cap": 5.0}},
    {"score": {"kind": "disentangled", "position_projections": True}, "position": "none"},
    {"qk_norm": True},
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_recomputed_weights_are_those_of_the_forward_pass_for_every_scheme_mask_and_grouping(
    scheme, monkeypatch
):
    """The values are replaced by a one-hot vector for each key: a head then returns its weights."""
    monkeypatch.setattr(attention, "CHUNK_WEIGHTS", 100)  # several chunks of rows
    for architecture, kv_heads, mask in product(
        ("decoder", "encoder"), (None, 2, 1), MASKS.values()
    ):
        sizes = {"dim": 24, "head_dim": LENGTH, "kv_heads": kv_heads}
        model = small(**scheme, **sizes, architecture=architecture)
        run = partial(model, TOKENS, mask=mask())

        def one_hot(v):
            return torch.eye(LENGTH, dtype=v.dtype).expand_as(v)

        edit = {"*.v_hook": one_hot}
        with trace(model, "*.heads_hook", edit=edit) as activations, torch.no_grad():
            every = attention_maps(model, run)
        for name, weights in every.items():  # the maps are float32
            expected = activations[f"{name}.heads_hook"].float()
            torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)
        with trace(model, (), edit=edit):
            some_maps = attention_maps(model, run, heads=[3, 1], rows=[4, 0, 2])
        for name, some in some_maps.items():
            assert torch.equal(some, every[name][:, [3, 1]][:, :, [4, 0, 2]])


@pytest.mark.parametrize("score", [score for score in SCORES if score != "location"])
def test_one_head_is_computed_alone_unless_heads_have_parameters_of_their_own(score, monkeypatch):
    model = small(position="none", score=score)
    module, heads = model.decoder.blocks[0].attention, []
    monkeypatch.setattr(
        module,
        "weights",
        lambda q, k, inputs: heads.append(q.shape[1]) or type(module).weights(module, q, k, inputs),
    )
    attention_maps(model, partial(model, IDS), pattern="decoder.blocks.0.attention", heads=[2])
    assert heads[-1] == (4 if module.score.per_head else 1)
    assert module.score.per_head == (score in ("transformer_xl", "disentangled"))


@pytest.mark.parametrize("score", ["scaled_dot", "transformer_xl"])
def test_no_head_and_no_row_are_empty_maps(score):
    model = small(position="none", score=score)
    for choice, shape in (({"heads": []}, (2, 0, 5, 5)), ({"rows": []}, (2, 4, 0, 5))):
        for weights in attention_maps(model, partial(model, IDS), **choice).values():
            assert weights.shape == shape


def test_heads_rows_and_sizes_that_do_not_exist_are_named(monkeypatch):
    model = small()
    run = partial(model, IDS)
    with pytest.raises(RegardError, match="head 4: there are 4 heads, 0 to 3"):
        attention_maps(model, run, heads=[4])
    with pytest.raises(RegardError, match="row 5: there are 5 rows, 0 to 4"):
        attention_maps(model, run, rows=[5])
    monkeypatch.setattr(attention, "MAX_WEIGHTS", 399)
    with pytest.raises(RegardError, match=r"2 maps of 2 × 4 × 5 × 5 weights .* choose layers"):
        attention_maps(model, run)
    assert len(attention_maps(model, run, heads=[0])) == 2


def test_all_calls_of_a_shared_layer_are_kept_when_asked():
    model = small(shared_layers=True, layers=3)
    maps = attention_maps(model, lambda: model(IDS), call=None)
    assert list(maps) == [f"decoder.blocks.0.attention#{layer}" for layer in range(3)]
    (last,) = attention_maps(model, lambda: model(IDS)).values()
    assert torch.equal(maps["decoder.blocks.0.attention#2"], last)


def test_one_row_of_one_head_is_computed_without_the_rest():
    model = Transformer(
        TransformerConfig(vocab_size=9, dim=64, layers=1, heads=8, context=4096, position="rotary")
    ).eval()
    ids = torch.randint(9, (1, 4096))
    (row,) = attention_maps(model, lambda: model(ids), heads=[3], rows=[4000]).values()
    assert row.shape == (1, 1, 1, 4096)
    torch.testing.assert_close(row.sum(), torch.tensor(1.0))
    assert (row[..., 4001:] == 0).all()


def test_a_model_of_another_library_is_told_to_be_imported():
    layer = torch.nn.TransformerEncoderLayer(8, 2, 8)
    message = "no attention module matches .*; TransformerEncoderLayer has no regard modules"
    with pytest.raises(RegardError, match=message):
        attention_maps(layer, lambda: layer(torch.zeros(3, 1, 8)))
