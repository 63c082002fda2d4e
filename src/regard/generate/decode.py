"""Continue texts token by token, with any model that can be asked what comes next."""

from collections.abc import Collection, Iterator, Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from regard.errors import ConfigError, ShapeError
from regard.generate.chain import Chain
from regard.generate.context import Context
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
    seed: int | None = None,
    source: Source | None = None,
) -> list[list[int]]:
    """Continue every prompt by up to `tokens` ids; only the new ids come back, without the stop.

    Prompts may differ in length. What a row becomes does not depend on the other rows, up to
    the last bits of its logits. The model is used in the mode it is in: `model.eval()` first.

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
    seed: int | None = None,
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
    seed: int | None = None,
    source: Source | None = None,
) -> Iterator[str]:
    """Continue one prompt, each piece of text as it comes, never half a character.

    A piece is what the newest ids add to the text before them, so that a space between two
    words is not lost. Ids that end inside a character wait for the next ones.
    """
    ids = list(prompt)
    begin, shown = 0, len(ids)  # decode from `begin`; the text up to `shown` is out
    for token in stream(model, prompt, chain, tokens=tokens, stop=stop, seed=seed, source=source):
        ids.append(token)
        before, text = tokenizer.decode(ids[begin:shown]), tokenizer.decode(ids[begin:])
        if len(text) > len(before) and not text.endswith("\ufffd"):
            yield text[len(before) :]
            begin, shown = shown, len(ids)
    rest = tokenizer.decode(ids[begin:])[len(tokenizer.decode(ids[begin:shown])) :]
    if rest:  # it ends inside a character
        yield rest


@torch.inference_mode()
def _decode(
    model: Language,
    prompts: Sequence[Sequence[int]],
    chain: Chain,
    tokens: int,
    stop: Collection[int],
    seed: int | None,
    source: Source | None,
) -> Iterator[list[int | None]]:
    """Yield the new id of each row, step by step; None for a row that has ended."""
    check_prompts(prompts, tokens, source)
    if not prompts:
        return
    limit = model.context or max(map(len, prompts)) + tokens
    capacity = min(limit, max(map(len, prompts)) + tokens - 1)
    windows = [list(prompt[-limit:]) for prompt in prompts]  # the ids that the state holds
    live = [True] * len(prompts)
    logits, state = prefill(model, windows, capacity, source)
    context = Context.begin(prompts, tokens, seed=seed, device=logits.device)
    used = max(map(len, windows))  # of the state's capacity; rows that are short pad it out
    for number in range(1, tokens + 1):
        drawn = chain(logits, context)
        ids = drawn.tolist()
        live = [alive and token not in stop for alive, token in zip(live, ids, strict=True)]
        if not any(live):
            return
        yield [token if alive else None for token, alive in zip(ids, live, strict=True)]
        if number == tokens:
            return
        context.append(drawn)
        for window, token in zip(windows, ids, strict=True):
            window.append(token)
        if used < capacity:
            scored, state = model.step(drawn.unsqueeze(1), state)
            logits, used = scored[:, -1], used + 1
            continue
        # Some row is full: make room in it, and begin again from what each row still holds.
        full = [len(window) > limit for window in windows]
        if source is not None:
            live = [alive and not over for alive, over in zip(live, full, strict=True)]
            if not any(live):
                return
        keep = max(1, limit // 2)
        pairs = zip(windows, full, strict=True)
        windows = [window[-keep:] if over else window for window, over in pairs]
        used = max(map(len, windows))
        capacity = min(limit, used + tokens - number - 1)
        logits, state = prefill(model, windows, capacity, source)


def prefill(
    model: Language, rows: Sequence[Sequence[int]], capacity: int, source: Source | None
) -> tuple[Float[Tensor, "rows vocab"], State]:
    """Take in rows of different lengths at once; the logits of what follows each."""
    state = model.start(len(rows), capacity, source)
    device = state.lengths.device
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
    ragged = any(len(row) < longest for row in rows)
    counts = torch.tensor([len(row) for row in rows], device=device) if ragged else None
    logits, state = model.step(ids, state, counts=counts)
    return logits[:, -1], state


def check_prompts(prompts: Sequence[Sequence[int]], tokens: int, source: Source | None) -> None:
    """Refuse what cannot be continued."""
    if tokens < 1:
        raise ConfigError(f"tokens={tokens} must be at least 1")
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise ConfigError(
                f"prompt {row} is empty; begin with the tokenizer's start id or with some text"
            )
    if source is not None and len(source.ids) != len(prompts):
        raise ShapeError(f"{len(source.ids)} sources do not match {len(prompts)} prompts")
