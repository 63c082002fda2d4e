"""Compare the outputs of an exported model in llama.cpp (llama-cpp-python) with those of torch."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from regard.errors import CheckpointError
from regard.models.transformer import Transformer

# A fraction of the largest output: llama.cpp's GELU on a CPU is a lookup table in float16.
TOLERANCE = 5e-3


def compare_llama_cpp(path: Path, model: Transformer, type: str) -> float | None:
    """The largest difference of the logits for random ids; None without llama-cpp-python.

    For an encoder, its hidden states are compared, which llama.cpp calls embeddings. For types
    other than f32 the difference is returned without a check.
    """
    try:
        import llama_cpp
    except ImportError:
        return None
    is_decoder = model.config.architecture == "decoder"
    length = min(model.config.context, 16)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, length), generator=generator)
    try:
        actual = (_logits if is_decoder else _embeddings)(llama_cpp, path, ids[0].tolist())
    except ValueError as error:
        raise CheckpointError(
            f"llama.cpp cannot open the file; nothing was written: {error}"
        ) from error
    with torch.no_grad():
        hidden = model(ids)
        expected = (model.head(hidden) if is_decoder else hidden)[0].numpy()
    difference = float(np.abs(actual - expected).max())
    if type == "f32" and not difference <= TOLERANCE * max(1.0, float(np.abs(expected).max())):
        raise CheckpointError(
            f"llama.cpp opens the file, but its {'logits' if is_decoder else 'embeddings'} "
            f"differ by {difference:.2g}; nothing was written"
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


def _embeddings(llama_cpp: Any, path: Path, ids: list[int]) -> Any:
    """The embedding of each token, without pooling."""
    llama = llama_cpp.Llama(
        str(path),
        n_ctx=len(ids),
        n_batch=len(ids),
        n_ubatch=len(ids),
        embedding=True,
        pooling_type=llama_cpp.LLAMA_POOLING_TYPE_NONE,
        verbose=False,
    )
    batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
    try:
        batch.n_tokens = len(ids)
        for position, token in enumerate(ids):
            batch.token[position], batch.pos[position] = token, position
            batch.n_seq_id[position], batch.seq_id[position][0] = 1, 0
            batch.logits[position] = True
        context = llama._ctx.ctx
        if llama_cpp.llama_decode(context, batch) != 0:
            raise ValueError("it cannot compute the embeddings of a text")
        rows = [llama_cpp.llama_get_embeddings_ith(context, n) for n in range(len(ids))]
        return np.array([row[: llama.n_embd()] for row in rows])
    finally:
        llama_cpp.llama_batch_free(batch)
        llama.close()
