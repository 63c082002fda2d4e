"""Measures of attention heads: entropy, distance, and scores of known behaviours."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import ConfigError
from regard.explain.attention import attention_maps, text_stack
from regard.explain.data_frame import data_frame
from regard.explain.trace import check_indices
from regard.html import html_table
from regard.nn.block import Block
from regard.nn.head import LMHead
from regard.nn.norm import RMSNorm

if TYPE_CHECKING:
    from pandas import DataFrame

Weights = Float[Tensor, "*heads time seen"]
Scores = Float[Tensor, "*heads"]


def attention_entropy(weights: Weights) -> Float[Tensor, "*heads time"]:
    """The attention entropy H_i = -sum_j w_ij ln w_ij, in nats.

    0 if one key has all the weight, ln n for n keys of equal weight.
    """
    return -torch.xlogy(weights, weights).sum(-1)


def attention_distance(weights: Weights) -> Float[Tensor, "*heads time"]:
    """The mean attention distance of each query, d_i = sum_j w_ij |i - j|, in tokens."""
    time, seen = weights.shape[-2:]
    i = torch.arange(time, device=weights.device).unsqueeze(1)
    j = torch.arange(seen, device=weights.device)
    return (weights * (i - j).abs()).sum(-1)


def previous_token_score(weights: Weights) -> Scores:
    """The mean of w_{i, i-1} over i >= 1: 1 for a head that attends to the previous token only."""
    return weights.diagonal(-1, -2, -1).mean(-1)


def induction_score(weights: Weights, ids: Int[Tensor, " time"]) -> Scores:
    """The mean weight on the tokens that followed earlier occurrences of the current token.

        s = mean_i sum_{j < i, id_{j-1} = id_i} w_ij,      over i with such a j

    The prefix-matching score of Olsson et al. 2022; 0 if no token is repeated.
    """
    previous_ids = torch.cat([ids.new_full((1,), -1), ids[:-1]])  # id_{j-1}
    return _mean_weight_on(weights, ids.unsqueeze(1) == previous_ids)


def duplicate_token_score(weights: Weights, ids: Int[Tensor, " time"]) -> Scores:
    """The mean weight on earlier occurrences of the current token: j < i with id_j = id_i."""
    return _mean_weight_on(weights, ids.unsqueeze(1) == ids)


def _mean_weight_on(weights: Tensor, selected: Tensor) -> Tensor:
    """The weight on selected earlier columns, averaged over the rows that have any."""
    selected = selected.tril(-1)
    rows = selected.any(-1)
    if not bool(rows.any()):
        return weights.new_zeros(weights.shape[:-2])
    return (weights * selected).sum(-1)[..., rows].mean(-1)


@torch.no_grad()
def copying_scores(model: nn.Module) -> dict[str, Float[Tensor, " heads"]]:
    r"""How much each head raises the logit of the tokens that it attends to, from -1 to 1.

        s_h = sum_k Re(e_k) / sum_k |e_k|,      e the eigenvalues of U O_h V_h E

    E is the embedding matrix, U the unembedding matrix; V_h and O_h are the value and output
    matrices of the head. The gains of the norms between them are included: where the norms are on
    the residual stream (post, deepnorm), also those of the other layers. The same nonzero
    eigenvalues are computed from V_h E U O_h, which has only head_dim rows and columns.
    Elhage et al. 2021.
    """
    side, stack = text_stack(model)
    head, embed = model.head, getattr(model, "embed", None)
    if not isinstance(head, LMHead) or not hasattr(embed, "token"):
        raise ConfigError(
            "copying scores need a model that predicts tokens from embeddings; this one has "
            f"head={type(head).__name__}"
        )
    if stack.layers[0].norm_placement.kind == "no_residual":
        raise ConfigError("copying scores need residual connections; this model has none")
    table = cast(Any, embed).token.weight.double()
    project = getattr(embed, "project", None)
    table = table if project is None else table @ project.weight.double().T
    if stack.embed_norm is not None:
        table = table * _gain(stack.embed_norm)
    unembed = head.matrix.double()  # (vocab, width)
    if head.project is not None:
        unembed = unembed @ head.project.weight.double()
    if stack.norm is not None:
        unembed = unembed * _gain(stack.norm)
    if table.shape[1] != unembed.shape[1]:
        raise ConfigError("copying scores need embeddings of the width of the residual stream")
    scores = {}
    for index, block in enumerate(cast(list[Block], list(stack.blocks))):
        attention = block.attention
        before, after = _norms_on_path(stack.layers, index)
        scaled_table, scaled_unembed = table, unembed  # the transpose of E, and U
        for norm in before:
            scaled_table = scaled_table * _gain(norm)
        for norm in after:
            scaled_unembed = scaled_unembed * _gain(norm)
        embed_unembed = scaled_table.T @ scaled_unembed  # (dim, dim): E U
        heads, kv_heads = attention.heads, attention.kv_heads
        value = attention.value.weight.double().unflatten(0, (kv_heads, -1))
        value = value.repeat_interleave(heads // kv_heads, 0)  # (heads, head_dim, dim)
        out = attention.out.weight.double().unflatten(1, (heads, -1)).transpose(0, 1)
        eigenvalues = torch.linalg.eigvals(value @ embed_unembed @ out)  # (heads, head_dim)
        scores[f"{side}.blocks.{index}.attention"] = (
            eigenvalues.real.sum(-1) / eigenvalues.abs().sum(-1).clamp_min(1e-300)
        ).float()
    return scores


def _norms_on_path(layers: Sequence[Block], index: int) -> tuple[list[nn.Module], list[nn.Module]]:
    """The norms in the layers between the embedding and a layer's heads, and after the heads."""
    block = layers[index]
    if block.norm_placement.needs_final_norm:  # the norms are on the branches
        post_norm = block.attention_post_norm
        return [block.attention_norm], [] if post_norm is None else [post_norm]
    norms = [
        [getattr(layer, name, None) for name in ("attention_norm", "cross_norm", "ffn_norm")]
        for layer in layers
    ]
    before, after = (
        [norm for layer_norms in part for norm in layer_norms if norm is not None]
        for part in (norms[:index], norms[index:])
    )
    return before, after


def _gain(norm: nn.Module) -> Tensor:
    gain = norm.gain if isinstance(norm, RMSNorm) else norm.weight
    return cast(Tensor, gain).double()


@dataclass(frozen=True, slots=True, repr=False)
class HeadScores:
    """Scores of every head of every layer, by behaviour: (layers, heads) each."""

    layers: list[str]
    scores: Mapping[str, Float[Tensor, "layers heads"]]

    def top(self, behaviour: str, count: int = 3) -> list[tuple[int, int, float]]:
        """The heads with the largest score: layer, head and score, best first."""
        table = self._table(behaviour)
        best = table.flatten().argsort(descending=True, stable=True)[:count].tolist()
        heads = table.shape[1]
        return [(n // heads, n % heads, float(table[n // heads, n % heads])) for n in best]

    def above(self, behaviour: str, threshold: float = 0.5) -> list[tuple[int, int]]:
        """The heads, as layer and head, whose score is above a threshold."""
        layers, heads = torch.where(self._table(behaviour) > threshold)
        return list(zip(layers.tolist(), heads.tolist(), strict=True))

    def _table(self, behaviour: str) -> Tensor:
        if behaviour not in self.scores:
            raise ConfigError(f"no scores of {behaviour!r}; available: {', '.join(self.scores)}")
        return self.scores[behaviour]

    def __repr__(self) -> str:
        best = (
            f"{name} {layer}.{head} {score:.2f}"
            for name in self.scores
            for layer, head, score in self.top(name, 1)
        )
        return f"HeadScores({', '.join(best)})"

    def _rows(self) -> list[tuple[Any, ...]]:
        count = next(iter(self.scores.values())).shape[1]
        return [
            (layer, head, *(float(table[layer, head]) for table in self.scores.values()))
            for layer in range(len(self.layers))
            for head in range(count)
        ]

    def _repr_html_(self) -> str:
        rows = (
            (layer, head, *(f"{s:.3f}" for s in scores)) for layer, head, *scores in self._rows()
        )
        return html_table(rows, header=("layer", "head", *self.scores))

    def to_pandas(self) -> "DataFrame":
        """A row for each head."""
        return data_frame(self._rows(), columns=["layer", "head", *self.scores])


@torch.no_grad()
def find_heads(
    model: nn.Module,
    *,
    tokens: Sequence[int] | None = None,
    length: int = 24,
    rows: int = 16,
    seed: int = 0,
) -> HeadScores:
    """Score every head of a decoder on random sequences that are repeated once.

    The model reads `rows` sequences of `length` distinct tokens, each followed by a copy of itself,
    so that attention to the previous token, to the same token and to the token after it can be
    distinguished. The tokens are drawn from `tokens`, by default the whole vocabulary. The entropy
    and the distance of the attention are measured on the same sequences. The copying score, which
    depends on the weights only, is included for models that have one.
    """
    side, stack = text_stack(model)
    if side != "decoder" or getattr(model, "encoder", None) is not None:
        raise ConfigError(
            "find_heads needs a decoder: its scores measure attention to earlier tokens"
        )
    size = int(cast(int, model.vocab_size))
    distinct = range(size) if tokens is None else list(dict.fromkeys(tokens))
    check_indices(distinct, size, "token")
    pool = torch.tensor(distinct)
    context = getattr(model, "context", None)
    if rows < 1:
        raise ConfigError(f"rows={rows} must be at least 1")
    available = min(len(pool), (context or 2 * length) // 2)
    if min(length, available) < 2:
        raise ConfigError(
            f"length={length}, {len(pool)} tokens or context={context} is too few: find_heads "
            "repeats a sequence of at least 2 tokens"
        )
    length = min(length, available)
    generator = torch.Generator().manual_seed(seed)
    sequences = torch.stack(
        [pool[torch.randperm(len(pool), generator=generator)[:length]] for _ in range(rows)]
    )
    ids = torch.cat([sequences, sequences], 1).to(next(model.parameters()).device)
    maps = attention_maps(
        model, lambda: model(ids), pattern=f"{side}.blocks.*.attention", call=None
    )
    layer_scores: dict[str, list[Tensor]] = {}
    for weights in maps.values():
        per_row = [
            {
                "previous_token": previous_token_score(w),
                "induction": induction_score(w, row),
                "duplicate_token": duplicate_token_score(w, row),
                "entropy": attention_entropy(w).mean(-1),
                "distance": attention_distance(w).mean(-1),
            }
            for w, row in zip(weights, ids, strict=True)
        ]
        for name in per_row[0]:
            layer_scores.setdefault(name, []).append(
                torch.stack([scores[name] for scores in per_row]).mean(0).cpu()
            )
    scores = {name: torch.stack(layers) for name, layers in layer_scores.items()}
    with suppress(ConfigError):  # the score is not defined for every model
        copying = list(copying_scores(model).values())
        scores["copying"] = torch.stack(
            [copying[n % len(copying)].cpu() for n in range(len(stack.layers))]
        )
    return HeadScores(list(maps), scores)
