"""Captioning: generated shapes, folders of images, attention over the image, refusals."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import regard
from cli.commands import command
from regard.api.event_lines import format_progress
from regard.config import RunConfig, build
from regard.data.builtin import shapes
from regard.data.captions import from_pixels
from regard.errors import ConfigError, DataError
from regard.models.build import build_model, resolve
from regard.nn.state import ImageSource
from regard.pipelines import open_data, prepare_training
from regard.pipelines.captions import _score, encode_words, nearest_captions
from regard.text import train_tokenizer

COLOURS = {"red": (220, 30, 30), "blue": (30, 30, 220)}
SETTINGS = ("model.dim=16", "model.image_size=16", "train.steps=60", "train.batch=16")
SETTINGS += ("train.lr=1e-2", "train.ema=0", "model.dropout=0", "model.encoder_layers=0")


def folder_of(path, count=40):
    """Images of one colour on the left or on the right, and a table of captions."""
    (path / "images").mkdir(parents=True)
    lines = ["file_name,caption,group"]
    for n in range(count):
        colour, side = list(COLOURS)[n % 2], ("left", "right")[n // 2 % 2]
        pixels = np.full((16, 16, 3), 128 + n, np.uint8)
        pixels[:, slice(0, 8) if side == "left" else slice(8, 16)] = COLOURS[colour]
        Image.fromarray(pixels).save(path / "images" / f"{n}.png")
        lines.append(f"{n}.png,{colour} on the {side},{n // 4}")
    (path / "captions.csv").write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("captions")
    return regard.train(str(folder_of(folder / "data")), *SETTINGS, out=folder / "run")


def test_a_folder_of_images_with_captions_is_learned(run, capsys, tmp_path):
    assert run.config.task["kind"] == "caption"
    progress = []
    metrics = run.evaluate(progress=lambda *step: progress.append(format_progress(*step)))
    assert progress[0] in {f"{n} of {n} images" for n in range(1, 40)}
    assert metrics["exact_match"] == 1
    assert metrics["nearest_exact_match"] <= 1
    assert {"bleu", "chrf", "nearest_bleu", "loss", "perplexity"} <= set(metrics)
    place = run.config.data.path
    image = f"{place}/images/1.png"
    assert run.predict(image) == "blue on the left"
    assert run.predict([image, f"{place}/images/2.png"])[1] == "red on the right"
    assert command("predict", str(run.folder.path), image) == 0
    assert capsys.readouterr().out.strip() == "blue on the left"
    rows = list(run.predict_file(f"{place}/images"))
    assert rows[0]["file"].endswith("0.png")
    assert rows[0]["prediction"] == "red on the left"
    ((name, attention),) = run.explain(image).items()
    assert name == "attention.0"
    assert attention.rows == ["blue", "on", "the", "left", "<stop>"]
    torch.testing.assert_close(attention.weights.sum(-1), torch.ones(1, 5))
    for suffix in ("png", "svg", "html"):
        out = tmp_path / f"words.{suffix}"
        assert command("explain", str(run.folder.path), image, "--out", str(out)) == 0
        assert out.stat().st_size > 1000
    capsys.readouterr()
    assert command("explain", str(run.folder.path), image) == 0
    assert "blue" in capsys.readouterr().out
    (decoder,) = run.states(image).values()
    assert decoder.rows == ["<start>", "blue", "on", "the", "left"]
    (given,) = run.attention(image, target="red", words=True).values()
    assert given.rows == ["red", "<stop>"]
    (given,) = run.attention(image, target="red").values()
    heading = given.figure(title="attention.0")._suptitle
    assert heading.get_window_extent().x1 <= heading.figure.bbox.x1  # of a narrow figure
    with pytest.raises(ConfigError, match="family"):
        run.export(tmp_path / "exported")


def test_groups_are_on_one_side_of_the_split(tmp_path):
    data = open_data(str(folder_of(tmp_path / "data")))
    train, validation = data.split(0.3, 1)
    assert not {*train.groups} & {*validation.groups}
    assert validation.train is train
    assert len(train) + len(validation) == 40
    table = open_data(str(tmp_path / "data" / "captions.csv"))
    assert table.fingerprint() == data.fingerprint()
    assert "10 groups" in data.description


def test_shapes_say_what_is_where():
    data = shapes(examples=60)
    assert data.fingerprint() == shapes(examples=60).fingerprint()
    pixels = data.read(np.arange(60), 48)
    for image, (caption,), region in zip(pixels, data.captions, data.boxes, strict=True):
        words = caption.split()
        assert len(words) in (3, 7, 8)
        boxes = list(dict.fromkeys(region.values()))
        if "above" in words:
            assert boxes[0][0] < boxes[1][0]
        if "left" in words:
            assert boxes[0][1] < boxes[1][1]
        for word, (top, left, bottom, right) in region.items():
            if words[word] == "black":  # darker than the ground
                assert image[:, top:bottom, left:right].min() < 20
            if words[word] == "white":
                assert image[:, top:bottom, left:right].max() == 250


@pytest.mark.parametrize("kind", ["char", "word", "bpe", "unigram"])
def test_the_last_token_of_each_word_is_that_of_the_sentence(kind):
    words = ["a", "red", "circle", "above", "the", "blue", "square"]
    choice = kind if kind in ("char", "word") else {"kind": kind, "vocab_size": 290}
    tokenizer = train_tokenizer(choice, [" ".join(words), "a large red square", "the blue one"])
    ((ids, lasts),) = encode_words(tokenizer, [words])
    assert ids.tolist() == tokenizer.encode(" ".join(words))
    for n, last in enumerate(lasts.tolist()):
        assert tokenizer.decode(ids[: last + 1].tolist()).strip() == " ".join(words[: n + 1])


def test_the_baseline_is_the_caption_of_the_nearest_image():
    pixels = np.zeros((3, 1, 16, 16), np.uint8)
    pixels[1] += 100
    pixels[2] += 200
    train = from_pixels("x", "", pixels, [("dark",), ("grey",), ("light",)])
    asked = from_pixels("y", "", pixels[[2, 0]] + 20, [("",), ("",)])
    assert nearest_captions(train, asked) == ["light", "dark"]


def test_captions_without_four_tokens_have_no_bleu():
    pixels = np.zeros((2, 1, 16, 16), np.uint8)
    short = from_pixels("x", "", pixels, [("a red circle",), ("dark", "very dark")])
    assert _score(["a red circle", "dark"], short) == {"exact_match": 1.0, "chrf": 100.0}
    long = from_pixels("x", "", pixels, [("a red circle",), ("dark", "very dark and cold")])
    assert list(_score(["a red circle", "dark"], long)) == ["exact_match", "bleu", "chrf"]


def test_a_table_of_one_word_captions_has_a_header(tmp_path):
    path = folder_of(tmp_path / "data", 8)
    rows = [f"{n}.png,w{n},mot{n}" for n in range(8)]
    (path / "captions.csv").write_text("\n".join(["file_name,en,fr", *rows]) + "\n")
    data = open_data(str(path / "captions.csv"), target="fr")
    assert data.captions[:2] == [("mot0",), ("mot1",)]


def test_several_captions_of_an_image_are_all_references(tmp_path):
    path = folder_of(tmp_path / "data", 4)
    rows = [{"file_name": f"{n // 2}.png", "caption": [f"one {n}", f"two {n}"]} for n in range(8)]
    (path / "captions.csv").unlink()
    (path / "captions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = open_data(str(path))
    assert len(data) == 4
    assert data.captions[0] == ("one 0", "two 0", "one 1", "two 1")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("gone.png,red on the left,9", "line 6: there is no image .*gone.png"),
        (",red on the left,9", "line 6: the caption 'red on the left' has no image"),
        ("0.png,,9", "line 6: the image 0.png has no caption"),
        ("broken.png,red,9", "line 6: .*broken.png is not a PNG, JPEG, WebP or GIF image"),
        ("cut.png,red,9", "line 6: .*cut.png is a corrupted image"),
        ("cut.bmp,red,9", r"line 6: .*cut.bmp is not an image \(.png .jpg .jpeg .webp .gif\)"),
    ],
)
def test_what_is_wrong_is_refused_with_file_and_line(tmp_path, line, message):
    path = folder_of(tmp_path / "data", 4)
    (path / "images" / "broken.png").write_bytes(b"no image")
    noise = np.random.default_rng(0).integers(0, 255, (40, 40, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path / "images" / "whole.png")
    content = (path / "images" / "whole.png").read_bytes()
    (path / "images" / "cut.png").write_bytes(content[: len(content) // 2])
    (path / "images" / "cut.bmp").write_bytes(content)
    with (path / "captions.csv").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match=message):
        read_all(path)


@pytest.mark.parametrize("header", ["a,b", None])
def test_columns_without_common_names_are_inferred(tmp_path, header):
    path = folder_of(tmp_path / "data", 4)
    rows = [f"{n}.png,the picture number {n}" for n in range(4)]
    (path / "captions.csv").write_text("\n".join([header, *rows] if header else rows) + "\n")
    for place in (path, path / "captions.csv"):
        data = open_data(str(place))
        assert data.kind == "captions"
        assert data.captions[3] == ("the picture number 3",)
        source, target = header.split(",") if header else ("1", "2")
        assert f"source={source} (inferred), target={target} (inferred)" in data.description
        assert data.columns == {"source": source, "target": target}


def test_a_folder_with_captions_in_several_languages_needs_the_name_of_a_column(tmp_path):
    path = folder_of(tmp_path / "data", 8)
    rows = [f"{n}.png,the picture number {n},image numéro {n}" for n in range(8)]
    (path / "captions.csv").write_text("\n".join(["file_name,en,fr", *rows]) + "\n")
    with pytest.raises(
        DataError, match=r"which of its columns holds their captions\n.*\nname it: data.target=COL"
    ):
        open_data(str(path))
    assert open_data(str(path), target="fr").captions[1] == ("image numéro 1",)
    with pytest.raises(DataError, match=r"captions.csv, line 1 has no column 'de'"):
        open_data(str(path), target="de")


def test_a_table_of_two_columns_may_lack_a_file_name(tmp_path):
    path = folder_of(tmp_path / "data", 4)
    rows = ["file_name,caption", *(f"{n}.png,a {n}" for n in range(4)), ",b"]
    (path / "captions.csv").write_text("\n".join(rows) + "\n")
    with pytest.raises(DataError, match=r"csv, line 6: the caption 'b' has no image"):
        open_data(str(path))


@pytest.mark.parametrize("suffix", ["webp", "gif"])
def test_other_image_formats_are_read(tmp_path, suffix):
    path = folder_of(tmp_path / "data", 4)
    pixels = read_all(path)
    for file in sorted((path / "images").iterdir()):
        options = {"lossless": True} if suffix == "webp" else {}
        Image.open(file).save(file.with_suffix(f".{suffix}"), **options)
        file.unlink()
    table = path / "captions.csv"
    table.write_text(table.read_text().replace(".png", f".{suffix}"))
    assert np.array_equal(read_all(path), pixels)
    for number in range(4):
        source = path / "images" / f"{number}.{suffix}"
        target = path / "by class" / "ab"[number % 2] / source.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
    assert open_data(str(path / "by class")).class_names == ("a", "b")


def coco(path, images, first=0):
    """COCO's JSON: two captions of each image."""
    files = [{"id": 100 + n, "file_name": f"{n}.png"} for n in range(first, first + images)]
    captions = [
        {"id": n, "image_id": image["id"], "caption": f"caption {n} of {image['file_name']}"}
        for image in files
        for n in range(2)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"info": {}, "licenses": [{"id": 1}], "images": files, "annotations": captions})
    )
    return path


def test_captions_of_coco_are_read_and_images_without_one_are_counted(tmp_path):
    path = folder_of(tmp_path / "data", 8)
    (path / "captions.csv").unlink()
    coco(path / "captions.json", 6)
    data = open_data(str(path))
    assert data.captions[2] == ("caption 0 of 2.png", "caption 1 of 2.png")
    assert "; 12 captions; left out: 2 images without a row in the table" in data.description
    assert "captions of captions.json" in data.description
    content = json.loads((path / "captions.json").read_text())
    content["annotations"][3]["image_id"] = 7
    (path / "captions.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"captions.json, row 4: the caption 'caption 1 of 1.png'"):
        open_data(str(path))


def test_the_folders_of_coco_are_read_by_the_path_of_a_split(tmp_path):
    (tmp_path / "coco").mkdir()
    for split, first in (("train2014", 0), ("val2014", 4)):
        images = folder_of(tmp_path / split, 8) / "images"
        images.rename(tmp_path / "coco" / split)
        coco(tmp_path / "coco" / "annotations" / f"captions_{split}.json", 4, first)
    with pytest.raises(
        DataError,
        match=r"2 tables that name images: captions_train2014.json, captions_val2014.json;\n.*data",
    ):
        open_data(str(tmp_path / "coco"))
    data = open_data(str(tmp_path / "coco" / "annotations" / "captions_val2014.json"))
    assert data.captions[0][0] == "caption 0 of 4.png"
    assert "4 images are outside the folder of the table" in data.description


def test_flickr8k_is_read(tmp_path):
    path = folder_of(tmp_path / "data", 4)
    (path / "captions.csv").unlink()
    (path / "images").rename(path / "Images")
    rows = [f'{n}.png,"A dog, number {m} , runs ."' for n in range(4) for m in range(5)]
    (path / "captions.txt").write_text("\n".join(["image,caption", *rows]) + "\n")
    for place, options in ((path, {}), (path / "captions.txt", {"kind": "captions"})):
        data = open_data(str(place), **options)
        assert (data.kind, len(data)) == ("captions", 4)
        assert data.captions[1][4] == "A dog, number 4 , runs ."


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds 4 images, but no table with their file names and captions\nfor captions, add"),
        (
            {"captions.txt": "a dog\na cat\n"},
            "captions.txt is not such a table: it names no images",
        ),
        (
            {"captions.txt": "image,caption\n0.png,a dog, a cat\n"},
            "captions.txt is not such a table: line 2 has 3 columns.*needs double quotes",
        ),
        ({f"{n}.bmp": "" for n in range(9)}, r"9 images in formats that are not read \(.bmp\)"),
        (
            {f"{name}.csv": "file_name,caption\n0.png,a dog\n1.png,a cat\n" for name in "ab"},
            "holds 2 tables that name images: a.csv, b.csv;\ngive the path .*data.validation=",
        ),
        ({"notes.md": "a note"}, "holds 4 images, but no table"),
    ],
)
@pytest.mark.parametrize("subfolder", [".", "Images"])
def test_a_folder_of_images_is_not_read_as_text(tmp_path, files, message, subfolder):
    path = folder_of(tmp_path / "data", 4)
    (path / "captions.csv").unlink()
    (path / subfolder).mkdir(exist_ok=True)
    for file in sorted((path / "images").iterdir()):
        file.rename(path / subfolder / file.name)
    (path / "images").rmdir()
    for name, content in files.items():
        (path / name).write_text(content)
    for kind in (None, "captions"):
        with pytest.raises(DataError, match=message):
            open_data(str(path), kind=kind)
    if "notes.md" in files:
        assert open_data(str(path), kind="text").kind == "text"


def read_all(path):
    data = open_data(str(path))
    return data.read(np.arange(len(data)), 16)


def test_a_transformer_has_a_smaller_learning_rate(tmp_path, capsys):
    path = str(folder_of(tmp_path / "data", 12))
    assert command("train", path, "--dry-run") == 0
    assert "train.lr=0.002" in capsys.readouterr().out
    assert command("train", path, "model.preset=tiny-captioner", "--dry-run") == 0
    assert "train.lr" not in capsys.readouterr().out  # 0.001, the default of the setting
    assert command("train", path, "model.preset=[1]", "--dry-run") == 2
    assert "unknown preset '[1]'" in capsys.readouterr().err


def test_models_and_tasks_that_do_not_fit_are_refused(tmp_path):
    path = str(folder_of(tmp_path / "data", 12))
    config = {"name": "x", "task": "caption", "data": {"path": path, "tokenizer": "word"}}
    for model in ({"preset": "bahdanau"}, {"preset": "tiny-encoder-decoder"}):
        with pytest.raises(ConfigError, match="needs a model that reads images, not text"):
            prepare_training(build(RunConfig, {**config, "model": model}))
    with pytest.raises(ConfigError, match="must be a power of two"):
        resolve({"preset": "tiny-captioner", "patch_size": 6, "image_size": 48})
    with pytest.raises(ConfigError, match="at least the 256 regions"):
        resolve({"preset": "tiny-captioner", "patch_size": 4})
    model = build_model(resolve({"preset": "tiny-captioner", "vocab_size": 9, "dim": 16}))
    with pytest.raises(regard.errors.ShapeError, match="do not fit the model"):
        model.start(1, 4, ImageSource.of(torch.zeros(1, 3, 32, 32), 16))
