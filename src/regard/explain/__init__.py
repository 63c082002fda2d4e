"""Interpretability: activations, attention maps, gradient norms, and pictures of them."""

from regard.explain.attention import AttentionMap, attention_maps
from regard.explain.gradient import GradientFlow, gradient_flow
from regard.explain.render.maps import draw_maps, html_maps
from regard.explain.render.terminal import heads_overview, heatmap
from regard.explain.trace import trace

__all__ = [
    "AttentionMap",
    "GradientFlow",
    "attention_maps",
    "draw_maps",
    "gradient_flow",
    "heads_overview",
    "heatmap",
    "html_maps",
    "trace",
]
