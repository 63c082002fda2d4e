"""Figures of attention: the variance of scores, permutations, the attention of a pronoun."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from regard.errors import ConfigError
from regard.explain.attention import has_attention
from regard.explain.figures.figure_model import FigureModel, check_positive
from regard.explain.figures.panels import FigureData, Heatmap, LinePlot, Panel, Table
from regard.explain.render.token_text import attention_vmax
from regard.explain.trace import trace
from regard.nn.attention import Attention, AttentionInputs, Mask
from regard.nn.position import Sinusoidal

TIRED = "The animal didn't cross the street because it was too tired"
WIDE = "The animal didn't cross the street because it was too wide"


def score_variance(
    model: FigureModel | None = None,
    text: str | None = None,
    *,
    dims: tuple[int, ...] = (4, 16, 64, 256, 1024),
    vectors: int = 256,
    seed: int = 1,
) -> FigureData:
    r"""The variance of attention scores with and without the factor 1 / sqrt(d).

        Var(q . k) = d,   Var(q . k / sqrt(d)) = 1      if q_i, k_i have mean 0 and variance 1

    Without the factor the softmax saturates: one key takes all the weight, and gradients vanish
    (Vaswani et al. 2017). Given a run and a text, the variance is measured in the run's layers.
    """
    if model is not None:
        if text is None:
            raise ConfigError("score-variance of a run needs a text as well")
        return _measured_variance(model, text)
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
    return FigureData(
        title="Variance of attention scores",
        caption=f"{vectors} random queries and keys of variance 1: the variance of q · k is d, and "
        "with the factor 1/√d it is 1. Without it, the softmax gives nearly all the weight to one "
        "key, and its gradient vanishes.",
        panels=[
            LinePlot(
                title="variance",
                x_label="d",
                y_label="variance of a score",
                series={name: [(row[0], row[c]) for row in rows] for c, name in names.items()},
                reference_lines={"d": [(row[0], row[0]) for row in rows]},
                log_x=True,
                log_y=True,
            ),
            LinePlot(
                title=f"largest of {vectors} attention weights",
                x_label="d",
                y_label="mean largest weight",
                series={name: [(row[0], row[c + 2]) for row in rows] for c, name in names.items()},
                log_x=True,
            ),
        ],
        numbers={f"variance at d = {row[0]}, {names[c]}": row[c] for row in rows for c in names},
    )


def _measured_variance(model: FigureModel, text: str) -> FigureData:
    """The variance of q . k in every attention layer of a model that reads a text."""
    require_attention(model)
    with torch.no_grad(), trace(model.module, "*_hook") as activations:
        model.attention(text)
    rows: list[list[str | int | float]] = []
    for name, q in activations.items():
        if not name.endswith(".q_hook"):
            continue
        k = activations[name.removesuffix("q_hook") + "k_hook"]
        scores: Tensor = q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT
        variance = scores.var(correction=0).item()
        rows.append([name.removesuffix(".q_hook"), q.shape[-1], variance, variance / q.shape[-1]])
    if not rows:
        raise ConfigError(
            f"{model.name} is a recurrent network, which attends with its states; score-variance "
            "needs the queries and keys of a Transformer"
        )
    panels: list[Panel] = [Table(header=["layer", "d", "Var(q · k)", "Var(q · k / √d)"], rows=rows)]
    return FigureData(
        title=f"Variance of the attention scores of {model.name}",
        caption="Over all heads, queries and keys of the text; q and k are those of the scores, "
        f"after RoPE where the layer has it.{model.note}",
        panels=panels,
    )


def require_attention(model: FigureModel) -> None:
    """Raise if the model reads no text or has no attention over it."""
    model.require_tokenizer()
    if not has_attention(model.module):
        raise ConfigError(
            f"{model.name} has no attention; give a run or a preset of a Transformer, such as "
            "tiny-decoder"
        )


def permutation(
    text: str = "The man ate the fish", *, dim: int = 16, heads: int = 2, seed: int = 1
) -> FigureData:
    r"""Permutation equivariance: without positions, permuted inputs give permuted outputs.

        f(P X) = P f(X)      P a permutation matrix

    With sinusoidal positions added to X this does not hold. Weights and word vectors are random.
    """
    check_positive(dim=dim, heads=heads)
    words = text.split()
    if not 2 <= len(words) <= 40:
        raise ConfigError(f"the text has {len(words)} words; permutation needs 2 to 40")
    generator = torch.Generator().manual_seed(seed)
    table = {word: torch.randn(dim, generator=generator) for word in dict.fromkeys(words)}
    x = torch.stack([table[word] for word in words]).double()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        attention = Attention(dim, heads).double()
    order = torch.randperm(len(words), generator=generator)
    if order.tolist() == list(range(len(words))):
        order = order.flip(0)
    y, permuted = attend(attention, x), attend(attention, x[order])
    sinusoid = Sinusoidal(dim).embed(torch.arange(len(words))[None])[0].double()
    with_positions = attend(attention, x + sinusoid), attend(attention, x[order] + sinusoid)
    error = (permuted - y[order]).abs().max().item()
    effect = (with_positions[1] - with_positions[0][order]).abs().max().item()
    names = [str(dimension) for dimension in range(dim)]
    permuted_words = [words[index] for index in order.tolist()]

    def output_map(title: str, rows: list[str], values: Tensor) -> Heatmap:
        return Heatmap(
            title=title,
            rows=rows,
            columns=names,
            values=values.tolist(),
            x_label="dimension of the output",
        )

    return FigureData(
        title="Attention is permutation equivariant",
        caption="The outputs of self-attention for the words in two orders: without positions each "
        "word has the same output at every position, so the outputs are permuted as the inputs "
        "are. The third map shows how the output of each word changes with its position when "
        "sinusoidal positions are added to the inputs.",
        panels=[
            output_map("in order", words, y),
            output_map("permuted", permuted_words, permuted),
            output_map(
                "change with positions",
                permuted_words,
                with_positions[1] - with_positions[0][order],
            ),
        ],
        numbers={
            "largest change without positions": error,
            "largest change with sinusoidal positions": effect,
        },
    )


@torch.no_grad()
def attend(attention: Attention, x: Float[Tensor, "time dim"]) -> Float[Tensor, "time dim"]:
    """Self-attention without a mask."""
    inputs = AttentionInputs.of(Mask.none(), torch.arange(len(x))[None])
    return attention(x[None], inputs=inputs)[0]


def pronoun(
    model: FigureModel,
    texts: Sequence[str] = (TIRED, WIDE),
    *,
    word: str = "it",
    layer: int | None = None,
) -> FigureData:
    """The attention of one word, by default "it", in two sentences that differ in one word."""
    require_attention(model)
    if model.source is not None:
        raise ConfigError(
            f"pronoun shows self-attention; {model.name} attends from one text to another"
        )
    if len(texts) != 2:
        raise ConfigError(f"pronoun compares two sentences, not {len(texts)}")
    rows, pieces = [], []
    for text in texts:
        ((path, attention),) = model.attention(text, layer=layer, words=True).items()
        if word not in attention.rows:
            raise ConfigError(
                f"{word!r} is not a word of {text[:60]!r}; give word= one of its words: "
                f"{' '.join(attention.rows)[:200]}"
            )
        rows.append(attention.weights[:, attention.rows.index(word)])  # (heads, columns)
        pieces.append(attention.columns)
    heads = [str(head) for head in range(len(rows[0]))]
    has_mean = len(heads) > 1
    largest = max(attention_vmax(weights.max().item(), weights.shape[1]) for weights in rows)
    panels: list[Panel] = [
        Heatmap(
            title=f"({number})",
            rows=[*heads, *(["mean"] * has_mean)],
            columns=columns,
            values=[*weights.tolist(), *([weights.mean(0).tolist()] * has_mean)],
            y_label="head",
            high=largest,
        )
        for number, (columns, weights) in enumerate(zip(pieces, rows, strict=True), 1)
    ]
    numbers = {}
    if len(pieces[0]) == len(pieces[1]):
        change = rows[1] - rows[0]
        columns = [
            first if first == second else f"{first} / {second}"
            for first, second in zip(*pieces, strict=True)
        ]
        panels.append(
            Heatmap(
                title="(2) - (1)",
                rows=heads,
                columns=columns,
                values=change.tolist(),
                y_label="head",
            )
        )
        numbers["largest change of a weight"] = change.abs().max().item()
    causal = getattr(model.config, "architecture", "") == "decoder"
    note = (
        f" {model.name} is a decoder: {word!r} cannot see the words after it, so its weights "
        "change only where the sentences differ before it."
        if causal
        else ""
    )
    return FigureData(
        title=f"What {word!r} attends to in {model.name}, {path}",
        caption=f"(1) {texts[0][:80]}. (2) {texts[1][:80]}. Each row is a head: the attention "
        f"weights of the word over all words of the sentence.{note}{model.note}",
        panels=panels,
        numbers=numbers,
    )
