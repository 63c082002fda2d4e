"""Predictions from intermediate layers: logit lens, tuned lens, direct logit attribution."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import ConfigError, ShapeError
from regard.explain.attention import text_stack
from regard.explain.data_frame import data_frame
from regard.explain.render.token_text import visible
from regard.explain.trace import run_eagerly, trace
from regard.html import html_table
from regard.nn.attention import Attention
from regard.nn.block import Block
from regard.nn.head import LMHead
from regard.nn.norm import LayerNorm, LayerNormStd, RMSNorm
from regard.text import Tokenizer

if TYPE_CHECKING:
    from pandas import DataFrame

# norm placements in which the output of a branch is added to the residual stream as it is
LINEAR_PLACEMENTS = ("pre", "parallel", "parallel_norms")


@torch.no_grad()
def residual_stream(
    model: nn.Module, ids: Int[Tensor, "batch time"]
) -> list[Float[Tensor, "batch time dim"]]:
    """The residual stream before the first layer and after each layer, without the final norm."""
    _, stack = text_stack(model)
    states: list[Tensor] = []

    def record(_: nn.Module, __: object, out: Tensor) -> None:
        states.append(out)

    blocks = _blocks(stack)
    with ExitStack() as hooks:
        hooks.enter_context(run_eagerly())
        for hook_point in (blocks[0].carry_hook, *(block.out_hook for block in blocks)):
            hooks.callback(hook_point.register_forward_hook(record).remove)
        model(ids)
    first, layers = states[0], states[1:]
    if len(blocks) < len(stack.layers):  # shared: `carry_hook` runs again before each call
        size = len(blocks) + 1
        layers = [s for n, s in enumerate(states) if n % size]
    return [first, *layers]


@torch.no_grad()
def logit_lens(
    model: nn.Module,
    ids: Int[Tensor, "batch time"],
    *,
    lens: "TunedLens | None" = None,
    positions: Sequence[int] | None = None,
) -> Float[Tensor, "layers batch scored vocab"]:
    r"""The logits that the output layer computes from the residual stream of each layer.

        logits_l = U n(x_l),      l = 0 (embeddings), 1, ..., layers;   n the final norm

    The logits of the last layer are those of the model. With `lens`, x_l is translated first.
    nostalgebraist 2020.
    """
    _, stack = text_stack(model)
    norm = nn.Identity() if stack.norm is None else stack.norm
    states = residual_stream(model, ids)
    if positions is not None:
        states = [state[:, list(positions)] for state in states]
    if lens is not None:
        states = lens.translate(states)
    return torch.stack([cast(Any, model.head)(norm(state)).float() for state in states])


class TunedLens(nn.Module):
    r"""A translator for each layer, trained so that its logits match those of the last layer.

        logits_l = U n(x_l + A_l x_l + b_l),      min KL(softmax(logits_last) || softmax(logits_l))

    A and b start at 0, the logit lens. Belrose et al. 2023.
    """

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def translate(self, states: Sequence[Tensor]) -> list[Tensor]:
        """The states of all layers but the last, translated, and the last as it is."""
        *lower, last = states
        if len(lower) != len(self.layers):
            raise ShapeError(
                f"a lens of {len(self.layers)} layers cannot translate the states of {len(lower)}; "
                "tune one for this model"
            )
        pairs = zip(self.layers, lower, strict=True)
        return [*(state + layer(state) for layer, state in pairs), last]


def tune_lens(
    model: nn.Module,
    batches: Iterable[Int[Tensor, "batch time"]],
    *,
    lr: float = 1e-3,
) -> TunedLens:
    """Train a tuned lens with Adam, one step per batch of ids; the model is not changed."""
    _, stack = text_stack(model)
    norm = nn.Identity() if stack.norm is None else stack.norm
    lens: TunedLens | None = None
    optimizer: torch.optim.Optimizer | None = None
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        for ids in batches:
            states = residual_stream(model, ids)
            if lens is None or optimizer is None:
                lens = TunedLens(states[0].shape[-1], len(states) - 1).to(states[0])
                optimizer = torch.optim.Adam(lens.parameters(), lr)
            *logits, last = [cast(Any, model.head)(norm(x)) for x in lens.translate(states)]
            target = last.log_softmax(-1)
            loss = sum(
                nn.functional.kl_div(
                    layer_logits.log_softmax(-1).flatten(0, 1),
                    target.flatten(0, 1),
                    reduction="batchmean",
                    log_target=True,
                )
                for layer_logits in logits
            )
            optimizer.zero_grad()
            cast(Tensor, loss).backward()
            optimizer.step()
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
    if lens is None:
        raise ConfigError("a tuned lens needs at least one batch of ids")
    return lens.eval()


@dataclass(frozen=True, slots=True, repr=False)
class LensPredictions:
    """The most probable next token of each layer at each position, and its probability."""

    tokens: list[str]
    predictions: list[list[str]]  # for each layer, from the embeddings up
    probabilities: Float[Tensor, "layers time"]
    final_rank: Int[Tensor, "layers time"]  # rank of the last layer's prediction; 0: first

    @classmethod
    def of(
        cls, logits: Float[Tensor, "layers 1 time vocab"], tokenizer: Tokenizer, ids: Sequence[int]
    ) -> "LensPredictions":
        """From the logits of `logit_lens` for one text."""
        best = logits[:, 0].softmax(-1).max(-1)
        final = logits[-1, 0].argmax(-1)
        final_logits = logits[:, 0].gather(-1, final.expand(len(logits), -1).unsqueeze(-1))
        return cls(
            [tokenizer.piece(id) for id in ids],
            [[tokenizer.piece(id) for id in layer] for layer in best.indices.tolist()],
            best.values.cpu(),
            (logits[:, 0] > final_logits).sum(-1).cpu(),
        )

    def __repr__(self) -> str:
        return f"LensPredictions({len(self.predictions)} layers, {len(self.tokens)} tokens)"

    def _repr_html_(self) -> str:
        rows = ((visible(token), *cells) for token, *cells in self._rows())
        return html_table(rows, header=("token", *self._names()))

    def to_pandas(self) -> "DataFrame":
        """A row for each token, a column for each layer: the most probable next token."""
        return data_frame(list(self._rows()), columns=["token", *self._names()])

    def _names(self) -> list[str]:
        return ["embedding", *(f"layer {n}" for n in range(len(self.predictions) - 1))]

    def _rows(self) -> list[tuple[str, ...]]:
        columns = [
            [f"{piece!r} {p:.2f}" for piece, p in zip(layer, row, strict=True)]
            for layer, row in zip(self.predictions, self.probabilities.tolist(), strict=True)
        ]
        return list(zip(self.tokens, *columns, strict=True))


@torch.no_grad()
def direct_logit_attribution(
    model: nn.Module,
    ids: Int[Tensor, "1 time"],
    token: int,
    *,
    against: int | None = None,
    position: int = -1,
) -> dict[str, float]:
    r"""Direct logit attribution: the contribution of each component to a logit.

        logit = sum_c u . g (c - mean(c)) / s + u . b + bias,      x = sum_c c

    x is the residual stream after the last layer: the sum of the embeddings, the output O_h y_h of
    each head, the output of each feed-forward layer, and biases. s is the scale of the final norm,
    g and b are its gain and bias (RMSNorm subtracts no mean). u is the row of the unembedding
    matrix, with `against` the difference of two rows. The contributions add up to the logit.
    Elhage et al. 2021.
    """
    side, stack = text_stack(model)
    blocks, head, norm = _blocks(stack), model.head, stack.norm
    placement = blocks[0].norm_placement.kind
    linear = type(head) is LMHead and head.cap is None
    if (
        placement not in LINEAR_PLACEMENTS
        or not linear
        or not isinstance(norm, LayerNorm | RMSNorm)
        or isinstance(norm, LayerNormStd)
    ):
        raise ConfigError(
            "logits are sums of components only with norm_placement "
            f"{', '.join(LINEAR_PLACEMENTS)} and a linear head without cap after LayerNorm or "
            f"RMSNorm; this model has {placement!r}, {type(head).__name__} and "
            f"{type(norm).__name__}"
        )
    if len(blocks) < len(stack.layers):
        raise ConfigError(
            f"direct logit attribution needs separate weights for each layer; this model shares "
            f"{len(blocks)} blocks among {len(stack.layers)} layers"
        )
    paths = [f"{side}.blocks.{index}" for index in range(len(blocks))]
    kinds = ["attention", *(["cross"] if blocks[0].cross is not None else [])]
    hook_points = [f"{path}.{kind}.heads_hook" for path in paths for kind in kinds]
    ffns = [] if blocks[0].ffn is None else [f"{path}.ffn" for path in paths]
    with trace(model, [f"{paths[0]}.carry_hook", *hook_points, *ffns]) as activations:
        model(ids)
    components = {"embedding": activations[f"{paths[0]}.carry_hook"][0, position]}
    for path, block in zip(paths, blocks, strict=True):
        for kind in kinds:
            attention = cast(Attention, getattr(block, kind))
            y = activations[f"{path}.{kind}.heads_hook"][0, :, position]  # (heads, value_dim)
            out = attention.out.weight.unflatten(1, (attention.heads, -1))
            head_outputs = torch.einsum("dhv,hv->hd", out, y)
            components |= {f"{path}.{kind}.{h}": x for h, x in enumerate(head_outputs)}
            if attention.out.bias is not None:
                components[f"{path}.{kind}.bias"] = attention.out.bias
        if block.ffn is not None:
            components[f"{path}.ffn"] = activations[f"{path}.ffn"][0, position]
    vectors = torch.stack(list(components.values())).double()
    x = vectors.sum(0)  # the residual stream
    if isinstance(norm, LayerNorm):
        scale = (x.var(correction=0) + norm.eps).sqrt()
        vectors, gain = vectors - vectors.mean(-1, keepdim=True), norm.weight.double()
    else:
        scale, gain = (x.square().mean() + norm.eps).sqrt(), norm.gain.double()
    head = cast(LMHead, head)
    u = _unembedding_row(head, token, against)
    contributions = (vectors * gain / scale) @ u
    result = dict(zip(components, contributions.tolist(), strict=True))
    constant = 0.0
    if (bias := getattr(norm, "bias", None)) is not None:
        constant += float(bias.double() @ u)
    if head.bias is not None:
        constant += float(head.bias[token])
        constant -= 0.0 if against is None else float(head.bias[against])
    result["bias"] = constant
    return result


def _unembedding_row(head: LMHead, token: int, against: int | None) -> Tensor:
    """The row of the unembedding matrix for `token`, minus that for `against`."""
    u = head.matrix[token].double()
    u = u if against is None else u - head.matrix[against].double()
    if head.project is not None:
        u = u @ head.project.weight.double()
    return u * head.scale


def _blocks(stack: nn.Module) -> list[Block]:
    return cast(list[Block], list(cast(nn.ModuleList, stack.blocks)))
