import copy
import re

import pytest
import torch
from torch import nn

from regard.errors import RegardError
from regard.explain import ablate, patch, steer, trace
from regard.explain.trace import Trace
from regard.models.ngram import NGram, NGramConfig
from regard.models.seq2seq import MemoryKV, RecurrentEncoderDecoder, Seq2SeqConfig, _run_fused
from regard.models.transformer import Transformer, TransformerConfig
from regard.nn.hook_point import HookPoint
from regard.nn.recurrent import Recurrent
from regard.nn.state import Source


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.before_hook, self.after_hook = nn.Linear(3, 4), HookPoint(), HookPoint()

    def forward(self, x):
        return self.after_hook(self.linear(self.before_hook(x)))


@pytest.fixture
def model():
    return nn.ModuleDict({"one": Small(), "two": Small()})


def hooks(model):
    return sum(len(module._forward_hooks) for module in model.modules())


def test_the_output_of_a_tap_is_recorded_under_its_path(model):
    x = torch.randn(2, 3)
    with trace(model) as activations:
        y = model["one"](x)
    assert set(activations) == {"one.before_hook", "one.after_hook"}
    assert activations["one.before_hook"] is x
    assert activations["one.after_hook"] is y


def test_a_pattern_chooses_the_hook_points(model):
    with trace(model, "two.*") as activations:
        model["one"](torch.randn(2, 3))
        model["two"](torch.randn(2, 3))
    assert set(activations) == {"two.before_hook", "two.after_hook"}


def test_a_tap_called_twice_keeps_the_last_output(model):
    with trace(model, "one.before_hook") as activations:
        model["one"](torch.zeros(1, 3))
        model["one"](torch.ones(1, 3))
    assert activations["one.before_hook"].tolist() == [[1.0] * 3]


def test_hooks_are_removed_after_the_block(model):
    with trace(model) as activations:
        assert hooks(model) == 4
    model["one"](torch.randn(2, 3))
    assert hooks(model) == 0
    assert not activations


def test_hooks_are_removed_after_an_error(model):
    with pytest.raises(RuntimeError, match="shapes"), trace(model):
        model["one"](torch.randn(2, 5))
    assert hooks(model) == 0


def test_a_pattern_that_matches_nothing_says_what_there_is(model):
    with (
        pytest.raises(
            RegardError, match=r"no hook point matches 'three\.\*'; available: one\.before_hook"
        ),
        trace(model, "three.*"),
    ):
        pass


def test_all_hook_points_of_a_deep_model_are_listed_in_one_sentence():
    config = TransformerConfig(vocab_size=9, dim=8, layers=12, heads=2, architecture="encoder")
    with pytest.raises(RegardError) as refused, trace(Transformer(config), "encoder.blocks.12.*"):
        pass
    every = "attention.q_hook attention.k_hook attention.v_hook attention.heads_hook "
    every = [f"encoder.blocks.0-11.{name}" for name in (every + "ffn.hidden_hook out_hook").split()]
    listed = str(refused.value).partition("available: ")[2]
    assert listed.split(", ") == every


def test_a_model_without_hook_points_is_named_as_such():
    with pytest.raises(RegardError, match="Linear has none"), trace(nn.Linear(1, 1)):
        pass


def test_a_trace_has_a_short_display_and_a_table():
    activations = Trace({"layers.0.<hook>": torch.tensor([[1.0, 3.0]])})
    assert repr(activations) == "Trace(layers.0.<hook> (1, 2))"
    assert "<td>layers.0.&lt;hook&gt;</td><td>(1, 2)</td><td>2</td><td>1</td>" in (
        activations._repr_html_()
    )
    table = activations.to_pandas()
    assert list(table.columns) == ["hook point", "shape", "mean", "std"]
    assert table.loc[0, "mean"] == 2.0


IDS = torch.tensor([[1, 2, 3, 4]])


def decoder(**choices):
    sizes = {"vocab_size": 9, "dim": 16, "layers": 2, "heads": 4, "context": 8, "ffn": "swiglu"}
    return Transformer(TransformerConfig(**(sizes | choices))).eval()


@torch.no_grad()
def test_an_ablated_head_is_one_whose_output_weights_are_zero():
    model = decoder()
    before = model(IDS)
    path = "decoder.blocks.1.attention.heads_hook"
    with trace(model, path, edit={path: ablate(heads=[1, 2])}) as activations:
        edited = model(IDS)
    assert (activations[path][:, [1, 2]] == 0).all()  # the recorded activation is the edited one
    assert (activations[path][:, [0, 3]] != 0).all()
    model.decoder.blocks[1].attention.out.weight[:, 4:12] = 0
    torch.testing.assert_close(edited, model(IDS))
    assert (edited - before).abs().max() > 1e-3


@torch.no_grad()
def test_neurons_positions_and_means_are_replaced():
    model, path = decoder(), "decoder.blocks.0.ffn.hidden_hook"
    with trace(model, path) as plain:
        model(IDS)
    edit = {path: ablate(units=[0, 5], positions=[2], mean=True)}
    with trace(model, path, edit=edit) as activations:
        model(IDS)
    expected = plain[path].clone()
    expected[:, 2, [0, 5]] = plain[path][..., [0, 5]].mean((0, 1))
    torch.testing.assert_close(activations[path], expected)


@torch.no_grad()
def test_patching_every_position_gives_the_other_run_and_steering_adds():
    model, path = decoder(), "decoder.blocks.0.out_hook"
    other = torch.tensor([[5, 6, 7, 8]])
    with trace(model, path) as clean:
        expected = model(other)
    with trace(model, (), edit={path: patch(clean[path])}) as nothing:
        torch.testing.assert_close(model(IDS), expected)
    assert not nothing
    with trace(model, path, edit={path: patch(clean[path], positions=[0])}) as some:
        model(IDS)
    assert torch.equal(some[path][:, 0], clean[path][:, 0])
    assert not torch.equal(some[path][:, 1], clean[path][:, 1])
    vector = torch.randn(16)
    with trace(model, path, edit={path: steer(vector, scale=2.0, positions=[3])}) as steered:
        model(other)
    torch.testing.assert_close(steered[path][:, 3], clean[path][:, 3] + 2 * vector)
    assert torch.equal(steered[path][:, :3], clean[path][:, :3])


def test_any_module_can_be_read_and_replaced_by_its_path():
    layer = nn.ModuleDict({"lstm": nn.LSTM(3, 4, batch_first=True), "out": nn.Linear(4, 2)})
    x = torch.randn(1, 2, 3)
    with trace(layer, ["lstm", "out"], edit={"lstm": ablate(units=[0])}) as activations:
        layer["out"](layer["lstm"](x)[0])
    assert (activations["lstm"][..., 0] == 0).all()
    assert activations["out"].shape == (1, 2, 2)


def test_a_pattern_that_matches_no_hook_point_selects_other_modules():
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.ReLU()) for _ in range(2)))
    with trace(layers, "*.1", edit={"*.1": ablate(units=[0])}) as activations:
        layers(torch.ones(1, 2, 3))
    assert sorted(activations) == ["0.1", "1.1"]
    assert (activations["1.1"][..., 0] == 0).all()
    model = decoder()
    with trace(model, ["decoder.blocks.*.ffn", "*.out_hook"]) as activations:
        model(IDS)
    names = [f"decoder.blocks.{n}.{name}" for n in range(2) for name in ("ffn", "out_hook")]
    assert sorted(activations) == names
    for pattern in ("*", ""):
        with pytest.raises(RegardError, match=f"no hook point matches '{re.escape(pattern)}'"):
            trace(layers, pattern).__enter__()


def test_mistakes_of_an_edit_are_named():
    model = decoder()
    hook_point = "decoder.blocks.0.attention.heads_hook"
    cases = [
        (hook_point, ablate(heads=[4]), r"head 4: there are 4 heads, 0 to 3"),
        (hook_point, ablate(positions=[9]), r"position 9: there are 4 positions, 0 to 3"),
        (hook_point, lambda x: x[:, :1], r"the edit of decoder.* returned \(1, 1, 4, 4\)"),
        (
            hook_point,
            patch(torch.zeros(1, 4, 3, 4)),
            r"record them from an input of the same length",
        ),
        (hook_point, steer(torch.zeros(3)), r"a vector of 3 values cannot be added"),
        ("decoder.blocks.0.ffn.hidden_hook", ablate(heads=[0]), r"\(1, 4, 48\) has no heads"),
        (
            "decoder.blocks.7.*",
            ablate(),
            r"no hook point matches 'decoder.blocks.7.\*'; available: dec",
        ),
    ]
    for path, edit, message in cases:
        with pytest.raises(RegardError, match=message), trace(model, (), edit={path: edit}):
            model(IDS)
    assert hooks(model) == 0


CELLS = ("elman", "update_gate", "gru", {"kind": "gru", "reset": "after"}, "lstm")


@pytest.mark.parametrize("cell", CELLS, ids=str)
@torch.no_grad()
def test_later_steps_see_the_replaced_state_and_gates_of_a_recurrent_layer(cell):
    layer, x = Recurrent(cell, 3, 4, 1).double(), torch.randn(2, 6, 3).double()
    plain, _ = layer(x)
    state = "0.cell_hook" if cell == "lstm" else "0.state_hook"  # c = 0 makes h 0
    with trace(layer, state, edit={state: ablate(positions=[2])}) as activations:
        edited, _ = layer(x)
    assert (activations[state][:, 2] == 0).all()
    torch.testing.assert_close(edited[:, :2], plain[:, :2])
    torch.testing.assert_close(edited[:, 3:], layer(x[:, 3:])[0])  # as if it began there
    for gate in layer[0].hook_names:
        hook_point = f"0.{gate}_hook"
        mean = {hook_point: ablate(units=[1], positions=[3], mean=True)}
        with trace(layer, hook_point) as clean:
            layer(x)
        with trace(layer, hook_point, edit=mean) as activations:
            edited, _ = layer(x)
        assert activations[hook_point].shape == clean[hook_point].shape == (2, 6, 4)
        so_far = clean[hook_point][:, :4, 1].mean().expand(2)
        torch.testing.assert_close(
            activations[hook_point][:, 3, 1], so_far
        )  # unedited before step 3
        assert ((edited - plain)[:, 3:].abs().amax((0, 2)) > 0).all()
        assert ((edited - plain)[:, :3].abs() < 1e-12).all()
        with trace(layer, hook_point, edit={hook_point: patch(clean[hook_point])}) as activations:
            torch.testing.assert_close(layer(x)[0], plain)
    with (
        pytest.raises(RegardError, match=r"0\.state_hook at step 0 depends on later steps"),
        trace(layer, (), edit={"0.state_hook": lambda x: x.flip(1)}),
    ):
        layer(x)


PLACEMENTS = ({}, {"attention_placement": "bahdanau"}, {"input_feeding": True}, {"hops": 2})


@pytest.mark.parametrize("choices", PLACEMENTS, ids=str)
@torch.no_grad()
def test_an_alignment_is_replaced_in_a_forward_pass_and_in_decoding(choices):
    config = Seq2SeqConfig(vocab_size=9, dim=8, cell="gru", score="dot", **choices)
    model = RecurrentEncoderDecoder(config).double().eval()
    source = Source(torch.tensor([[1, 2, 3], [4, 5, 0]]), torch.tensor([3, 2]))
    ids = torch.tensor([[1, 6, 7, 8], [1, 8, 7, 6]])
    plain = model(ids, source=source)
    first = torch.zeros(2, 1, 4, 3).double().index_fill(3, torch.tensor([0]), 1.0)
    with trace(model, "*", edit={"attention.*.weights_hook": patch(first)}) as activations:
        edited = model(ids, source=source)
        stepped, _ = model.hidden(ids, model.start(2, 4, source))
    assert torch.equal(activations["attention.0.weights_hook"], first)
    assert activations["decoder.0.update_gate_hook"].shape == (2, 4, 8)
    assert (edited - plain).abs().max() > 1e-3
    torch.testing.assert_close(stepped, edited)
    initial, memory_kv = model._encode(source)
    hops = [(k[:, :, :1], v[:, :, :1]) for k, v in memory_kv.hops]  # the rest of the source removed
    expected, *_ = model._decode(
        ids, initial, MemoryKV(hops, memory_kv.allowed[..., :1]), _run_fused
    )
    torch.testing.assert_close(edited, expected)


def test_a_tap_that_did_not_run_is_named_and_a_counted_model_has_none():
    lstm = Recurrent("lstm", 3, 4, 1)
    with trace(lstm) as activations:
        pass
    with pytest.raises(RegardError, match=r"'0\.state_hook' was not recorded; nothing was"):
        activations["0.state_hook"]
    ngram = NGram(NGramConfig(vocab_size=9, order=2))
    with pytest.raises(RegardError, match="NGram has none"), trace(ngram):
        pass


@pytest.mark.long  # imports the compiler
def test_a_compiled_model_runs_eagerly_inside_and_says_so():
    model = decoder()
    compiled = torch.compile(model, backend="eager")
    before = compiled(IDS)
    with (
        pytest.warns(UserWarning, match="turns torch.compile off"),
        trace(compiled, "*.out_hook", edit={"*.heads_hook": ablate()}) as activations,
    ):
        edited = compiled(IDS)
    assert list(activations) == ["decoder.blocks.0.out_hook", "decoder.blocks.1.out_hook"]
    assert (edited - before).abs().max() > 1e-3
    assert torch.equal(compiled(IDS), before)


def test_a_hook_point_calls_every_kind_of_hook():
    point, seen, x = HookPoint(), [], torch.ones(2, requires_grad=True)

    def see(*_):
        seen.append(1)

    everywhere = nn.modules.module
    registers = [point.register_forward_pre_hook, point.register_forward_hook]
    registers += [point.register_full_backward_pre_hook, point.register_full_backward_hook]
    registers += [everywhere.register_module_forward_pre_hook]
    registers += [everywhere.register_module_forward_hook]
    registers += [everywhere.register_module_full_backward_pre_hook]
    registers += [everywhere.register_module_full_backward_hook]
    for count, register in enumerate(registers, 1):
        handle = register(see)
        point(x).sum().backward()
        handle.remove()
        assert len(seen) == count, register
    assert point(x) is x


def test_hook_points_are_submodules_that_can_be_copied_and_replaced():
    model = decoder()
    block, twin = model.decoder.blocks[0], copy.deepcopy(model).decoder.blocks[0]
    assert block.out_hook is dict(block.named_children())["out_hook"] is not twin.out_hook
    assert twin.out_hook is dict(twin.named_children())["out_hook"]
    block.out_hook = HookPoint()
    assert block.out_hook is block._modules["out_hook"]
