"""Continue texts token by token, with any model that can be asked what comes next."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.errors import ConfigError, ShapeError
from regard.generate.chain import Chain
from regard.generate.decode_loop import CudaGraphLoop, DecodeLoop, EagerLoop, Engine
from regard.generate.sampler_context import SamplerContext, rows_of
from regard.generate.stop_text import until
from regard.models.base import Language, State
from regard.nn.state import Source


@runtime_checkable
class Decoder(Protocol):
    """Whatever turns ids back into text."""

    def decode(self, ids: list[int]) -> str:
        """The text of these ids; bytes that are no whole character become U+FFFD."""


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
    """Continue every prompt by up to `tokens` ids; only the new ids come back, without the stop.

    Prompts may differ in length; an empty one is an error, since nothing says what begins a
    text. What a row becomes does not depend on the other rows, up to the last bits of its
    logits. The model is used in the mode it is in: `model.eval()` first.

    A row that has filled the model's context forgets the older half of it and goes on from the
    rest; with a `source` it ends there instead, since a translation is not an endless text.
    """
    answers: list[list[int]] = [[] for _ in prompts]
    for ids in _decode(model, prompts, chain, tokens, stop, seed, source):
        for answer, token in zip(answers, ids, strict=True):
            if token is not None:
                answer.append(token)
    return answers


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
    """Continue one prompt, each id as it comes: the ids that `generate` gives all at once."""
    for (token,) in _decode(model, [prompt], chain, tokens, stop, seed, source):
        if token is not None:
            yield token


def stream_text(
    model: Language,
    tokenizer: Decoder,
    prompt: Sequence[int],
    chain: Chain,
    *,
    tokens: int,
    stop: Collection[int] = (),
    seed: int | Sequence[int] | None = None,
    source: Source | None = None,
    stop_texts: Sequence[str] = (),
) -> Iterator[str]:
    """Continue one prompt, each piece of text as it comes, never half a character.

    The text also ends before the first of `stop_texts`, wherever its tokens are cut.
    """
    ids = stream(model, prompt, chain, tokens=tokens, stop=stop, seed=seed, source=source)
    return until(text_of(ids, tokenizer, prompt), stop_texts)


def text_of(ids: Iterable[int], tokenizer: Decoder, prompt: Sequence[int]) -> Iterator[str]:
    """The text that ids add to a prompt, piece by piece as they come.

    A piece is what the newest ids add to the text before them, so that a space between two
    words is not lost. Ids that end inside a character wait for the next ones.
    """
    all_ids = list(prompt)
    begin, shown = 0, len(all_ids)  # decode from `begin`; the text up to `shown` is out
    for token in ids:
        all_ids.append(token)
        before, text = tokenizer.decode(all_ids[begin:shown]), tokenizer.decode(all_ids[begin:])
        if len(text) > len(before) and not text.endswith("\ufffd"):
            yield text[len(before) :]
            begin, shown = shown, len(all_ids)
    rest = tokenizer.decode(all_ids[begin:])[len(tokenizer.decode(all_ids[begin:shown])) :]
    if rest:  # it ends inside a character
        yield rest


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
    chain.must_fit(len(prompts))

    def begun(device: torch.device) -> SamplerContext:
        return SamplerContext.from_prompts(
            prompts, tokens, seed=seed, stop=sorted(stop), device=device
        )

    first = loop = _begin(model, chain, rows, capacity, source, begun)
    used = max(len(row.window) for row in rows)  # of the capacity; short rows pad it out
    written, number, leaving = loop.last.unsqueeze(1), 0, False
    try:
        while True:
            arrived, ahead = written.T.tolist(), None
            loop.check()
            count = min(loop.block, capacity - used, tokens - number - len(arrived))
            if loop.block > 1 and number and count > 0 and not leaving:  # while the host looks
                ahead, used = loop.decode(count), used + count
            for ids in arrived:
                number += 1
                found: list[int | None] = [None] * len(prompts)
                for row, token in zip(rows, ids, strict=True):
                    found[row.number] = row.take(token, stop)
                if not any(row.live for row in rows):
                    return
                yield found
            if number == tokens:
                return
            if ahead is not None:
                written, leaving = ahead, 2 * sum(row.live for row in rows) <= len(rows)
                continue
            leaving, full = False, used == capacity
            if full and source is not None:
                for row in rows:
                    row.live = row.live and len(row.window) <= limit
            left = [place for place, row in enumerate(rows) if row.live]
            if not left:
                return
            if 2 * len(left) <= len(rows) or (full and len(left) < len(rows)):  # worth a copy
                keep = torch.tensor(left, device=loop.last.device)
                rows = [rows[place] for place in left]
                chain, source = chain.select(keep), source and source.select(keep)
                loop = loop.select(keep, chain)
            if not full:
                count = min(loop.block, capacity - used, tokens - number)
                written, used = loop.decode(count), used + count
                continue
            # Some row is full: make room in it, and begin again from what each row still holds.
            for row in rows:
                if len(row.window) > limit:
                    del row.window[: -max(1, limit // 2)]
            used = max(len(row.window) for row in rows)
            capacity = min(limit, used + tokens - number - 1)
            loop = _begin(model, chain, rows, capacity, source, _going_on(loop.context))
            written = loop.last.unsqueeze(1)
    finally:
        if isinstance(model, Engine) and isinstance(first, CudaGraphLoop):
            model.loop = first


def _begin(
    model: Language,
    chain: Chain,
    rows: Sequence["_Row"],
    capacity: int,
    source: Source | None,
    context_on: Callable[[torch.device], SamplerContext],
) -> DecodeLoop:
    """Read the rows and draw the id that follows each; the loop writes the others."""
    windows = [row.window for row in rows]
    if isinstance(model, Engine) and source is None and model.records(chain):
        context = context_on(model.device)
        return model.begin(chain, context, *padded(windows, model.device), capacity)
    logits, state = prefill(model, windows, capacity, source)
    context = context_on(logits.device)
    drawn = chain(logits, context)
    context.append(drawn)
    return EagerLoop(model, chain, context, state, drawn)


def _going_on(context: SamplerContext) -> Callable[[torch.device], SamplerContext]:
    """The same context, wherever it is."""
    return lambda device: context


@dataclass(slots=True)
class _Row:
    """One text that is being written."""

    number: int
    window: list[int]  # the ids that the state holds, and the newest
    live: bool = True

    def take(self, token: int, stop: Collection[int]) -> int | None:
        """Note the newest id, and give it back while the text has not ended."""
        self.window.append(token)
        self.live = self.live and token not in stop
        return token if self.live else None


def prefill(
    model: Language, rows: Sequence[Sequence[int]], capacity: int, source: Source | None
) -> tuple[Float[Tensor, "rows vocab"], State]:
    """Take in rows of different lengths at once; the logits of what follows each."""
    state = model.start(len(rows), capacity, source)
    ids, counts = padded(rows, state.lengths.device)
    ragged = min(map(len, rows)) < ids.shape[1]
    logits, state = model.step(ids, state, counts=counts if ragged else None)
    return logits[:, -1], state


def padded(
    rows: Sequence[Sequence[int]], device: torch.device
) -> tuple[Int[Tensor, "rows time"], Int[Tensor, " rows"]]:
    """Rows of different lengths as one tensor, and how many ids of each are real."""
    ids = rows_of(rows, max(map(len, rows))).to(device)
    return ids, torch.tensor([len(row) for row in rows], device=device)


def check_prompts(prompts: Sequence[Sequence[int]], tokens: int, source: Source | None) -> None:
    """Refuse what cannot be continued."""
    if not isinstance(tokens, int):
        raise ConfigError(f"tokens={tokens!r} must be a whole number")
    if tokens < 1:
        raise ConfigError(f"tokens={tokens} must be at least 1")
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise ConfigError(
                f"prompt {row} is empty; begin with the tokenizer's start id or with some text"
            )
    if source is not None and len(source.ids) != len(prompts):
        raise ShapeError(f"{len(source.ids)} sources do not match {len(prompts)} prompts")
