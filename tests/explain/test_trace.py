import pytest
import torch
from torch import nn

from regard.errors import RegardError
from regard.explain import trace
from regard.explain.trace import Trace
from regard.nn.tap import Tap


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.before_tap, self.after_tap = nn.Linear(3, 4), Tap(), Tap()

    def forward(self, x):
        return self.after_tap(self.linear(self.before_tap(x)))


@pytest.fixture
def model():
    return nn.ModuleDict({"one": Small(), "two": Small()})


def hooks(model):
    return sum(len(module._forward_hooks) for module in model.modules())


def test_the_output_of_a_tap_is_recorded_under_its_path(model):
    x = torch.randn(2, 3)
    with trace(model) as activations:
        y = model["one"](x)
    assert set(activations) == {"one.before_tap", "one.after_tap"}
    assert activations["one.before_tap"] is x
    assert activations["one.after_tap"] is y


def test_a_pattern_chooses_the_taps(model):
    with trace(model, "two.*") as activations:
        model["one"](torch.randn(2, 3))
        model["two"](torch.randn(2, 3))
    assert set(activations) == {"two.before_tap", "two.after_tap"}


def test_a_tap_called_twice_keeps_the_last_output(model):
    with trace(model, "one.before_tap") as activations:
        model["one"](torch.zeros(1, 3))
        model["one"](torch.ones(1, 3))
    assert activations["one.before_tap"].tolist() == [[1.0] * 3]


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
        pytest.raises(RegardError, match=r"no tap matches 'three\.\*'; available: one\.before_tap"),
        trace(model, "three.*"),
    ):
        pass


def test_a_model_without_taps_is_named_as_such():
    with pytest.raises(RegardError, match="this model has none"), trace(nn.Linear(1, 1)):
        pass


def test_a_trace_has_a_short_display_and_a_table():
    activations = Trace({"layers.0.<tap>": torch.tensor([[1.0, 3.0]])})
    assert repr(activations) == "Trace(layers.0.<tap> (1, 2))"
    assert "<td>layers.0.&lt;tap&gt;</td><td>(1, 2)</td><td>2</td><td>1</td>" in (
        activations._repr_html_()
    )
    table = activations.to_pandas()
    assert list(table.columns) == ["tap", "shape", "mean", "std"]
    assert table.loc[0, "mean"] == 2.0
