"""A Vision Transformer of `transformers`, read and written."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import regard
from regard.config import make
from regard.errors import ConfigError
from regard.hub import MODEL_TYPES
from regard.hub.config_json import read_config_as, write_config
from regard.hub.external_checkpoint import open_checkpoint, prefixed_rules
from regard.hub.model_types.vit import NEW_LAYER, image_task
from regard.hub.weight_mapping import plan_export
from regard.models.build import weights
from regard.tasks import TASKS

pytestmark = pytest.mark.parity

ARCHITECTURES = ["ViTForImageClassification", "ViTModel"]
NEAR = 1e-5  # two libraries add up float32 in different orders


def small(architecture, **fields):
    """A random model of theirs, its weights large enough for every part to show."""
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 48, "image_size": 24, "patch_size": 4, "num_labels": 5}
    config = transformers.ViTConfig(**{**sizes, "architectures": [architecture], **fields})
    model = getattr(transformers, architecture)(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.2)
    return model


def answers(theirs, images, **more):
    """Hidden states, and what is read off them, of their model."""
    out = theirs(images, **more)
    if hasattr(out, "logits"):
        return None, out.logits
    return out.last_hidden_state, out.pooler_output


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("qkv_bias", [True, False])
@pytest.mark.parametrize("size", [24, 32, 16, (20, 36)], ids=str)
def test_images_of_any_size_give_the_same_numbers(tmp_path, architecture, qkv_bias, size):
    theirs = small(architecture, qkv_bias=qkv_bias)
    theirs.save_pretrained(tmp_path)
    ours = open_checkpoint(tmp_path).load().eval()
    images = torch.randn(3, 3, *(size if isinstance(size, tuple) else (size, size)))
    with torch.no_grad():
        hidden, read = answers(theirs, images, interpolate_pos_encoding=size != 24)
        x = ours(images)
        assert (ours.head(x) - read).abs().max() <= NEAR
        if hidden is not None:
            assert (x - hidden).abs().max() <= NEAR


@pytest.mark.parametrize(
    ("sides", "patch"), [((24, 16), 4), ((16, 24), (4, 8)), ((24, 24), (8, 4))], ids=str
)
@torch.no_grad()
def test_rectangles_are_read_and_written_as_theirs(tmp_path, sides, patch):
    theirs = small("ViTForImageClassification", image_size=sides, patch_size=patch)
    theirs.save_pretrained(tmp_path / "theirs")
    run = regard.import_model(tmp_path / "theirs", tmp_path / "run")
    images = torch.randn(3, 3, *sides)
    assert (run.model.head(run.model(images)) - theirs(images).logits).abs().max() <= NEAR
    pixels = np.random.default_rng(0).integers(0, 255, (30, 40, 3), dtype=np.uint8)
    assert len(run.classify(pixels)) == 3  # resized to the image size of the model
    assert run.export(tmp_path / "ours").difference <= NEAR
    table = json.loads((tmp_path / "ours" / "preprocessor_config.json").read_text())
    assert table["size"] == {"height": sides[0], "width": sides[1]}


def test_gradients_are_the_same(tmp_path):
    theirs = small("ViTForImageClassification")
    theirs.save_pretrained(tmp_path)
    opened = open_checkpoint(tmp_path)
    ours = opened.load().train()
    images, targets = torch.randn(3, 3, 32, 32), torch.tensor([0, 4, 2])
    theirs(images, labels=targets, interpolate_pos_encoding=True).loss.backward()
    (ours.head.loss(ours(images), targets) / 3).backward()
    table = ours.encoder.position.table.weight.grad
    assert (table - theirs.vit.embeddings.position_embeddings.grad[0]).abs().max() <= NEAR
    assert (ours.embed.cls.grad - theirs.vit.embeddings.cls_token.grad[0, 0]).abs().max() <= NEAR


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_is_read_and_written_again_is_the_same_to_the_bit(tmp_path, architecture):
    small(architecture).save_pretrained(tmp_path)
    opened = open_checkpoint(tmp_path)
    model_type, table = write_config(opened.config)
    assert (model_type.name, table["architectures"]) == ("vit", [architecture])
    assert read_config_as(model_type, table) == opened.config
    ours = weights(opened.load())
    plan = plan_export(prefixed_rules(model_type, opened.config), ours)
    written = {
        mapping.external: mapping.layout.join([ours[n] for n in mapping.internal])
        for mapping in plan.mappings
    }
    before = load_file(tmp_path / "model.safetensors")
    assert not plan.missing
    assert written.keys() == before.keys()
    assert all(torch.equal(written[name], before[name]) for name in before)


def test_names_of_the_newer_library_are_read_too(tmp_path):
    theirs = small("ViTForImageClassification")
    names = {name for name in theirs.state_dict() if ".layers.0." in name}
    assert names == {f"vit.layers.0.{n}.{p}" for n in NEW_LAYER for p in ("weight", "bias")}
    theirs.config.save_pretrained(tmp_path)
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    ours = open_checkpoint(tmp_path).load()
    query = theirs.state_dict()["vit.layers.1.attention.q_proj.weight"]
    assert torch.equal(ours.encoder.blocks[1].attention.query.weight, query)


def test_a_classifier_becomes_a_run_and_a_folder_again(tmp_path):
    names = ["cat", "dog", "cow", "hen", "fly"]
    theirs = small("ViTForImageClassification", id2label=dict(enumerate(names)))
    theirs.save_pretrained(tmp_path / "theirs")
    mean, std = [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]
    colours = {"image_processor_type": "ViTImageProcessor", "image_mean": mean, "image_std": std}
    (tmp_path / "theirs" / "preprocessor_config.json").write_text(json.dumps(colours))

    run = regard.import_model(tmp_path / "theirs", tmp_path / "run")
    image = np.random.default_rng(0).integers(0, 256, (24, 24, 3), dtype=np.uint8)
    scaled = (torch.from_numpy(image).permute(2, 0, 1) / 255 - _column(mean)) / _column(std)
    shares = theirs(scaled.unsqueeze(0)).logits[0].softmax(-1)
    found = dict(run.classify(image, top=5))
    assert found == pytest.approx(dict(zip(names, shares.tolist(), strict=True)), abs=NEAR)

    exported = run.export(tmp_path / "again")
    assert exported.difference <= NEAR
    table = json.loads((tmp_path / "again" / "config.json").read_text())
    assert list(table["id2label"].values()) == names
    processor = json.loads((tmp_path / "again" / "preprocessor_config.json").read_text())
    assert (processor["image_mean"], processor["image_std"]) == (mean, std)
    assert processor["size"] == {"height": 24, "width": 24}


def _column(values):
    return torch.tensor(values).view(3, 1, 1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image_size": [24, 32, 3]}, "must be an integer, or a height and a width"),
        ({"image_size": [224, 0]}, "must be a height and a width"),
        ({"image_size": float("inf")}, "must be an integer, or a height and a width"),
        ({"patch_size": 16.5}, "must be an integer, or a height and a width"),
        ({"pooler_output_size": 7}, "pooler_output_size=7"),
        ({"patch_size": 5}, "patch_size=5 must divide image_size=224"),
        ({"hidden_act": "snake"}, "activation 'snake'"),
    ],
)
def test_what_we_do_not_have_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        read_config_as(MODEL_TYPES["vit"], {"model_type": "vit", **fields})


# What becomes of colours and classes

COLOURS = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
NAMES = {"id2label": {"1": "dog", "0": "cat"}}


@pytest.mark.parametrize(
    "processor",
    [
        {},
        COLOURS,
        {"image_mean": 0.4, "image_std": 0.3},
        COLOURS | {"do_normalize": False},
        COLOURS | {"rescale_factor": 1 / 127.5},
        {"do_rescale": False, "image_mean": [120, 110, 100], "image_std": [50, 60, 70]},
        {"do_rescale": False, "do_normalize": False},
    ],
    ids=str,
)
def test_pixels_are_scaled_as_by_the_processor_of_transformers(processor):
    import transformers

    images = np.random.default_rng(0).integers(0, 256, (2, 3, 8, 8), dtype=np.uint8)
    theirs = transformers.ViTImageProcessor(**processor, do_resize=False)
    wanted = theirs(list(torch.from_numpy(images)), return_tensors="pt")["pixel_values"]
    task = make(image_task(NAMES, processor, 3), TASKS, "task")
    assert torch.allclose(task.normalize(torch.from_numpy(images)), wanted.float(), rtol=1e-5)


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        ({"image_mean": "x"}, "image_mean='x' must be a number for each of 3"),
        ({"image_mean": [0.5]}, "image_mean"),
        ({"image_mean": [0.5, 0.5, float("nan")]}, "image_mean"),
        ({"image_std": [1, 1, float("inf")]}, "image_std"),
        ({"image_std": [1, 1, 10**400]}, "image_std"),
        ({"image_std": [True] * 3}, "image_std"),
        ({"image_std": [1, 1, 0]}, "must be above 0"),
        ({"rescale_factor": 0}, "must be above 0"),
        ({"rescale_factor": "1/255"}, "rescale_factor='1/255'"),
        ({"do_normalize": "no"}, "do_normalize='no' must be true or false"),
        ({"do_center_crop": True}, "do_center_crop=true is not supported"),
    ],
)
def test_pixel_statistics_that_make_no_sense_are_refused(processor, message):
    with pytest.raises(ConfigError, match=message):
        image_task(NAMES, processor, 3)


def test_classes_are_named_by_their_numbers():
    assert image_task(NAMES, {}, 3)["class_names"] == ["cat", "dog"]
    assert image_task({"num_labels": 3}, {}, 3)["class_names"] == ["LABEL_0", "LABEL_1", "LABEL_2"]
    with pytest.raises(ConfigError, match="must be an object of classes and their indices"):
        image_task({"id2label": ["cat", "dog"]}, {}, 3)
    for labels in ({"0": "cat", "5": "dog"}, {"a": "cat"}):
        with pytest.raises(ConfigError, match="id2label must name the classes"):
            image_task({"id2label": labels}, {}, 3)
