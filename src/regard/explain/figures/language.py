"""Figures of language models: next-token probabilities, Shannon, shuffled words."""

import math
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Literal

import torch

from regard.errors import ConfigError
from regard.explain.figures.figure_model import FigureModel, check_positive
from regard.explain.figures.panels import Bars, FigureData, Table


def next_token(model: FigureModel, text: str, *, top: int = 4) -> FigureData:
    r"""The probability of each token of a text, and the most probable tokens at its position.

    log P(t_2 ... t_N | t_1) = sum_{n=2}^N log P(t_n | t_1 ... t_{n-1})
    """
    model.require_language_model("next-token")
    check_positive(top=top)
    ids = model.ids(text)
    if len(ids) < 2:
        raise ConfigError(f"the text has {len(ids)} tokens; next-token needs at least 2")
    log_p = model.logits(ids[:-1]).double().log_softmax(-1)
    targets = torch.tensor(ids[1:])
    scores = log_p.gather(1, targets[:, None]).squeeze(1)
    best = log_p.topk(min(top, log_p.shape[1]))
    ranks = 1 + (log_p > scores[:, None]).sum(1)
    rows: list[list[str | int | float]] = []
    shades = []
    for index, id in enumerate(ids[1:]):
        p = scores[index].exp().item()
        best_ids, probs = best.indices[index].tolist(), best.values[index].exp().tolist()
        pieces = model.pieces(best_ids)
        cells = [f"{piece!r} {100 * q:.1f} %" for piece, q in zip(pieces, probs, strict=True)]
        token = f"{model.pieces([id])[0]!r}"
        rows.append([token, f"{100 * p:.2f} %", scores[index].item(), int(ranks[index]), *cells])
        shades.append([0.0, p, 0.0, 0.0, *probs])
    total = scores.sum().item()
    first = model.pieces(ids[:1])[0]
    return FigureData(
        title=f"Next-token probabilities of {model.name}",
        caption="Every token, its probability after all tokens before it, and the most probable "
        f"tokens there. The first token, {first!r}, is given. The log-probability of the text is "
        f"the sum.{model.note}",
        panels=[
            Table(
                header=["token", "P", "log P", "rank", *(f"{n + 1}." for n in range(len(cells)))],
                rows=rows,
                shades=shades,
            )
        ],
        numbers={
            "log P of the text": total,
            "tokens": len(rows),
            "perplexity": math.exp(-total / len(rows)),
            "bits per token": -total / len(rows) / math.log(2),
        },
    )


def shannon(
    text: str,
    *,
    orders: int = 4,
    unit: Literal["char", "word"] = "char",
    length: int = 100,
    seed: int = 1,
) -> FigureData:
    r"""Shannon's approximations: text sampled from the n-gram counts of one text, order by order.

        order 0    every symbol with the same probability
        order n    P(w | the n - 1 symbols before it) = count(h w) / count(h)

    The text is treated as circular, so that every history has a successor. The entropy is that of
    the next symbol, H = -sum P(h w) log2 P(w | h). Shannon 1948.
    """
    check_positive(orders=orders, length=length)
    symbols = list(" ".join(text.split())) if unit == "char" else text.split()
    if len(symbols) < 2:
        raise ConfigError(f"the text has {len(symbols)} {unit}s; shannon needs at least 2")
    random = Random(seed)
    separator = "" if unit == "char" else " "
    rows: list[list[str | int | float]] = []
    for order in range(orders + 1):
        counts = ngram_counts(symbols, order)
        sample = separator.join(_sample(symbols, counts, order, length, random))
        rows.append([order, entropy(counts), sample])
    return FigureData(
        title=f"Shannon's approximations of a text of {len(symbols):,} {unit}s",
        caption="Order 0 samples every symbol with the same probability, order 1 with its "
        "frequency, order n after the n - 1 symbols before it. H is the entropy of the next symbol "
        "in bits: it falls with the order, at high orders only because the text is short and each "
        "history occurs once.",
        panels=[Table(header=["order", "H (bits)", f"a sample of {length} {unit}s"], rows=rows)],
    )


def ngram_counts(symbols: Sequence[str], order: int) -> dict[tuple[str, ...], Counter[str]]:
    """How often each symbol follows each history of order - 1 symbols; the text is circular."""
    if order == 0:
        return {(): Counter(dict.fromkeys(sorted(set(symbols)), 1))}
    counts: dict[tuple[str, ...], Counter[str]] = {}
    for start in range(len(symbols)):
        *history, symbol = (symbols[(start + n) % len(symbols)] for n in range(order))
        counts.setdefault(tuple(history), Counter())[symbol] += 1
    return counts


def entropy(counts: dict[tuple[str, ...], Counter[str]]) -> float:
    """The entropy of the next symbol in bits: -sum P(h w) log2 P(w | h)."""
    total = sum(sum(next_counts.values()) for next_counts in counts.values())
    bits = 0.0
    for next_counts in counts.values():
        history_count = sum(next_counts.values())
        bits -= sum(n / total * math.log2(n / history_count) for n in next_counts.values())
    return bits + 0.0  # not -0.0


def _sample(
    symbols: Sequence[str],
    counts: dict[tuple[str, ...], Counter[str]],
    order: int,
    length: int,
    random: Random,
) -> list[str]:
    """A sample of `length` symbols, which begins with a history of the text."""
    history_length = max(0, order - 1)
    start = random.randrange(len(symbols))
    sample = [symbols[(start + n) % len(symbols)] for n in range(history_length)]
    while len(sample) < length:
        next_counts = counts[tuple(sample[len(sample) - history_length :])]
        sample += random.choices(list(next_counts), list(next_counts.values()))
    return sample[:length]


def shuffled_words(
    model: FigureModel, text: str, *, shuffles: int = 20, seed: int = 1
) -> FigureData:
    """The loss of a trained model on a text, and on the same words in random orders."""
    model.require_language_model("shuffled-words")
    check_positive(shuffles=shuffles)
    words = text.split()
    if len(words) < 3:
        raise ConfigError(f"the text has {len(words)} words; shuffled-words needs at least 3")
    random = Random(seed)
    original = _loss(model, " ".join(words))
    losses = []
    for _ in range(shuffles):
        random.shuffle(words)
        losses.append(_loss(model, " ".join(words)))
    mean = sum(losses) / len(losses)
    deviation = math.sqrt(sum((loss - mean) ** 2 for loss in losses) / max(1, len(losses) - 1))
    return FigureData(
        title=f"Loss of {model.name} on shuffled words",
        caption="The mean cross-entropy of a token in nats, for the text as it is and for the same "
        "words in random orders. A model that ignores order has the same loss for all of them."
        f"{model.note}",
        panels=[
            Bars(
                labels=["as written", *(f"{n + 1}" for n in range(shuffles))],
                series={"loss": [original, *losses]},
                x_label="order of the words",
                y_label="loss per token (nats)",
            )
        ],
        numbers={
            "loss as written": original,
            "mean loss of shuffles": mean,
            "standard deviation of shuffles": deviation,
            "share of shuffles with a larger loss": sum(x > original for x in losses) / shuffles,
        },
    )


def _loss(model: FigureModel, text: str) -> float:
    ids = model.ids(text)
    log_p = model.logits(ids[:-1]).double().log_softmax(-1)
    return -log_p.gather(1, torch.tensor(ids[1:])[:, None]).mean().item()
