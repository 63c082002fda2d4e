"""The Vision Transformer: patches, positions of other sizes, and what every model promises."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from regard.errors import ConfigError, ShapeError
from regard.explain import attention_maps
from regard.models.build import (
    build_model,
    config_table,
    count_parameters,
    load_weights,
    preset,
    resolve,
    weights,
)
from regard.models.presets import PRESETS
from regard.models.vision import VisionConfig, VisionTransformer
from regard.nn.patch import PatchEmbedding, interpolate_positions
from regard.nn.position import POSITIONS

CLASSES = 5
TINY = VisionConfig(
    dim=16,
    layers=2,
    heads=2,
    image_size=12,
    patch_size=3,
    channels=2,
    head={"kind": "classification", "classes": CLASSES},
)
MEAN = {"cls": False, "head": {"kind": "classification", "classes": CLASSES, "pool": "mean"}}
CASES = {
    **{f"position={name}": replace(TINY, position=name) for name in POSITIONS},
    "offset": replace(TINY, position={"kind": "learned", "offset": 2}),
    "each_layer": replace(TINY, position={"kind": "learned", "each_layer": True}),
    "mean": replace(TINY, **MEAN),
    "embed_norm": replace(TINY, embed_norm=True),
    "shared": replace(TINY, shared_layers=True),
    "window": replace(TINY, window=4),
    "deepnorm": replace(TINY, norm_placement="deepnorm"),
    **{
        name: replace(
            make(), dim=16, layers=2, heads=2, image_size=12, patch_size=3, channels=2, **MEAN
        )
        for name, make in PRESETS.items()
        if isinstance(make(), VisionConfig)
    },
}
every_case = pytest.mark.parametrize("case", CASES)


def build_case(case):
    """A small model whose weights are large enough for every part to show in the result."""
    model = build_model(CASES[case]).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.3)
    return model


def test_a_patch_is_embedded_by_the_formula(float64):
    embed = PatchEmbedding(2, 7, 3)
    torch.nn.init.normal_(embed.cls)
    torch.nn.init.normal_(embed.patch.bias)
    images = torch.randn(2, 2, 6, 9)
    x = embed(images)
    assert x.shape == (2, 1 + 2 * 3, 7)
    for image in range(2):
        assert torch.equal(x[image, 0], embed.cls)
        for row in range(2):
            for column in range(3):
                patch = images[image, :, 3 * row : 3 * row + 3, 3 * column : 3 * column + 3]
                slow = embed.patch.weight.flatten(1) @ patch.flatten() + embed.patch.bias
                torch.testing.assert_close(x[image, 1 + 3 * row + column], slow)


def keys(x, a=-0.75):
    """Keys' cubic convolution kernel (1981), with the a that torch has."""
    x = abs(x)
    if x < 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    return a * (x**3 - 5 * x**2 + 8 * x - 4) if x < 2 else 0.0


def test_positions_are_interpolated_by_the_formula_and_the_first_stay(float64):
    table = torch.randn(2 + 16, 3)
    height, width = 3, 7
    fast = interpolate_positions(table, (4, 4), (height, width), num_prefix_tokens=2)
    assert torch.equal(fast[:2], table[:2])
    square = table[2:].view(4, 4, 3)
    for row in range(height):
        for column in range(width):
            y, x = (row + 0.5) * 4 / height - 0.5, (column + 0.5) * 4 / width - 0.5
            slow = torch.zeros(3)
            for i in range(-3, 8):
                for j in range(-3, 8):
                    near = square[min(max(i, 0), 3), min(max(j, 0), 3)]  # beyond the edge: the edge
                    slow += keys(y - i) * keys(x - j) * near
            torch.testing.assert_close(fast[2 + row * width + column], slow, rtol=0, atol=1e-12)


@every_case
def test_logits_are_finite_and_one_for_each_class(case):
    model = build_case(case)
    hidden = model(torch.randn(3, 2, 12, 12))
    assert hidden.shape == (3, model.config.context, 16)
    logits = model.head(hidden)
    assert logits.shape == (3, CLASSES)
    assert logits.isfinite().all()


@every_case
@pytest.mark.parametrize("size", [(15, 15), (9, 18)], ids=str)
def test_images_of_another_size_are_read_too(case, size):
    model = build_case(case)
    hidden = model(torch.randn(2, 2, *size))
    assert hidden.shape[1] == size[0] * size[1] // 9 + model.config.cls
    assert hidden.isfinite().all()
    assert model.head(hidden).shape == (2, CLASSES)


@every_case
def test_every_parameter_receives_a_gradient(case):
    model = build_case(case)
    model.head.loss(model(torch.randn(3, 2, 12, 12)), torch.tensor([0, 1, 4])).backward()
    for name, parameter in model.named_parameters():
        unused = name.endswith("key.bias") or case == "offset"  # see tests/contract
        assert unused or parameter.grad.any(), name


def test_gradients_reach_interpolated_positions():
    model = build_case("position=learned")
    model(torch.randn(1, 2, 15, 15)).square().sum().backward()
    assert model.encoder.position.table.weight.grad.abs().sum(1).all()


@every_case
def test_an_image_does_not_see_its_neighbours(case):
    model = build_case(case)
    images = torch.randn(3, 2, 12, 12)
    alone = torch.cat([model(image[None]) for image in images])
    torch.testing.assert_close(model(images), alone, rtol=1e-5, atol=1e-5)  # sums in other orders


@pytest.mark.parametrize("case", [n for n in CASES if n not in ("position=none", "window")])
def test_where_a_patch_stands_matters(case):
    model = build_case(case)
    image = torch.randn(1, 2, 12, 12)
    shifted = image.roll(3, dims=-1)  # the same patches, each one place further
    assert not torch.allclose(model(image).mean(1), model(shifted).mean(1), atol=1e-3)


def test_without_positions_the_order_of_patches_does_not_matter():
    model = build_case("position=none")
    image = torch.randn(1, 2, 12, 12)
    shifted = image.roll(3, dims=-1)
    torch.testing.assert_close(model(image)[:, 0], model(shifted)[:, 0], rtol=1e-4, atol=1e-4)


def test_the_mean_is_over_all_patches():
    model = build_case("mean")
    hidden = model(torch.randn(2, 2, 12, 12))
    slow = F.linear(hidden.sum(1) / 16, model.head.out.weight, model.head.out.bias)
    torch.testing.assert_close(model.head(hidden), slow)


@every_case
def test_settings_and_weights_make_an_equal_model(case):
    model = build_case(case)
    twin = build_model(resolve(config_table(CASES[case]))).eval()
    load_weights(twin, weights(model), "here")
    images = torch.randn(2, 2, 12, 12)
    assert torch.equal(model(images), twin(images))


def test_names_of_parameters_are_those_promised():
    names = set(dict(VisionTransformer(TINY).named_parameters()))
    assert {
        "embed.patch.weight",
        "embed.patch.bias",
        "embed.cls",
        "encoder.position.table.weight",
        "encoder.blocks.1.attention.query.weight",
        "encoder.norm.weight",
        "head.out.weight",
    } <= names


def test_what_the_whole_image_looks_at_can_be_seen():
    model = build_case("position=learned")
    images = torch.randn(2, 2, 12, 12)
    maps = attention_maps(model, lambda: model(images), pattern="encoder.blocks.*")
    assert list(maps) == ["encoder.blocks.0.attention", "encoder.blocks.1.attention"]
    looked = maps["encoder.blocks.1.attention"][:, :, 0, 1:]  # of the class vector, at patches
    assert looked.unflatten(-1, (4, 4)).shape == (2, 2, 4, 4)
    maps = attention_maps(model, lambda: model(torch.randn(2, 2, 15, 15)))
    assert maps["encoder.blocks.0.attention"].shape == (
        2,
        2,
        26,
        26,
    )  # interpolated or not


def test_a_tiny_model_learns_a_batch_by_heart():
    torch.manual_seed(1)
    model = VisionTransformer(replace(TINY, **MEAN))
    images, targets = torch.randn(8, 2, 12, 12), torch.arange(8) % CLASSES
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = model.head.loss(model(images), targets) / 8
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.05


@pytest.mark.parametrize(
    ("name", "count"),
    [("vit-b16", 86_567_656), ("vit-l16", 304_326_632), ("vit-h14", 632_045_800)],
)
def test_published_sizes_come_out(name, count):
    assert count_parameters(preset(name)) == count


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"patch_size": 5}, "patch_size=5 must divide image_size=12"),
        ({"cls": False}, "head.pool='mean'"),
        ({"cls": False, "head": "pooled"}, "cls=false removes"),
        ({"head": "linear"}, "other heads predict tokens"),
        ({"channels": 0}, "channels=0 must be at least 1"),
        ({"heads": 3}, "heads=3 must divide dim=16"),
    ],
)
def test_what_cannot_be_is_refused(fields, said):
    with pytest.raises(ConfigError, match=said):
        replace(TINY, **fields)


def test_images_that_do_not_fit_are_refused():
    model = VisionTransformer(TINY)
    with pytest.raises(ShapeError, match="images have 3 channels, but the model needs 2"):
        model(torch.randn(1, 3, 12, 12))
    with pytest.raises(
        ShapeError, match="an image of 13 × 12 pixels cannot be split into patches of 3"
    ):
        model(torch.randn(1, 2, 13, 12))


def test_a_mean_is_over_patches_and_what_reads_the_first_vector_needs_one():
    head = {"kind": "classification", "classes": 3}
    with pytest.raises(ConfigError, match="averages the patches"):
        VisionConfig(head={**head, "pool": "mean"})
    with pytest.raises(ConfigError, match="reads the class token"):
        VisionConfig(cls=False, head=head)
    assert VisionConfig(cls=False, head={**head, "pool": "last"}).context == 196
