"""The base class of the library's samplers: a logits processor that a `Chain` can run fast.

A sampler need not be a `LogitsProcessor`: any callable that fits the `Sampler` protocol can be a
sampler of a chain. A `LogitsProcessor` also declares its requirements, so that a chain sorts the
logits at most once, runs without host synchronization, and applies different settings to different
rows of a batch.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, ClassVar, Protocol, TypeGuard, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.errors import ConfigError
from regard.generate.sampling_state import SamplingState


@runtime_checkable
class Sampler(Protocol):
    """One sampler of a chain: maps logits to logits and sets those of removed tokens to -inf.

    A sampler that is off returns its argument unchanged. `sampling` may be None for samplers
    that use the logits only.
    """

    def __call__(
        self, logits: Float[Tensor, "rows vocab"], sampling: SamplingState | None = None
    ) -> Float[Tensor, "rows vocab"]:
        """Reshape or truncate the distribution."""


def setting(
    default: Any, *, off: Any = MISSING, per_row: bool = True, kw_only: bool = False
) -> Any:
    """A dataclass field that is a setting of a sampler.

    `off` is the value that switches the sampler off; where several settings have an `off`, the
    sampler is off if all of them have that value. `per_row=False`: all rows of a batch must share
    the value.
    """
    metadata = {"per_row": per_row} | ({} if off is MISSING else {"off": off})
    return field(default=default, kw_only=kw_only, metadata=metadata)


class LogitsProcessor:
    """A sampler whose formula works on logits in token-id order and on sorted logits.

    `process` is the formula. Where a setting is a number, `process` must also work with a tensor
    (rows, 1) of numbers: that is how a batch runs in which rows have different settings.
    """

    __slots__ = ()

    needs_ids: ClassVar[bool] = False  # it needs logits in token-id order
    needs_sorted: ClassVar[bool] = False  # it needs logits in descending order
    may_leave_gaps: ClassVar[bool] = False  # it may remove a token and keep a less likely one
    needs_full_vocab: ClassVar[bool] = False  # its formula depends on the vocabulary's size
    capturable: ClassVar[bool] = True  # a CUDA graph may capture it: no sync, static shapes
    stateful: ClassVar[bool] = False  # it updates state from the id that was sampled

    @property
    def has_sorted_formula(self) -> bool:
        """Whether it overrides `process_sorted`."""
        return type(self).process_sorted is not LogitsProcessor.process_sorted

    @classmethod
    def off_settings(cls) -> dict[str, Any]:
        """The settings that switch the sampler off, from its fields' metadata."""
        return _off_settings(cls)  # type: ignore[arg-type]  # a class is hashable

    @property
    def is_off(self) -> bool:
        """Whether its settings switch it off; a chain then skips it."""
        settings = self.off_settings().items()
        return bool(settings) and all(getattr(self, name) == value for name, value in settings)

    def __call__(
        self, logits: Float[Tensor, "rows vocab"], sampling: SamplingState | None = None
    ) -> Float[Tensor, "rows vocab"]:
        """Reshape or truncate the distribution; return `logits` itself if it is off."""
        return logits if self.is_off else self.process(logits, sampling)

    def process(self, logits: Tensor, sampling: SamplingState | None) -> Tensor:
        """The formula, for tokens in any order."""
        raise NotImplementedError

    def process_sorted(self, logits: Tensor, sampling: SamplingState | None) -> Tensor:
        """The formula on logits in descending order, with removed tokens last."""
        return self.process(logits, sampling)

    def update_state(
        self,
        before: Float[Tensor, "rows vocab"],
        after: Float[Tensor, "rows vocab"],
        ids: Int[Tensor, " rows"],
        sampling: SamplingState,
    ) -> None:
        """Update the state from the sampled ids; only stateful samplers override it."""


class SortedLogitsProcessor(LogitsProcessor):
    """A logits processor that implements `process_sorted` only."""

    __slots__ = ()

    needs_sorted: ClassVar[bool] = True

    def process(self, logits: Tensor, sampling: SamplingState | None) -> Tensor:
        """Sort, apply the formula, and restore token-id order."""
        sorted_logits, sorted_ids = sort_logits(logits)
        processed = self.process_sorted(sorted_logits, sampling)
        return unsort_logits(processed, sorted_ids, logits.shape[-1])


def sort_logits(logits: Tensor, skip_removed: bool = False) -> tuple[Tensor, Tensor]:
    """Logits in descending order (ties by token id), and the token id of each logit.

    `skip_removed` leaves out removed tokens where that at least halves the width. The width then
    depends on the values, which on a GPU would need a host synchronization.
    """
    width = int((logits > -torch.inf).sum(-1).amax()) if skip_removed else logits.shape[-1]
    if width > logits.shape[-1] // 2:
        sorted_logits, sorted_ids = logits.sort(dim=-1, descending=True, stable=True)
        return sorted_logits, sorted_ids
    ids = torch.arange(logits.shape[-1], device=logits.device).expand_as(logits)
    remaining, ids = (x[:, : max(width, 1)] for x in move_removed_last(logits, ids))
    sorted_logits, indices = remaining.sort(dim=-1, descending=True, stable=True)
    return sorted_logits, ids.gather(-1, indices)


def unsort_logits(sorted_logits: Tensor, sorted_ids: Tensor, vocab_size: int) -> Tensor:
    """Sorted logits back in token-id order; tokens that were left out are removed (-inf)."""
    removed = sorted_logits.new_full((len(sorted_logits), vocab_size), -torch.inf)
    return removed.scatter_(-1, sorted_ids, sorted_logits)


def move_removed_last(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Move removed tokens to the end and keep the order of the others, without a second sort."""
    remaining = logits > -torch.inf
    remaining_count = remaining.cumsum(-1)
    target = torch.where(
        remaining, remaining_count - 1, remaining_count[..., -1:] + (~remaining).cumsum(-1) - 1
    )
    moved = torch.empty_like(logits).scatter_(-1, target, logits)
    return moved, torch.empty_like(ids).scatter_(-1, target, ids)


def keep_where(logits: Tensor, keep: Tensor, min_keep: int = 1) -> Tensor:
    """Remove all tokens but `keep`; the `min_keep` largest logits are kept in any case."""
    if min_keep > 1:
        threshold = logits.topk(min(min_keep, logits.shape[-1])).values[..., -1:]
        keep = keep | (logits >= threshold)
    return torch.where(keep, logits, -torch.inf)


def entropy(logits: Tensor) -> Tensor:
    """-sum_v P(v) ln P(v) of each row, in nats; 0 ln 0 is 0."""
    return torch.special.entr(logits.softmax(-1)).sum(-1, keepdim=True)


def is_per_row(value: object) -> TypeGuard[Tensor]:
    """Whether a setting is a tensor with one number per row."""
    return isinstance(value, Tensor)


def require_state(sampling: SamplingState | None, name: str) -> SamplingState:
    """The sampling state, for a sampler that cannot work without one."""
    if sampling is None:
        raise ConfigError(
            f"{name} uses the generated tokens or random numbers; call it with a SamplingState"
        )
    return sampling


@dataclass(frozen=True, slots=True)
class ExternalSampler(LogitsProcessor):
    """Wraps a sampler that is not a `LogitsProcessor`, with conservative flags."""

    sampler: Sampler

    needs_ids = True
    capturable = False

    def process(self, logits: Tensor, sampling: SamplingState | None) -> Tensor:
        """Call the wrapped sampler."""
        return self.sampler(logits, sampling)


def as_logits_processor(sampler: Sampler) -> LogitsProcessor:
    """The sampler itself, or wrapped in `ExternalSampler`."""
    return sampler if isinstance(sampler, LogitsProcessor) else ExternalSampler(sampler)


@dataclass(frozen=True, slots=True)
class PerRow(LogitsProcessor):
    """One sampler of a batch whose rows have different settings, or do not have the sampler."""

    sampler: LogitsProcessor  # its numeric settings are tensors (rows, 1)
    active: Bool[Tensor, "rows 1"] | None  # the rows that have the sampler; None: all

    @classmethod
    def merge(
        cls, samplers: Sequence[LogitsProcessor | None], device: torch.device | str
    ) -> "PerRow":
        """The samplers of all rows as one; None for a row without the sampler."""
        example = next(sampler for sampler in samplers if sampler is not None)
        off, settings = example.off_settings(), {}
        for f in _per_row_fields(example):
            default = off.get(f.name, getattr(example, f.name))
            values = [
                default if sampler is None else getattr(sampler, f.name) for sampler in samplers
            ]
            dtype = torch.float32 if f.type is float else torch.long
            settings[f.name] = torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)
        active = torch.tensor(
            [sampler is not None for sampler in samplers], device=device
        ).unsqueeze(1)
        return cls(_copy_with(example, settings), None if None not in samplers else active)

    @property
    def rows(self) -> int:
        """How many rows it has settings for."""
        if self.active is not None:
            return len(self.active)
        return len(getattr(self.sampler, _per_row_fields(self.sampler)[0].name))

    @property
    def needs_ids(self) -> bool:  # type: ignore[override]
        """As the wrapped sampler."""
        return self.sampler.needs_ids

    @property
    def capturable(self) -> bool:  # type: ignore[override]
        """As the wrapped sampler."""
        return self.sampler.capturable

    @property
    def needs_full_vocab(self) -> bool:  # type: ignore[override]
        """As the wrapped sampler."""
        return self.sampler.needs_full_vocab

    @property
    def stateful(self) -> bool:  # type: ignore[override]
        """As the wrapped sampler."""
        return self.sampler.stateful

    @property
    def has_sorted_formula(self) -> bool:
        """As the wrapped sampler."""
        return self.sampler.has_sorted_formula

    @property
    def needs_sorted(self) -> bool:  # type: ignore[override]
        """Whether it has a formula for sorted logits, which then takes the per-row settings."""
        return self.has_sorted_formula

    @property
    def may_leave_gaps(self) -> bool:  # type: ignore[override]
        """As the wrapped sampler."""
        return self.sampler.may_leave_gaps

    def process(self, logits: Tensor, sampling: SamplingState | None) -> Tensor:
        """The formula in the active rows."""
        return self._in_active_rows(self.sampler.process(logits, sampling), logits)

    def process_sorted(self, logits: Tensor, sampling: SamplingState | None) -> Tensor:
        """The formula on sorted logits in the active rows."""
        return self._in_active_rows(self.sampler.process_sorted(logits, sampling), logits)

    def _in_active_rows(self, processed: Tensor, logits: Tensor) -> Tensor:
        return processed if self.active is None else torch.where(self.active, processed, logits)

    def update_state(
        self, before: Tensor, after: Tensor, ids: Tensor, sampling: SamplingState
    ) -> None:
        """Update the state of the wrapped sampler."""
        self.sampler.update_state(before, after, ids, sampling)

    def select(self, rows: Int[Tensor, " selected"]) -> "PerRow":
        """The same sampler for a subset of the rows."""
        settings = {
            f.name: getattr(self.sampler, f.name)[rows] for f in _per_row_fields(self.sampler)
        }
        active = None if self.active is None else self.active[rows]
        return PerRow(_copy_with(self.sampler, settings), active)


@cache
def _off_settings(kind: type[Any]) -> dict[str, Any]:
    settings: tuple[Field[Any], ...] = fields(kind) if is_dataclass(kind) else ()
    return {f.name: f.metadata["off"] for f in settings if "off" in f.metadata}


def merge_key(sampler: LogitsProcessor) -> Hashable:
    """The key that samplers must share to be merged: type and all settings but the per-row ones."""
    per_row = [f.name for f in _per_row_fields(sampler)]
    shared = (f.name for f in _settings(sampler) if f.name not in per_row)
    return type(sampler), *(getattr(sampler, name) for name in shared)


def _settings(sampler: LogitsProcessor) -> "tuple[Field[Any], ...]":
    return fields(sampler) if is_dataclass(sampler) else ()


def _per_row_fields(sampler: LogitsProcessor) -> "list[Field[Any]]":
    numeric = (f for f in _settings(sampler) if f.type in (int, float))
    return [f for f in numeric if f.metadata.get("per_row", True)]


def _copy_with(sampler: LogitsProcessor, settings: Mapping[str, Tensor]) -> LogitsProcessor:
    """A copy with tensors for its numeric settings, without the checks of `__post_init__`."""
    copy = object.__new__(type(sampler))
    for f in _settings(sampler):
        object.__setattr__(copy, f.name, settings.get(f.name, getattr(sampler, f.name)))
    return copy
