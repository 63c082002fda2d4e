"""Interpretability: activations, attention maps, gradient norms, and pictures of them."""

from regard.explain.attention import attention_maps
from regard.explain.attention_map import AttentionMap, AttentionMaps
from regard.explain.gradient import GradientFlow, gradient_flow
from regard.explain.render.maps import draw_maps, html_maps
from regard.explain.render.terminal import heads_overview, heatmap
from regard.explain.trace import ablate, patch, steer, trace

__all__ = [
    "AttentionMap",
    "AttentionMaps",
    "GradientFlow",
    "ablate",
    "attention_maps",
    "draw_maps",
    "gradient_flow",
    "heads_overview",
    "heatmap",
    "html_maps",
    "patch",
    "steer",
    "trace",
]
