"""Attention maps as an interactive page: all layers and heads, one large, for files and notebooks.

The page is self-contained: its data, style and script are in it, and nothing is requested. Weights
are stored with 16 bits, deflated, and read when a head is shown.
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

from regard.explain.render.maps import html_maps
from regard.explain.render.token_text import strongest, visible

if TYPE_CHECKING:
    from regard.explain.token_map import TokenMap

SCRIPT, STYLE = (Path(__file__).with_name(f"explorer.{suffix}") for suffix in ("js", "css"))
THUMB = 32  # cells of a map in the overview
MAX_CELLS = 48_000_000  # of all maps of a page; larger ones are max-pooled
FALLBACK_CELLS = 2_000  # up to this size the maps are also there as tables, without a script
PAGE_STYLE = (
    "body { margin: 0 } @media (prefers-color-scheme: dark) { body { background: #14171c } }"
)


def explorer(maps: Mapping[str, "TokenMap"]) -> str:
    """The maps of several modules as one HTML element with its script.

    Where scripts do not run, small maps are shown as tables.
    """
    factor = math.sqrt(max(1.0, sum(_cells(each) for each in maps.values()) / MAX_CELLS))
    labels: list[list[str]] = []
    tables, parts = [], []
    for index, (name, each) in enumerate(maps.items()):
        table, weights = _table(name, each, factor, labels)
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


def _cells(each: "TokenMap") -> int:
    return math.prod(each.values.shape)


def _table(
    name: str, each: "TokenMap", factor: float, labels: list[list[str]]
) -> tuple[dict[str, Any], list[str]]:
    """What the script needs to know of the maps of one module, and their weights as text."""
    weights, headings = each.values.float().cpu(), list(each.headings)
    if len(weights) > 1 and each.kind != "states":
        weights, headings = torch.cat([weights, weights.mean(0, keepdim=True)]), [*headings, "mean"]
    full = list(weights.shape[1:])
    if factor > 1:
        size = [max(1, int(side / factor)) for side in full]
        weights = F.adaptive_max_pool2d(weights, size)
    low, high = (float(weights.min()), float(weights.max())) if weights.numel() else (0.0, 0.0)
    signed, largest = low < 0, max(-low, high)
    thumb = F.adaptive_max_pool2d(weights, [min(side, THUMB) for side in weights.shape[1:]])
    top = (largest or 1.0) if signed else strongest(largest, full[1])
    relative = thumb / top
    shades = (relative + 1) / 2 if signed else relative.sqrt()
    entropy = [] if signed else (-torch.xlogy(weights, weights).sum(-1).mean(-1)).tolist()
    table = {
        "name": name,
        "kind": each.kind,
        "headings": headings,
        "rows": _index(labels, each.rows),
        "columns": _index(labels, each.columns),
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
    if each.image is not None:
        pixels = each.image.pixels
        colours = pixels.expand(3, -1, -1) if len(pixels) == 1 else pixels[:3]
        table["image"] = {
            "pixels": _base64(colours.permute(1, 2, 0).contiguous().numpy().tobytes()),
            "height": pixels.shape[1],
            "width": pixels.shape[2],
            "grid": list(each.image.grid),
            "skipped": each.image.skipped,
        }
    return table, [_deflate(one, largest, signed) for one in weights]


def _deflate(weights: Tensor, largest: float, signed: bool) -> str:
    """Integers of 16 bits, all high bytes before all low ones, which deflates better."""
    relative = weights.double().numpy() / (largest or 1.0)
    whole = relative * 32767 + 32768 if signed else relative * 65535
    integers = np.rint(whole).astype(np.uint16).ravel()
    planes = np.concatenate([integers >> 8, integers & 255]).astype(np.uint8)
    return _base64(zlib.compress(planes.tobytes(), 1))


def _index(labels: list[list[str]], tokens: list[str]) -> int:
    shown = [visible(token) for token in tokens]
    if shown not in labels:
        labels.append(shown)
    return labels.index(shown)


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


def _fallback(maps: Mapping[str, "TokenMap"]) -> str:
    """Tables, or for larger maps a sentence."""
    if sum(_cells(each) for each in maps.values()) > FALLBACK_CELLS:
        sizes = ", ".join(f"{name}: {each!r}" for name, each in maps.items())
        return f"<p>{escape(sizes)}. The figure needs JavaScript.</p>"
    parts = []
    for name, each in maps.items():
        tables = html_maps(each.values, each.rows, each.columns, headings=each.headings)
        parts.append(f"<p>{escape(name)}</p>{tables}")
    return "".join(parts)
