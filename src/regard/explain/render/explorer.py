"""Maps as an interactive page for files and notebooks: all layers and heads, one of them enlarged.

The page is self-contained: its data, style and script are in it, and nothing is requested. Weights
are stored as deflated 16-bit integers and read when a head is shown.
"""

import base64
import hashlib
import json
import math
import zlib
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.explain.render.maps import html_maps, value_range
from regard.explain.render.token_text import attention_vmax, visible

if TYPE_CHECKING:
    from regard.explain.token_map import TokenMap

SCRIPT, STYLE = (Path(__file__).with_name(f"explorer.{suffix}") for suffix in ("js", "css"))
THUMB = 32  # rows and columns of a thumbnail in the overview
MAX_CELLS = 80_000_000  # cells of all maps of a page; with more, the maps are max-pooled
FALLBACK_CELLS = 2_000  # up to this size, the page shows tables if JavaScript is off
PAGE_STYLE = (
    "body { margin: 0 } @media (prefers-color-scheme: dark) { body { background: #14171c } }"
)


def explorer(maps: Mapping[str, "TokenMap"]) -> str:
    """The maps of several modules as one HTML element with its script.

    Where scripts do not run, small maps are shown as tables.
    """
    factor = math.sqrt(max(1.0, sum(_cells(token_map) for token_map in maps.values()) / MAX_CELLS))
    labels: list[list[str]] = []
    tables, parts = [], []
    for index, (name, token_map) in enumerate(maps.items()):
        table, weights = _module_data(name, token_map, factor, labels)
        tables.append(table)
        parts += [
            f'<div hidden data-weights="{index}.{head}">{text}</div>'
            for head, text in enumerate(weights)
        ]
    meta = escape(json.dumps({"labels": labels, "maps": tables}), quote=False)
    content = f'<div hidden class="regard-meta">{meta}</div>{"".join(parts)}'
    key = hashlib.sha256(content.encode()).hexdigest()[:16]
    style = escape(STYLE.read_text(encoding="utf-8"), quote=False)
    return (
        f'<div class="regard-attention" data-regard="{key}">{_fallback(maps)}{content}'
        f'<div hidden class="regard-style">{style}</div></div>\n'
        f'<script>{SCRIPT.read_text(encoding="utf-8").rstrip()}("{key}")</script>'
    )


def _cells(token_map: "TokenMap") -> int:
    return math.prod(token_map.values.shape)


def _module_data(
    name: str, token_map: "TokenMap", factor: float, labels: list[list[str]]
) -> tuple[dict[str, Any], list[str]]:
    """The description of a module's maps for the script, and the weights of each map as text.

    The labels of rows and columns are added to `labels`.
    """
    weights, headings = token_map.values.float().cpu(), list(token_map.headings)
    if len(weights) > 1 and token_map.kind != "states":
        weights, headings = torch.cat([weights, weights.mean(0, keepdim=True)]), [*headings, "mean"]
    full = list(weights.shape[1:])
    entropy = []  # of the weights before pooling
    if token_map.kind != "states" and value_range(weights)[0] >= 0:
        entropy = [-torch.xlogy(head, head).sum(-1).mean().item() for head in weights]
    if factor > 1:
        size = [max(1, int(side / factor)) for side in full]
        weights = F.adaptive_max_pool2d(weights, size)
    low, high = value_range(weights)
    signed, largest = low < 0, max(-low, high)
    thumb = F.adaptive_max_pool2d(weights, [min(side, THUMB) for side in weights.shape[1:]])
    top = (largest or 1.0) if signed else attention_vmax(largest, full[1])
    relative = thumb / top
    shades = (relative + 1) / 2 if signed else relative.sqrt()
    table = {
        "name": name,
        "kind": token_map.kind,
        "headings": headings,
        "rows": _index(labels, token_map.rows),
        "columns": _index(labels, token_map.columns),
        "shape": list(weights.shape),
        "full": full,
        "pooled": factor > 1,
        "max": largest,
        "top": top,  # the value of the strongest colour
        "signed": signed,
        "entropy": entropy,
        "thumbs": _base64((shades * 255).round().to(torch.uint8).numpy().tobytes()),
        "thumbShape": list(thumb.shape),
    }
    if token_map.image is not None:
        pixels = token_map.image.pixels
        colours = pixels.expand(3, -1, -1) if len(pixels) == 1 else pixels[:3]
        table["image"] = {
            "pixels": _base64(colours.permute(1, 2, 0).contiguous().numpy().tobytes()),
            "height": pixels.shape[1],
            "width": pixels.shape[2],
            "grid": list(token_map.image.grid),
            "prefixTokens": token_map.image.prefix_tokens,
        }
    return table, [_deflate(head, largest, signed) for head in weights]


def _deflate(weights: Tensor, largest: float, signed: bool) -> str:
    """The weights as 16-bit integers: all high bytes, then all low bytes, which deflates better."""
    relative = weights.double().numpy() / (largest or 1.0)
    scaled = relative * 32767 + 32768 if signed else relative * 65535
    integers = np.rint(scaled).astype(np.uint16).ravel()
    planes = np.concatenate([integers >> 8, integers & 255]).astype(np.uint8)
    return _base64(zlib.compress(planes.tobytes(), 1))


def _index(labels: list[list[str]], tokens: list[str]) -> int:
    """The index of these tokens in `labels`, to which they are added if they are new."""
    visible_tokens = [visible(token) for token in tokens]
    if visible_tokens not in labels:
        labels.append(visible_tokens)
    return labels.index(visible_tokens)


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


def _fallback(maps: Mapping[str, "TokenMap"]) -> str:
    """The content without JavaScript: tables, or for larger maps a sentence."""
    if sum(_cells(token_map) for token_map in maps.values()) > FALLBACK_CELLS:
        sizes = ", ".join(f"{name}: {token_map!r}" for name, token_map in maps.items())
        return f"<p>{escape(sizes)}. The figure needs JavaScript.</p>"
    parts = []
    for name, token_map in maps.items():
        tables = html_maps(
            token_map.values, token_map.rows, token_map.columns, headings=token_map.headings
        )
        parts.append(f"<p>{escape(name)}</p>{tables}")
    return "".join(parts)
