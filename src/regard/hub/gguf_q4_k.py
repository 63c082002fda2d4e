"""Quantization to Q4_K, llama.cpp's 4-bit format, which the gguf package (0.19) only reads."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

SUPER_BLOCK, SUB_BLOCKS = 256, 8  # weights of a super-block, and its sub-blocks, each with a scale


def quantize_q4_k(weight: NDArray[Any]) -> NDArray[np.uint8]:
    r"""Quantize a matrix, whose width is a multiple of 256, to the bytes of each row.

        w = d s_p q - e m_p,      q in 0 … 15,  s_p and m_p in 0 … 63

    with float16 d and e for a super-block of 256 weights, s_p and m_p for each sub-block p of 32.
    The range of a sub-block from min(0, smallest) to its largest weight is divided evenly.
    (llama.cpp searches for the scales with the least squared error, which is a little more exact.)
    """
    x = weight.astype(np.float32).reshape(-1, SUB_BLOCKS, SUPER_BLOCK // SUB_BLOCKS)
    low = np.minimum(x.min(-1), 0.0)
    step = (x.max(-1) - low) / 15
    d = (step.max(-1) / 63).astype(np.float16)
    e = (-low.min(-1) / 63).astype(np.float16)
    scale = np.rint(_divide(step, d)).clip(0, 63).astype(np.uint8)
    minimum = np.rint(_divide(-low, e)).clip(0, 63).astype(np.uint8)
    sub_step = d.astype(np.float32)[:, None] * scale
    sub_low = e.astype(np.float32)[:, None] * minimum
    safe = np.where(sub_step == 0, 1, sub_step)[..., None]
    q = np.rint((x + sub_low[..., None]) / safe).clip(0, 15).astype(np.uint8)
    q = np.where(sub_step[..., None] == 0, 0, q).astype(np.uint8)

    packed = np.empty((len(x), 12), np.uint8)  # 8 scales and 8 minima of 6 bits
    packed[:, :4] = (scale[:, :4] & 63) | ((scale[:, 4:] >> 4) << 6)
    packed[:, 4:8] = (minimum[:, :4] & 63) | ((minimum[:, 4:] >> 4) << 6)
    packed[:, 8:] = (scale[:, 4:] & 15) | ((minimum[:, 4:] & 15) << 4)
    # two sub-blocks share their bytes
    pairs = q.reshape(-1, SUB_BLOCKS // 2, 2, SUPER_BLOCK // SUB_BLOCKS)
    nibbles = (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).reshape(-1, SUPER_BLOCK // 2)
    fields = [d[:, None].view(np.uint8), e[:, None].view(np.uint8), packed, nibbles]
    return np.concatenate(fields, 1).reshape(len(weight), -1)


def _divide(x: NDArray[Any], by: NDArray[Any]) -> NDArray[Any]:
    divisor = by.astype(np.float32)[:, None]
    return np.divide(x, divisor, out=np.zeros_like(x), where=divisor != 0)
