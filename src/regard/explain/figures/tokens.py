"""Figures of text as tokens: counts of words, merges, boundaries, rare words."""

import json
from collections import Counter
from functools import reduce
from itertools import pairwise

from regard.errors import ConfigError
from regard.explain.figures.figure_model import FigureModel, check_positive
from regard.explain.figures.panels import Bars, FigureData, LinePlot, Segmentations, Table
from regard.explain.render.token_text import visible
from regard.text import TOKENIZERS, Tokenizer, train_tokenizer

BANANAS = "Yes, we have no bananas\nSay yes for bananas\nNo bananas, we say"
FREQUENCY_RANGES = ((0, 0), (1, 1), (2, 3), (4, 7), (8, 15), (16, None))  # occurrences
BOUNDARY_CHARACTERS = 120  # characters of a text whose token boundaries are shown
SUBWORD_KINDS = ("bpe", "wordpiece", "unigram")  # tokenizers with a vocab_size


def bag_of_words(text: str = BANANAS) -> FigureData:
    r"""How often each word occurs in each line of a text; the order of words is lost.

    c_w = count(w)
    """
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise ConfigError("the text is empty; bag-of-words needs at least one line with words")
    tokenizer = train_tokenizer({"kind": "word", "lower": True}, lines)
    bags = [[tokenizer.piece(id) for id in tokenizer.encode(line)] for line in lines]
    words = sorted({word for bag in bags for word in bag})
    counts = [[bag.count(word) for bag in bags] for word in words]
    largest = max(map(max, counts))
    return FigureData(
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


def bpe_merges(
    text: str, model: FigureModel | None = None, *, merges: int = 15, word: str | None = None
) -> FigureData:
    r"""Byte-pair encoding merge by merge: the most frequent pair of tokens becomes a token.

        (a, b) = argmax count(a b),     vocabulary += ab

    Given a run, the merges are those of its tokenizer, counted in the text. Sennrich et al. 2016.
    """
    check_positive(merges=merges)
    if model is None:
        size = 256 + len(train_tokenizer("char", [text]).special_ids) + merges
        tokenizer = train_tokenizer({"kind": "bpe", "vocab_size": size}, [text])
    else:
        tokenizer = model.require_tokenizer()
        if tokenizer.kind != "bpe":
            raise ConfigError(
                f"{model.name} has a {tokenizer.kind} tokenizer, which has no merges; give a run "
                "with data.tokenizer=bpe, or only a text"
            )
    steps = merge_steps(tokenizer, text)[:merges]
    if not steps:
        raise ConfigError("no pair of characters occurs twice in the text; give a longer text")
    vocabulary = tokenizer.backend.get_vocab()

    def show(token: str) -> str:
        return tokenizer.piece(vocabulary[token])

    def merged_length(word: str) -> int:
        """How many tokens a word has after all merges."""
        return len(reduce(merge, (pair for pair, _, _ in steps), list(word)))

    words = word_counts(tokenizer, text)
    if word is None:  # the longer word that merges shorten most; ties by frequency
        longer = [w for w in words if len(set(w)) > 5]  # not only spaces
        example = max(longer or words, key=lambda w: (len(w) - merged_length(w), words[w]))
    else:
        example = "".join(part for part, _ in _pre_tokenize(tokenizer, word))
    rows: list[list[str | int | float]] = []
    pieces = list(example)
    for number, (pair, count, total) in enumerate(steps, 1):
        pieces = merge(pieces, pair)
        first, second = map(show, pair)
        new, tokens = show("".join(pair)), " ".join(visible(show(piece)) for piece in pieces)
        rows.append([number, f"{first!r} + {second!r}", count, repr(new), total, tokens])
    initial_tokens = sum(len(w) * count for w, count in words.items())
    return FigureData(
        title="Byte-pair encoding, merge by merge",
        caption="Text begins as bytes. Each step joins the pair of neighbouring tokens that occurs "
        "most often within words, which reduces the number of tokens of the text. The last column "
        "shows one word after the merges so far; a space, ␣, belongs to the word after it.",
        panels=[
            Table(
                header=["merge", "pair", "count", "new token", "tokens of the text", "example"],
                rows=rows,
            ),
            LinePlot(
                title="length of the text",
                x_label="merges",
                y_label="tokens",
                series={
                    "tokens": list(enumerate([initial_tokens, *(total for _, _, total in steps)]))
                },
            ),
        ],
    )


Pair = tuple[str, str]


def merge_steps(tokenizer: Tokenizer, text: str) -> list[tuple[Pair, int, int]]:
    """Each merge of a BPE tokenizer: the pair, its count in the text, and the tokens after it."""
    words = [(list(word), count) for word, count in word_counts(tokenizer, text).items()]
    steps = []
    for first, second in _merges(tokenizer):
        pair = (first, second)
        count = sum(n * sum(other == pair for other in pairwise(word)) for word, n in words)
        words = [(merge(word, pair), n) for word, n in words]
        steps.append((pair, count, sum(len(word) * n for word, n in words)))
    return steps


def _merges(tokenizer: Tokenizer) -> list[Pair]:
    merges = json.loads(tokenizer.backend.to_str())["model"]["merges"]
    return [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")) for pair in merges]


def merge(pieces: list[str], pair: Pair) -> list[str]:
    """The pieces with every occurrence of a pair joined, from the left.

    >>> merge(list("aaab"), ("a", "a"))
    ['aa', 'a', 'b']
    """
    merged: list[str] = []
    for piece in pieces:
        if merged and (merged[-1], piece) == pair:
            merged[-1] += piece
        else:
            merged.append(piece)
    return merged


def word_counts(tokenizer: Tokenizer, text: str) -> Counter[str]:
    """The counts of the pre-tokenized words of a text; a BPE tokenizer merges only within them."""
    return Counter(word for word, _ in _pre_tokenize(tokenizer, text))


def _pre_tokenize(tokenizer: Tokenizer, text: str) -> list[tuple[str, tuple[int, int]]]:
    backend = tokenizer.backend
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    words: list[tuple[str, tuple[int, int]]] = backend.pre_tokenizer.pre_tokenize_str(text)
    return words


def train_tokenizers(corpus: list[str], vocab_size: int) -> dict[str, Tokenizer]:
    """Every kind of tokenizer, trained on the same text."""
    if vocab_size < 300:
        raise ConfigError(
            f"vocab_size={vocab_size} must be at least 300: the 256 bytes and some tokens"
        )
    specs = {kind: {"kind": kind, "vocab_size": vocab_size} for kind in SUBWORD_KINDS}
    return {kind: train_tokenizer(specs.get(kind, kind), corpus) for kind in TOKENIZERS}


def token_boundaries(
    texts: list[str], models: list[FigureModel] | None = None, *, vocab_size: int = 400
) -> FigureData:
    """The tokens of one text under every kind of tokenizer.

    The tokenizers are trained on the texts after the first, or else on the text itself; those of
    runs are added.
    """
    first, *corpus = texts
    text = first[:BOUNDARY_CHARACTERS]
    note = "" if text == first else f" Shown: the first {BOUNDARY_CHARACTERS} characters."
    tokenizers = train_tokenizers(corpus or texts, vocab_size)
    tokenizers |= _run_tokenizers(models)
    pieces = {name: tokenize(tokenizer, text) for name, tokenizer in tokenizers.items()}
    labels = [
        f"{name} ({tokenizers[name].vocab_size:,}): {len(line)} tokens"
        for name, line in pieces.items()
    ]
    training_text = f"{sum(map(len, corpus)):,} characters of other text" if corpus else "this text"
    return FigureData(
        title="Token boundaries under every tokenizer",
        caption=f"Trained on {training_text}; in parentheses the size of the vocabulary. A space "
        f"is shown as ␣ where it belongs to a token; <unk> is text outside the vocabulary.{note}",
        panels=[Segmentations(labels=labels, pieces=list(pieces.values()))],
    )


def _run_tokenizers(models: list[FigureModel] | None) -> dict[str, Tokenizer]:
    for model in models or []:
        if not model.trained:
            raise ConfigError(f"the preset {model.name} has no tokenizer; give a run, or none")
    return {model.name: model.require_tokenizer() for model in models or []}


def tokenize(tokenizer: Tokenizer, text: str) -> list[str]:
    """The tokens of a text, as strings."""
    return [tokenizer.piece(id) for id in tokenizer.encode(text)]


def rare_words(
    text: str, models: list[FigureModel] | None = None, *, vocab_size: int = 400
) -> FigureData:
    """The number of tokens of a word, by its frequency in the training text.

    Tokenizers are trained on the first nine tenths of the text; words of the last tenth that do
    not occur there have the frequency 0.
    """
    end = text.rfind(" ", 0, max(1, len(text) * 9 // 10))
    train = text[: end if end > 0 else len(text)]
    tokenizers = train_tokenizers([train], vocab_size)
    frequencies = word_counts(tokenizers["word"], train)
    all_counts = word_counts(tokenizers["word"], text)
    words = {word: frequencies[word] for word in all_counts if word.isalpha()}
    if len(words) < 10:
        raise ConfigError(f"the text has {len(words)} distinct words; rare-words needs at least 10")
    tokenizers |= _run_tokenizers(models)
    groups = {
        _range_name(low, high): [
            word for word, n in words.items() if n >= low and (high is None or n <= high)
        ]
        for low, high in FREQUENCY_RANGES
    }
    groups = {name: members for name, members in groups.items() if members}
    counts = {
        name: [
            sum(len(tokenizer.encode(f" {word}")) for word in members) / len(members)
            for members in groups.values()
        ]
        for name, tokenizer in tokenizers.items()
    }
    unknown = {
        name: [
            sum(bool(tokenizer.unknown_parts(word)) for word in members) / len(members)
            for members in groups.values()
        ]
        for name, tokenizer in tokenizers.items()
        if tokenizer.special_id("unk") is not None
    }
    rarest = sorted(words, key=lambda word: (words[word], -len(word)))[:5]
    labels = [f"{name} ({len(members)})" for name, members in groups.items()]
    return FigureData(
        title="Rare words",
        caption="Words grouped by their frequency in the training text, in parentheses the number "
        "of distinct words. Subword tokenizers split rare words into more tokens; a vocabulary of "
        "words has only <unk> for a word that is not in the training text.",
        panels=[
            Bars(
                title="tokens per word",
                labels=labels,
                series=counts,
                x_label="occurrences of the word",
                y_label="mean number of tokens",
            ),
            Bars(
                title="words with unknown parts",
                labels=labels,
                series=unknown,
                x_label="occurrences of the word",
                y_label="share of the words",
            ),
            Table(
                title="the rarest words",
                header=["word", "occurrences", *tokenizers],
                rows=[
                    [word, words[word], *("·".join(tokenize(t, word)) for t in tokenizers.values())]
                    for word in rarest
                ],
            ),
        ],
    )


def _range_name(low: int, high: int | None) -> str:
    if high is None:
        return f"{low} or more"
    return str(low) if low == high else f"{low} to {high}"
