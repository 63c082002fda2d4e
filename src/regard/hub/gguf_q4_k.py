"""Q4_K, llama.cpp's 4-bit format; the gguf package (0.19) reads it, but cannot write it."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK, PARTS = 256, 8  # weights of a block, and its parts, which have a scale each


def quantize_q4_k(weight: NDArray[Any]) -> NDArray[np.uint8]:
    r"""The bytes of each row of a matrix, whose width is a multiple of 256.

        w = d s_p q - e m_p,      q in 0 … 15,  s_p and m_p in 0 … 63

    with float16 d and e for a block of 256 weights, s_p and m_p for each part p of 32. A part's
    range from min(0, smallest) to its largest weight is divided evenly. (llama.cpp searches for
    the scales with the least squared error, which is a little more exact.)
    """
    x = weight.astype(np.float32).reshape(-1, PARTS, BLOCK // PARTS)
    low = np.minimum(x.min(-1), 0.0)
    step = (x.max(-1) - low) / 15
    d = (step.max(-1) / 63).astype(np.float16)
    e = (-low.min(-1) / 63).astype(np.float16)
    scale = np.rint(_divide(step, d)).clip(0, 63).astype(np.uint8)
    minimum = np.rint(_divide(-low, e)).clip(0, 63).astype(np.uint8)
    part_step = d.astype(np.float32)[:, None] * scale
    part_low = e.astype(np.float32)[:, None] * minimum
    safe = np.where(part_step == 0, 1, part_step)[..., None]
    q = np.rint((x + part_low[..., None]) / safe).clip(0, 15).astype(np.uint8)
    q = np.where(part_step[..., None] == 0, 0, q).astype(np.uint8)

    packed = np.empty((len(x), 12), np.uint8)  # 16 numbers of 6 bits
    packed[:, :4] = (scale[:, :4] & 63) | ((scale[:, 4:] >> 4) << 6)
    packed[:, 4:8] = (minimum[:, :4] & 63) | ((minimum[:, 4:] >> 4) << 6)
    packed[:, 8:] = (scale[:, 4:] & 15) | ((minimum[:, 4:] & 15) << 4)
    pairs = q.reshape(-1, PARTS // 2, 2, BLOCK // PARTS)  # two parts share their bytes
    nibbles = (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).reshape(-1, BLOCK // 2)
    parts = [d[:, None].view(np.uint8), e[:, None].view(np.uint8), packed, nibbles]
    return np.concatenate(parts, 1).reshape(len(weight), -1)


def _divide(x: NDArray[Any], by: NDArray[Any]) -> NDArray[Any]:
    divisor = by.astype(np.float32)[:, None]
    return np.divide(x, divisor, out=np.zeros_like(x), where=divisor != 0)
