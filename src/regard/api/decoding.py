"""Generation with a run: prompt ids, the chain of samplers, the decode engine."""

from collections.abc import Sequence
from typing import cast

from torch import nn

from regard.accel import Snapshot, decoding_path
from regard.accel.packed_decoder import PackedDecoder
from regard.errors import ConfigError
from regard.generate import Chain, Engine, generate, parse_chain
from regard.generate.decode import detokenize_stream
from regard.generate.stop_text import truncate_at_stop
from regard.models.base import Language
from regard.text import Tokenizer

BATCH = 64  # prompts that are continued together
SMALL_MODEL = 2e6  # parameters up to which one CPU thread decodes as fast as several


def prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a prompt, after the tokenizer's prefix ids; never empty.

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

    A text selects every token with this text, with or without a leading space; the text of `force`
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


def generate_texts(
    model: Language,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    chain: Chain,
    *,
    tokens: int,
    seeds: Sequence[int | None],
    until: Sequence[str] = (),
) -> list[str]:
    """Continue several prompts, `BATCH` at a time, each with its seed, up to any of `until`."""
    texts: list[str] = []
    for start in range(0, len(prompts), BATCH):
        rows, row_seeds = prompts[start : start + BATCH], seeds[start : start + BATCH]
        given = [seed for seed in row_seeds if seed is not None]
        stop, seed = set(tokenizer.stop_ids), given or None
        for prompt, ids in zip(
            rows, generate(model, rows, chain, tokens=tokens, stop=stop, seed=seed), strict=True
        ):
            pieces = detokenize_stream(ids, tokenizer, prompt)
            texts.append("".join(truncate_at_stop(pieces, until)))
    return texts


class EngineCache:
    """Caches the decode engine of a model, until the model changes."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._engine: Engine | None = None
        self._int8 = False
        self._snapshot: Snapshot | None = None

    def engine(self, int8: bool = False) -> Engine:
        """The engine of the fastest decoder, with int8 weights if `int8`.

        While a forward hook is registered, as inside `explain.trace`, it is the model itself.
        """
        if any(module._forward_hooks for module in self.model.modules()):
            if int8:
                raise ConfigError("int8 cannot be combined with trace or forward hooks")
            return Engine(cast(Language, self.model), capture=False)
        unchanged = self._snapshot is not None and self._snapshot.find_change() is None
        if self._engine is None or self._int8 != int8 or not unchanged:
            path = decoding_path(cast(Language, self.model), int8=int8)
            if int8 and path.name == "plain":
                raise ConfigError(
                    f"int8 is not supported by this model: {path.obstacles['packed']}; leave it out"
                )
            self._engine, self._int8 = Engine(path.language), int8
            if isinstance(path.language, PackedDecoder):
                self._snapshot = path.language.snapshot
                path.language.checks_contents = False  # it was done above
            else:
                self._snapshot = Snapshot(self.model)
        return self._engine
