"""NumPy archives (.npz), read by position like safetensors, and trusted in nothing.

An archive is a zip file of one .npy for each array: a short text with type and shape, then the
numbers. Arrays of objects, which only pickle could read, are refused, and compressed ones are.
"""

import math
import struct
import zipfile
from pathlib import Path
from typing import IO

import numpy as np
import torch
from numpy.lib import format as npy

from regard.errors import CheckpointError
from regard.files.safetensors import MAX_DIMS, Entry, Tensors
from regard.files.untrusted import open_regular_file, quote

LOCAL = struct.Struct("<26xHH")  # of what stands before a file in a zip: two lengths
MOST = 10_000  # arrays
DTYPES = {"<f4": torch.float32, "<f2": torch.float16}
DAMAGED = (OSError, ValueError, EOFError, NotImplementedError, struct.error, zipfile.BadZipFile)


def names_in(path: Path) -> set[str]:
    """The arrays of an archive; none of what is not one."""
    try:
        with open_regular_file(path) as file, zipfile.ZipFile(file) as archive:
            return {each.removesuffix(".npy") for each in archive.namelist()[:MOST]}
    except (*DAMAGED, CheckpointError):
        return set()


def open_archive(path: Path) -> Tensors:
    """Where the arrays of an archive lie."""
    entries = {}
    try:
        with open_regular_file(path) as file, zipfile.ZipFile(file) as archive:
            size = path.stat().st_size
            for info in archive.infolist()[:MOST]:
                file.seek(info.header_offset)
                name, extra = LOCAL.unpack(file.read(LOCAL.size))
                file.seek(info.header_offset + LOCAL.size + name + extra)
                begin = file.tell()
                shape, dtype = _header(file, info)
                entry = Entry(path, dtype, shape, file.tell())
                end = entry.start + entry.size
                if end != begin + info.file_size or end > size:
                    raise ValueError(f"{quote(info.filename)} has another size than it says")
                entries[info.filename.removesuffix(".npy")] = entry
    except DAMAGED as error:
        raise CheckpointError(f"{path} is no whole archive of plain arrays: {error}") from None
    return Tensors(entries)


def _header(file: IO[bytes], info: zipfile.ZipInfo) -> tuple[torch.Size, torch.dtype]:
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{quote(info.filename)} is compressed; save it by numpy.savez")
    version = npy.read_magic(file)
    read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
    if read is None:
        raise ValueError(f"{quote(info.filename)} is of format {version}")
    shape, columns_first, dtype = read(file)
    if dtype.str not in DTYPES or (columns_first and len(shape) > 1):
        raise ValueError(f"{quote(info.filename)} holds {dtype.str}, not rows of float32")
    if len(shape) > MAX_DIMS or math.prod(each or 1 for each in shape) >= 1 << 59:
        raise ValueError(f"{quote(info.filename)} has shape {quote(shape)}")
    return torch.Size(shape), DTYPES[np.dtype(dtype).str]
