"""Changes of a model that its fingerprint finds."""

import sys

import pytest
import torch
from torch import nn

from regard.accel.fingerprint import ModelFingerprint
from regard.accel.packed import BLOCKED_ELEMENTS

WIDTH = 512  # WIDTH^2 elements are BLOCKED_ELEMENTS


class Model(nn.Module):
    """Tensors that are compared in different ways."""

    def __init__(self, device="cpu"):
        super().__init__()
        self.scale, self.names = 2.0, {"a": 1}
        self.small = nn.Parameter(torch.randn(40, 50))
        self.strided = nn.Parameter(torch.randn(50, 40).t())
        self.large = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.register_buffer("halves", torch.randn(WIDTH * WIDTH + 5).bfloat16())
        self.register_buffer("shifted", torch.randn(WIDTH * WIDTH + 8).half()[1:])
        self.register_buffer("transposed", torch.randn(WIDTH, WIDTH + 1).t())
        self.to(device)


TENSORS = ["small", "strided", "large", "halves", "shifted", "transposed"]


def fingerprint(model):
    return ModelFingerprint(model, copied_elements=sys.maxsize)


def check_that_changes_are_found(model):
    """`find_change` finds and names a change of one value of any tensor, and of its layout."""
    known = fingerprint(model)
    assert known.find_change() is None
    for name in TENSORS:
        data = getattr(model, name).data
        last = tuple(size - 1 for size in data.shape)
        for place in ((0,) * data.ndim, tuple(size // 2 for size in data.shape), last):
            before = data[place].clone()
            data[place] = -before
            assert known.find_change() == name
            assert known.find_change(contents=False) is None
            data[place] = before
        assert known.find_change() is None
    model.large.data = model.large.data.t()
    assert known.find_change() == "large"


def test_the_model_of_these_tests_has_small_and_large_tensors():
    sizes = {name: getattr(Model(), name).numel() for name in TENSORS}
    assert [name for name in TENSORS if sizes[name] < BLOCKED_ELEMENTS] == ["small", "strided"]
    assert not Model().strided.is_contiguous()
    assert not Model().transposed.is_contiguous()
    assert Model().shifted.data_ptr() % 8


def test_a_change_of_one_value_is_found_and_named():
    check_that_changes_are_found(Model())


def test_the_first_of_several_changes_is_named():
    model = Model()
    known = fingerprint(model)
    model.halves.data[7] += 1
    model.large.data[3, 4] += 1
    assert known.find_change() == "large"
    model.small.data[3, 4] += 1
    assert known.find_change() == "small"


def test_tensors_above_the_copied_size_are_not_read():
    model = Model()
    known = ModelFingerprint(model, copied_elements=WIDTH * WIDTH)
    model.halves.data[7] += 1
    assert known.find_change() is None
    model.large.data[3, 4] += 1
    assert known.find_change() == "large"


@pytest.mark.parametrize("contents", [False, True])
def test_attributes_versions_and_replaced_tensors_are_compared_without_contents(contents):
    def change(edit):
        model = Model()
        known = fingerprint(model)
        edit(model)
        return known.find_change(contents=contents)

    assert change(lambda model: setattr(model, "scale", 2.0)) is None
    assert change(lambda model: setattr(model, "scale", 3.0)) == "scale"
    assert change(lambda model: model.names.update(b=2)) == "names"
    assert change(lambda model: model.halves.add_(0)) == "halves"
    assert change(lambda model: setattr(model, "halves", model.halves.clone())) == "halves"
    large = torch.zeros(WIDTH, WIDTH)
    assert change(lambda model: setattr(model.large, "data", large)) == "large"


def test_a_model_without_tensors_has_nothing_to_read():
    model = nn.Module()
    known = fingerprint(model)
    assert known.contents == []
    assert known.find_change() is None
