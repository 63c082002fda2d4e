"""Autoregressive decoding: `generate` and `stream` continue prompts token by token.

Works with any `Language`. Speculative decoding and searches are in modules of their own.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.errors import ConfigError, ShapeError
from regard.generate.chain import Chain
from regard.generate.decode_loop import CudaGraphLoop, DecodeLoop, EagerLoop, Engine
from regard.generate.sampling_state import SamplingState, pad_rows
from regard.generate.stop_strings import truncate_at_stop
from regard.models.base import Language, State, mark_prompt_as_prefix
from regard.nn.state import Source

MAX_TOKENS = 10_000_000  # their buffers are preallocated


@runtime_checkable
class Detokenizer(Protocol):
    """Turns token ids back into text, as every tokenizer does."""

    def decode(self, ids: list[int]) -> str:
        """The text of these ids; incomplete UTF-8 sequences become U+FFFD."""


def generate(
    model: Language,
    prompts: Sequence[Sequence[int]],
    chain: Chain,
    *,
    tokens: int,
    stop: Collection[int] = (),
    seed: int | Sequence[int] | None = None,
    source: Source | None = None,
) -> list[list[int]]:
    """Continue every prompt by up to `tokens` ids; return the new ids, without the stop id.

    Prompts may differ in length and must not be empty. A row does not depend on the other rows,
    up to rounding of its logits. The model is used in the mode it is in: call `model.eval()`
    first.

    A row that fills the model's context drops the older half and continues from the rest; with a
    `source` it ends there instead, since a translation has an end.
    """
    completions: list[list[int]] = [[] for _ in prompts]
    for ids in _decode(model, prompts, chain, tokens, stop, seed, source):
        for completion, token in zip(completions, ids, strict=True):
            if token is not None:
                completion.append(token)
    return completions


def stream(
    model: Language,
    prompt: Sequence[int],
    chain: Chain,
    *,
    tokens: int,
    stop: Collection[int] = (),
    seed: int | Sequence[int] | None = None,
    source: Source | None = None,
) -> Iterator[int]:
    """Continue one prompt and yield each id as it is sampled: the same ids as `generate`."""
    for (token,) in _decode(model, [prompt], chain, tokens, stop, seed, source):
        if token is not None:
            yield token


def stream_text(
    model: Language,
    tokenizer: Detokenizer,
    prompt: Sequence[int],
    chain: Chain,
    *,
    tokens: int,
    stop: Collection[int] = (),
    seed: int | Sequence[int] | None = None,
    source: Source | None = None,
    stop_strings: Sequence[str] = (),
) -> Iterator[str]:
    """Continue one prompt and yield pieces of text, never an incomplete character.

    The text also ends before the first of `stop_strings`, however they are tokenized.
    """
    ids = stream(model, prompt, chain, tokens=tokens, stop=stop, seed=seed, source=source)
    return truncate_at_stop(detokenize_stream(ids, tokenizer, prompt), stop_strings)


def detokenize_stream(
    ids: Iterable[int], tokenizer: Detokenizer, prompt: Sequence[int]
) -> Iterator[str]:
    """Incremental detokenization: the text that ids add to a prompt, piece by piece."""
    text = IncrementalText(tokenizer, prompt)
    for token in ids:
        if piece := text.append(token):
            yield piece
    if rest := text.end():
        yield rest


class IncrementalText:
    """The text that ids add to a prompt, id by id.

    A piece is the text that the newest ids add to the text before them, so that a space between
    two words is not lost. Ids that end inside a character wait for the next ones.
    """

    def __init__(self, tokenizer: Detokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer, self._ids = tokenizer, list(prompt)
        # decode from `begin`; the text up to `shown` was returned
        self._begin, self._shown = 0, len(self._ids)

    def append(self, token: int) -> str:
        """The text that this id completes; empty inside a character."""
        self._ids.append(token)
        piece = self._rest()
        if piece.endswith("\ufffd"):
            return ""
        if piece:
            self._begin, self._shown = self._shown, len(self._ids)
        return piece

    def end(self) -> str:
        """What is left where the ids end inside a character."""
        return self._rest()

    def _rest(self) -> str:
        decode, ids = self._tokenizer.decode, self._ids
        before = decode(ids[self._begin : self._shown])
        return decode(ids[self._begin :])[len(before) :]


@torch.inference_mode()
def _decode(
    model: Language,
    prompts: Sequence[Sequence[int]],
    chain: Chain,
    tokens: int,
    stop: Collection[int],
    seed: int | Sequence[int] | None,
    source: Source | None,
) -> Iterator[list[int | None]]:
    """Yield the new id of each row, step by step; None for a row that has ended."""
    check_prompts(prompts, tokens, source)
    if not prompts:
        return
    limit = model.context or max(map(len, prompts)) + tokens
    capacity = min(limit, max(map(len, prompts)) + tokens - 1)
    rows = [_Row(number, list(prompt[-limit:])) for number, prompt in enumerate(prompts)]
    chain.check_rows(len(prompts))
    sampling = SamplingState.from_prompts(
        prompts, tokens, seed=seed, stop=sorted(stop), device=model.device
    )
    first = loop = _start_loop(model, chain, rows, capacity, source, sampling)
    used = max(len(row.ids) for row in rows)  # of the capacity; short rows are padded
    decoded, count, shrink = loop.last.unsqueeze(1), 0, False
    try:
        while True:
            steps_of_ids, ahead = decoded.T.tolist(), None  # the host waits for the device here
            loop.raise_if_failed()
            steps = min(loop.tokens_per_sync, capacity - used, tokens - count - len(steps_of_ids))
            if loop.tokens_per_sync > 1 and count and steps > 0 and not shrink:
                # the device decodes the next tokens while the host handles these
                ahead, used = loop.decode(steps), used + steps
            for ids in steps_of_ids:
                count += 1
                new_ids: list[int | None] = [None] * len(prompts)
                for row, token in zip(rows, ids, strict=True):
                    new_ids[row.number] = row.append(token, stop)
                if not any(row.unfinished for row in rows):
                    return
                yield new_ids
            if count == tokens:
                return
            if ahead is not None:
                decoded, shrink = ahead, 2 * sum(row.unfinished for row in rows) <= len(rows)
                continue
            shrink, full = False, used == capacity
            if full and source is not None:
                for row in rows:
                    row.unfinished = row.unfinished and len(row.ids) <= limit
            unfinished = [index for index, row in enumerate(rows) if row.unfinished]
            if not unfinished:
                return
            if 2 * len(unfinished) <= len(rows) or (full and len(unfinished) < len(rows)):
                # few enough rows are left that copying their state pays off
                keep = torch.tensor(unfinished, device=loop.last.device)
                rows = [rows[index] for index in unfinished]
                chain, source = chain.select(keep), source and source.select(keep)
                loop = loop.select(keep, chain)
            if not full:
                steps = min(loop.tokens_per_sync, capacity - used, tokens - count)
                decoded, used = loop.decode(steps), used + steps
                continue
            # A row has filled the context: drop its older half, and prefill all rows again.
            for row in rows:
                if len(row.ids) > limit:
                    del row.ids[: -max(1, limit // 2)]
            used = max(len(row.ids) for row in rows)
            capacity = min(limit, used + tokens - count - 1)
            loop = _start_loop(model, chain, rows, capacity, source, loop.sampling)
            decoded = loop.last.unsqueeze(1)
    finally:
        if isinstance(model, Engine) and isinstance(first, CudaGraphLoop):
            model.loop = first


def _start_loop(
    model: Language,
    chain: Chain,
    rows: Sequence["_Row"],
    capacity: int,
    source: Source | None,
    sampling: SamplingState,
) -> DecodeLoop:
    """Prefill the rows and sample the next id of each; the loop decodes the others."""
    prompt_ids = [row.ids for row in rows]
    if isinstance(model, Engine) and source is None and model.can_capture(chain):
        return model.start_loop(chain, sampling, *pad_prompts(prompt_ids, model.device), capacity)
    logits, state = prefill(model, prompt_ids, capacity, source)
    ids = chain(logits, sampling)
    sampling.append(ids)
    return EagerLoop(model, chain, sampling, state, ids)


@dataclass(slots=True)
class _Row:
    """One text that is being generated."""

    number: int  # index of its prompt
    ids: list[int]  # those that the model's state holds, and the newest
    unfinished: bool = True

    def append(self, token: int, stop: Collection[int]) -> int | None:
        """Append the newest id; return it, or None if the text has ended."""
        self.ids.append(token)
        self.unfinished = self.unfinished and token not in stop
        return token if self.unfinished else None


def prefill(
    model: Language, rows: Sequence[Sequence[int]], capacity: int, source: Source | None
) -> tuple[Float[Tensor, "rows vocab"], State]:
    """Run the model on prompts of different lengths; the logits after each, and the state.

    The state of a Transformer is its KV cache.
    """
    state = mark_prompt_as_prefix(model, model.start(len(rows), capacity, source))
    ids, counts = pad_prompts(rows, state.lengths.device)
    ragged = min(map(len, rows)) < ids.shape[1]
    logits, state = model.step(ids, state, counts=counts if ragged else None)
    return logits[:, -1], state


def pad_prompts(
    rows: Sequence[Sequence[int]], device: torch.device
) -> tuple[Int[Tensor, "rows time"], Int[Tensor, " rows"]]:
    """Prompts of different lengths as one right-padded tensor, and their lengths."""
    ids = pad_rows(rows, max(map(len, rows))).to(device)
    return ids, torch.tensor([len(row) for row in rows], device=device)


def check_prompts(prompts: Sequence[Sequence[int]], tokens: int, source: Source | None) -> None:
    """Raise if the prompts cannot be continued."""
    if not isinstance(tokens, int):
        raise ConfigError(f"tokens={tokens!r} must be an integer")
    if tokens < 1:
        raise ConfigError(f"tokens={tokens} must be at least 1")
    if tokens > MAX_TOKENS:
        raise ConfigError(f"tokens={tokens} must be at most {MAX_TOKENS:,}")
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise ConfigError(
                f"prompt {row} is empty; begin with the tokenizer's start id or with some text"
            )
    if source is not None and len(source.lengths) != len(prompts):
        raise ShapeError(
            f"{len(source.lengths)} sources for {len(prompts)} prompts; give one per prompt"
        )
