"""Images from IDX files, arrays and folders: what is found, and what is refused."""

import gzip
import os
import shutil
import struct
import sys
import zipfile

import numpy as np
import pytest

from regard.data.images import Images, as_pixels, class_folders, file_pixels, read_idx, resize
from regard.data.loader import RowLoader
from regard.errors import ConfigError, DataError
from regard.pipelines import open_data
from regard.pipelines.images import image_files

GENERATOR = np.random.default_rng(0)


def pixels(count, *shape):
    return GENERATOR.integers(0, 256, (count, *shape), dtype=np.uint8)


def idx(array):
    """An array of bytes as an IDX file has it."""
    head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.tobytes()


@pytest.fixture
def mnist(tmp_path):
    """MNIST's four files with 20 and 5 images of 6 × 4 pixels."""
    folder = tmp_path / "digits"
    folder.mkdir()
    parts = {"train": pixels(20, 6, 4), "t10k": pixels(5, 6, 4)}
    for part, images in parts.items():
        labels = np.arange(len(images), dtype=np.uint8) % 3
        (folder / f"{part}-images-idx3-ubyte").write_bytes(idx(images))
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
    return folder, parts


def test_idx_files_are_found_and_read(mnist):
    folder, parts = mnist
    found = open_data(str(folder))
    assert isinstance(found, Images)
    assert (found.name, found.class_names, found.channels) == ("digits", ("0", "1", "2"), 1)
    assert found.description == "20 images, 4 × 6 pixels, grayscale, 3 classes"
    assert found.labels.tolist()[:4] == [0, 1, 2, 0]
    squeezed = resize(parts["train"][[3, 5], None], 4)
    assert np.array_equal(found.read(np.array([3, 5]), 4), squeezed)
    train, held = found.split(0.1, seed=1)
    assert (len(train), len(held)) == (20, 5)  # its own test split
    assert held.description == "the test split of the data, 5 images"


def test_zipped_or_not_the_content_is_the_same(mnist):
    folder, _ = mnist
    before = open_data(str(folder)).fingerprint()
    plain = folder / "train-images-idx3-ubyte"
    plain.with_name(f"{plain.name}.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    assert open_data(str(folder)).fingerprint() == before


def _truncate(path):
    path.write_bytes(path.read_bytes()[:-7])


def _append_byte(path):
    path.write_bytes(path.read_bytes() + b"x")


def _truncate_gzip(path):
    path.write_bytes(gzip.compress(path.read_bytes())[:-20])


def _change_magic(path):
    path.write_bytes(b"\0\0\x0d\x03" + path.read_bytes()[4:])


def _empty(path):
    path.write_bytes(b"")


def _huge_header(path):
    path.write_bytes(bytes([0, 0, 8, 3]) + struct.pack(">3I", 2**32 - 1, 2**32 - 1, 2**32 - 1))


def _drop_labels(path):
    path.write_bytes(idx(pixels(19, 6, 4)))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_truncate, r"has 473 bytes of data, and its header says 20 × 6 × 4"),
        (_append_byte, "has 481 bytes"),
        (_truncate_gzip, "is corrupted"),
        (
            _change_magic,
            "begins with 00 00 0d 03; an IDX file of bytes with 3 axes begins with 00 00 08",
        ),
        (_empty, "begins with"),
        (_huge_header, "header says 4294967295"),
        (_drop_labels, "19 images, but 20 labels"),
    ],
)
def test_corrupted_idx_files_are_refused_by_name(mnist, damage, said):
    path = mnist[0] / "train-images-idx3-ubyte"
    damage(path)
    with pytest.raises(DataError, match=said) as error:
        open_data(str(mnist[0]))
    assert str(path) in str(error.value)


def test_images_without_labels_are_refused(mnist):
    (mnist[0] / "train-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match="has no labels next to it; expected train-labels-idx1"):
        open_data(str(mnist[0]))


def test_an_idx_file_of_labels_has_one_axis(mnist):
    with pytest.raises(DataError, match="1 axes"):
        read_idx(mnist[0] / "train-images-idx3-ubyte", 1)


def save(path, **arrays):
    np.savez(path, **arrays)
    return str(path)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1)], ids=["first", "last"])
def test_channels_may_stand_at_either_end(tmp_path, channels, order):
    images = pixels(8, channels, 5, 5)
    found = open_data(save(tmp_path / "a.npz", x=images.transpose(order), y=np.arange(8) % 2))
    assert (found.name, found.channels) == ("a", channels)
    assert np.array_equal(found.read(np.arange(8), 5), images)


def test_an_array_without_channels_is_grayscale(tmp_path):
    images = pixels(8, 5, 5)
    found = open_data(save(tmp_path / "a.npz", x=images, y=np.arange(8) % 2))
    assert found.channels == 1
    assert np.array_equal(found.read(np.array([6, 2]), 5), images[[6, 2], None])


def test_values_may_be_fractions():
    images = np.array([[[[0.0, 0.5], [1.0, 0.25]]]])
    assert as_pixels(images, "here").flatten().tolist() == [0, 128, 255, 64]
    assert as_pixels(images * 200, "here").flatten().tolist() == [0, 100, 200, 50]


def test_a_test_part_and_words_for_classes_are_taken(tmp_path):
    path = save(
        tmp_path / "a.npz",
        train_images=pixels(6, 4, 4),
        train_labels=np.array(["dog", "cat", "cow"] * 2),
        test_images=pixels(2, 4, 4),
        test_labels=np.array(["dog", "cow"]),  # no cat, yet a dog stays number 2
    )
    found = open_data(path)
    assert found.class_names == ("cat", "cow", "dog")
    assert found.validation.labels.tolist() == [2, 1]


def test_a_number_stands_for_a_named_class_but_not_for_another_number(tmp_path):
    found = open_data(save(tmp_path / "a.npz", x=pixels(4, 3, 3), y=np.array([0, 1, 1, 0])))
    assert found.with_class_names(["cat", "dog", "cow"]).labels.tolist() == [0, 1, 1, 0]
    assert found.with_class_names(["1", "0"]).labels.tolist() == [1, 0, 0, 1]
    with pytest.raises(DataError, match="a class '0' that the model does not have"):
        found.with_class_names(["1", "2"])


def test_a_test_part_alone_can_be_judged(mnist):
    for file in mnist[0].glob("train-*"):
        file.unlink()
    assert len(open_data(str(mnist[0]))) == 5


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        (
            {"z": np.zeros(3)},
            r"needs arrays 'x' and 'y' or (.|\n)* 'train_off' of (.|\n)*it has: z$",
        ),
        (
            dict.fromkeys(("train", "valid", "test"), np.array([None, {}])),
            r"'train_xyp' of shape \(points, 3\), the rows \(dx, dy, lift\)(.|\n)*np.concatenate\(",
        ),
        ({"x": pixels(4, 3, 3)}, "it has: x"),
        ({"x": pixels(4, 3, 3), "y": np.zeros(3, int)}, "4 images, but 3 labels"),
        ({"x": pixels(4, 9), "y": np.arange(4)}, r"this array has shape \(4, 9\)"),
        ({"x": pixels(4, 9, 9, 2), "y": np.arange(4)}, "1 or 3 channels"),
        ({"x": pixels(4, 3, 3), "y": np.zeros(4)}, "labels must be integers or strings"),
        ({"x": pixels(4, 3, 3), "y": np.zeros(4, int)}, "one class only, '0'"),
        ({"x": pixels(0, 3, 3), "y": np.zeros(0, int)}, "has no images"),
        ({"x": np.full((4, 3, 3), 300), "y": np.arange(4)}, "values from 300 to 300"),
        ({"x": np.full((4, 3, 3), np.nan), "y": np.arange(4)}, "finite numbers"),
        ({"x": np.array([None, {}]), "y": np.arange(2)}, "has object arrays"),
        ({"x": pixels(4, 3, 3), "y": np.array([{}, 1, 2, 3])}, "has object arrays"),
        (
            {
                "x": pixels(4, 3, 3),
                "y": np.arange(4),
                "x_test": pixels(1, 3, 3),
                "y_test": np.array([9]),
            },
            "has a class '9' that the model does not have",
        ),
    ],
)
def test_arrays_that_cannot_be_used_are_refused(tmp_path, arrays, said):
    with pytest.raises(DataError, match=said):
        open_data(save(tmp_path / "bad.npz", **arrays))


@pytest.mark.parametrize("content", [b"PK\x03\x04 and then nothing", b"", b"\x93NUMPY\x01\0"])
def test_a_file_that_is_no_archive_is_refused(tmp_path, content):
    path = tmp_path / "bad.npz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"bad.npz is corrupted or not an .npz archive"):
        open_data(str(path))


def test_a_single_array_is_no_archive(tmp_path):
    with (tmp_path / "bad.npz").open("wb") as file:
        np.save(file, pixels(4, 3, 3))
    with pytest.raises(DataError, match=r"bad.npz is corrupted or not an .npz archive"):
        open_data(str(tmp_path / "bad.npz"))


def test_the_validation_split_depends_on_the_seed(tmp_path):
    found = open_data(save(tmp_path / "a.npz", x=pixels(50, 3, 3), y=np.arange(50) % 5))
    train, held = found.split(0.2, seed=1)
    assert (len(train), len(held)) == (40, 10)
    everything = np.concatenate([each.read(np.arange(len(each)), 3) for each in (train, held)])
    assert sorted(map(bytes, everything)) == sorted(map(bytes, found.read(np.arange(50), 3)))
    again, other = found.split(0.2, seed=1)[1], found.split(0.2, seed=2)[1]
    assert held.fingerprint() == again.fingerprint() != other.fingerprint()
    one, two = (found.subset(np.array(rows), "") for rows in ([0, 1], [5, 6]))  # of equal classes
    assert one.fingerprint() != two.fingerprint()
    with pytest.raises(DataError, match="too few"):
        found.split(0.001, seed=1)
    with pytest.raises(ConfigError, match="between 0 and 1"):
        found.split(1.5, seed=1)


def test_mean_and_spread_are_those_of_each_channel(tmp_path):
    images = pixels(30, 3, 4, 4)
    images[:, 2] = 7
    found = open_data(save(tmp_path / "a.npz", x=images, y=np.arange(30) % 2))
    mean, spread = found.statistics(4)
    values = images.transpose(1, 0, 2, 3).reshape(3, -1) / 255
    np.testing.assert_allclose(mean, values.mean(1), atol=1e-6)  # rounded to six digits
    np.testing.assert_allclose(spread[:2], values.std(1)[:2], atol=1e-6)
    assert spread[2] == pytest.approx(1 / 255, abs=1e-6)  # and not 0


def test_case_is_not_folded_in_images(tmp_path):
    path = save(tmp_path / "a.npz", x=pixels(4, 3, 3), y=np.arange(4))
    with pytest.raises(ConfigError, match="lowercases text; a holds images"):
        open_data(path, lower=True)


def test_every_image_comes_once_in_an_epoch():
    loader = RowLoader(count=10, batch=4, seed=3)
    rows = np.concatenate([loader.examples(step) for step in range(5)])
    assert sorted(rows[:10]) == sorted(rows[10:]) == list(range(10))
    assert not np.array_equal(rows[:10], rows[10:])
    assert np.array_equal(loader.examples(2), loader.examples(2))
    assert not np.array_equal(loader.examples(0), RowLoader(10, 4, 4).examples(0))


@pytest.fixture
def zoo(tmp_path):
    """A folder of small images for each of two classes, in two sizes."""
    image = pytest.importorskip("PIL.Image", reason="image files need Pillow")
    for name, size in (("cat", (8, 6)), ("dog", (4, 4))):
        (tmp_path / "zoo" / name).mkdir(parents=True)
        for number in range(3):
            array = np.full((size[1], size[0]), 40 * number, np.uint8)
            image.fromarray(array).save(tmp_path / "zoo" / name / f"{number}.png")
    (tmp_path / "zoo" / ".hidden").mkdir()
    (tmp_path / "zoo" / "notes.txt").write_text("about cats and dogs")
    return tmp_path / "zoo"


def test_a_folder_for_each_class_is_read(zoo):
    found = open_data(str(zoo))
    assert (found.name, found.class_names, found.channels) == ("zoo", ("cat", "dog"), 1)
    assert found.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert found.description == "6 images, 2 sizes, most often 8 × 6 pixels, grayscale, 2 classes"
    read = found.read(np.array([2, 4]), 5)
    assert read.shape == (2, 1, 5, 5)
    assert set(read[0].flatten()) == {80}
    assert set(read[1].flatten()) == {40}


def test_folders_for_training_and_testing_are_separate(zoo, tmp_path):
    both = tmp_path / "both"
    both.mkdir()
    (zoo / "notes.txt").unlink()
    shutil.copytree(zoo, both / "train")
    shutil.copytree(zoo, both / "test")
    (both / "test" / "dog" / "0.png").unlink()
    found = open_data(str(both))
    assert (found.name, len(found), len(found.validation)) == ("both", 6, 5)


def test_colour_anywhere_means_colour_everywhere(zoo):
    from PIL import Image

    Image.new("RGB", (4, 4), (10, 20, 30)).save(zoo / "dog" / "red.jpg", quality=100)
    found = open_data(str(zoo))
    assert found.channels == 3
    assert found.read(np.array([0]), 4).shape == (1, 3, 4, 4)


def test_a_file_that_is_no_image_is_named(zoo):
    (zoo / "cat" / "1.png").write_bytes(b"not an image")
    with pytest.raises(DataError, match=r"1.png is not a PNG, JPEG, WebP or GIF image"):
        open_data(str(zoo))


def test_an_image_that_is_cut_short_is_named(zoo):
    from PIL import Image

    path = zoo / "cat" / "1.png"
    Image.fromarray(pixels(64, 64)).save(path)
    path.write_bytes(path.read_bytes()[:1000])
    found = open_data(str(zoo))
    with pytest.raises(DataError, match=r"1.png is a corrupted image"):
        found.read(np.array([1]), 8)


def test_the_validation_folder_comes_before_the_test_folder(zoo, tmp_path):
    folder = tmp_path / "three"
    for name in ("train", "val", "test"):
        shutil.copytree(zoo, folder / name)
    (folder / "val" / "dog" / "0.png").unlink()
    training, validation = open_data(str(folder)).split(0.1, seed=1)
    assert len(validation) == len(training) - 1
    count = len(validation)
    assert validation.description == f"the validation split of the data, {count} images"


def test_a_folder_of_text_with_some_pictures_is_text(zoo):
    for number in range(8):
        (zoo / f"chapter{number}.txt").write_text("once upon a time")
    assert open_data(str(zoo)).kind == "text"


def test_without_pillow_the_error_says_what_to_install(zoo, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"needs Pillow.* pip install 'regard\[images\]'"):
        open_data(str(zoo))


def test_pictures_beside_a_tree_of_text_do_not_make_it_images(zoo):
    deep = zoo / "src" / "package"
    deep.mkdir(parents=True)
    for number in range(20):
        (deep / f"{number}.txt").write_text("some words\n")
    assert open_data(str(zoo)).kind == "text"


def test_sixteen_bits_of_grey_are_read_as_eight(zoo):
    image = pytest.importorskip("PIL.Image", reason="image files need Pillow")
    ramp = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    image.fromarray(ramp).save(zoo / "cat" / "ramp.png")
    pixels = file_pixels(zoo / "cat" / "ramp.png", 8, 1)[0]
    assert np.abs(pixels.astype(int) - (ramp >> 8)).max() <= 1


def test_yes_and_no_are_white_and_black():
    assert as_pixels(np.array([[[True, False]]]), "x").flatten().tolist() == [255, 0]


def test_an_archive_that_promises_too_much_or_is_locked_is_refused(tmp_path):
    header = b"\x93NUMPY\x01\x00"
    promise = b"{'descr': '<f8', 'fortran_order': False, 'shape': (10000000000000,), }"
    promise += b" " * (-(len(promise) + 11) % 64) + b"\n"
    whole = header + len(promise).to_bytes(2, "little") + promise
    with zipfile.ZipFile(tmp_path / "huge.npz", "w") as archive:
        archive.writestr("x.npy", whole)
        archive.writestr("y.npy", whole)
    content = bytearray((tmp_path / "huge.npz").read_bytes())
    with pytest.raises(DataError, match=r"huge\.npz is corrupted or not"):
        open_data(str(tmp_path / "huge.npz"))
    content[6] |= 1  # "encrypted", in the local header and in the directory
    content[content.index(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "locked.npz").write_bytes(content)
    with pytest.raises(DataError, match=r"locked\.npz is corrupted or not"):
        open_data(str(tmp_path / "locked.npz"))


def test_what_may_not_be_looked_at_is_no_image(tmp_path, monkeypatch):
    for name in ("cats/one.png", "cats/two.png", "dogs/one.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    look = os.stat

    def stat(path, *words, **options):
        if str(path).endswith("two.png"):
            raise PermissionError
        return look(path, *words, **options)

    monkeypatch.setattr(os, "stat", stat)
    assert {name: len(files) for name, files in class_folders(tmp_path).items()} == {
        "cats": 1,
        "dogs": 1,
    }


def test_arrays_that_are_larger_than_the_memory_are_not_unpacked(tmp_path, monkeypatch):
    path = tmp_path / "zeros.npz"
    np.savez_compressed(path, x=np.zeros((90, 30, 30), np.uint8), y=np.arange(90) % 2)
    size = 90 * 30 * 30 + 90 * 8 + 2 * 128  # with the headers
    assert path.stat().st_size < size / 40
    monkeypatch.setattr("regard.data.npz_files._memory", lambda: size - 1)
    with pytest.raises(DataError, match=r"zeros\.npz has 82\.0 kB of arrays"):
        open_data(str(path))
    monkeypatch.setattr("regard.data.npz_files._memory", lambda: size)
    assert open_data(str(path))


@pytest.mark.parametrize("names", [("x", "y"), ("xyp", "off")])
def test_files_of_an_archive_that_are_not_arrays_are_refused(tmp_path, names):
    path = tmp_path / "raw.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "not an array")
    with pytest.raises(DataError, match=r"'(x|xyp)' is not a NumPy array"):
        open_data(str(path))


def test_hidden_files_of_a_folder_are_not_predicted(tmp_path):
    for name in ("a.png", "._a.png", ".cache/b.png"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
    assert [file.name for _, file in image_files(tmp_path).rows] == ["a.png"]
