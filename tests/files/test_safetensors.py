"""Safetensors files: read exactly, written exactly, and refused where anything cannot be true."""

import json
import os
import struct
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from regard.errors import CheckpointError
from regard.files.safetensors import DTYPES, TensorReader, open_tensors, read_header
from regard.hub.safetensors_writer import SafetensorsWriter, split_into_shards, write_index

FLOATS = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def write_raw(path, header, data=b"\0" * 8, length=None):
    """A file whose header says what it likes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def example_tensors():
    return {
        "a": torch.randn(3, 4),
        "half": torch.randn(5).to(torch.bfloat16),
        "empty": torch.zeros(0, 7),
        "scalar": torch.tensor(2.5, dtype=torch.float16),
        "flags": torch.tensor([True, False]),
        "ids": torch.arange(6).view(2, 3),
    }


def test_what_the_library_writes_is_read_bit_for_bit(tmp_path):
    wanted = example_tensors()
    save_file(wanted, tmp_path / "model.safetensors")
    with open_tensors(tmp_path) as tensors:
        found = {name: tensors.read(name) for name in tensors.entries}
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_what_is_written_here_the_library_reads_bit_for_bit(tmp_path):
    wanted = example_tensors()
    specs = {name: (tensor.dtype, tensor.shape) for name, tensor in wanted.items()}
    with SafetensorsWriter({tmp_path / "x.safetensors": specs}) as writer:
        for name in reversed(wanted):  # any order will do
            writer.write(name, wanted[name])
    found = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_tensor_comes_in_chunks_of_one_piece_of_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("regard.files.safetensors.CHUNK", 10)
    tensor = torch.randn(7)
    save_file(
        {"x": tensor, "same": tensor.clone(), "other": -tensor}, tmp_path / "model.safetensors"
    )
    with open_tensors(tmp_path) as tensors:
        content = b"".join(bytes(part) for part in tensors.chunks("x"))
        assert tensors.equal("x", "same")
        assert not tensors.equal("x", "other")
    assert content == tensor.numpy().tobytes()


def test_a_tensor_that_was_never_written_is_noticed(tmp_path):
    specs = {"x": (torch.float32, torch.Size([1]))}
    with (
        pytest.raises(CheckpointError, match="x was never written"),
        SafetensorsWriter({tmp_path / "f": specs}),
    ):
        pass


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ({"x": {**FLOATS, "data_offsets": [0, 4]}}, "needs 8 bytes"),
        ({"x": {**FLOATS, "data_offsets": [-8, 0]}}, "offsets -8"),
        ({"x": {**FLOATS, "data_offsets": [8, 0]}}, "needs 8 bytes"),
        ({"x": {**FLOATS, "data_offsets": [0]}}, "lacks"),
        ({"x": {**FLOATS, "data_offsets": ["0", "8"]}}, "offsets '0'"),
        ({"x": {**FLOATS, "data_offsets": [0.0, 8.0]}}, "offsets 0.0"),
        ({"x": {**FLOATS, "shape": [-2]}}, r"shape \[-2\]"),
        ({"x": {**FLOATS, "shape": [True, 2]}}, "shape"),
        ({"x": {**FLOATS, "shape": [2.0]}}, "shape"),
        ({"x": {**FLOATS, "shape": [1 << 62, 4], "data_offsets": [0, 1 << 66]}}, "shape"),
        ({"x": {**FLOATS, "dtype": "F12"}}, "dtype 'F12'"),
        ({"x": {**FLOATS, "dtype": ["F32"]}}, "dtype"),
        ({"x": {"dtype": "F32", "shape": [2]}}, "lacks"),
        ({"x": [1, 2]}, "lacks"),
        ({"x": FLOATS, "y": FLOATS}, "overlaps"),
        ({"x": {**FLOATS, "data_offsets": [4, 12]}}, "leaves a gap"),
        ({}, "should have"),
        ([], "not a JSON object"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'{"x": 1, "x": 2}', "twice"),
        (b"[" * 100_000, "not JSON"),
        (b'{"x": ' + b"9" * 5000 + b"}", "not JSON"),
    ],
)
def test_headers_that_cannot_be_true_are_refused(header, why, tmp_path):
    with pytest.raises(CheckpointError, match=why) as raised:
        read_header(write_raw(tmp_path / "model.safetensors", header))
    assert "model.safetensors" in str(raised.value)


@pytest.mark.parametrize("length", [9, 1 << 32, (1 << 64) - 1])
def test_a_header_longer_than_the_file_is_refused(length, tmp_path):
    with pytest.raises(CheckpointError, match="a header of"):
        read_header(write_raw(tmp_path / "x", b"{}", b"", length))


@pytest.mark.parametrize("size", [0, 7])
def test_a_file_without_the_length_of_its_header_is_refused(size, tmp_path):
    (tmp_path / "x").write_bytes(bytes(size))
    with pytest.raises(CheckpointError, match=f"it has {size} bytes, and the length .* takes 8"):
        read_header(tmp_path / "x")


@given(kept=st.integers(0, 300))
def test_a_truncated_file_is_refused_wherever_it_ends(kept, tmp_path_factory):
    path = tmp_path_factory.mktemp("cut") / "x.safetensors"
    save_file({"x": torch.randn(30), "y": torch.randn(7)}, path)
    content = path.read_bytes()
    path.write_bytes(content[: min(kept, len(content) - 1)])
    with pytest.raises(CheckpointError):
        read_header(path)


@given(content=st.binary(max_size=200))
def test_any_bytes_are_a_file_or_a_clear_error(content, tmp_path_factory):
    path = tmp_path_factory.mktemp("any") / "x.safetensors"
    path.write_bytes(content)
    with suppress(CheckpointError):
        read_header(path)


def write_shards(folder):
    tensors = {f"t{i}": torch.randn(4) for i in range(5)}
    specs = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    files = split_into_shards(folder, specs, limit=32)
    with SafetensorsWriter(files) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    write_index(folder, writer.entries)
    return tensors


def test_shards_hold_together(tmp_path):
    wanted = write_shards(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == [
        f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)
    ]
    with open_tensors(tmp_path) as tensors:
        assert all(torch.equal(tensors.read(name), wanted[name]) for name in wanted)


def test_a_tensor_larger_than_a_shard_has_one_of_its_own(tmp_path):
    form = (torch.float32, torch.Size([100]))
    specs = {"a": form, "small": (torch.float32, torch.Size([1])), "b": form}
    files = split_into_shards(tmp_path, specs, limit=50)
    assert [list(group) for group in files.values()] == [["a"], ["small"], ["b"]]


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "a/b", "..", ".", "", "a\\b.safetensors", 3, None]
)
def test_an_index_that_points_elsewhere_is_refused(name, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(CheckpointError, match="not a safetensors file in its folder"):
        open_tensors(tmp_path)


@pytest.mark.parametrize("table", [{}, {"weight_map": []}, {"weight_map": {}}, []])
def test_an_index_without_a_map_is_refused(table, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(table))
    with pytest.raises(CheckpointError, match=r"weight_map|not a JSON object"):
        open_tensors(tmp_path)


def test_a_missing_shard_a_missing_tensor_and_a_double_one_are_named(tmp_path):
    write_shards(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    table["weight_map"]["ghost"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(table))
    with pytest.raises(CheckpointError, match="lists 'ghost'"):
        open_tensors(tmp_path)
    first, second = (tmp_path / f"model-0000{n}-of-00003.safetensors" for n in (1, 2))
    second.write_bytes(first.read_bytes())
    with pytest.raises(CheckpointError, match="two shards have a tensor 't0'"):
        open_tensors(tmp_path)
    second.unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00003"):
        open_tensors(tmp_path)


def test_a_pickle_is_refused_with_the_way_to_convert_it(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02cos\nsystem\n")
    with pytest.raises(CheckpointError, match=r"(?s)pickle.*save_pretrained"):
        open_tensors(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        open_tensors(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_pipe_is_refused_and_not_waited_for(name, tmp_path):
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"cannot read .*{name}: it is not a regular file"):
        open_tensors(tmp_path)


def test_a_file_that_shrinks_while_it_is_read_is_noticed(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"x": torch.randn(100)}, path)
    tensors = open_tensors(tmp_path)
    path.write_bytes(path.read_bytes()[:-8])
    with tensors, pytest.raises(CheckpointError, match="became shorter"):
        tensors.read("x")


def test_every_dtype_is_known_by_the_name_of_the_format(tmp_path):
    for name, dtype in DTYPES.items():
        path = Path(tmp_path, f"{name}.safetensors")
        save_file({"x": torch.zeros(3).to(dtype)}, path)
        assert read_header(path)["x"].dtype == dtype
        assert TensorReader(read_header(path)).entries["x"].size == 3 * dtype.itemsize
