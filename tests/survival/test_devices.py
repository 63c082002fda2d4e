"""Buffers are on the device of the model, however it was built."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from regard.models.build import _SkipInit, build_model, build_on_meta, preset
from regard.nn.position import POSITIONS

SMALL = {"vocab_size": 30, "dim": 16, "layers": 2, "heads": 2, "context": 8}


def model_config(position):
    return preset("gpt2", position=position, **SMALL)


@pytest.mark.parametrize("position", POSITIONS)
def test_under_a_default_device_everything_is_on_it(position):
    """CUDA tensors without data: there is no GPU here."""
    with FakeTensorMode(), torch.device("cuda"), _SkipInit():
        model = build_model(model_config(position))
        tensors = (*model.parameters(), *model.buffers())
        assert {tensor.device.type for tensor in tensors} == {"cuda"}


def test_after_the_meta_device_buffers_have_their_values():
    config = model_config("alibi")
    expected = build_model(config).decoder.position.slope
    empty = build_on_meta(config)
    for model in (
        empty.to_empty(device="cpu"),
        build_on_meta(config).to_empty(device="cpu").bfloat16(),
    ):
        slope = model.decoder.position.slope
        assert torch.equal(slope, expected.to(slope.dtype))
