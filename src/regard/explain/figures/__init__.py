"""The figures of the lectures, by name: a function that computes the data of each.

The arguments of a function say what the figure needs: `subject` or `subjects` are models, `text`
or `texts` are texts, those with a default may be left out; the others are options.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

from regard.explain.figures.attention import score_variance
from regard.explain.figures.language import next_token, shannon, shuffled_words
from regard.explain.figures.panels import Picture
from regard.explain.figures.positions import positions
from regard.explain.figures.tokens import bag_of_words

INPUTS = {"subject": "RUN", "subjects": "RUN…", "text": "TEXT", "texts": "TEXT…"}


@dataclass(frozen=True, slots=True)
class Entry:
    """A figure: the function that computes it, and the topics of the lectures that it shows."""

    compute: Callable[..., Picture]
    topics: tuple[str, ...]  # numbers of docs/lectures.md

    @property
    def summary(self) -> str:
        """What it shows, in one sentence."""
        return inspect.getdoc(self.compute).partition("\n")[0]  # type: ignore[union-attr]

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """All arguments of the function."""
        return dict(inspect.signature(self.compute).parameters)

    @property
    def inputs(self) -> dict[str, bool]:
        """The models and texts that it takes, and whether each is needed."""
        given = {name: p for name, p in self.parameters.items() if name in INPUTS}
        return {name: p.default is inspect.Parameter.empty for name, p in given.items()}

    @property
    def options(self) -> dict[str, object]:
        """Its options and their defaults."""
        others = {name: p for name, p in self.parameters.items() if name not in INPUTS}
        return {name: parameter.default for name, parameter in others.items()}

    @property
    def usage(self) -> str:
        """The models and texts that it takes, as in a usage line."""
        words = ((INPUTS[name], needed) for name, needed in self.inputs.items())
        return " ".join(word if needed else f"[{word}]" for word, needed in words)


# Figures by the name that `regard show` takes, in the order of the lectures.
FIGURES: dict[str, Entry] = {
    "bag-of-words": Entry(bag_of_words, ("A1",)),
    "next-token": Entry(next_token, ("A4", "H1")),
    "shannon": Entry(shannon, ("B1",)),
    "score-variance": Entry(score_variance, ("D1",)),
    "shuffled-words": Entry(shuffled_words, ("D5",)),
    "positions": Entry(positions, ("D6", "H3")),
}
