"""Blocks and stacks: positions or none, dropout, and what a state remembers."""

import pytest
import torch

from regard.models.transformer import Transformer, TransformerConfig
from regard.nn.attention import Mask, split_heads
from regard.nn.position import POSITIONS

TINY = {"vocab_size": 11, "dim": 16, "layers": 2, "heads": 4, "context": 16}
AT = torch.arange(6).unsqueeze(0)


def encoder(**fields):
    return Transformer(TransformerConfig(**{**TINY, **fields}, architecture="encoder")).encoder


def test_without_positions_a_permutation_of_the_input_permutes_the_output():
    stack = encoder(position="none").double()
    x, order = torch.randn(2, 6, 16).double(), torch.randperm(6)
    y = stack(x, positions=AT, mask=Mask.none())
    permuted = stack(x[:, order], positions=AT, mask=Mask.none())
    torch.testing.assert_close(permuted, y[:, order], rtol=0, atol=1e-12)


@pytest.mark.parametrize("position", [name for name in POSITIONS if name != "none"])
def test_with_positions_the_order_of_the_input_matters(position):
    stack = encoder(position=position, init={"kind": "normal", "std": 0.5})
    x, order = torch.randn(2, 6, 16), torch.tensor([1, 0, 2, 3, 4, 5])
    y = stack(x, positions=AT, mask=Mask.none())
    permuted = stack(x[:, order], positions=AT, mask=Mask.none())
    assert (permuted - y[:, order]).abs().max() > 1e-3


@pytest.mark.parametrize("position", ["sinusoidal", "learned"])
def test_positions_of_each_layer_are_added_before_every_attention(position):
    stack = encoder(position={"kind": position, "each_layer": True}).eval()
    inputs = []
    for block in stack.blocks:
        block.attention.query.register_forward_hook(lambda _, given, __: inputs.append(given[0]))
    x = torch.randn(2, 6, 16)
    stack(x, positions=AT, mask=Mask.none())
    placed = stack.position.embed(AT)
    first = stack.blocks[0].attention_norm(x) + placed
    torch.testing.assert_close(inputs[0], first, rtol=0, atol=1e-6)
    assert len(inputs) == 2


@pytest.mark.parametrize("position", ["sinusoidal", "learned"])
def test_projected_positions_are_added_to_queries_keys_and_values(position):
    stack = encoder(
        position={"kind": position, "each_layer": True, "after_projection": True}
    ).eval()
    attention, seen = stack.blocks[1].attention, {}
    for name in ("query", "key", "value", "q_hook", "k_hook", "v_hook"):
        getattr(attention, name).register_forward_hook(
            lambda _, __, out, name=name: seen.update({name: out})
        )
    stack(torch.randn(2, 6, 16), positions=AT, mask=Mask.none())
    placed = stack.position.embed(AT).unsqueeze(1)  # (1, 1, time, head_dim): one for all heads
    assert placed.shape[-1] == attention.head_dim
    for name, hook_point in (("query", "q_hook"), ("key", "k_hook"), ("value", "v_hook")):
        expected = split_heads(seen[name], attention.heads) + placed
        torch.testing.assert_close(seen[hook_point], expected, rtol=0, atol=1e-6)


def test_padding_does_not_enter_the_statistics_of_batch_norm():
    stack = encoder(norm="batch", embed_norm=True, norm_placement="sandwich")
    lengths = torch.tensor([6, 3])
    x = torch.randn(2, 6, 16)
    y = stack(x, positions=AT, mask=Mask.lengths(lengths))
    x[1, 3:] = 100.0
    changed = stack(x, positions=AT, mask=Mask.lengths(lengths))
    assert torch.equal(y[0], changed[0])
    assert torch.equal(y[1, :3], changed[1, :3])


def test_a_block_is_attention_then_feed_forward():
    stack = encoder(norm_placement="post", position="none").double()
    block = stack.blocks[0]
    x = torch.randn(2, 6, 16).double()
    seen = []
    block.register_forward_hook(lambda _, __, out: seen.append(out))
    inputs = []
    block.attention.register_forward_pre_hook(
        lambda _, __, named: inputs.append(named["inputs"]), with_kwargs=True
    )
    stack(x, positions=AT, mask=Mask.none())
    talked = block.attention_norm(x + block.attention(x, inputs=inputs[0]))
    expected = block.ffn_norm(talked + block.ffn(talked))
    torch.testing.assert_close(seen[0], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["dropout", "attention_dropout", "ffn_dropout"])
def test_dropout_acts_only_in_training(kind):
    stack = encoder(**{kind: 0.5}, init={"kind": "normal", "std": 0.5})
    x = torch.randn(2, 6, 16)
    assert not torch.equal(
        stack(x, positions=AT, mask=Mask.none()), stack(x, positions=AT, mask=Mask.none())
    )
    stack.eval()
    assert torch.equal(
        stack(x, positions=AT, mask=Mask.none()), stack(x, positions=AT, mask=Mask.none())
    )


def test_a_norm_of_the_embeddings_stands_before_the_first_block():
    stack = encoder(embed_norm=True)
    inputs = []
    stack.blocks[0].register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    stack(5 + 3 * torch.randn(2, 6, 16), positions=AT, mask=Mask.none())
    torch.testing.assert_close(inputs[0].mean(-1), torch.zeros(2, 6), rtol=0, atol=1e-5)
    torch.testing.assert_close(inputs[0].var(-1, correction=0), torch.ones(2, 6), rtol=0, atol=1e-3)


def test_shared_layers_are_one_block_used_again():
    shared, alone = encoder(shared_layers=True).eval(), encoder().eval()
    assert len(shared.blocks) == 1
    assert len(shared.layers) == 2
    alone.position.load_state_dict(shared.position.state_dict())
    alone.norm.load_state_dict(shared.norm.state_dict())
    for block in alone.blocks:
        block.load_state_dict(shared.blocks[0].state_dict())
    x = torch.randn(2, 6, 16)
    torch.testing.assert_close(
        shared(x, positions=AT, mask=Mask.none()), alone(x, positions=AT, mask=Mask.none())
    )


def test_some_layers_have_full_attention_in_spite_of_a_window():
    stack = encoder(layers=4, window=2, global_every=2)
    assert stack.windows == (2, None, 2, None)
    masks = []
    for block in stack.blocks:
        block.attention.register_forward_pre_hook(
            lambda _, __, named: masks.append(named["inputs"].dense()), with_kwargs=True
        )
    stack(torch.randn(2, 6, 16), positions=AT, mask=Mask.causal())
    assert [int(mask[0, 0, -1].sum()) for mask in masks] == [2, 6, 2, 6]


def test_queries_and_keys_are_normed_each_by_itself():
    stack = encoder(qk_norm=True, position="none").double()
    attention = stack.blocks[0].attention
    torch.nn.init.normal_(attention.q_norm.weight)
    seen = []
    attention.q_hook.register_forward_hook(lambda _, __, out: seen.append(out))
    x = torch.randn(2, 6, 16).double()
    for mode in (True, False):
        attention.train(mode)
        stack(x, positions=AT, mask=Mask.none())
    q = attention.query(stack.blocks[0].attention_norm(x)).unflatten(-1, (4, 4)).transpose(1, 2)
    for each in seen:
        torch.testing.assert_close(each, attention.q_norm(q), rtol=0, atol=1e-12)
