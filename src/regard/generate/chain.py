"""A chain of samplers that ends in a draw, and how one is written on the command line."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from difflib import SequenceMatcher
from functools import reduce
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.config import parse_entry
from regard.errors import ConfigError, RegardError, unknown
from regard.generate.fused_chain import Tail, takes
from regard.generate.sampler_context import RowGenerators, Sampler, SamplerContext
from regard.generate.sampler_orders import arranged
from regard.generate.samplers import SAMPLERS, Temperature, name_of
from regard.generate.samplers.logits_processor import (
    LogitsProcessor,
    PerRow,
    as_stage,
    kind,
    pack,
    rank,
    unrank,
)

DEFAULT_SAMPLERS = ("temperature=0.8", "top_p=0.95")  # where the user names no sampler
NEVER = 2**62  # the length at which a row that is well has failed


def draw(logits: Float[Tensor, "rows vocab"], generators: RowGenerators) -> Int[Tensor, " rows"]:
    r"""Draw one token per row from softmax(logits), with one random number per row.

        the first v  with  P(0) + ... + P(v)  >  u,      u uniform in [0, 1)

    A removed token adds nothing to the sum and so is never the first to pass u.
    """
    u = generators.uniform().unsqueeze(1)
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    # float64 so that no token is too rare for the sum; the Metal backend has none
    reached = weights.cumsum(-1, dtype=u.dtype)
    u = u * reached[:, -1:]
    return torch.searchsorted(reached, u, right=True).squeeze(1).clamp_max(logits.shape[1] - 1)


@dataclass(frozen=True, slots=True)
class StageTrace:
    """What a stage was given and what it left; where they are ranked, whose they are.

    Ranked ones may lack tokens that were removed before.
    """

    stage: LogitsProcessor
    before: Float[Tensor, "rows some"]
    after: Float[Tensor, "rows some"]
    order: Int[Tensor, "rows some"] | None
    vocab: int

    def by_id(self, ranked: Float[Tensor, "rows some"]) -> Float[Tensor, "rows vocab"]:
        """Its logits in the order of ids."""
        return ranked if self.order is None else unrank(ranked, self.order, self.vocab)


@dataclass(frozen=True, slots=True)
class Chain:
    """Samplers in the order they act, then a draw. Without any: the model's own distribution.

    >>> from regard.generate import Temperature, TopK
    >>> Chain((TopK(40), Temperature(0.8)))
    Chain(stages=(TopK(k=40, exact=False), Temperature(value=0.8)))
    >>> print(Chain((TopK(40), Temperature(0.8))))
    top_k=40 → temperature=0.8 → draw
    """

    stages: tuple[Sampler, ...] = ()

    def __post_init__(self) -> None:
        acting = self._acting
        learners = [at for at, stage in enumerate(acting) if stage.learns]
        of_rows = any(isinstance(stage, PerRow) for stage in acting)  # then each row's is checked
        if learners and learners != [len(acting) - 1] and not of_rows:
            raise ConfigError(
                f"{said(acting[learners[0]])} learns from what is drawn, and so must be the last "
                "sampler and the only one that does"
            )

    @classmethod
    def together(cls, chains: Sequence["Chain"], device: torch.device | str = "cpu") -> "Chain":
        """One chain for a batch whose rows each have their own.

        Stages of one kind are run at once, with a setting per row; a row passes by those that
        its own chain lacks. The order within each row's chain is kept.
        """
        rows = [[as_stage(stage) for stage in chain.stages] for chain in chains]
        rows = [[stage for stage in row if not stage.neutral] for row in rows]
        kinds: list[Any] = reduce(_merged, [[kind(stage) for stage in row] for row in rows], [])
        stages = []
        for each in kinds:
            column = [row.pop(0) if row and kind(row[0]) == each else None for row in rows]
            if any(column):
                stages.append(_joined(column, device))
        return cls(tuple(stages))

    @property
    def greedy(self) -> bool:
        """Whether a stage leaves a single token, so that there is nothing to draw."""
        return any(isinstance(stage, Temperature) and stage.greedy for stage in self.stages)

    @property
    def _idle(self) -> bool:
        """Whether its one stage does what the argmax does anyway, and nobody looks on."""
        return self.greedy and len(self.stages) == 1 and type(self) is Chain

    @property
    def _acting(self) -> tuple[LogitsProcessor, ...]:
        return tuple(stage for stage in map(as_stage, self.stages) if not stage.neutral)

    @property
    def tail(self) -> Tail | None:
        """What kernels do at its end, where there are some for it and nobody looks on."""
        return Tail.of(self._acting) if type(self) is Chain else None

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph may hold `pick`, once it was called in that context."""
        return all(as_stage(stage).capturable for stage in self.stages)

    def __call__(
        self, logits: Float[Tensor, "rows vocab"], context: SamplerContext
    ) -> Int[Tensor, " rows"]:
        """The next id of each row; a row with nothing to draw from is an error."""
        if self._idle:
            left = widened(logits)
            if all(map(math.isfinite, left.amax(-1).tolist())):
                return left.argmax(-1)
        ids = self.pick(logits, context)
        self.check(context, lambda row, length: logits[row : row + 1])
        return ids

    def pick(
        self,
        logits: Float[Tensor, "rows vocab"],
        context: SamplerContext,
        decide: Callable[[Tensor], Tensor] | None = None,
    ) -> Int[Tensor, " rows"]:
        """The next id of each row, without waiting for the device.

        Rows that had nothing to draw from are noted, and `check` complains of them. `decide`
        takes the place of the draw and the note: it is given the logits that are left.
        """
        note_used(context)
        tail = self.tail if decide is None and takes(logits) else None
        if tail is not None:
            before = Chain(self._acting[: tail.begin])
            left = before.logits(logits, context) if tail.begin else logits
            return tail.pick(left, context, failures(context))
        left, order, learners = widened(logits), None, []
        for each in () if self._idle and decide is None else self.steps(logits, context):
            left, order = each.after, each.order
            if each.stage.learns:
                learners.append(each)
        left = left if order is None else unrank(left, order, logits.shape[1])
        if decide is None:
            note_failed(left, context)
            ids = left.argmax(-1) if self.greedy else draw(left, context.generators)
        else:
            ids = decide(left)
        for each in learners:
            each.stage.learn(each.by_id(each.before), each.by_id(each.after), ids, context)
        return ids

    def logits(
        self, logits: Float[Tensor, "rows vocab"], context: SamplerContext
    ) -> Float[Tensor, "rows vocab"]:
        """What is drawn from: softmax of these, removed tokens at -inf."""
        left, order = widened(logits), None
        for each in self.steps(logits, context):
            left, order = each.after, each.order
        return left if order is None else unrank(left, order, logits.shape[1])

    def steps(
        self, logits: Float[Tensor, "rows vocab"], context: SamplerContext
    ) -> Iterator[StageTrace]:
        """Go through the stages that are not neutral, sorting when one first asks for an order.

        Tokens then stay ranked, since stages keep an order; removed ones are moved to the end
        where a stage left holes. Only a stage that must know ids puts them back. On a CPU what
        was removed before the sort is left out of it.
        """
        logits, order, holes = widened(logits), None, False
        stages = self._acting
        narrow = logits.device.type == "cpu" and not torch.compiler.is_compiling()
        narrow, vocab = narrow and not any(s.counts_all for s in stages), logits.shape[1]
        for stage in stages:
            if stage.by_id and order is not None:
                logits, order, holes = unrank(logits, order, vocab), None, False
            elif stage.needs_order and order is None:
                logits, order = rank(logits, narrow)
            elif stage.by_rank and order is not None and holes:
                (logits, order), holes = pack(logits, order), False
            call = stage.apply if order is None else stage.ranked
            before, logits = logits, call(logits, context)
            yield StageTrace(stage, before, logits, order, vocab)
            holes = holes or stage.leaves_holes

    def must_fit(self, rows: int) -> None:
        """Refuse a chain made for another number of rows."""
        for stage in self.stages:
            if isinstance(stage, PerRow) and stage.rows != rows:
                raise ConfigError(f"{stage.rows} chains do not match {rows} prompts")

    def check(
        self, context: SamplerContext, logits: Callable[[int, int], Float[Tensor, "rows vocab"]]
    ) -> None:
        """Complain if a row had nothing to draw from: of the model, or of the stage at fault.

        `logits` are those of a row when its text had so many ids. What a row draws behind its
        stop is nobody's concern.
        """
        failed = context.state.get("failed")
        if failed is None:
            return
        for row, length in enumerate(failed.tolist()):
            if length == NEVER or _ended(context, row, length):
                continue
            failed.fill_(NEVER)
            reason = self._reason(logits(row, length), context, row, length)
            raise RegardError(f"row {row} has nothing to draw from: {reason}")

    def _reason(self, logits: Tensor, context: SamplerContext, row: int, length: int) -> str:
        """Why nothing was left of a row, by doing what was done to it once more."""
        best = float(logits.amax())
        if not math.isfinite(best):
            return f"the model's largest logit is {best}"
        rows = torch.tensor([row], device=logits.device)
        own, now = self.select(rows), context.select(rows)
        used, since = now.state["used"], (now.lengths - length - 1).clamp_min(0)
        now.generators.used = used - since * (now.generators.used - used)  # each takes as many
        now.lengths = torch.full_like(now.lengths, length)
        for each in Chain.steps(own, logits, now):
            if not each.after.amax().isfinite():
                return f"nothing is left by {said(each.stage)}"
        return "the samplers removed all"

    def select(self, rows: Int[Tensor, " some"]) -> "Chain":
        """The chain of some rows of a batch."""
        some = (stage.select(rows) if isinstance(stage, PerRow) else stage for stage in self.stages)
        return replace(self, stages=tuple(some))

    def words(self) -> list[str]:
        """The words that `parse_chain` makes this chain from."""
        return [said(stage) for stage in self.stages]

    def __str__(self) -> str:
        return " → ".join([*self.words(), "argmax" if self.greedy else "draw"])


def note_used(context: SamplerContext) -> None:
    """Note how many random numbers there were before a token, to come by the same again."""
    used = context.generators.used
    context.remembered("used", lambda: torch.zeros_like(used)).copy_(used)


def failures(context: SamplerContext) -> Int[Tensor, " rows"]:
    """How long each row's text was when there first was nothing to draw from, or `NEVER`."""
    return context.remembered("failed", lambda: torch.full_like(context.lengths, NEVER))


def note_failed(left: Float[Tensor, "rows vocab"], context: SamplerContext) -> None:
    """Note the rows of which nothing is left, by the length of their text when it first was so."""
    failed = failures(context)
    best = left.amax(-1)
    when = torch.where(best - best == 0, NEVER, context.lengths)  # NaN where it is not finite
    torch.minimum(failed, when, out=failed)


def _ended(context: SamplerContext, row: int, length: int) -> bool:
    """Whether a row had drawn its stop before its text had so many ids."""
    answer = context.history[row, int(context.prompts[row]) : length].tolist()
    return not set(context.stop).isdisjoint(answer)


def widened(logits: Tensor) -> Tensor:
    """Logits in float32 or better."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _merged(one: list[Any], other: list[Any]) -> list[Any]:
    """A list that has both as parts, in their order."""
    result = []
    for same, i, j, k, m in SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
        result += one[i:j] if same == "equal" else one[i:j] + other[k:m]
    return result


def _joined(
    column: Sequence[LogitsProcessor | None], device: torch.device | str
) -> LogitsProcessor:
    """The stages of all rows as one; the stage itself where it is the same in all."""
    first = column[0]
    if first is not None and all(stage == first for stage in column):
        return first
    return PerRow.of(column, device)


def parse_chain(
    words: str | Iterable[str] | None = None,
    order: str | None = None,
    named: Callable[[str, str], list[int]] | None = None,
) -> Chain:
    """Make a chain from words like `top_p=0.9`, which act in the order they are written.

    The value goes to the sampler's first setting; a TOML table names several. Without `words` the
    samplers are `DEFAULT_SAMPLERS`, or those of the named `order`. With the name of
    an `order`, they act in that of another system, which may have defaults of its own. `named`
    gives the ids that a sampler's text stands for, as in `ban=["the"]`.

    >>> parse_chain(["temperature=0.7", "top_k=40"])
    Chain(stages=(Temperature(value=0.7), TopK(k=40, exact=False)))
    >>> parse_chain(["greedy"])
    Chain(stages=(Temperature(value=0.0),))
    >>> print(parse_chain(["temperature=0.7", "top_k=20"], "llama.cpp"))
    top_k={k=20, exact=true} → top_p=0.95 → min_p=0.05 → temperature=0.7 → draw
    """
    if words is None:
        words = DEFAULT_SAMPLERS if order is None else ()
    words = [words] if isinstance(words, str) else words
    samplers = tuple(parse_sampler(word.strip(), named) for word in words)
    return Chain(samplers if order is None else arranged(samplers, order))


def parse_sampler(word: str, named: Callable[[str, str], list[int]] | None = None) -> Sampler:
    """Make one sampler from a word like `top_p=0.9`."""
    if word == "greedy":
        return Temperature(0.0)
    name, equals, _ = word.partition("=")
    if name == "greedy":
        raise ConfigError(f"{word!r}: greedy takes no value")
    if name not in SAMPLERS:
        raise ConfigError(unknown("sampler", name, [*SAMPLERS, "greedy"]))
    if not equals:
        raise ConfigError(f"{word!r} lacks its value; write name=value, as in top_p=0.9")

    def with_ids(table: dict[str, Any]) -> dict[str, Any]:
        if isinstance(table.get("tokens"), str):
            table = {**table, "tokens": [table["tokens"]]}
        lists = {key: each for key, each in table.items() if isinstance(each, list)}
        return table | {key: [id for each in of for id in ids(each)] for key, of in lists.items()}

    def ids(token: Any) -> list[Any]:
        if named is None or not isinstance(token, str):
            return [token]
        found = named(name, token)
        if not found:
            raise ConfigError(f"{name}: no token of this model reads {token!r}")
        return found

    return parse_entry(word, SAMPLERS[name], with_ids)


def said(sampler: Sampler, row: int = 0) -> str:
    """A sampler as the word it is made from: settings other than the default.

    >>> from regard.generate.samplers import TopP
    >>> said(TopP(0.5)), said(TopP(0.5, min_keep=2))
    ('top_p=0.5', 'top_p={p=0.5, min_keep=2}')
    """
    stage: Any = sampler.stage if isinstance(sampler, PerRow) else sampler
    kind_name = name_of(stage)
    if kind_name is None or not is_dataclass(stage):
        return str(stage)
    first, *rest = fields(stage)
    values = {first.name: getattr(stage, first.name)} | {
        each.name: getattr(stage, each.name)
        for each in rest
        if isinstance(getattr(stage, each.name), Tensor)
        or getattr(stage, each.name) != each.default
    }
    texts = {name: _toml(value, row) for name, value in values.items()}
    if len(texts) == 1:
        return f"{kind_name}={texts[first.name]}"
    return f"{kind_name}={{{', '.join(f'{name}={text}' for name, text in texts.items())}}}"


def _toml(value: Any, row: int) -> str:
    if isinstance(value, Tensor):
        return f"{value[row].item():.6g}"
    return json.dumps(value)
