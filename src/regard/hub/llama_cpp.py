"""Check that llama.cpp computes the logits of an exported decoder, if llama-cpp-python is there."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from regard.errors import CheckpointError
from regard.models.transformer import Transformer

# Of logits, as a fraction of their largest: llama.cpp's GELU on a CPU is a table in float16.
TOLERANCE = 5e-3


def compare_llama_cpp(path: Path, model: Transformer, type: str) -> float | None:
    """The largest difference of the logits after random ids; None without llama-cpp-python.

    For types other than f32 the difference is reported, not checked. An encoder is not compared.
    """
    try:
        import llama_cpp
    except ImportError:
        return None
    if model.config.architecture != "decoder":
        return None
    length = min(model.config.context, 16)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, length), generator=generator)
    try:
        theirs = _logits(llama_cpp, path, ids[0].tolist())
    except ValueError as error:
        raise CheckpointError(
            f"llama.cpp cannot open the file; nothing was written: {error}"
        ) from error
    with torch.no_grad():
        ours = model.head(model(ids))[0].numpy()
    difference = float(np.abs(theirs - ours).max())
    if type == "f32" and not difference <= TOLERANCE * max(1.0, float(np.abs(ours).max())):
        raise CheckpointError(
            f"llama.cpp opens the file, but its logits are off by {difference:.2g}; nothing was "
            "written"
        )
    return difference


def _logits(llama_cpp: Any, path: Path, ids: list[int]) -> Any:
    float32 = llama_cpp.GGML_TYPE_F32
    llama = llama_cpp.Llama(
        str(path),
        n_ctx=len(ids),
        n_batch=len(ids),
        logits_all=True,
        type_k=float32,
        type_v=float32,
        verbose=False,
    )
    try:
        llama.eval(ids)
        return np.array(llama.scores[: len(ids)])
    finally:
        llama.close()
