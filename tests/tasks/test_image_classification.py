"""Classifying images: what a batch holds, the loss, the metrics, and a run from end to end."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import regard
from regard.config import RunConfig, build, merge
from regard.errors import ConfigError, DataError
from regard.models.vision import VisionConfig, VisionTransformer
from regard.pipelines import (
    default_settings,
    open_split,
    open_validation,
    prepare_evaluation,
    prepare_training,
)
from regard.tasks import ImageClassification
from regard.tasks.image_classification import random_crop

MODEL = VisionConfig(
    dim=8,
    layers=1,
    heads=2,
    image_size=8,
    patch_size=4,
    channels=1,
    head={"kind": "classification", "classes": 3},
)
CHANCE = torch.Generator


def halves(count, seed=0):
    """Noisy images of 8 × 8 whose upper half is bright, or the lower one, or both."""
    images = np.random.default_rng(seed).integers(0, 60, (count, 8, 8), dtype=np.uint8)
    labels = np.arange(count) % 3
    images[labels != 1, :4] += 150
    images[labels != 0, 4:] += 150
    return images, labels


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with halves.npz and a run that has learned from it; not to be changed."""
    folder = tmp_path_factory.mktemp("images")
    images, labels = halves(600)
    np.savez(folder / "halves.npz", x=images, y=np.array(["upper", "lower", "both"])[labels])
    regard.train(str(folder / "halves.npz"), out=folder / "run", **SHORT)
    return folder


SHORT = {
    "model": {"dim": 16, "layers": 1, "heads": 2, "image_size": 8, "patch_size": 2},
    "train": {
        "steps": 40,
        "batch": 32,
        "lr": 1e-2,
        "schedule": "constant",
        "ema": 0.9,
        "evaluate_every": 20,
    },
    "task": {"crop_padding": 0},
    "device": "cpu",
}


def config(path, **over):
    base = {
        "name": "test",
        "task": {"kind": "image_classification", "crop_padding": 1, "flip": True},
        "data": {"path": str(path)},
        "model": {"preset": "tiny-vit", **SHORT["model"]},
        "train": {"steps": 4, "batch": 8, "accumulate": 2},
    }
    return build(RunConfig, merge(base, over))


def test_pixels_are_centred_and_scaled():
    task = ImageClassification(mean=[0.5, 0.2], std=[0.25, 0.1])
    images = torch.tensor([[[[0, 255]], [[51, 102]]]], dtype=torch.uint8)
    expected = torch.tensor([[[[-2.0, 2.0]], [[0.0, 2.0]]]])
    torch.testing.assert_close(task.normalize(images), expected)


def test_images_are_augmented_in_training_only():
    task = ImageClassification(mean=[0.0], std=[1.0], crop_padding=2, flip=True)
    pixels, labels = halves(16)
    still = task.collate((pixels[:, None], labels, False), CHANCE().manual_seed(1))
    moved = task.collate((pixels[:, None], labels, True), CHANCE().manual_seed(1))
    again = task.collate((pixels[:, None], labels, True), CHANCE().manual_seed(1))
    other = task.collate((pixels[:, None], labels, True), CHANCE().manual_seed(2))
    torch.testing.assert_close(still.images, torch.from_numpy(pixels[:, None]) / 255)
    assert torch.equal(moved.images, again.images)
    assert not torch.equal(moved.images, still.images)
    assert not torch.equal(moved.images, other.images)
    assert torch.equal(moved.targets, still.targets)


def test_about_half_of_the_images_are_mirrored():
    task = ImageClassification(mean=[0.0], std=[1.0], flip=True)
    pixels = np.tile(np.array([[0, 255]], np.uint8), (2000, 1, 1, 1))
    batch = task.collate((pixels, np.zeros(2000, int), True), CHANCE().manual_seed(1))
    assert 0.45 < (batch.images[:, 0, 0, 0] == 1).float().mean() < 0.55
    assert (batch.images.sum(-1) == 1).all()


def test_an_image_is_cropped_at_each_offset_from_a_black_border():
    images = torch.arange(1, 13, dtype=torch.uint8).view(1, 1, 3, 4).expand(400, 2, 3, 4)
    cropped = random_crop(images, 1, CHANCE().manual_seed(0))
    framed = torch.nn.functional.pad(images[0], (1, 1, 1, 1))
    all_ways = {bytes(framed[:, y : y + 3, x : x + 4].numpy()) for y in range(3) for x in range(3)}
    assert {bytes(image.numpy()) for image in cropped} == all_ways


def test_the_loss_is_the_summed_cross_entropy_and_smoothed_only_while_training():
    torch.manual_seed(0)
    model, task = (
        VisionTransformer(MODEL),
        ImageClassification(mean=[0.1], std=[0.5], label_smoothing=0.2),
    )
    pixels, labels = halves(5)
    batch = task.collate((pixels[:, None], labels, False), CHANCE())
    logp = model.head(model(batch.images)).log_softmax(-1)
    plain = -sum(logp[i, labels[i]] for i in range(5))
    even = -logp.mean(-1).sum()
    torch.testing.assert_close(task.loss(model.eval(), batch), plain)
    torch.testing.assert_close(task.loss(model.train(), batch), 0.8 * plain + 0.2 * even)
    assert task.count(batch) == 5


def test_metrics_are_exact_whatever_the_batches():
    torch.manual_seed(0)
    model, task = (
        VisionTransformer(MODEL).train(),
        ImageClassification(mean=[0.1], std=[0.5], label_smoothing=0.2),
    )
    pixels, labels = halves(10)

    def batches(*sizes):
        start = 0
        for size in sizes:
            rows = slice(start, start + size)
            yield task.collate((pixels[rows, None], labels[rows], False), CHANCE())
            start += size

    (whole,) = batches(10)
    logits = model.head(model(whole.images)).detach()
    found = task.metrics(model, batches(7, 3))
    assert found["accuracy"] == pytest.approx((logits.argmax(-1) == whole.targets).double().mean())
    loss = torch.nn.functional.cross_entropy(logits, whole.targets)
    assert found["loss"] == pytest.approx(float(loss), rel=1e-6)
    assert model.training
    with pytest.raises(DataError, match="no image"):
        task.metrics(model, [])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"label_smoothing": 1.0}, "smoothing=1.0"),
        ({"crop_padding": -1}, "crop_padding=-1 must be 0 or more"),
        ({"mean": [0.5]}, "one value per channel"),
        ({"mean": [0.5], "std": [0.0]}, "above 0"),
        ({"mean": [0.5], "std": [math.nan]}, "above 0"),
    ],
)
def test_options_without_sense_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        ImageClassification(**options)


def test_names_are_given_to_numbers_only():
    assert ImageClassification().resolve_class_names(["cat", "dog"]) == ["cat", "dog"]
    task = ImageClassification(class_names=["cat", "dog"])
    assert task.resolve_class_names(["0", "1"]) == ["cat", "dog"]
    assert task.resolve_class_names(["cat", "dog"]) == ["cat", "dog"]
    for own in (["0", "1", "2"], ["1", "2"], ["Katze", "Hund"]):
        with pytest.raises(ConfigError, match="numbers its classes from 0"):
            task.resolve_class_names(own)


@pytest.mark.parametrize(
    ("names", "dataset_names"),
    [(["cat", "cat"], ["0", "1"]), (["cat", "dog", "cat"], ["cat", "dog"])],
)
def test_two_classes_cannot_have_one_name(names, dataset_names):
    with pytest.raises(ConfigError, match=r"task\.class_names has 'cat' twice"):
        ImageClassification(class_names=names).resolve_class_names(dataset_names)


def test_a_batch_is_a_function_of_seed_and_number(place):
    settings = config(place / "halves.npz")
    one, two = prepare_training(settings), prepare_training(settings)
    assert torch.equal(one.batch(7).images, two.batch(7).images)
    assert torch.equal(one.batch(7).targets, one.batch(7).targets)
    assert not torch.equal(one.batch(7).images, one.batch(8).images)
    assert one.batch(0).images.shape == (4, 1, 8, 8)  # of two micro-batches
    other = config(place / "halves.npz", train={"seed": 2})
    assert not torch.equal(prepare_training(other).batch(7).images, one.batch(7).images)


def test_the_changes_of_an_image_depend_on_seed_and_number(tmp_path):
    one, _ = halves(1)
    np.savez(tmp_path / "same.npz", x=np.repeat(one, 40, 0), y=np.arange(40) % 2)
    prepared = prepare_training(config(tmp_path / "same.npz"))
    other = prepare_training(config(tmp_path / "same.npz", train={"seed": 2}))
    assert not torch.equal(prepared.batch(0).images, prepared.batch(1).images)
    assert not torch.equal(prepared.batch(0).images, other.batch(0).images)


def test_facts_of_the_data_are_saved_in_the_run(place):
    kept = regard.load(place / "run").config
    assert kept.task["class_names"] == ["both", "lower", "upper"]
    train, _ = open_split(kept)
    mean, std = train.statistics(8)
    assert (kept.task["mean"], kept.task["std"]) == (mean, std)
    assert kept.model["head"]["classes"] == 3
    assert kept.model["channels"] == 1
    assert not (place / "run" / "tokenizer.json").exists()


def test_a_run_learns_and_evaluates_again_to_the_same_metrics(place):
    run = regard.load(place / "run")
    assert run.metrics["accuracy"] > 0.9
    again = run.evaluate()
    assert again["accuracy"] == run.metrics["accuracy"]
    assert again["loss"] == pytest.approx(run.metrics["loss"], rel=1e-6)


def test_other_data_is_evaluated_by_the_names_of_its_classes(place, tmp_path):
    images, labels = halves(90, seed=5)
    few = labels != 2
    names = np.array(["upper", "lower", "both"])[labels]
    np.savez(tmp_path / "new.npz", x=images[few], y=names[few])  # nobody is "both"
    run = regard.load(place / "run")
    right = [run.classify(image)[0][0] == name for image, name in zip(images, names, strict=True)]
    wanted = np.mean([each for each, counts in zip(right, few, strict=True) if counts])
    assert run.evaluate(str(tmp_path / "new.npz"))["accuracy"] == pytest.approx(wanted)
    np.savez(tmp_path / "odd.npz", x=images, y=np.where(labels == 0, "left", "lower"))
    with pytest.raises(DataError, match="a class 'left' that the model does not have"):
        run.evaluate(str(tmp_path / "odd.npz"))
    np.savez(tmp_path / "red.npz", x=np.repeat(images[:, None], 3, 1), y=names)
    with pytest.raises(DataError, match=r"images have 3 channels, but model\.channels is 1"):
        run.evaluate(str(tmp_path / "red.npz"))
    (tmp_path / "text.txt").write_text("some words\n")
    with pytest.raises(DataError, match="holds text; the run learns from images"):
        run.evaluate(str(tmp_path / "text.txt"))


def test_an_image_is_classified(place, tmp_path):
    run = regard.load(place / "run")
    image = np.zeros((8, 8), np.uint8)
    image[:4] = 200
    found = run.classify(image)
    assert found[0][0] == "upper"
    assert math.isclose(sum(share for _, share in found), 1, rel_tol=1e-5)
    assert len(run.classify(image, top=1)) == 1
    assert run.classify(image / 255.0)[0][1] == pytest.approx(found[0][1], abs=0.05)
    pillow = pytest.importorskip("PIL.Image", reason="image files need Pillow")
    pillow.fromarray(image).save(tmp_path / "half.png")
    assert run.classify(tmp_path / "half.png") == found


def test_what_needs_text_says_so(place):
    run = regard.load(place / "run")
    with pytest.raises(ConfigError, match="which cannot generate; use `predict"):
        run.generate("once")
    with pytest.raises(ConfigError, match="cannot translate"):
        run.translate("once")
    with pytest.raises(ConfigError, match="no tokenizer: its model reads no text"):
        run.tokenizer  # noqa: B018
    with pytest.raises(DataError, match="once"):  # no such image
        run.explain("once")


def test_attention_between_the_patches_of_an_image_has_the_image(place):
    run = regard.load(place / "run")
    image = np.zeros((2, 8, 8), np.uint8)[0]
    maps = run.attention(image, layers=[0], heads=[1])
    ((name, each),) = maps.items()
    assert name == "encoder.blocks.0.attention"
    grid = run.model.config.grid
    assert each.rows[:2] == ["0,0", "0,1"]  # no class token in this model
    assert len(each.columns) == grid[0] * grid[1]
    assert each.image.pixels.shape[1:] == run.model.config.image_sides
    assert list(run.explain(image)) == [f"encoder.blocks.{run.model.config.layers - 1}.attention"]


def test_a_run_on_images_resumes_to_the_same_bits(place, tmp_path):
    steady = {**SHORT["train"], "evaluate_every": 4}
    first, whole = ({**SHORT, "train": {**steady, "steps": steps}} for steps in (4, 8))
    regard.train(str(place / "halves.npz"), out=tmp_path / "first", **first)
    resumed = regard.resume(tmp_path / "first", "train.steps=8").model
    straight = regard.train(str(place / "halves.npz"), out=tmp_path / "whole", **whole).model
    expected = dict(straight.named_parameters())
    assert all(torch.equal(each, expected[name]) for name, each in resumed.named_parameters())


def test_the_best_by_accuracy_is_the_highest(place, tmp_path):
    more = {"steps": 30, "best_metric": "accuracy", "evaluate_every": 4}
    over = {**SHORT, "train": {**SHORT["train"], **more}}
    run = regard.train(str(place / "halves.npz"), out=tmp_path / "run", **over)
    rows = [row["validation"]["accuracy"] for row in run.folder.rows() if "validation" in row]
    assert run.metrics["accuracy"] == max(rows) > min(rows)
    assert run.evaluate()["accuracy"] == max(rows)


def test_settings_are_chosen_for_images_of_any_size(place):
    train, _ = open_split(config(place / "halves.npz"))
    chosen = default_settings(train, {"path": "x"}, gpu=False)
    assert chosen["task"]["kind"] == "image_classification"
    assert chosen["model"]["image_size"] % chosen["model"]["patch_size"] == 0


def test_sizes_are_printed_as_width_and_height(place):
    tall = config(place / "halves.npz", model={"image_size": [12, 4]})
    assert prepare_training(tall).description[0].endswith("; resized to 4 × 12")


@pytest.mark.parametrize(
    ("over", "said"),
    [
        (
            {"task": "causal"},
            r"halves holds images;\nit needs text.*\ntasks for images: image_classification",
        ),
        ({"train": {"tokens": 64, "batch": None}}, "train.tokens counts tokens"),
        ({"train": {"best_metric": "bleu"}}, "choose among last, loss, accuracy"),
        (
            {"model": {"head": "none", "cls": True}},
            "model.head must be 'classification', not 'none'",
        ),
        ({"model": {"patch_size": 3}}, "patch_size=3 must divide"),
        ({"task": {"mean": [0.1, 0.2], "std": [1, 1]}}, "a value for each of 1 channels"),
        ({"task": {"kind": "image_classification", "crops": 1}}, "unknown option 'crops'"),
    ],
)
def test_settings_that_do_not_fit_images_are_refused(place, over, said):
    with pytest.raises(ConfigError, match=said):
        prepare_training(config(place / "halves.npz", **over))


def test_a_model_of_text_does_not_read_images(place):
    settings = replace(config(place / "halves.npz"), model={"preset": "gpt2"})
    with pytest.raises(ConfigError, match="needs a model that reads images, not text"):
        prepare_training(settings)


def test_a_vision_model_does_not_read_text(tmp_path):
    (tmp_path / "cats.txt").write_text("the cat sat on the mat\n" * 20)
    settings = build(
        RunConfig,
        {
            "name": "t",
            "data": {"path": str(tmp_path / "cats.txt")},
            "model": {"preset": "tiny-vit"},
        },
    )
    with pytest.raises(ConfigError, match="needs a model that reads text, not images"):
        prepare_training(settings)


def test_a_folder_with_a_test_part_is_evaluated_on_that(place, tmp_path):
    images, labels = halves(12)
    np.savez(tmp_path / "both.npz", x=images, y=labels, x_test=images[:5], y_test=labels[:5])
    validation = open_validation([str(tmp_path / "both.npz")], "images", lower=False)
    assert len(validation) == 5
    run = regard.load(place / "run")
    assert (
        prepare_evaluation(run.config, validation, None).validation_size == 5
    )  # numbers are classes by order


def test_another_set_of_classes_gets_a_head_of_its_own(place, tmp_path):
    images, labels = halves(60)
    np.savez(tmp_path / "two.npz", x=images, y=np.array(["dark", "light", "light"])[labels])
    short = merge(SHORT, {"train": {"steps": 1, "lr": 0.0, "ema": 0.0}})
    started = merge(short, {"train": {"start": str(place / "run")}})
    run = regard.train(str(tmp_path / "two.npz"), out=tmp_path / "run", **started)
    before, after = regard.load(place / "run").model, run.model
    assert after.head.out.weight.shape[0] == 2
    kept, own = before.state_dict(), after.state_dict()
    assert all(torch.equal(kept[name], own[name]) for name in own if "head" not in name)


def test_a_subset_of_the_classes_keeps_their_numbers(place, tmp_path):
    images, labels = halves(60)
    kept = labels < 2
    names = np.array(["upper", "lower"])[labels[kept]]
    np.savez(tmp_path / "two.npz", x=images[kept], y=names)
    settings = {"task": {"class_names": ["both", "lower", "upper"]}}
    data = prepare_training(config(tmp_path / "two.npz", **settings))
    assert {*data.batch(0).targets.tolist()} == {1, 2}
    assert not any("class both" in line for line in data.description)  # no image of it at all
    (validation,) = data.validation_batches(None)
    assert {*validation.targets.tolist()} <= {1, 2}


def test_an_image_cannot_be_shifted_out_of_sight(place, tmp_path):
    with pytest.raises(ConfigError, match=r"task\.crop_padding=8 must be less than image_size=8"):
        regard.train(
            str(place / "halves.npz"),
            out=tmp_path / "run",
            **merge(SHORT, {"task": {"crop_padding": 8}}),
        )
