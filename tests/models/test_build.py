"""Models on the meta device, and models with saved weights."""

import subprocess
import sys

import pytest
import torch

from regard.errors import CheckpointError, ConfigError
from regard.models.build import (
    build_model,
    build_on_meta,
    load_model,
    preset,
    resolve,
    weights,
)

SMALL = {"vocab_size": 30, "dim": 16, "layers": 2, "heads": 2}


@pytest.mark.parametrize("name", ["gpt2", "modern", "tiny-encoder-decoder", "lstm"])
def test_a_hollow_model_has_all_names_and_shapes_and_no_numbers(name):
    sizes = SMALL if name != "lstm" else {"vocab_size": 30, "dim": 16}
    config = preset(name, **sizes, **({"kv_heads": 1} if name == "modern" else {}))
    whole, empty = weights(build_model(config)), weights(build_on_meta(config))
    assert {n: t.shape for n, t in whole.items()} == {n: t.shape for n, t in empty.items()}
    assert all(tensor.is_meta for tensor in empty.values())


def test_what_is_not_learned_is_there_in_a_hollow_model_too():
    slope = build_on_meta(preset("gpt2", position="alibi", **SMALL)).decoder.position.slope
    assert torch.equal(slope, torch.tensor([2**-4, 2**-8]))


def test_a_hollow_model_does_not_wait_for_the_compiler():
    code = (
        "import sys; from regard.models.build import build_on_meta, preset;"
        "build_on_meta(preset('modern'));"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_loaded_model_owns_the_tensors_it_was_given_and_their_type():
    config = preset("gpt2", **SMALL)
    saved = {n: t.to(torch.bfloat16) for n, t in weights(build_model(config)).items()}
    model = load_model(config, saved, "here")
    for name, tensor in weights(model).items():
        assert tensor.dtype == torch.bfloat16
        assert tensor.data_ptr() == saved[name].data_ptr()
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_weights_of_another_model_are_refused_by_name():
    config = preset("gpt2", **SMALL)
    saved = weights(build_model(config))
    saved["decoder.norm.extra"] = saved.pop("decoder.norm.weight")
    with pytest.raises(
        CheckpointError, match=r"(?s)norm\.weight is missing.*extra is not a weight of this model"
    ):
        load_model(config, saved, "here")


def test_a_preset_of_another_family_is_refused():
    with pytest.raises(ConfigError, match=r"is of model\.family='transformer', not 'ngram'"):
        resolve({"preset": "gpt2", "family": "ngram"})
    assert resolve({"preset": "gpt2", "family": "transformer"}) == resolve({"preset": "gpt2"})
    assert resolve({"preset": "gru", "family": "lstm"}) == resolve({"preset": "gru"})  # as before
