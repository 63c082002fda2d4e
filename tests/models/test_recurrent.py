"""Recurrent language models: the promises every language model makes."""

import pytest
import torch
from safetensors.torch import load, save

from regard.errors import ConfigError, ShapeError
from regard.models.base import Language
from regard.models.build import config_table, resolve
from regard.models.recurrent import RecurrentConfig, RecurrentLM
from regard.nn.recurrent import CELLS
from regard.nn.state import Source

VOCAB = 11


def small(seed=0, **choices):
    torch.manual_seed(seed)
    return RecurrentLM(RecurrentConfig(vocab_size=VOCAB, **{"dim": 16, **choices})).eval()


def some_ids(rows=3, time=9, seed=0):
    return torch.randint(VOCAB, (rows, time), generator=torch.Generator().manual_seed(seed))


def logits_of(model, ids):
    return model.head(model(ids))


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


def test_shapes_and_names():
    model = small(tied=False)
    assert isinstance(model, Language)
    assert model.context is None
    assert model(some_ids()).shape == (3, 9, 16)
    assert [name for name, _ in model.named_parameters()] == [
        "embed.weight",
        "layers.0.input.weight",
        "layers.0.input.bias",
        "layers.0.hidden.weight",
        "layers.1.input.weight",
        "layers.1.input.bias",
        "layers.1.hidden.weight",
        "head.weight",
    ]
    assert "head.weight" not in small().state_dict()


@pytest.mark.parametrize("cell", CELLS)
def test_every_cell_makes_a_model_whose_steps_equal_its_forward_pass(cell):
    model, ids = small(cell=cell), some_ids()
    logits, state = model.step(ids[:, :4], model.start(3, 9), all_logits=True)
    rest, _ = model.step(ids[:, 4:], state, all_logits=True)
    close(torch.cat([logits, rest], 1), logits_of(model, ids))
    assert len(state.current()[0]) == model.layers[0].state_vectors


def test_a_run_from_before_there_were_other_cells_is_an_lstm():
    table = {"family": "lstm", "vocab_size": 5, "dim": 8}
    assert resolve(table) == RecurrentConfig(vocab_size=5, dim=8, cell="lstm")
    assert config_table(resolve(table))["family"] == "recurrent"


def test_nothing_leaks_from_the_future():
    model, ids = small(), some_ids()
    changed = ids.clone()
    changed[:, 5] = (changed[:, 5] + 1) % VOCAB
    before, after = model(ids), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5], after[:, 5])
    assert not torch.equal(before[:, 8], after[:, 8])


@pytest.mark.parametrize("width", [1, 2, 4, 9])
@pytest.mark.parametrize("tied", [True, False])
def test_stepping_equals_forward(width, tied):
    model, ids = small(tied=tied), some_ids()
    state = model.start(len(ids), 9)
    every = []
    for part in ids.split(width, 1):
        last, _ = model.step(part, state)
        logits, state = model.step(part, state, all_logits=True)
        close(last, logits[:, -1:])
        every.append(logits)
    close(torch.cat(every, 1), logits_of(model, ids))
    assert state.lengths.tolist() == [9] * 3


@pytest.mark.parametrize("input_skip", [False, True])
def test_ragged_rows_equal_rows_alone(input_skip):
    model, ids = small(input_skip=input_skip), some_ids()
    logits, state = model.step(ids, model.start(3, 9), counts=torch.tensor([9, 1, 4]))
    more, state = model.step(ids[:, :2], state, counts=torch.tensor([2, 0, 1]))
    assert state.lengths.tolist() == [11, 1, 5]
    for row, (count, again) in enumerate([(9, 2), (1, 0), (4, 1)]):
        alone = torch.cat([ids[row : row + 1, :count], ids[row : row + 1, :again]], 1)
        expected = logits_of(model, alone)
        close(logits[row, 0], expected[0, count - 1])
        close(more[row, 0], expected[0, -1])


def test_select_reorders_and_repeats_rows():
    model, ids = small(), some_ids()
    _, state = model.step(ids[:, :5], model.start(3, 9), counts=torch.tensor([5, 4, 3]))
    rows = torch.tensor([2, 0, 2])
    chosen = state.select(rows)
    assert chosen.lengths.tolist() == [3, 5, 3]
    expected, _ = model.step(ids[:, 5:7], state)
    same, _ = model.step(ids[rows][:, 5:7], chosen)
    close(same, expected[rows])
    assert not torch.equal(expected[0], expected[2])


def test_rewind_goes_back_within_the_last_step_and_no_further():
    model, ids = small(), some_ids(rows=2)
    _, state = model.step(ids[:, :3], model.start(2, 9))
    _, state = model.step(ids[:, 3:8], state)
    state = state.rewind(torch.tensor([8, 7])).rewind(torch.tensor([6, 3]))
    logits, after = model.step(ids[:, 8:], state)
    assert after.lengths.tolist() == [7, 4]
    for row, kept in enumerate([6, 3]):
        alone = torch.cat([ids[row : row + 1, :kept], ids[row : row + 1, 8:]], 1)
        close(logits[row, 0], logits_of(model, alone)[0, -1])
    with pytest.raises(ShapeError, match="only the states of the last step are stored"):
        state.rewind(torch.tensor([6, 2]))


def test_every_parameter_receives_gradient():
    model, ids = small(tied=False), some_ids()
    model.head.loss(model(ids[:, :-1]), ids[:, 1:]).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_model_loads_into_a_fresh_one(tied):
    model, fresh, ids = small(tied=tied), small(seed=1, tied=tied), some_ids()
    fresh.load_state_dict(load(save(model.state_dict())))
    assert torch.equal(logits_of(fresh, ids), logits_of(model, ids))


def test_it_overfits_one_batch():
    model, ids = small(dim=32).train(), some_ids(rows=4, time=13, seed=3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(150):
        optimizer.zero_grad()
        loss = model.head.loss(model(ids[:, :-1]), ids[:, 1:]) / 48
        loss.backward()
        optimizer.step()
    # the first id of a row may begin two rows, so a little is left
    assert loss < 0.1


def test_dropout_works_in_training_only():
    model, ids = small(dropout=0.5), some_ids()
    assert torch.equal(model(ids), model(ids))
    model.train()
    assert not torch.equal(model(ids), model(ids))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"vocab_size": 0}, "vocab_size=0 must be at least 1"),
        ({"dim": 0}, "dim=0 must be at least 1"),
        ({"layers": -1}, "layers=-1 must be at least 1"),
        ({"context": 0}, "context=0 must be at least 1"),
        ({"dropout": 1.0}, r"dropout=1.0 must lie in \[0, 1\)"),
        ({"cell": "lstn"}, "unknown cell 'lstn'"),
        ({"one_hot": True, "char_dim": 3}, "one_hot=true is for ids alone; leave out one_hot"),
    ],
)
def test_wrong_settings_are_named(wrong, message):
    with pytest.raises(ConfigError, match=message):
        RecurrentConfig(**{"vocab_size": 5, **wrong})


def test_with_an_input_skip_the_logits_are_a_sum_of_two_products():
    model, ids = small(cell="elman", input_skip=True), some_ids()
    w_h, w_x = model.head.matrix.split(16, 1)
    h, x = model.layers(model.embed(ids))[0], model.embed(ids)
    torch.testing.assert_close(model.head(model(ids)), h @ w_h.T + x @ w_x.T)


def test_one_hot_inputs_select_columns_of_the_input_matrix():
    model, ids = small(cell="elman", layers=1, one_hot=True), torch.tensor([[3]])
    cell = model.layers[0]
    expected = torch.tanh(cell.input.weight[:, 3] + cell.input.bias)
    torch.testing.assert_close(model(ids)[0, 0], expected)
    assert not any(name.startswith("embed") for name, _ in model.named_parameters())


def test_a_source_is_refused():
    with pytest.raises(ConfigError, match="takes no source"):
        small().start(1, 5, source=Source(torch.zeros(1, 1).long(), torch.ones(1).long()))


@pytest.mark.parametrize("options", [{"input_skip": True}, {"bidirectional": False}])
def test_ends_are_read_only_from_vectors_of_two_directions(options):
    head = {"kind": "classification", "classes": 2, "pool": "ends"}
    table = {"family": "recurrent", "vocab_size": VOCAB, "bidirectional": True, "head": head}
    resolve(table)
    with pytest.raises(ConfigError, match="needs bidirectional=true and input_skip=false"):
        resolve({**table, **options})


def test_the_pools_in_the_error_are_those_of_the_head():
    table = {"family": "recurrent", "vocab_size": VOCAB, "bidirectional": True}
    forecast = {"input_dim": 2, "head": {"kind": "forecast", "outputs": 2}}
    with pytest.raises(ConfigError, match="to 'mean' or 'flatten'"):
        resolve({**table, **forecast})
    with pytest.raises(ConfigError, match="to 'ends', 'mean' or 'max'"):
        resolve({**table, "head": {"kind": "classification", "classes": 2}})
