"""Speculative decoding: guess a few tokens cheaply, and let the model judge them all at once."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import one_hot

from regard.errors import ConfigError
from regard.generate.chain import Chain, draw, note_failed
from regard.generate.decode import check_prompts
from regard.generate.sampler_context import SamplerContext, rows_of
from regard.models.base import Language, State
from regard.nn.state import Source

_OTHER = 0x5851F42D4C957F2D  # a row's guesses come from another source of chance than its text


def speculate(
    model: Language,
    prompts: Sequence[Sequence[int]],
    chain: Chain,
    *,
    draft: "Language | PromptLookup",
    ahead: int = 4,
    tokens: int,
    stop: Collection[int] = (),
    seed: int | Sequence[int] | None = None,
    source: Source | None = None,
) -> list[list[int]]:
    r"""Continue every prompt as `generate` does, with fewer passes through the model.

    `draft`, a smaller model or a prompt-lookup in the text itself, guesses up to `ahead` tokens x,
    drawn from Q. One pass gives the model's P at each of them. The first guess is judged by

        keep x with probability min(1, P(x) / Q(x)),  else draw from max(0, P - Q), renormalised

    then the next, up to the first that is not kept; if all are, one more is drawn from P. What
    comes out is distributed as P, whatever Q is; greedy text is the same to the token. P and Q
    are what the chain leaves of each model's distribution.
    Leviathan et al. 2023, Chen et al. 2023.
    """
    answers: list[list[int]] = [[] for _ in prompts]
    for found in _rounds(model, prompts, chain, draft, ahead, tokens, stop, seed, source):
        for answer, ids in zip(answers, found, strict=True):
            answer += ids
    return answers


def stream_speculated(
    model: Language,
    prompt: Sequence[int],
    chain: Chain,
    *,
    draft: "Language | PromptLookup",
    ahead: int = 4,
    tokens: int,
    stop: Collection[int] = (),
    seed: int | None = None,
    source: Source | None = None,
) -> Iterator[int]:
    """Continue one prompt, a few ids at a time: those that `speculate` gives all at once."""
    for (ids,) in _rounds(model, [prompt], chain, draft, ahead, tokens, stop, seed, source):
        yield from ids


@torch.inference_mode()
def _rounds(
    model: Language,
    prompts: Sequence[Sequence[int]],
    chain: Chain,
    draft: "Language | PromptLookup",
    ahead: int,
    tokens: int,
    stop: Collection[int],
    seed: int | Sequence[int] | None,
    source: Source | None,
) -> Iterator[list[list[int]]]:
    """Yield what each pass through the model adds to each prompt."""
    check_prompts(prompts, tokens, source)
    if ahead < 1:
        raise ConfigError(f"ahead={ahead} must be at least 1 token to guess")
    if not prompts:
        return
    chain.must_fit(len(prompts))
    reader = _Reader(model, prompts, max(map(len, prompts)) + tokens + ahead, source)
    device = reader.state.lengths.device
    context = SamplerContext.from_prompts(
        prompts, tokens + ahead, seed=seed, stop=sorted(stop), device=device
    )
    guesser: Draft = draft if isinstance(draft, PromptLookup) else _Smaller(draft, source)
    known = None if isinstance(draft, PromptLookup) else draft.vocab_size
    left = dict.fromkeys(range(len(prompts)), tokens)  # how many ids each may still have
    guesses = Guesses.none(context)  # until the model has shown its vocabulary
    while True:
        logits = reader.read(guesses)
        settled = _judge(logits, guesses, chain, context)
        found: list[list[int]] = [[] for _ in prompts]
        for row, ids in zip(list(left), settled, strict=True):
            ended = ids[-1] in stop
            found[row] = ids[:-1] if ended else ids
            left[row] = 0 if ended else left[row] - len(ids)
        yield found
        going = reader.settle(settled, [at for at, more in enumerate(left.values()) if more])
        if not going:
            return
        if len(going) < len(left):
            left = dict(item for at, item in enumerate(left.items()) if at in going)
            rows = torch.tensor(going, device=device)
            context, chain, guesser = context.select(rows), chain.select(rows), guesser.select(rows)
        if known not in (None, logits.shape[-1]):
            raise ConfigError(
                f"the draft knows {known} ids and the model {logits.shape[-1]}; "
                "both must have the same vocabulary"
            )
        most = min(ahead, reader.room)
        guesses = guesser.guess(context, chain, most) if most else Guesses.none(context)
        guesses = guesses.upto([more - 1 for more in left.values()])


@dataclass(frozen=True, slots=True)
class Guesses:
    """How each row may go on, and what else might have been guessed."""

    ids: Int[Tensor, "rows guesses"]
    counts: Int[Tensor, " rows"]  # how many of a row's ids are guesses
    logits: Float[Tensor, "rows guesses vocab"] | None = None  # of Q; None: nothing else

    @classmethod
    def none(cls, context: SamplerContext) -> "Guesses":
        """Not a single guess for any row."""
        return cls(context.history[:, :0], torch.zeros_like(context.lengths))

    def upto(self, most: list[int]) -> "Guesses":
        """At most so many of each row."""
        bound = torch.tensor(most, device=self.counts.device)
        return replace(self, counts=self.counts.minimum(bound))

    def at(
        self, rows: Int[Tensor, " some"], number: int, vocab: int
    ) -> tuple[Int[Tensor, " some"], Float[Tensor, "some vocab"]]:
        """The guess of this number in some rows, and its Q; -1 and zeros where there is none."""
        dtype = torch.float32 if rows.device.type == "mps" else torch.float64  # as `draw` has it
        if number == self.ids.shape[1]:
            zeros = torch.zeros(len(rows), vocab, dtype=dtype, device=rows.device)
            return torch.full_like(rows, -1), zeros
        ids, real = self.ids[rows, number], number < self.counts[rows]
        if self.logits is None:
            q = one_hot(ids, vocab).to(dtype)
        else:
            q = self.logits[rows, number].to(dtype).softmax(-1)
        return ids.where(real, -1), q * real.unsqueeze(1)


@runtime_checkable
class Draft(Protocol):
    """Whoever guesses."""

    def guess(self, context: SamplerContext, chain: Chain, most: int) -> Guesses:
        """Up to `most` ids for each row of the context."""

    def select(self, rows: Int[Tensor, " some"]) -> "Draft":
        """The same for these rows only."""


@dataclass(frozen=True, slots=True)
class PromptLookup:
    """Guess that a text goes on as it did when it last said the same (Saxena 2023).

    The last `longest` ids are looked for in the text before them; if they are new, one less.
    It costs next to nothing, and pays where an answer quotes its prompt.
    """

    longest: int = 3

    def __post_init__(self) -> None:
        if self.longest < 1:
            raise ConfigError(f"longest={self.longest} must be at least one id to look up")

    def guess(self, context: SamplerContext, chain: Chain, most: int) -> Guesses:
        """What followed the latest place that ends like the text."""
        texts = zip(context.history.tolist(), context.lengths.tolist(), strict=True)
        found = [self._after(text[:length])[:most] for text, length in texts]
        width, device = max(map(len, found)), context.lengths.device
        return Guesses(
            rows_of(found, width).to(device),
            torch.tensor([len(each) for each in found], device=device),
        )

    def _after(self, text: list[int]) -> list[int]:
        for size in range(min(self.longest, len(text) - 1), 0, -1):
            for begin in range(len(text) - size - 1, -1, -1):
                if text[begin : begin + size] == text[-size:]:
                    return text[begin + size :]
        return []

    def select(self, rows: Int[Tensor, " some"]) -> "PromptLookup":
        """It remembers nothing."""
        return self


class _Smaller:
    """Guess what a smaller model would say, drawn through the same chain.

    Its state holds what is settled, and guesses are made on a copy, so that a model that cannot
    be rewound will do. When it is full, it begins again from the newer half of its context.
    """

    def __init__(self, model: Language, source: Source | None) -> None:
        self.model, self.source = model, source
        self.state: State | None = None
        self.begins: Tensor | None = None  # where in each row's text the state begins

    def guess(self, context: SamplerContext, chain: Chain, most: int) -> Guesses:
        """Draw one token after the other from the smaller model."""
        room = self.model.context or context.history.shape[1]
        most = min(most, room - max(1, room // 2))
        if most < 1:
            return Guesses.none(context)
        logits, state = self._take_in(context, room, most)
        every = torch.arange(len(logits), device=logits.device)
        own, state = context.select(every), state.select(every)
        own.generators = replace(own.generators, keys=own.generators.keys ^ _OTHER)
        chain = Chain(chain.stages)  # a trace is one of the text, not of guesses
        ids: list[Tensor] = []
        asked: list[Tensor] = []
        left: list[Tensor] = []

        def decide(logits: Tensor) -> Tensor:
            note_failed(logits, own)
            left.append(logits)
            return draw(logits, own.generators)

        for number in range(most):
            if number:
                scored, state = self.model.step(ids[-1].unsqueeze(1), state)
                logits = scored[:, -1]
            asked.append(logits)
            ids.append(chain.pick(logits, own, decide))
            own.append(ids[-1])
        begun = context.lengths.tolist()
        chain.check(own, lambda row, length: asked[length - begun[row]][row : row + 1])
        counts = torch.full_like(context.lengths, most)
        return Guesses(torch.stack(ids, 1), counts, torch.stack(left, 1))

    def _take_in(self, context: SamplerContext, room: int, most: int) -> tuple[Tensor, State]:
        """Read what was settled since; the logits of what follows."""
        ends, state = context.lengths, self.state
        begins = torch.zeros_like(ends) if self.begins is None else self.begins
        if state is not None:
            new = ends - begins - state.lengths
            if int(state.lengths.max()) + int(new.max()) + most > room:
                state = None
        if state is None:
            begins = begins.where(ends - begins <= room - most, ends - max(1, room // 2))
            state = self.model.start(len(ends), room, self.source)
        first = begins + state.lengths
        counts = ends - first
        where = first.unsqueeze(1) + torch.arange(int(counts.max()), device=ends.device)
        ids = context.history.gather(1, where.clamp_max(context.history.shape[1] - 1))
        scored, self.state = self.model.step(ids, state, counts=counts)
        self.begins = begins
        return scored[:, -1], self.state

    def select(self, rows: Int[Tensor, " some"]) -> "_Smaller":
        """The same for these rows only."""
        some = _Smaller(self.model, self.source and self.source.select(rows))
        if self.state is not None and self.begins is not None:
            some.state, some.begins = self.state.select(rows), self.begins[rows]
            some.state = some.state.rewind(some.state.lengths)  # the longest may have left
        return some


class _Reader:
    """The model with what it has read of each row: all but the last id, which it reads next.

    A full context is handled as `generate` does: a row forgets the older half, or ends.
    """

    def __init__(
        self,
        model: Language,
        prompts: Sequence[Sequence[int]],
        room: int,
        source: Source | None,
    ) -> None:
        self.model, self.source = model, source
        self.limit = room if model.context is None else min(room, model.context)
        self.rows = [list(prompt[-self.limit :]) for prompt in prompts]
        self.state = self._begin()

    @property
    def room(self) -> int:
        """How many guesses can be read beside the rows as they are."""
        return self.limit - max(map(len, self.rows))

    def read(self, guesses: Guesses) -> Float[Tensor, "rows scored vocab"]:
        """The logits after the last id of each row and after each guess."""
        last = torch.tensor([row[-1:] for row in self.rows], device=guesses.ids.device)
        ids, counts = torch.cat([last, guesses.ids], 1), 1 + guesses.counts
        logits, self.state = self.model.step(ids, self.state, counts=counts, every=True)
        return logits

    def settle(self, settled: list[list[int]], going: list[int]) -> list[int]:
        """Keep what was settled and forget the other guesses; which rows of `going` go on."""
        for row, ids in zip(self.rows, settled, strict=True):
            row += ids
        if self.source is not None:
            going = [at for at in going if len(self.rows[at]) <= self.limit]
        device = self.state.lengths.device
        if not going:
            return going
        if len(going) < len(self.rows):
            self.state = self.state.select(torch.tensor(going, device=device))
            self.rows = [self.rows[at] for at in going]
        if any(len(row) > self.limit for row in self.rows):
            keep = max(1, self.limit // 2)
            self.rows = [row[-keep:] if len(row) > self.limit else row for row in self.rows]
            self.state = self._begin()
        else:
            lengths = torch.tensor([len(row) - 1 for row in self.rows], device=device)
            self.state = self.state.rewind(lengths)
        return going

    def _begin(self) -> State:
        state = self.model.start(len(self.rows), self.limit, self.source)
        longest = max(map(len, self.rows)) - 1
        if not longest:
            return state
        device = state.lengths.device
        ids = rows_of([row[:-1] for row in self.rows], longest).to(device)
        counts = torch.tensor([len(row) - 1 for row in self.rows], device=device)
        return self.model.step(ids, state, counts=counts)[1]


def _judge(
    logits: Float[Tensor, "rows scored vocab"],
    guesses: Guesses,
    chain: Chain,
    context: SamplerContext,
) -> list[list[int]]:
    """What each row settles on: the guesses it keeps, and one more id of its own."""
    settled: list[list[int]] = [[] for _ in logits]
    rows = torch.arange(len(logits), device=logits.device)  # those that are not through yet
    for number in range(logits.shape[1]):
        own, some, scored = chain.select(rows), context.select(rows), logits[rows, number]
        guess, q = guesses.at(rows, number, logits.shape[-1])
        ids = own.pick(scored, some, _verdict(guess, q, some))
        own.check(some, partial(_row_of, scored))
        some.append(ids)
        context.put(rows, some)
        kept = []
        for row, token, guessed in zip(rows.tolist(), ids.tolist(), guess.tolist(), strict=True):
            settled[row].append(token)
            kept.append(token == guessed and token not in context.stop)
        if not any(kept):
            break
        rows = rows[torch.tensor(kept, device=rows.device)]
    return settled


def _row_of(logits: Tensor, row: int, length: int) -> Tensor:
    """What `Chain.check` asks for."""
    return logits[row : row + 1]


def _verdict(
    guess: Int[Tensor, " rows"], q: Float[Tensor, "rows vocab"], context: SamplerContext
) -> Callable[[Tensor], Tensor]:
    """How to make ids of P's logits: keep the guess, or draw from what P has more of than Q."""

    def decide(left: Tensor) -> Tensor:
        note_failed(left, context)
        u, at = context.generators.uniform(), guess.clamp_min(0).unsqueeze(1)
        p = left.to(u.dtype).softmax(-1)
        keep = (guess >= 0) & (u * q.gather(1, at).squeeze(1) < p.gather(1, at).squeeze(1))
        rest = (p - q).clamp_min(0)
        rest = rest.where(rest.sum(-1, keepdim=True) > 0, p)  # they differ by rounding only
        return guess.where(keep, draw(rest.log(), context.generators))

    return decide
