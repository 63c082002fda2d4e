"""The figures of the lectures, by name: a function that computes the data of each.

The parameters of a function are the inputs and options of the figure: `model` or `models` are
models, `text` or `texts` are texts, and the others are options. Parameters with a default may be
left out.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin, get_type_hints

from regard.explain.figures.attention import permutation, pronoun, score_variance
from regard.explain.figures.cost import cost
from regard.explain.figures.landscape import loss_landscape
from regard.explain.figures.language import next_token, shannon, shuffled_words
from regard.explain.figures.panels import FigureData
from regard.explain.figures.positions import positions
from regard.explain.figures.recurrence import gates, gradient_flow
from regard.explain.figures.sampling import beam_tree, samplers, temperature
from regard.explain.figures.structure import parameter_count, path_lengths, receptive_field
from regard.explain.figures.tokens import bag_of_words, bpe_merges, rare_words, token_boundaries
from regard.explain.figures.vectors import word_vectors

INPUTS = {"model": "RUN", "models": "RUN…", "text": "TEXT", "texts": "TEXT…"}


@dataclass(frozen=True, slots=True)
class FigureEntry:
    """A figure: the function that computes it, and the topics of the lectures that it shows."""

    compute: Callable[..., FigureData]
    topics: tuple[str, ...]  # ids of topics in docs/lectures.md
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # used if none is given
    without_model: tuple[str, ...] = ()  # options that apply only if no model is given

    @property
    def summary(self) -> str:
        """The first line of the docstring: the contents of the figure in one sentence."""
        return inspect.getdoc(self.compute).partition("\n")[0]  # type: ignore[union-attr]

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """All arguments of the function."""
        return dict(inspect.signature(self.compute).parameters)

    @property
    def inputs(self) -> dict[str, bool]:
        """The models and texts that the figure takes, and whether each is required."""
        inputs = {name: p for name, p in self.parameters.items() if name in INPUTS}
        required = {name: p.default is inspect.Parameter.empty for name, p in inputs.items()}
        return required | ({"models": False} if self.models else {})

    @property
    def options(self) -> dict[str, object]:
        """The options of the figure and their defaults."""
        others = {name: p for name, p in self.parameters.items() if name not in INPUTS}
        return {name: parameter.default for name, parameter in others.items()}

    @property
    def list_options(self) -> set[str]:
        """The options that are lists."""
        hints = get_type_hints(self.compute)
        return {
            name
            for name in self.options
            if any(get_origin(hint) is tuple for hint in (hints[name], *get_args(hints[name])))
        }

    @property
    def default_texts(self) -> list[str]:
        """The texts that the figure shows if none is given."""
        parameters = self.parameters
        defaults = [parameters[name].default for name in ("text", "texts") if name in parameters]
        texts: list[str] = []
        for default in defaults:
            if isinstance(default, str | tuple):
                texts += [default] if isinstance(default, str) else default
        return texts

    @property
    def usage(self) -> str:
        """The models and texts that the figure takes, as in a usage line."""
        words = ((INPUTS[name], required) for name, required in self.inputs.items())
        return " ".join(word if required else f"[{word}]" for word, required in words)


SMALL_DECODER = {"preset": "tiny-decoder", "dim": 32, "layers": 8, "heads": 2, "context": 32}
RESIDUAL_COMPARISON = {
    "with residuals": SMALL_DECODER,
    "without residuals": {**SMALL_DECODER, "norm_placement": "no_residual"},
}

# Figures by the name that `regard show` takes, in the order of the lectures.
FIGURES: dict[str, FigureEntry] = {
    "bag-of-words": FigureEntry(bag_of_words, ("A1",)),
    "bpe-merges": FigureEntry(bpe_merges, ("A2", "H3")),
    "token-boundaries": FigureEntry(token_boundaries, ("A2",)),
    "rare-words": FigureEntry(rare_words, ("A2",)),
    "word-vectors": FigureEntry(word_vectors, ("A3", "H3")),
    "next-token": FigureEntry(next_token, ("A4", "H1")),
    "shannon": FigureEntry(shannon, ("B1",)),
    "receptive-field": FigureEntry(
        receptive_field, ("B4",), without_model=("kernel_size", "layers", "dilations")
    ),
    "gates": FigureEntry(gates, ("B8",)),
    "gradient-flow": FigureEntry(gradient_flow, ("B10",)),
    "score-variance": FigureEntry(
        score_variance, ("D1",), without_model=("dims", "vectors", "seed")
    ),
    "permutation": FigureEntry(permutation, ("D5",)),
    "shuffled-words": FigureEntry(shuffled_words, ("D5",)),
    "positions": FigureEntry(
        positions, ("D6", "H3"), without_model=("kinds", "dim", "heads", "seed")
    ),
    "path-lengths": FigureEntry(path_lengths, ("D11", "H3")),
    "cost": FigureEntry(cost, ("D11",)),
    "parameter-count": FigureEntry(parameter_count, ("H3",), without_model=("dim",)),
    "loss-landscape": FigureEntry(loss_landscape, ("D7", "G"), RESIDUAL_COMPARISON),
    "beam-tree": FigureEntry(beam_tree, ("E1", "H3")),
    "temperature": FigureEntry(temperature, ("E2",)),
    "samplers": FigureEntry(samplers, ("E2", "E3", "H3")),
    "pronoun": FigureEntry(pronoun, ("H6",)),
}
