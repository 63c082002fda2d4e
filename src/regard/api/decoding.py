"""What generation needs of a run: prompt ids, samplers, a decode engine."""

from collections.abc import Sequence
from typing import cast

from torch import nn

from regard.accel.packed_decoder import pack
from regard.errors import ConfigError
from regard.generate import Chain, Engine, parse_chain
from regard.models.base import Language
from regard.text import Tokenizer

SMALL_MODEL = 2e6  # parameters up to which one CPU thread decodes as fast as several
Weights = list[tuple[object, ...]]


def prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a prompt after those that open every text; never empty.

    An empty prompt becomes a line break, as if a line had ended before it; with the vocabulary
    of another library, that library's start or stop token.
    """
    ids = [*tokenizer.prefix_ids, *tokenizer.encode(text)]
    if ids:
        return ids
    start = tokenizer.special_id("start")
    if not tokenizer.is_native and start is not None:
        return [start]
    return (tokenizer.encode("\n") if tokenizer.is_native else [])[:1] or [tokenizer.stop_id]


def chain_for(
    tokenizer: Tokenizer, words: str | Sequence[str] | None, order: str | None = None
) -> Chain:
    """A chain of samplers, in which tokens may be named by their text: `ban=["the"]`.

    A text names every token that reads so, with or without a leading space; the text of `force`
    is encoded as it is.
    """

    def token_ids(sampler: str, text: str) -> list[int]:
        if sampler == "force":
            if unknown := tokenizer.unknown_parts(text):
                raise ConfigError(f"force={text!r}: {unknown[0]!r} is not in the vocabulary")
            return tokenizer.encode(text)
        word = text.removeprefix(" ")
        pieces = ((id, tokenizer.piece(id)) for id in range(tokenizer.size))
        return [id for id, piece in pieces if piece.removeprefix(" ") == word]

    return parse_chain(words, order, token_ids)


class EngineCache:
    """Packs a model for decoding once, and again when its weights have changed."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._engine: Engine | None = None
        self._built_from: tuple[bool, Weights] | None = None

    def engine(self, int8: bool = False) -> Engine:
        """The engine of the packed model, with int8 weights where asked for."""
        if self._engine is None or self._built_from != (int8, self._weights()):
            model = cast(Language, self.model)
            packed = pack(model, int8=int8)
            if int8 and packed is model:
                raise ConfigError("int8 is not supported by this kind of model; leave it out")
            self._engine = Engine(packed)
            self._built_from = (int8, self._weights())  # after packing, which moves the storage
        return self._engine

    def _weights(self) -> Weights:
        """Storage, dtype and version counter of every parameter."""
        return [
            (parameter.data_ptr(), parameter.dtype, _version(parameter))
            for parameter in self.model.parameters()
        ]


def _version(parameter: nn.Parameter) -> int:
    return 0 if parameter.is_inference() else parameter._version
