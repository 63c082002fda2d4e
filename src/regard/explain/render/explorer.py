"""Attention maps of several modules as HTML, for a page or a notebook."""

from collections.abc import Mapping
from html import escape
from typing import Any

from regard.explain.render.maps import html_maps


def explorer(maps: Mapping[str, Any]) -> str:
    """The maps of each module under its name."""
    parts = []
    for name, each in maps.items():
        tables = html_maps(each.weights, each.rows, each.columns, headings=each.headings)
        parts.append(f"<p>{escape(name)}</p>{tables}")
    return "".join(parts)
