"""Word vectors in two dimensions."""

from typing import Literal

from regard.errors import ConfigError
from regard.explain.figures.figure_model import FigureModel, check_positive
from regard.explain.figures.panels import FigureData, Scatter
from regard.explain.neighbours import WordVectors
from regard.explain.projection import pca, tsne


def word_vectors(
    model: FigureModel,
    text: str | None = None,
    *,
    words: int = 60,
    projection: Literal["pca", "tsne"] = "pca",
) -> FigureData:
    r"""The embedding vectors of words in two dimensions, by PCA or t-SNE.

    y = (v - mean(v)) [u_1 u_2],     u_1, u_2 the first two principal components

    Shown are the words of the text, or the first words of the vocabulary, which are the most
    frequent. `projection=tsne` keeps neighbours together (`explain.tsne`).
    """
    check_positive(words=words)
    vectors = WordVectors.from_model(model.module, model.require_tokenizer())
    if text is None:
        by_id = sorted(vectors.words.items(), key=lambda item: item[1])
        ids = {word: id for word, id in by_id if word.isalpha()}
    else:
        distinct = dict.fromkeys(model.normalize(text).split())
        ids = {word: vectors.id(word) for word in distinct}
    ids = dict(list(ids.items())[:words])
    if len(ids) < (fewest := 3 if projection == "pca" else 4):
        raise ConfigError(f"{len(ids)} words: word-vectors needs at least {fewest}")
    table = vectors.table[list(ids.values())].double().cpu()
    numbers, axes = {}, ("", "")
    if projection == "pca":
        points, ratios = pca(table)
        method = "projected onto their first two principal components"
        numbers["explained variance ratio"] = ratios.sum().item()
        axes = ("first component", "second component")
    else:
        points, method = tsne(table), "placed by t-SNE, which keeps neighbours together"
    return FigureData(
        title=f"Word vectors of {model.name}",
        caption=f"{len(ids)} L2-normalized embedding vectors, {method}; words that occur in "
        f"similar contexts are close.{model.note}",
        panels=[
            Scatter(
                labels=list(ids),
                points=[(x, y) for x, y in points.tolist()],
                x_label=axes[0],
                y_label=axes[1],
            )
        ],
        numbers=numbers,
    )
