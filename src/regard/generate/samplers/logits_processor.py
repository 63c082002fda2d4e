"""What the library's own samplers share: a neutral value, and the order of tokens they need.

A sampler need not be a `LogitsProcessor`: any `Sampler` is a link of a chain. A stage also says how it may
be run, so that a chain sorts once at most, never waits for the device and treats every row of a
batch by settings of its own.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import Field, dataclass, fields, is_dataclass
from typing import Any, ClassVar, TypeGuard

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.errors import ConfigError
from regard.generate.sampler_context import Sampler, SamplerContext

STATIC = {"static": True}  # of a setting that rows cannot each have for themselves


class LogitsProcessor:
    """A sampler whose formula does not care whether tokens come by id or ranked.

    `apply` is the formula. Where a setting is a number, `apply` must also work with one per row,
    as a tensor (rows, 1): a batch in which each row has its own is run that way.
    """

    __slots__ = ()

    off: ClassVar[Mapping[str, Any]] = {}  # the settings at which it is neutral
    by_id: ClassVar[bool] = False  # it must know which token is which
    needs_order: ClassVar[bool] = False  # it must be given tokens from likely to unlikely
    leaves_holes: ClassVar[bool] = False  # it may remove a token and keep an unlikelier one
    counts_all: ClassVar[bool] = False  # it asks how large the vocabulary is
    capturable: ClassVar[bool] = True  # nothing in it waits for the device or changes shape
    learns: ClassVar[bool] = False  # it wants to know what was drawn

    @property
    def by_rank(self) -> bool:
        """Whether it has a formula of its own for ranked tokens, which counts places."""
        return type(self).ranked is not LogitsProcessor.ranked

    @property
    def neutral(self) -> bool:
        """Whether it changes nothing, and so is skipped."""
        settings = self.off.items()
        return bool(settings) and all(getattr(self, name) == value for name, value in settings)

    def __call__(
        self, logits: Float[Tensor, "rows vocab"], context: SamplerContext | None = None
    ) -> Float[Tensor, "rows vocab"]:
        """Reshape or narrow what may be drawn; the very same logits where it is neutral."""
        return logits if self.neutral else self.apply(logits, context)

    def apply(self, logits: Tensor, context: SamplerContext | None) -> Tensor:
        """The formula, tokens in any order."""
        raise NotImplementedError

    def ranked(self, logits: Tensor, context: SamplerContext | None) -> Tensor:
        """The formula on tokens from likely to unlikely, removed ones last."""
        return self.apply(logits, context)

    def learn(
        self,
        before: Float[Tensor, "rows vocab"],
        after: Float[Tensor, "rows vocab"],
        ids: Int[Tensor, " rows"],
        context: SamplerContext,
    ) -> None:
        """Take note of what was drawn; most stages have no memory."""


class Ranking(LogitsProcessor):
    """A stage that looks at tokens from likely to unlikely: it has `ranked` only."""

    __slots__ = ()

    needs_order: ClassVar[bool] = True

    def apply(self, logits: Tensor, context: SamplerContext | None) -> Tensor:
        """Sort, look, and put back."""
        ranked, order = rank(logits)
        return unrank(self.ranked(ranked, context), order, logits.shape[-1])


def rank(logits: Tensor, narrow: bool = False) -> tuple[Tensor, Tensor]:
    """Logits from large to small, equal ones by their id, and the ids they belong to.

    `narrow` leaves out what was removed before: much less to sort, but the width depends on the
    numbers, for which a GPU would have to be waited for.
    """
    width = int((logits > -torch.inf).sum(-1).amax()) if narrow else logits.shape[-1]
    if width > logits.shape[-1] // 2:
        ranked, order = logits.sort(dim=-1, descending=True, stable=True)
        return ranked, order
    ids = torch.arange(logits.shape[-1], device=logits.device).expand_as(logits)
    left, ids = (each[:, : max(width, 1)] for each in pack(logits, ids))
    ranked, order = left.sort(dim=-1, descending=True, stable=True)
    return ranked, ids.gather(-1, order)


def unrank(ranked: Tensor, order: Tensor, vocab: int) -> Tensor:
    """Ranked logits back in the order of ids; what was left out is removed."""
    return ranked.new_full((len(ranked), vocab), -torch.inf).scatter_(-1, order, ranked)


def pack(ranked: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Move removed tokens behind the others, which stay in their order: no second sort."""
    alive = ranked > -torch.inf
    after = alive.cumsum(-1)
    place = torch.where(alive, after - 1, after[..., -1:] + (~alive).cumsum(-1) - 1)
    moved = torch.empty_like(ranked).scatter_(-1, place, ranked)
    return moved, torch.empty_like(order).scatter_(-1, place, order)


def cut(logits: Tensor, keep: Tensor, least: int = 1) -> Tensor:
    """Remove all but `keep`; the `least` largest logits stay in any case."""
    if least > 1:
        last = logits.topk(min(least, logits.shape[-1])).values[..., -1:]
        keep = keep | (logits >= last)
    return torch.where(keep, logits, -torch.inf)


def entropy(logits: Tensor) -> Tensor:
    """-sum_v P(v) ln P(v) of each row, in nats; 0 ln 0 is 0."""
    return torch.special.entr(logits.softmax(-1)).sum(-1, keepdim=True)


def by_row(setting: object) -> TypeGuard[Tensor]:
    """Whether a number is one per row."""
    return isinstance(setting, Tensor)


def needed(context: SamplerContext | None, name: str) -> SamplerContext:
    """The context, for a sampler that cannot do without."""
    if context is None:
        raise ConfigError(f"{name} looks at the text or at chance; call it with a SamplerContext")
    return context


@dataclass(frozen=True, slots=True)
class ExternalSampler(LogitsProcessor):
    """A sampler that is no `LogitsProcessor`, of which nothing is known."""

    sampler: Sampler

    by_id = True
    capturable = False

    def apply(self, logits: Tensor, context: SamplerContext | None) -> Tensor:
        """Whatever it does."""
        return self.sampler(logits, context)


def as_stage(sampler: Sampler) -> LogitsProcessor:
    """A sampler as a stage."""
    return sampler if isinstance(sampler, LogitsProcessor) else ExternalSampler(sampler)


@dataclass(frozen=True, slots=True)
class PerRow(LogitsProcessor):
    """One stage of a batch whose rows have settings of their own, or do without it."""

    stage: LogitsProcessor  # its numbers are tensors (rows, 1)
    where: Bool[Tensor, "rows 1"] | None  # the rows it acts on; None: all

    @classmethod
    def of(cls, stages: Sequence[LogitsProcessor | None], device: torch.device | str) -> "PerRow":
        """The stages of all rows as one; None for a row that does without."""
        some = next(stage for stage in stages if stage is not None)
        settings = {}
        for each in _numbers(some):
            rest = some.off.get(each.name, getattr(some, each.name))
            values = [rest if s is None else getattr(s, each.name) for s in stages]
            dtype = torch.float32 if each.type is float else torch.long
            settings[each.name] = torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)
        acts = torch.tensor([stage is not None for stage in stages], device=device).unsqueeze(1)
        return cls(_with(some, settings), None if None not in stages else acts)

    @property
    def rows(self) -> int:
        """How many rows it has settings for."""
        if self.where is not None:
            return len(self.where)
        return len(getattr(self.stage, _numbers(self.stage)[0].name))

    @property
    def by_id(self) -> bool:  # type: ignore[override]
        """As of its stage."""
        return self.stage.by_id

    @property
    def capturable(self) -> bool:  # type: ignore[override]
        """As of its stage."""
        return self.stage.capturable

    @property
    def counts_all(self) -> bool:  # type: ignore[override]
        """As of its stage."""
        return self.stage.counts_all

    @property
    def learns(self) -> bool:  # type: ignore[override]
        """As of its stage."""
        return self.stage.learns

    @property
    def by_rank(self) -> bool:
        """As of its stage."""
        return self.stage.by_rank

    @property
    def needs_order(self) -> bool:  # type: ignore[override]
        """Whether its stage has a formula for ranked tokens: only that takes a tensor."""
        return self.by_rank

    @property
    def leaves_holes(self) -> bool:  # type: ignore[override]
        """As of its stage."""
        return self.stage.leaves_holes

    def apply(self, logits: Tensor, context: SamplerContext | None) -> Tensor:
        """The formula in the rows that want it."""
        return self._chosen(self.stage.apply(logits, context), logits)

    def ranked(self, logits: Tensor, context: SamplerContext | None) -> Tensor:
        """The same on ranked tokens."""
        return self._chosen(self.stage.ranked(logits, context), logits)

    def _chosen(self, changed: Tensor, logits: Tensor) -> Tensor:
        return changed if self.where is None else torch.where(self.where, changed, logits)

    def learn(self, before: Tensor, after: Tensor, ids: Tensor, context: SamplerContext) -> None:
        """Take note of what was drawn."""
        self.stage.learn(before, after, ids, context)

    def select(self, rows: Int[Tensor, " some"]) -> "PerRow":
        """The same stage of some rows."""
        numbers = {each.name: getattr(self.stage, each.name)[rows] for each in _numbers(self.stage)}
        return PerRow(_with(self.stage, numbers), None if self.where is None else self.where[rows])


def kind(stage: LogitsProcessor) -> Hashable:
    """What rows must agree in to share a stage: all but its numbers."""
    numbers = [each.name for each in _numbers(stage)]
    rest = (each.name for each in _settings(stage) if each.name not in numbers)
    return type(stage), *(getattr(stage, name) for name in rest)


def _settings(stage: LogitsProcessor) -> "tuple[Field[Any], ...]":
    return fields(stage) if is_dataclass(stage) else ()


def _numbers(stage: LogitsProcessor) -> "list[Field[Any]]":
    numeric = (each for each in _settings(stage) if each.type in (int, float))
    return [each for each in numeric if not each.metadata.get("static")]


def _with(stage: LogitsProcessor, settings: Mapping[str, Tensor]) -> LogitsProcessor:
    """The same stage with tensors for numbers; each was checked when it was a number."""
    copy = object.__new__(type(stage))
    for each in _settings(stage):
        value = settings.get(each.name, getattr(stage, each.name))
        object.__setattr__(copy, each.name, value)
    return copy
