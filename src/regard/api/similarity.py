"""Embeddings of a run: nearest words and texts, and one word at several positions."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from regard.api.prediction import check_top
from regard.api.run_evaluation import validation_data
from regard.data.text_files import read_lines, scan
from regard.errors import ConfigError
from regard.explain.neighbours import WordVectors, compare_occurrences, format_terms, parse_terms
from regard.pipelines.sentences import contrastive_task, embed_texts, nearest_texts
from regard.text import PairTokenizers, Tokenizer

if TYPE_CHECKING:
    from regard.api.run import Run

Neighbours = dict[str, list[tuple[str, float]]]


def nearest_words(run: "Run", words: str | Sequence[str], top: int) -> Neighbours:
    """The words with the most similar embedding vectors and their cosines, best first."""
    check_top(top)
    vectors = WordVectors.from_model(run.model, run.tokenizer)
    split = words.split() if isinstance(words, str) else words
    queries = parse_terms(run._normalize(word) for word in split)
    return {format_terms(terms): vectors.nearest(terms, top) for terms in queries}


def text_embeddings(run: "Run", texts: str | Sequence[str]) -> Tensor:
    """The L2-normalized embeddings of texts: a vector, or a row for each of a list."""
    run._require("embed", "embed texts")
    task, tokenizer = contrastive_task(run.config.task), cast(Tokenizer, run.tokenizers)
    listed = [texts] if isinstance(texts, str) else list(texts)
    if not listed:
        raise ConfigError("there is no text to embed; give at least one")
    vectors = embed_texts(run.model, task, tokenizer, list(map(run._normalize, listed)))
    return vectors[0] if isinstance(texts, str) else vectors


def similar_texts(
    run: "Run", texts: str | Sequence[str], among: Sequence[str] | Path | str | None, top: int
) -> Neighbours:
    """For each text, those of `among` (or the validation data) with the most similar embeddings."""
    check_top(top)
    queries = [texts] if isinstance(texts, str) else list(texts)
    if among is None:
        rows = cast(Any, validation_data(run)).rows
        among = [text for row in rows for text in row]
    elif isinstance(among, str | Path):
        path = Path(among)
        among = [line for line in read_lines(path, scan(path)) if line.strip()]
    among = list(dict.fromkeys(among))
    embed = text_embeddings
    return nearest_texts(queries, embed(run, queries), among, embed(run, among), top)


def word_occurrences(run: "Run", word: str, text: str) -> dict[str, Any]:
    """Cosines between the vectors of a word at all its positions in a text."""
    if isinstance(run.tokenizers, PairTokenizers):
        raise ConfigError("compare_occurrences needs a run on text; this one is trained on pairs")
    return compare_occurrences(
        run.model,
        run.tokenizer,
        run._normalize(word),
        run._normalize(text),
        contextual=getattr(run.model.config, "architecture", None) != "cbow",
    )
