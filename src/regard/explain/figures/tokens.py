"""Figures of text as tokens: counts, merges, boundaries, rare words."""

from regard.errors import ConfigError
from regard.explain.figures.panels import Picture, Table
from regard.text import train_tokenizer

BANANAS = "Yes, we have no bananas\nSay yes for bananas\nNo bananas, we say"


def bag_of_words(text: str = BANANAS) -> Picture:
    r"""How often each word occurs in each line of a text; the order of words is lost.

    c_w = how often w occurs
    """
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise ConfigError("the text is empty; bag-of-words needs at least one line with words")
    tokenizer = train_tokenizer({"kind": "word", "lower": True}, lines)
    bags = [[tokenizer.piece(id) for id in tokenizer.encode(line)] for line in lines]
    words = sorted({word for bag in bags for word in bag})
    counts = [[bag.count(word) for bag in bags] for word in words]
    largest = max(map(max, counts))
    return Picture(
        title="Bag of words",
        caption="One column for each line of the text. "
        + " ".join(f"({n + 1}) {line.strip()[:60]}." for n, line in enumerate(lines[:6]))
        + " A line and its words in any other order have the same column.",
        panels=[
            Table(
                header=["word", *(f"({n + 1})" for n in range(len(lines)))],
                rows=[[word, *row] for word, row in zip(words, counts, strict=True)],
                shades=[[0.0, *(0.6 * count / largest for count in row)] for row in counts],
            )
        ],
    )
