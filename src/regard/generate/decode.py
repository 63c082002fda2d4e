"""Autoregressive decoding: `generate` and `stream` continue prompts token by token.

Works with any `Language`. Speculative decoding and searches are in other modules.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.errors import ConfigError, ShapeError
from regard.generate.chain import Chain
from regard.generate.decode_loop import CudaGraphDecoder, CudaGraphLoop, DecodeLoop, EagerLoop
from regard.generate.sampling_state import SamplingState, pad_rows
from regard.generate.stop_strings import truncate_at_stop
from regard.models.base import Language, State, mark_prompt_as_prefix
from regard.nn.state import Source

MAX_TOKENS = 10_000_000  # new ids of a row; buffers for them are preallocated


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
    max_new_tokens: int,
    stop: Collection[int] = (),
    seed: int | Sequence[int] | None = None,
    source: Source | None = None,
) -> list[list[int]]:
    """Continue every prompt by up to `max_new_tokens` ids; return the new ids, without the stop id.

    Prompts may differ in length and must not be empty. A row does not depend on the other rows,
    up to rounding of its logits. The model is used in the mode it is in: call `model.eval()`
    first.

    A row that fills the model's context drops its older half and continues. With a `source`, as in
    translation, the row ends there instead.
    """
    completions: list[list[int]] = [[] for _ in prompts]
    for ids in _decode(model, prompts, chain, max_new_tokens, stop, seed, source):
        for completion, token in zip(completions, ids, strict=True):
            if token is not None:
                completion.append(token)
    return completions


def stream(
    model: Language,
    prompt: Sequence[int],
    chain: Chain,
    *,
    max_new_tokens: int,
    stop: Collection[int] = (),
    seed: int | Sequence[int] | None = None,
    source: Source | None = None,
) -> Iterator[int]:
    """Continue one prompt and yield each id as it is sampled: the same ids as `generate`."""
    for (token,) in _decode(model, [prompt], chain, max_new_tokens, stop, seed, source):
        if token is not None:
            yield token


def detokenize_stream(
    ids: Iterable[int],
    tokenizer: Detokenizer,
    prompt: Sequence[int],
    stop_strings: Sequence[str] = (),
) -> Iterator[str]:
    """Incremental detokenization: yield the text of ids that follow a prompt, piece by piece.

    A piece never ends inside a character. The text ends before the first of `stop_strings`,
    however they are tokenized.
    """
    return truncate_at_stop(_detokenize(ids, tokenizer, prompt), stop_strings)


def _detokenize(ids: Iterable[int], tokenizer: Detokenizer, prompt: Sequence[int]) -> Iterator[str]:
    text = IncrementalDetokenizer(tokenizer, prompt)
    for token in ids:
        if piece := text.append(token):
            yield piece
    if remaining := text.end():
        yield remaining


class IncrementalDetokenizer:
    """Incremental detokenization: converts the ids that follow a prompt to text, id by id.

    A piece is the text that the newest ids add to the text before them, so that a space between
    two words is not lost. While the newest ids end inside a character, the piece is empty.
    """

    def __init__(self, tokenizer: Detokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer, self._ids = tokenizer, list(prompt)
        # decode from `prefix_offset` on; the text of ids before `read_offset` was returned
        self._prefix_offset, self._read_offset = 0, len(self._ids)

    def append(self, token: int) -> str:
        """Append an id; return the new text, empty if it ends inside a character."""
        self._ids.append(token)
        piece = self._new_text()
        if piece.endswith("\ufffd"):
            return ""
        if piece:
            self._prefix_offset, self._read_offset = self._read_offset, len(self._ids)
        return piece

    def end(self) -> str:
        """The remaining text, if the last ids end inside a character."""
        return self._new_text()

    def _new_text(self) -> str:
        decode, ids = self._tokenizer.decode, self._ids
        before = decode(ids[self._prefix_offset : self._read_offset])
        return decode(ids[self._prefix_offset :])[len(before) :]


@torch.inference_mode()
def _decode(
    model: Language,
    prompts: Sequence[Sequence[int]],
    chain: Chain,
    max_new_tokens: int,
    stop: Collection[int],
    seed: int | Sequence[int] | None,
    source: Source | None,
) -> Iterator[list[int | None]]:
    """Yield the new id of each row, step by step; None for a row that has ended."""
    check_prompts(prompts, max_new_tokens, source)
    if not prompts:
        return
    limit = model.context or max(map(len, prompts)) + max_new_tokens
    capacity = min(limit, max(map(len, prompts)) + max_new_tokens - 1)
    rows = [_Row(index, list(prompt[-limit:])) for index, prompt in enumerate(prompts)]
    chain.check_rows(len(prompts))
    sampling = SamplingState.from_prompts(
        prompts, max_new_tokens, seed=seed, stop=sorted(stop), device=model.device
    )
    first_loop = loop = _start_loop(model, chain, rows, capacity, source, sampling)
    used = max(len(row.ids) for row in rows)  # positions in use; short rows are padded
    decoded, generated, shrink = loop.last.unsqueeze(1), 0, False
    try:
        while True:
            ids_by_step, ahead = decoded.T.tolist(), None  # the host waits for the device here
            loop.raise_if_failed()
            steps = min(
                loop.tokens_per_sync, capacity - used, max_new_tokens - generated - len(ids_by_step)
            )
            if loop.tokens_per_sync > 1 and generated and steps > 0 and not shrink:
                # the device decodes the next tokens while the host handles these
                ahead, used = loop.decode(steps), used + steps
            for ids in ids_by_step:
                generated += 1
                new_ids: list[int | None] = [None] * len(prompts)
                for row, token in zip(rows, ids, strict=True):
                    new_ids[row.index] = row.append(token, stop)
                if not any(row.unfinished for row in rows):
                    return
                yield new_ids
            if generated == max_new_tokens:
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
                steps = min(loop.tokens_per_sync, capacity - used, max_new_tokens - generated)
                decoded, used = loop.decode(steps), used + steps
                continue
            # A row has filled the context: drop its older half, and prefill all rows again.
            for row in rows:
                if len(row.ids) > limit:
                    del row.ids[: -max(1, limit // 2)]
            used = max(len(row.ids) for row in rows)
            capacity = min(limit, used + max_new_tokens - generated - 1)
            loop = _start_loop(model, chain, rows, capacity, source, loop.sampling)
            decoded = loop.last.unsqueeze(1)
    finally:
        if isinstance(model, CudaGraphDecoder) and isinstance(first_loop, CudaGraphLoop):
            model.loop = first_loop


def _start_loop(
    model: Language,
    chain: Chain,
    rows: Sequence["_Row"],
    capacity: int,
    source: Source | None,
    sampling: SamplingState,
) -> DecodeLoop:
    """Prefill the rows and sample the next id of each; return the loop for the ids after it."""
    prompt_ids = [row.ids for row in rows]
    if isinstance(model, CudaGraphDecoder) and model.can_capture(chain):
        ids, counts = pad_prompts(prompt_ids, model.device)
        return model.start_loop(chain, sampling, ids, counts, capacity, source)
    logits, state = prefill(model, prompt_ids, capacity, source)
    ids = chain(logits, sampling)
    sampling.append(ids)
    return EagerLoop(model, chain, sampling, state, ids)


@dataclass(slots=True)
class _Row:
    """One sequence that is being generated."""

    index: int  # the index of its prompt
    ids: list[int]  # the ids in the model's state, and the newest id
    unfinished: bool = True

    def append(self, token: int, stop: Collection[int]) -> int | None:
        """Append the newest id; return it, or None if the sequence has ended."""
        self.ids.append(token)
        self.unfinished = self.unfinished and token not in stop
        return token if self.unfinished else None


def prefill(
    model: Language, rows: Sequence[Sequence[int]], capacity: int, source: Source | None
) -> tuple[Float[Tensor, "rows vocab"], State]:
    """Run the model on prompts of different lengths; return the logits after each, and the state.

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


def check_prompts(
    prompts: Sequence[Sequence[int]], max_new_tokens: int, source: Source | None
) -> None:
    """Raise if the prompts cannot be continued."""
    if not isinstance(max_new_tokens, int):
        raise ConfigError(f"max_new_tokens={max_new_tokens!r} must be an integer")
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={max_new_tokens} must be at least 1")
    if max_new_tokens > MAX_TOKENS:
        raise ConfigError(f"max_new_tokens={max_new_tokens} must be at most {MAX_TOKENS:,}")
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise ConfigError(
                f"prompt {row} is empty; begin with the tokenizer's BOS id or with some text"
            )
    if source is not None and len(source.lengths) != len(prompts):
        raise ShapeError(
            f"{len(source.lengths)} sources for {len(prompts)} prompts; give one per prompt"
        )
