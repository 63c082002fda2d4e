"""Word vectors in two dimensions."""

from regard.errors import ConfigError
from regard.explain.figures.figure_model import FigureModel
from regard.explain.figures.panels import FigureData, Scatter
from regard.explain.neighbours import WordVectors
from regard.explain.projection import pca


def word_vectors(model: FigureModel, text: str | None = None, *, words: int = 60) -> FigureData:
    r"""The embedding vectors of words, projected on their first two principal components (PCA).

    y = (v - mean(v)) [u_1 u_2],     u_1, u_2 the first two principal components

    The words of the text, or the first of the vocabulary, which are the most frequent.
    """
    vectors = WordVectors.from_model(model.module, model.require_tokenizer())
    if text is None:
        known = sorted(vectors.words.items(), key=lambda item: item[1])
        chosen = {word: id for word, id in known if word.isalpha()}
    else:
        asked = dict.fromkeys(model.normalize(text).split())
        chosen = {word: vectors.id(word) for word in asked}
    chosen = dict(list(chosen.items())[:words])
    if len(chosen) < 3:
        raise ConfigError(f"{len(chosen)} words: word-vectors needs at least 3")
    points, shares = pca(vectors.table[list(chosen.values())].double().cpu())
    return FigureData(
        title=f"Word vectors of {model.name}",
        caption=f"{len(chosen)} L2-normalized embedding vectors, projected on their first two "
        f"principal components; words that occur in similar contexts are close.{model.note}",
        panels=[
            Scatter(
                labels=list(chosen),
                points=[(x, y) for x, y in points.tolist()],
                x_label="first component",
                y_label="second component",
            )
        ],
        numbers={"share of the variance": shares.sum().item()},
    )
