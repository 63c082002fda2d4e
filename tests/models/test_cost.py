"""The formulas of the cost against what torch counts and saves for backward."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from regard.models.build import build_model, preset
from regard.models.cost import cost
from regard.models.transformer import TransformerConfig
from regard.nn.state import ImageSource, Source

TIME = 32
SMALL = TransformerConfig(vocab_size=50, dim=64, layers=2, heads=4, context=TIME)
CHANGES = [
    {},
    {"kv_heads": 2},
    {"head_dim": 32},
    {"ffn": "swiglu"},
    {"ffn": "relu"},
    {"norm": "rms"},
    {"position": "rotary"},
    {"position": {"kind": "rotary", "interleaved": True}},
    {"position": "t5"},
    {"position": "alibi"},
    {"score": {"kind": "scaled_dot", "cap": 50.0}},
    {"score": "cosine"},
    {"score": "additive", "kv_heads": 2},
    {"score": "general", "kv_heads": 2},
    {"score": "shaw", "position": "none"},
    {"score": "transformer_xl", "position": "none"},
    {"score": {"kind": "disentangled", "max_distance": 8}, "position": "none"},
    {
        "score": {"kind": "disentangled", "max_distance": 8, "position_projections": True},
        "position": "none",
    },
    {"qk_norm": True},
    {"norm_placement": "post"},
    {"norm_placement": "sandwich"},
    {"norm_placement": "parallel"},
    {"norm_placement": "parallel_norms"},
    {"tied": False, "bias": False},
    {"embed_norm": True},
    {"embed_dim": 16, "factorize_positions": False},
    {"architecture": "encoder", "shared_layers": True},
    {"architecture": "encoder", "embed_dim": 16, "head": "masked"},
    {"architecture": "encoder", "head": {"kind": "tag", "classes": 3}},
    {"architecture": "encoder-decoder"},
    {"architecture": "encoder-decoder", "encoder_layers": 1, "position": "rotary", "ffn": "geglu"},
]
every_change = pytest.mark.parametrize("change", CHANGES, ids=lambda change: str(change))


def row(config):
    """A row of the whole context, and a source as long where one is read."""
    ids = torch.randint(0, config.vocab_size, (1, config.context))
    if config.architecture != "encoder-decoder":
        return ids, {}
    return ids, {"source": Source(ids, torch.tensor([config.context]))}


@contextmanager
def count_flops():
    """Count what torch computes; it knows the products, but not the kernel that fuses them."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        yield counter


@every_change
def test_a_forward_pass_takes_the_flops_that_torch_counts(change):
    config = replace(SMALL, **change)
    model, (ids, given) = build_model(config).eval(), row(config)
    with torch.no_grad(), count_flops() as counter:
        model.head(model(ids, **given))
    assert cost(config).flops_per_token == round(counter.get_total_flops() / TIME)


@every_change
def test_training_takes_three_times_that(change):
    config = replace(SMALL, **change)
    model, (ids, given) = build_model(config).train(), row(config)
    with count_flops() as counter:
        model.head(model(ids, **given)).sum().backward()
    waves = 0.0
    if config.score == "transformer_xl":  # the vectors of distances need no gradient
        waves = 2 * config.layers * config.dim**2 * (2 * TIME - 1) / TIME
    found = counter.get_total_flops() / TIME + waves
    assert cost(config).training_flops_per_token == pytest.approx(found)


@pytest.mark.parametrize(
    "change",
    [c for c in CHANGES if c.get("architecture") != "encoder"],
    ids=lambda change: str(change),
)
def test_one_more_token_takes_the_flops_that_torch_counts(change):
    config = replace(SMALL, **change)
    model, (ids, given) = build_model(config).eval(), row(config)
    with torch.no_grad():
        _, state = model.step(ids[:, 1:], model.start(1, TIME, given.get("source")))
        with count_flops() as counter:
            model.step(ids[:, :1], state)
    assert cost(config).decode_flops_per_token == counter.get_total_flops()


def test_a_decode_step_of_a_captioner_does_not_read_the_image_again():
    sizes = {"vocab_size": 50, "dim": 32, "image_size": 32, "patch_size": 8, "context": 16}
    for encoder_layers in (0, 2):
        config = preset("show-attend-tell", **sizes, encoder_layers=encoder_layers)
        model, images = build_model(config).eval(), torch.randn(1, 3, 32, 32)
        with torch.no_grad():
            state = model.start(1, 16, ImageSource.of(images, config.regions))
            with count_flops() as counter:
                model.step(torch.tensor([[1]]), state)
        assert cost(config).decode_flops_per_token == counter.get_total_flops()


def test_an_encoder_and_counts_do_not_generate():
    assert cost(replace(SMALL, architecture="encoder")).decode_flops_per_token == 0
    assert cost(preset("ngram")).decode_flops_per_token == 0


def test_a_window_counts_only_what_is_in_sight():
    # torch's dense kernel multiplies what is masked too, so it cannot be asked
    near = cost(replace(SMALL, window=8))
    assert cost(SMALL).flops_per_token - near.flops_per_token == 2 * 4 * (TIME - 8) * 64
    every_other = cost(replace(SMALL, window=8, global_every=2))
    assert cost(SMALL).flops_per_token - every_other.flops_per_token == 4 * (TIME - 8) * 64


@pytest.mark.parametrize("change", [{}, {"kv_heads": 2}, {"kv_heads": 1, "head_dim": 24}])
@pytest.mark.parametrize("architecture", ["decoder", "encoder-decoder"])
def test_the_state_has_the_bytes_of_its_buffers(change, architecture):
    config = replace(SMALL, architecture=architecture, **change)
    model, (_, given) = build_model(config), row(config)
    state = model.start(1, TIME, given.get("source"))
    growing = sum(part.nbytes for layer in state.layers for part in (layer.keys, layer.values))
    source = sum(part.nbytes for pair in state.memory_kv or [] for part in pair)
    counted = cost(config)
    assert counted.state_bytes_per_token == growing / TIME
    assert counted.state_bytes == counted.window_bytes == growing + source


def test_windows_need_less_of_the_state_than_the_buffers_hold():
    counted = cost(replace(SMALL, window=8, global_every=2))
    assert counted.state_bytes == TIME * counted.state_bytes_per_token
    assert counted.window_bytes == counted.state_bytes * (8 + TIME) / (2 * TIME)


@pytest.mark.parametrize("name", ["elman", "update-gate", "gru", "lstm", "bengio", "convolution"])
def test_a_recurrent_model_keeps_the_same_state_however_long(name):
    model = build_model(preset(name))
    kept = sum(part.nbytes for layer in model.start(1, 99).layers for part in layer)
    counted = cost(preset(name))
    assert counted.state_bytes == kept
    assert counted.state_bytes_per_token == 0
    ids = torch.zeros(1, 7, dtype=torch.long)
    with torch.no_grad(), count_flops() as counter:
        model.step(ids, model.start(1, 7), all_logits=True)
    assert counted.flops_per_token == counted.decode_flops_per_token
    assert counted.flops_per_token == counter.get_total_flops() / 7


def saved_bytes(config):
    """All that torch keeps for the backward pass, each storage once, without the weights."""
    model, (ids, given) = build_model(config).train(), row(config)
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no address comes twice
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(ids, **given)
    return sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in weights)


@every_change
def test_activations_take_the_bytes_that_torch_keeps(change):
    # within 6 %: ids, masks, angles and the leftovers of a few operations are not counted
    config = replace(SMALL, **change)
    assert cost(config).activation_bytes == pytest.approx(saved_bytes(config), rel=0.06)


def test_recomputation_keeps_the_input_of_each_layer_and_one_layer_whole():
    few, many = (cost(replace(SMALL, layers=layers)) for layers in (2, 12))
    assert many.checkpointed_bytes - few.checkpointed_bytes == 10 * TIME * 64 * 4
    assert few.checkpointed_bytes < few.activation_bytes


def test_weights_gradients_and_moments_take_sixteen_bytes():
    counted = cost(SMALL)
    assert counted.training_bytes == 16 * counted.parameters
    assert counted.training_bytes == (
        counted.weight_bytes + counted.gradient_bytes + counted.optimizer_bytes
    )
    model = build_model(SMALL)
    others = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    others += model.decoder.position.table.weight.numel()  # a table, which multiplies nothing
    copied = counted.mixed_training_bytes - counted.training_bytes
    assert copied == 2 * (counted.parameters - others)


def test_an_image_takes_the_flops_that_torch_counts():
    config = preset("tiny-vit")
    model = build_model(config).eval()
    with torch.no_grad(), count_flops() as counter:
        model.head(model(torch.zeros(1, 1, 28, 28)))
    found = counter.get_total_flops() / config.context
    assert cost(config).flops_per_token == round(found)
