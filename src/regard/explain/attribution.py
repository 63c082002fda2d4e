"""Attribution to inputs: rollout, gradient × attention, integrated gradients."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import ConfigError, ShapeError, unknown
from regard.explain.attention import attention_maps
from regard.explain.data_frame import data_frame
from regard.explain.render.token_text import css_colour, shade, visible
from regard.explain.trace import matching_modules, submodules, trace
from regard.nn.attention import Attention, repeat_kv_heads
from regard.text import Tokenizer

if TYPE_CHECKING:
    from pandas import DataFrame


# `attribute` integrates in 50 steps, or in 400 if the convergence delta is then more than 1 % of
# the difference of the scores
STEPS, MAX_DELTA = (50, 400), 0.01


def attention_rollout(
    layers: Sequence[Float[Tensor, "heads time time"]], *, residual: float = 0.5
) -> Float[Tensor, "time time"]:
    r"""Attention rollout: the attention of each position to the input tokens through all layers.

        R = A_n ... A_2 A_1,      A_l = r I + (1 - r) mean_h W_l,      r = `residual`

    Rows sum to 1. Abnar & Zuidema 2020.
    """
    if not layers:
        raise ConfigError("attention rollout needs the self-attention of at least one layer")
    result = torch.eye(layers[0].shape[-1], dtype=layers[0].dtype, device=layers[0].device)
    for weights in layers:
        if weights.shape[-1] != weights.shape[-2]:
            raise ShapeError(
                "attention rollout needs self-attention weights of shape (heads, time, time), not "
                f"{tuple(weights.shape)}"
            )
        attention = weights.mean(0)
        mixed = residual * torch.eye(len(attention)).to(attention) + (1 - residual) * attention
        result = mixed @ result
    return result


def gradient_times_attention(
    model: nn.Module, score: Callable[[], Float[Tensor, ""]], *, pattern: str = "*"
) -> dict[str, Float[Tensor, "batch heads time seen"]]:
    r"""The weights of each attention module times the gradient of a score with respect to them.

        w_ij * d score / d w_ij,      d score / d w_ij = g_i . v_j

    g is the gradient at the output of the head, which is sum_j w_ij v_j: the fused kernel runs, and
    the gradient is exact. `score` runs the model and returns a number, such as the logit of the
    answer. Barkan et al. 2021, Chefer et al. 2021.
    """
    attentions = matching_modules(model, Attention, pattern, "attention module")
    outputs: dict[str, Tensor] = {}
    result: list[Tensor] = []

    def record_output(name: str) -> Callable[[Tensor], Tensor]:
        def edit(out: Tensor) -> Tensor:
            outputs[name] = out if out.requires_grad else out.detach().requires_grad_()
            return outputs[name]

        return edit

    def run() -> None:
        with torch.enable_grad():
            result.append(score())

    edit = {f"{name}.heads_hook": record_output(name) for name in attentions}
    with trace(model, [f"{name}.v_hook" for name in attentions], edit=edit) as values:
        weights = attention_maps(model, run, pattern=list(attentions))
    names = list(weights)
    gradients = torch.autograd.grad(
        result[0], [outputs[name] for name in names], allow_unused=True, materialize_grads=True
    )
    attributions = {}
    for name, gradient in zip(names, gradients, strict=True):
        v = repeat_kv_heads(values[f"{name}.v_hook"].detach(), attentions[name].heads)
        attributions[name] = weights[name] * (gradient @ v.transpose(-1, -2)).float()
    return attributions


def integrated_gradients(
    model: nn.Module,
    ids: Int[Tensor, "1 time"],
    score: Callable[[Float[Tensor, "steps time dim"]], Float[Tensor, " steps"]],
    *,
    baseline: int | None = None,
    steps: int = 50,
    power: float = 1.0,
    embed: str = "embed",
    run: Callable[[Int[Tensor, "steps time"]], Tensor] | None = None,
) -> tuple[Float[Tensor, " time"], float]:
    r"""How much each input token contributes to a score, compared with a baseline input.

        c_t = (x_t - b_t) . int_0^1  d score / d x_t  (b + a (x - b)) da

    x are the embeddings of `ids`, b those of the token `baseline` at every position, or 0. The
    integral is a Gauss-Legendre sum of `steps` points over s, a = s^power: a power above 1 places
    more points near the baseline. The score of a model that normalizes its embeddings and adds no
    positions changes steeply near 0; it needs a power of 4 or many steps. `score` maps the model's
    output to one number per row. `embed` is the path of the embedding module; `run` calls the model
    with ids, by default `model(ids)`. Returns the contributions and the convergence delta:
    score(x) - score(b) minus the sum of the contributions, 0 for exact integration.
    Sundararajan et al. 2017.
    """
    forward = model if run is None else run
    module = submodules(model).get(embed)
    if not isinstance(module, nn.Module):
        raise ConfigError(f"the model has no module {embed!r}; give the path of its embedding")
    with torch.no_grad():
        x: Tensor = module(ids)
        b = torch.zeros_like(x) if baseline is None else module(torch.full_like(ids, baseline))
    points, weights = np.polynomial.legendre.leggauss(steps)
    s = (points + 1) / 2
    nodes = torch.tensor(s**power).to(x)
    node_weights = torch.tensor(power * s ** (power - 1) * weights / 2).to(x)

    def scores(inputs: Tensor) -> Tensor:
        with trace(model, (), edit={embed: lambda out: inputs}):
            return score(forward(ids.expand(len(inputs), -1)))

    total = torch.zeros_like(x[0])
    chunk = max(1, 8192 // x.shape[1])
    for first in range(0, steps, chunk):
        part = nodes[first : first + chunk].view(-1, 1, 1)
        inputs = (b + part * (x - b)).detach().requires_grad_()
        # cuDNN has no backward pass of recurrent layers in eval mode
        with torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):
            (gradient,) = torch.autograd.grad(scores(inputs).sum(), inputs)
        total += (node_weights[first : first + chunk].view(-1, 1, 1) * gradient).sum(0)
    contributions = ((x - b)[0] * total).sum(-1)
    with torch.no_grad():
        baseline_score, input_score = scores(torch.cat([b, x]))
    delta = float(input_score - baseline_score - contributions.sum())
    return contributions.detach(), delta


@dataclass(frozen=True, slots=True, repr=False)
class Attribution:
    """The contribution of each token to the score of an output."""

    tokens: list[str]
    values: list[float]
    output: str  # the class or token whose score is attributed
    convergence_delta: float = 0.0  # the difference of the scores minus the sum of the values

    def __repr__(self) -> str:
        largest = max(zip(self.values, self.tokens, strict=True), key=lambda pair: abs(pair[0]))
        return (
            f"Attribution({len(self.tokens)} tokens to {self.output!r}, largest {largest[1]!r} "
            f"{largest[0]:+.3f}, convergence delta {self.convergence_delta:+.2g})"
        )

    def _repr_html_(self) -> str:
        largest = max(map(abs, self.values)) or 1.0
        tokens = []
        for token, value in zip(self.tokens, self.values, strict=True):
            colour = css_colour(shade(value, largest, signed=True), signed=True)
            dark = abs(value) > 0.6 * largest
            tokens.append(
                f'<span style="background: {colour}; color: {"#fff" if dark else "#000"}; '
                f'padding: 1px" title="{value:+.4f}">{escape(visible(token))}</span>'
            )
        return (
            f'<div style="line-height: 1.8">{" ".join(tokens)} → <b>{escape(self.output)}</b></div>'
        )

    def to_pandas(self) -> "DataFrame":
        """A row for each token."""
        return data_frame({"token": self.tokens, "contribution": self.values})


def token_score(model: nn.Module, token: int, *, position: int = -1) -> Callable[[Any], Tensor]:
    """A score for `integrated_gradients`: the logit of a token at a position."""

    def score(hidden: Tensor) -> Tensor:
        logits: Tensor = cast(Any, model.head)(hidden[:, position])
        return logits[:, token].float()

    return score


def attribute(
    model: nn.Module,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    output: str | None = None,
    class_names: Sequence[str] | None = None,
    segments: Int[Tensor, "1 time"] | None = None,
) -> Attribution:
    """The contribution of each token to the logit of an output, by `integrated_gradients` from 0.

    The output is one of `class_names`, or without them the next token; by default the most
    probable. `segments` are the segment ids of a pair of texts.
    """
    batch = torch.tensor([ids], device=next(model.parameters()).device)

    def logits(hidden: Tensor) -> Tensor:
        out: Tensor = cast(Any, model.head)(hidden[:, -1] if class_names is None else hidden)
        return out.float()

    def run(ids: Tensor) -> Tensor:
        inputs = {} if segments is None else {"segments": segments.expand(len(ids), -1)}
        hidden: Tensor = model(ids, **inputs)
        return hidden

    if output is None:
        with torch.no_grad():
            output_index = int(logits(run(batch))[0].argmax())
    elif class_names is None:
        output_ids = tokenizer.encode(output)
        if len(output_ids) != 1:
            pieces = ", ".join(repr(tokenizer.piece(id)) for id in output_ids[:8])
            raise ConfigError(
                f"output={output!r} must be one token, the next one; it has {len(output_ids)}"
                f"{': ' if pieces else ''}{pieces}"
            )
        output_index = output_ids[0]
    elif output in class_names:
        output_index = list(class_names).index(output)
    else:
        raise ConfigError(unknown("class", output, class_names))
    for steps in STEPS:
        values, delta = integrated_gradients(
            model,
            batch,
            lambda hidden: logits(hidden)[:, output_index],
            steps=steps,
            power=4.0,
            run=run,
        )
        if abs(delta) <= MAX_DELTA * abs(float(values.sum()) + delta):
            break
    label = tokenizer.piece(output_index) if class_names is None else class_names[output_index]
    return Attribution(list(map(tokenizer.piece, ids)), values.tolist(), label, delta)
