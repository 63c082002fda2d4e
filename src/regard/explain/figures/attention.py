"""Figures of attention: the variance of scores, permutations, and what a pronoun attends to."""

import torch
from torch import Tensor

from regard.errors import ConfigError
from regard.explain.figures.panels import Lines, Panel, Picture, Table
from regard.explain.figures.subject import Subject
from regard.explain.trace import trace


def score_variance(
    subject: Subject | None = None,
    text: str | None = None,
    *,
    dims: tuple[int, ...] = (4, 16, 64, 256, 1024),
    vectors: int = 256,
    seed: int = 1,
) -> Picture:
    r"""The variance of attention scores with and without the factor 1 / sqrt(d).

        Var(q . k) = d,   Var(q . k / sqrt(d)) = 1      if q_i, k_i have mean 0 and variance 1

    Without it the softmax saturates: one key takes all the weight, and gradients vanish
    (Vaswani et al. 2017). With a run and a text, the scores of its own layers.
    """
    if subject is not None:
        if text is None:
            raise ConfigError("score-variance of a run needs a text as well")
        return _measured_variance(subject, text)
    if min(dims, default=0) < 1 or vectors < 2:
        raise ConfigError(f"dims={list(dims)} must be at least 1, and vectors={vectors} at least 2")
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for dim in dims:
        q, k = (torch.randn(vectors, dim, generator=generator, dtype=torch.float64) for _ in "qk")
        scores = q @ k.T
        scaled = scores / dim**0.5
        rows.append(
            [
                dim,
                scores.var().item(),
                scaled.var().item(),
                scores.softmax(-1).amax(-1).mean().item(),
                scaled.softmax(-1).amax(-1).mean().item(),
            ]
        )
    names = {1: "q · k", 2: "q · k / √d"}
    return Picture(
        title="Variance of attention scores",
        caption=f"{vectors} random queries and keys of variance 1: the variance of q · k is d, and "
        "with the factor 1/√d it is 1. Without it, the softmax gives nearly all the weight to one "
        "key, and its gradient vanishes.",
        panels=[
            Lines(
                title="variance",
                x_label="d",
                y_label="variance of a score",
                series={name: [(row[0], row[c]) for row in rows] for c, name in names.items()},
                guides={"d": [(row[0], row[0]) for row in rows]},
                log_x=True,
                log_y=True,
            ),
            Lines(
                title=f"largest of {vectors} attention weights",
                x_label="d",
                y_label="mean largest weight",
                series={name: [(row[0], row[c + 2]) for row in rows] for c, name in names.items()},
                log_x=True,
            ),
        ],
        facts={f"variance at d = {row[0]}, {names[c]}": row[c] for row in rows for c in names},
    )


def _measured_variance(subject: Subject, text: str) -> Picture:
    """The variance of q . k in every attention layer of a model that reads a text."""
    require_attention(subject)
    with torch.no_grad(), trace(subject.model, "*_tap") as taps:
        subject.attention(text)
    rows: list[list[str | int | float]] = []
    for name, q in taps.items():
        if not name.endswith(".q_tap"):
            continue
        k = taps[name.removesuffix("q_tap") + "k_tap"]
        scores: Tensor = q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT
        variance = scores.var(correction=0).item()
        rows.append([name.removesuffix(".q_tap"), q.shape[-1], variance, variance / q.shape[-1]])
    panels: list[Panel] = [Table(header=["layer", "d", "Var(q · k)", "Var(q · k / √d)"], rows=rows)]
    return Picture(
        title=f"Variance of the attention scores of {subject.name}",
        caption="Over all heads, queries and keys of the text; q and k as the layer compares them, "
        f"rotated where it rotates them.{subject.note}",
        panels=panels,
    )


def require_attention(subject: Subject) -> None:
    """Raise if the model has no attention over a text."""
    from regard.explain.attention import has_attention

    if not has_attention(subject.model):
        raise ConfigError(
            f"{subject.name} has no attention; give a run or a preset of a Transformer, such as "
            "tiny-decoder"
        )
