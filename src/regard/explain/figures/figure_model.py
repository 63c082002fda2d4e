"""The model that a figure shows: that of a run, or a preset with untrained weights."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import ConfigError
from regard.explain.gradient import GradientFlow
from regard.explain.token_map import AttentionMap, StateMap
from regard.nn.state import Source
from regard.text import Tokenizer
from regard.text.tokenizer import JOINER


@dataclass(frozen=True, kw_only=True, slots=True)
class FigureModel:
    """A model with its tokenizer, and the functions of its run that figures call."""

    name: str
    module: nn.Module
    tokenizer: Tokenizer | None  # for pairs, the tokenizer of the target
    trained: bool
    methods: Sequence[str]  # the methods that the run supports, as in `api.Run.methods`
    normalize: Callable[[str], str]
    attention: Callable[..., Mapping[str, AttentionMap]]
    states: Callable[[str], Mapping[str, StateMap]]  # gates of recurrent cells
    gradients: Callable[[str], GradientFlow]
    source: Callable[[str], tuple[Source, list[int]]] | None = None  # pairs: source, prompt

    @property
    def config(self) -> Any:
        """The settings of the model."""
        return self.module.config

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(iter([*self.module.parameters(), *self.module.buffers()])).device

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer, if the model reads text."""
        if self.tokenizer is None:
            raise ConfigError(f"{self.name} reads no text; give a run or a preset that does")
        return self.tokenizer

    def require_language_model(self, figure: str) -> None:
        """Raise if the model does not predict the next token of a text."""
        if "generate" not in self.methods:
            raise ConfigError(
                f"{figure} needs a model that predicts the next token; {self.name} supports "
                f"{', '.join(self.methods) or 'no method for texts'}"
            )

    def ids(self, text: str) -> list[int]:
        """The ids of a text, including those that the tokenizer puts before every text."""
        tokenizer = self.require_tokenizer()
        ids = [*tokenizer.prefix_ids, *tokenizer.encode(self.normalize(text))]
        context = getattr(self.module, "context", None)
        if context is not None and len(ids) > context:
            raise ConfigError(
                f"the text has {len(ids)} tokens, and the context of {self.name} is {context}; "
                "shorten the text"
            )
        return ids

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The tokens for display; a model may have more ids than its tokenizer."""
        tokenizer = self.require_tokenizer()
        return [_piece(tokenizer, id) if id < tokenizer.vocab_size else f"<{id}>" for id in ids]

    @torch.no_grad()
    def logits(self, ids: Sequence[int]) -> Float[Tensor, "time vocab"]:
        """The logits after each id, on the CPU."""
        batch: Int[Tensor, "1 time"] = torch.tensor([list(ids)], device=self.device)
        head: Any = self.module.head
        logits: Tensor = head(self.module(batch))
        return logits[0].float().cpu()

    @property
    def note(self) -> str:
        """A sentence for the caption if the weights are random, else an empty string."""
        return untrained_note([self])


def _piece(tokenizer: Tokenizer, id: int) -> str:
    """The text of a token; a punctuation mark of a word vocabulary includes its adjacent spaces.

    Such a vocabulary has several tokens for one mark, which differ in their joiners.
    """
    piece = tokenizer.piece(id)
    token = tokenizer.backend.id_to_token(id) or piece
    if tokenizer.kind != "word" or not re.fullmatch(r"[^\w\s]", piece):
        return piece
    before, after = (" " * (not joined) for joined in (token[0] == JOINER, token[-1] == JOINER))
    return f"{before}{piece}{after}"


def untrained_note(models: Sequence[FigureModel]) -> str:
    """A sentence for the caption that names the models with random weights, or an empty string."""
    untrained = [model.name for model in models if not model.trained]
    if not untrained:
        return ""
    if len(untrained) == 1:
        return f" {untrained[0]} is a preset: its weights are random."
    return f" {', '.join(untrained)} are presets: their weights are random."


def check_positive(**options: int) -> None:
    """Raise if an option is not at least 1."""
    for name, value in options.items():
        if value < 1:
            raise ConfigError(f"{name}={value} must be at least 1")
