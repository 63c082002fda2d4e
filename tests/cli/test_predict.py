"""`regard train` on images, and `regard predict`."""

import json

import numpy as np
import pytest

WORDS = ["model.dim=8", "model.layers=1", "model.heads=2", "train.steps=2", "train.batch=4"]


@pytest.fixture
def photos(tmp_path):
    """A folder for each of two classes, with small images in colour."""
    image = pytest.importorskip("PIL.Image", reason="image files need Pillow")
    for name, colour in (("sea", (0, 0, 200)), ("wood", (0, 200, 0))):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(6):
            shape = (12 + number, 14, 3)
            array = np.broadcast_to(np.array(colour, np.uint8), shape)
            image.fromarray(array).save(tmp_path / "photos" / name / f"{number}.png")
    return tmp_path / "photos"


def test_a_folder_of_images_is_enough(regard, photos):
    completed = regard("train", photos, *WORDS, "--out", "run")
    assert completed.code == 0
    assert "12 images, 6 sizes" in completed.err
    assert "resized to" in completed.err
    assert "classes    sea, wood" in completed.err
    assert "mean=" not in completed.err  # a fact of the data, no choice
    assert "regard predict run image.png" in completed.err
    assert "accuracy" in completed.out
    for name in ("evaluate", "info"):
        assert "accuracy" in regard(name, "run").out


def test_images_are_classified_one_line_each(regard, photos):
    regard("train", photos, *WORDS, "--out", "run")
    files = [photos / "sea" / "0.png", photos / "wood" / "5.png"]
    lines = regard("predict", "run", *files, "-n", 1).out.splitlines()
    assert [line.split()[0] for line in lines] == [str(file) for file in files]
    output = json.loads(regard("predict", "run", *files, "--json").out)
    assert sum(share for _, share in output[str(files[0])][0]) == pytest.approx(1)
    completed = regard("predict", "run", photos / "none.png")
    assert completed.code == 3
    assert "none.png cannot be read: No such file" in completed.err


def test_a_run_on_images_does_not_generate(regard, photos):
    regard("train", photos, *WORDS, "--out", "run")
    completed = regard("generate", "run", "once")
    assert completed.code == 2
    assert "cannot generate; use `predict` instead" in completed.err
