"""Interpretability: activations, attention maps, gradient norms, and figures of them."""

from regard.explain.ablation import head_effects
from regard.explain.attention import attention_maps
from regard.explain.attribution import (
    Attribution,
    attention_rollout,
    gradient_times_attention,
    integrated_gradients,
    token_score,
)
from regard.explain.gradient import GradientFlow, gradient_flow
from regard.explain.heads import (
    HeadScores,
    attention_distance,
    attention_entropy,
    copying_scores,
    duplicate_token_score,
    find_heads,
    induction_score,
    previous_token_score,
)
from regard.explain.lens import (
    LensPredictions,
    TunedLens,
    direct_logit_attribution,
    logit_lens,
    residual_stream,
    tune_lens,
)
from regard.explain.linear_probe import ProbeResult, probe
from regard.explain.projection import pca, position_similarity, tsne
from regard.explain.render.maps import draw_maps, html_maps
from regard.explain.render.terminal import heads_overview, heatmap
from regard.explain.token_map import AttentionMap, AttentionMaps, StateMap, StateMaps, TokenMap
from regard.explain.trace import ablate, patch, steer, trace

__all__ = [
    "AttentionMap",
    "AttentionMaps",
    "Attribution",
    "GradientFlow",
    "HeadScores",
    "LensPredictions",
    "ProbeResult",
    "StateMap",
    "StateMaps",
    "TokenMap",
    "TunedLens",
    "ablate",
    "attention_distance",
    "attention_entropy",
    "attention_maps",
    "attention_rollout",
    "copying_scores",
    "direct_logit_attribution",
    "draw_maps",
    "duplicate_token_score",
    "find_heads",
    "gradient_flow",
    "gradient_times_attention",
    "head_effects",
    "heads_overview",
    "heatmap",
    "html_maps",
    "induction_score",
    "integrated_gradients",
    "logit_lens",
    "patch",
    "pca",
    "position_similarity",
    "previous_token_score",
    "probe",
    "residual_stream",
    "steer",
    "token_score",
    "trace",
    "tsne",
    "tune_lens",
]
