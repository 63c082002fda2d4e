"""Read NumPy archives (.npz) from untrusted sources, array by array.

An archive is a zip file with one .npy file per array: a header with dtype and shape, then the
data. Object arrays, which need pickle, and compressed archives are refused.
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
from regard.files.safetensors import MAX_DIMS, TensorEntry, TensorReader
from regard.files.untrusted import ARCHIVE_ERRORS, open_regular_file, quote

LOCAL_HEADER = struct.Struct("<26xHH")  # of a file in a zip: lengths of its name and extra field
MAX_ARRAYS = 10_000
DTYPES = {"<f4": torch.float32, "<f2": torch.float16}


def array_names(path: Path) -> set[str]:
    """The names of the arrays in an archive; empty if the file is not an archive."""
    try:
        with open_regular_file(path) as file, zipfile.ZipFile(file) as archive:
            return {name.removesuffix(".npy") for name in archive.namelist()[:MAX_ARRAYS]}
    except (*ARCHIVE_ERRORS, CheckpointError):
        return set()


def open_archive(path: Path) -> TensorReader:
    """Open an archive: the dtype, shape and offset of each array."""
    entries = {}
    try:
        with open_regular_file(path) as file, zipfile.ZipFile(file) as archive:
            size = path.stat().st_size
            for info in archive.infolist()[:MAX_ARRAYS]:
                file.seek(info.header_offset)
                name_length, extra_length = LOCAL_HEADER.unpack(file.read(LOCAL_HEADER.size))
                file.seek(info.header_offset + LOCAL_HEADER.size + name_length + extra_length)
                begin = file.tell()
                shape, dtype = _header(file, info)
                entry = TensorEntry(path, dtype, shape, file.tell())
                end = entry.start + entry.size
                if end != begin + info.file_size or end > size:
                    raise ValueError(
                        f"{quote(info.filename)} does not have the size that its header gives"
                    )
                entries[info.filename.removesuffix(".npy")] = entry
    except ARCHIVE_ERRORS as error:
        raise CheckpointError(
            f"{path} is not a complete archive of plain arrays: {error}"
        ) from None
    return TensorReader(entries)


def _header(file: IO[bytes], info: zipfile.ZipInfo) -> tuple[torch.Size, torch.dtype]:
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{quote(info.filename)} is compressed; save it with numpy.savez")
    version = npy.read_magic(file)
    read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
    if read is None:
        raise ValueError(
            f"{quote(info.filename)} has .npy version {version}, which is not supported"
        )
    shape, fortran_order, dtype = read(file)
    if dtype.str not in DTYPES or (fortran_order and len(shape) > 1):
        raise ValueError(
            f"{quote(info.filename)} holds {dtype.str}, not float32 or float16 in C order"
        )
    if len(shape) > MAX_DIMS or math.prod(length or 1 for length in shape) >= 1 << 59:
        raise ValueError(f"{quote(info.filename)} has shape {quote(shape)}, which is too large")
    return torch.Size(shape), DTYPES[np.dtype(dtype).str]
