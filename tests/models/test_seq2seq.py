"""Recurrent encoder-decoders against the equations of the papers and the layers of torch."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import regard
import seq2seq_reference as reference
from regard.config import DataConfig, RunConfig, TrainConfig
from regard.data.batch import PairBatch
from regard.errors import ConfigError, ShapeError
from regard.explain import attention_maps
from regard.models.build import preset, weights
from regard.models.seq2seq import RecurrentEncoderDecoder, Seq2SeqConfig
from regard.nn.head import IGNORE_INDEX
from regard.nn.state import Source
from regard.tasks import Seq2Seq

VOCAB, DIM = 11, 8
GRU = {"kind": "gru", "reset": "after"}
LENGTHS = [5, 3, 1]


def small(**choices):
    return RecurrentEncoderDecoder(
        Seq2SeqConfig(vocab_size=VOCAB, **{"dim": DIM, **choices})
    ).eval()


def random_batch(rows=3, time=4):
    source = Source(torch.randint(VOCAB, (rows, 5)), torch.tensor(LENGTHS[:rows]))
    return torch.randint(VOCAB, (rows, time)), source


def rows_alone(source):
    return [ids[:n].tolist() for ids, n in zip(source.ids, source.lengths, strict=True)]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("formula", "choices"),
    [
        (reference.bahdanau, {"cell": GRU, "score": "additive", "attention_placement": "bahdanau"}),
        (
            reference.luong,
            {"layers": 2, "bidirectional": False, "score": "general", "input_feeding": True},
        ),
    ],
)
def test_a_model_computes_its_papers_equations(formula, choices):
    model = small(**choices)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    ids, source = random_batch()
    actual, own = model(ids, source=source), weights(model)
    for row, read in enumerate(rows_alone(source)):
        expected = formula(own, read, ids[row].tolist())
        torch.testing.assert_close(actual[row], expected, rtol=0, atol=1e-12)


def copy_weights(cell, into, suffix):
    """The weights of one of our cells in a layer of torch's."""
    pairs = [("weight_ih", cell.input.weight), ("weight_hh", cell.hidden.weight)]
    pairs += [("bias_ih", cell.input.bias), ("bias_hh", cell.hidden.bias)]
    for name, ours in pairs:
        theirs = getattr(into, f"{name}_{suffix}")
        theirs.data.copy_(torch.zeros_like(theirs) if ours is None else ours)


@pytest.mark.parametrize(("cell", "theirs"), [("lstm", nn.LSTM), (GRU, nn.GRU)])
def test_the_encoder_equals_torchs_on_packed_rows(cell, theirs):
    model = small(cell=cell, layers=2, score="dot")
    other = theirs(DIM, DIM, 2, batch_first=True, bidirectional=True)
    for layer, both in enumerate(model.encoder):
        copy_weights(both.forward_layer, other, f"l{layer}")
        copy_weights(both.backward_layer, other, f"l{layer}_reverse")
    _, source = random_batch()
    x = model.embed(source.ids)
    packed = pack_padded_sequence(x, source.lengths, batch_first=True)
    y, last = other(packed)
    y, _ = pad_packed_sequence(y, batch_first=True)
    h, states = model.encoder(x, source.lengths)
    torch.testing.assert_close(h, y, rtol=0, atol=1e-6)
    for kept, expected in enumerate(last if isinstance(last, tuple) else (last,)):
        for layer, state in enumerate(states):
            both = torch.cat([expected[2 * layer], expected[2 * layer + 1]], -1)
            torch.testing.assert_close(state[kept], both, rtol=0, atol=1e-6)


def test_a_look_between_two_layers_equals_torchs_multi_head_attention():
    model = small(
        cell=GRU, layers=2, encoder_layers=1, bridge=False, score="scaled_dot", heads=2,
        attention_placement="between", tied=False,
    )  # fmt: skip
    below, above = nn.GRU(DIM, DIM, batch_first=True), nn.GRU(2 * DIM, DIM, batch_first=True)
    copy_weights(model.decoder[0], below, "l0")
    copy_weights(model.decoder[1], above, "l0")
    look, ours = nn.MultiheadAttention(DIM, 2, batch_first=True), model.attention[0]
    parts = (ours.query, ours.key, ours.value)
    look.in_proj_weight.data.copy_(torch.cat([part.weight for part in parts]))
    look.in_proj_bias.data.copy_(torch.cat([part.bias for part in parts]))
    look.out_proj.load_state_dict(ours.out.state_dict())

    ids, source = random_batch()
    h, _ = model.encoder(model.embed(source.ids), source.lengths)
    h = model.direction_projection(h).tanh()
    a, _ = below(model.embed(ids))
    padding = torch.arange(5) >= source.lengths.unsqueeze(1)
    c, expected = look(a, h, h, key_padding_mask=padding, average_attn_weights=False)
    s, _ = above(torch.cat([a, c], -1))
    (map,) = attention_maps(model, lambda: model(ids, source=source)).values()
    torch.testing.assert_close(model(ids, source=source), s, rtol=0, atol=1e-6)
    torch.testing.assert_close(map, expected, rtol=0, atol=1e-6)


def test_without_attention_the_last_state_is_all_that_is_known_of_the_source():
    model = small(bidirectional=False)
    _, source = random_batch()
    _, states = model.encoder(model.embed(source.ids), source.lengths)
    begin, memory = model._encode(source)
    assert memory.hops == []
    for layer, expected in zip(begin, states, strict=True):
        for ours, theirs in zip(layer, expected, strict=True):
            assert torch.equal(ours, theirs)


def test_a_reversed_source_is_read_from_its_end_and_looked_at_in_its_order():
    torch.manual_seed(1)
    plain = small(bidirectional=False, score="dot")
    reversed_model = small(bidirectional=False, score="dot", reversed_source=True)
    reversed_model.load_state_dict(plain.state_dict())
    ids, source = random_batch()
    back = source.ids.clone()
    for row, length in enumerate(LENGTHS):
        back[row, :length] = source.ids[row, :length].flip(0)
    back = Source(back, source.lengths)
    expected = plain(ids, source=back)
    torch.testing.assert_close(reversed_model(ids, source=source), expected, rtol=0, atol=1e-6)
    (ours,) = attention_maps(reversed_model, lambda: reversed_model(ids, source=source)).values()
    (theirs,) = attention_maps(plain, lambda: plain(ids, source=back)).values()
    for row, length in enumerate(LENGTHS):
        torch.testing.assert_close(ours[row, ..., :length], theirs[row, ..., :length].flip(-1))


@pytest.mark.parametrize("placement", ["bahdanau", "luong"])
def test_attention_maps_hold_all_steps_and_no_padding(placement):
    model = small(score="additive", attention_placement=placement, hops=2)
    ids, source = random_batch()
    maps = attention_maps(model, lambda: model(ids, source=source))
    assert list(maps) == ["attention.0", "attention.1"]
    for map in maps.values():
        assert map.shape == (3, 1, 4, 5)
        torch.testing.assert_close(map.sum(-1), torch.ones(3, 1, 4))
        assert not map[1, ..., 3:].any()


def test_a_hop_looks_with_what_the_one_before_has_found():
    model = small(score="general", hops=2)
    _, source = random_batch()
    _, memory = model._encode(source)
    q = torch.randn(3, 4, DIM)
    first, second = model._attend(q, memory)
    again = model.attention[1](q + first.context_vectors, *memory.hops[1], memory.allowed)
    assert torch.equal(second.context_vectors, again.context_vectors)
    assert not torch.equal(second.weights, first.weights)


# Hard attention


def test_a_straight_look_goes_to_one_place():
    model = small(score="general", hard_attention="straight_through").train()
    ids, source = random_batch()
    (map,) = attention_maps(model, lambda: model(ids, source=source)).values()
    assert set(map.flatten().tolist()) == {0.0, 1.0}
    torch.testing.assert_close(map.sum(-1), torch.ones(3, 1, 4))


def test_reinforce_finds_the_gradient_of_the_expected_loss():
    # one step, rows that differ only in where they look: over many rows the draws are the
    # expectation, which can also be summed over all places
    torch.manual_seed(3)
    model = small(score="general", hard_attention="reinforce", bidirectional=False).train()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.7)
    rows, length = 20_000, 4
    source = Source(torch.tensor([[1, 5, 2, 7]]), torch.tensor([length]))
    many = Source(source.ids.expand(rows, -1), source.lengths.expand(rows))
    ids, target = torch.tensor([[3]]), torch.tensor([[6]])
    task = Seq2Seq(label_smoothing=0.0)

    def gradient(loss):
        return torch.autograd.grad(loss, model.attention[0].score.key.weight)[0]

    batch = PairBatch(many, ids.expand(rows, -1), target.expand(rows, -1))
    estimate = gradient(task.loss(model, batch) / rows)

    begin, memory = model._encode(source)
    (k, v), s = memory.hops[0], model.decoder[0](model.embed(ids), state=begin[0])[0]
    chances = (s.unsqueeze(1) @ k.transpose(-1, -2)).softmax(-1).flatten()
    costs = []
    for place in range(length):
        z = model.readout(torch.cat([s, v[:, 0, place : place + 1]], -1)).tanh()
        costs.append(model.head.loss(z, target))
    exact = gradient((chances * torch.stack(costs)).sum())
    # the error of a mean over 20,000 draws
    torch.testing.assert_close(estimate, exact, rtol=0, atol=0.03 * exact.abs().max().item())


def test_draws_learn_from_scored_steps_alone():
    model = small(score="dot", hard_attention="reinforce").train()
    ids, source = random_batch()
    targets = torch.randint(VOCAB, (3, 4))
    targets[1:, 2:] = IGNORE_INDEX
    torch.manual_seed(0)
    loss = Seq2Seq().loss(model, PairBatch(source, ids, targets))
    changed = ids.clone()
    changed[1:, 3:] = 0
    torch.manual_seed(0)
    again = Seq2Seq().loss(model, PairBatch(source, changed, targets))
    torch.testing.assert_close(loss, again)
    model.eval()
    assert model.forward_with_log_probs(ids, source=source)[1] is None


# What is refused


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ({"bridge": False}, "the decoder does not see the source"),
        ({"layers": 2, "encoder_layers": 1}, "layers=2 and encoder_layers=1;\nleave out"),
        ({"score": "shaw"}, "compares positions within one sequence, but a decoder attends"),
        ({"score": "dott"}, "unknown score 'dott'; did you mean 'dot'"),
        ({"score": "dot", "attention_placement": "between"}, "between two layers .* layers=1; set"),
        ({"input_feeding": True}, "input_feeding=true feeds the attentional vector"),
        (
            {"score": "dot", "attention_placement": "bahdanau", "input_feeding": True},
            "leave out input_feeding",
        ),
        ({"hops": 2}, "configure attention, but no score is set"),
        ({"score": "location", "heads": 2}, "heads=2 would get no gradient"),
        ({"cell": "lsmt"}, "unknown cell 'lsmt'; did you mean 'lstm'"),
        ({"dropout": 1.0}, r"dropout=1.0 must lie in \[0, 1\)"),
        ({"hops": 0}, "hops=0 must be at least 1"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_reason(choices, reason):
    with pytest.raises(ConfigError, match=reason):
        Seq2SeqConfig(vocab_size=VOCAB, **choices)


def test_heads_must_divide_the_width_and_a_source_must_be_there():
    with pytest.raises(ShapeError, match="heads=3 must divide dim=8"):
        small(score="dot", heads=3)
    with pytest.raises(ConfigError, match="needs a source"):
        small().start(1, 4)


def test_the_presets_are_their_papers():
    assert preset("sutskever").score is None
    assert preset("bahdanau").score == "additive"
    assert preset("luong").input_feeding


def test_a_run_learns_to_reverse_and_shows_where_it_looks(tmp_path):
    path = {"kind": "reversal", "examples": 1000, "min_length": 2, "max_length": 4}
    config = RunConfig(
        name="reversal",
        task="seq2seq",
        data=DataConfig(path=path, tokenizer="char"),
        model={"preset": "bahdanau", "dim": 32, "tied": True, "context": 16},
        train=TrainConfig(steps=200, batch=32, lr=1e-2, evaluate_every=200),
    )
    run = regard.train(config, out=tmp_path / "run")
    ((name, seen),) = run.explain("abcd").items()
    assert name == "attention.0"
    assert seen.columns[:4] == list("abcd")
    assert run.translate("abcd") == "dcba"
    assert seen.weights[0, :4, :4].argmax(-1).tolist() == [3, 2, 1, 0]
