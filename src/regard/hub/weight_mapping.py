"""Renaming rules: how the tensors of another library are called and laid out, as data.

A rule is read in both directions. `{i}` stands for the number of a layer, `{p}` for `weight`
or `bias`; both stand for the same on the two sides.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

HOLES = {"{i}": r"(?P<i>\d+)", "{p}": r"(?P<p>weight|bias)"}


@runtime_checkable
class Layout(Protocol):
    """How several of our tensors lie in one of theirs."""

    def split(self, theirs: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
        """Ours, as views where that is possible; `shapes` are those that the model wants."""

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        """Theirs."""


@dataclass(frozen=True, slots=True)
class Stacked:
    """One above the other along the first axis; a single one is itself.

    `transposed` for matrices that multiply from the right (GPT-2's Conv1D).
    """

    transposed: bool = False

    def split(self, theirs: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
        """Ours."""
        upright = theirs.T if self.transposed and theirs.ndim == 2 else theirs
        return list(upright.split([shape[0] for shape in shapes])) if len(shapes) > 1 else [upright]

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        """Theirs."""
        joined = torch.cat(list(ours)) if len(ours) > 1 else ours[0]
        return joined.T if self.transposed and joined.ndim == 2 else joined


@dataclass(frozen=True, slots=True)
class ByHead:
    """The parts of one head together, head after head: q_1 k_1 v_1 q_2 k_2 v_2 … (BLOOM, NeoX)."""

    heads: int

    def split(self, theirs: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
        """Ours."""
        apart = theirs.unflatten(0, (self.heads, len(shapes), -1))
        return [apart[:, number].flatten(0, 1) for number in range(len(shapes))]

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        """Theirs."""
        return torch.stack([each.unflatten(0, (self.heads, -1)) for each in ours], 1).flatten(0, 2)


@dataclass(frozen=True, slots=True)
class Wrapped:
    """One tensor with an axis of length 1 before the others: a row, or a batch of one."""

    def split(self, theirs: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
        """Ours."""
        return [theirs.squeeze(0)]

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        """Theirs."""
        return ours[0].unsqueeze(0)


PLAIN = Stacked()
TRANSPOSED = Stacked(transposed=True)


@dataclass(frozen=True, slots=True)
class Rule:
    """Their name, our name or names, and how the numbers lie."""

    theirs: str
    ours: str | tuple[str, ...]
    layout: Layout = field(default=PLAIN)

    @property
    def parts(self) -> tuple[str, ...]:
        """Our names."""
        return (self.ours,) if isinstance(self.ours, str) else self.ours


def renamed(
    names: Mapping[str, str | tuple[str, ...]],
    theirs: str = "",
    ours: str = "",
    layout: Layout = PLAIN,
) -> list[Rule]:
    """Rules for the weights and biases of many modules: their names to ours, below a common one.

    >>> renamed({"ln_1": "attention_norm"}, "h.{i}.", "decoder.blocks.{i}.")[0].theirs
    'h.{i}.ln_1.{p}'
    """

    def parts(name: str | tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"{ours}{each}.{{p}}" for each in ([name] if isinstance(name, str) else name))

    return [Rule(f"{theirs}{name}.{{p}}", parts(each), layout) for name, each in names.items()]


@dataclass(frozen=True, slots=True)
class Move:
    """One of their tensors and those of ours that it holds, by full names."""

    theirs: str
    ours: tuple[str, ...]
    layout: Layout


@dataclass(frozen=True, slots=True)
class Plan:
    """What goes where, and what has no place on one of the two sides."""

    moves: list[Move]
    missing: list[str]  # ours that nothing fills
    unknown: list[str] = field(default_factory=list)  # theirs that fill nothing of the model
    copies: dict[str, str] = field(default_factory=dict)  # theirs, to the one that is the same
    tied: set[str] = field(default_factory=set)  # theirs that an alias of ours leads to


def plan_import(
    rules: Iterable[Rule],
    theirs: Iterable[str],
    ours: Iterable[str],
    aliases: Mapping[str, str] | None = None,
) -> Plan:
    """From their names to ours; `aliases` are further names of ours for the same tensor."""
    wanted, patterns = set(ours), [(_pattern(rule.theirs), rule) for rule in rules]
    filled: dict[tuple[str, ...], str] = {}
    plan = Plan([], [])
    for name in theirs:
        for pattern, rule in patterns:
            found = pattern.fullmatch(name)
            if found is None:
                continue
            full = tuple(_filled(part, found.groupdict()) for part in rule.parts)
            parts = tuple((aliases or {}).get(part, part) for part in full)
            if parts != full:
                plan.tied.add(name)
            if parts in filled:
                plan.copies[name] = filled[parts]
                break
            if wanted.issuperset(parts):
                plan.moves.append(Move(name, parts, rule.layout))
                wanted.difference_update(parts)
                filled[parts] = name
                break
        else:
            plan.unknown.append(name)
    plan.missing.extend(sorted(wanted))
    return plan


def plan_export(rules: Iterable[Rule], ours: Iterable[str]) -> Plan:
    """From our names to theirs; `missing` are ours without a rule."""
    left, moves = dict.fromkeys(ours), []
    for rule in rules:
        pattern = _pattern(rule.parts[0])
        for name in list(left):
            found = pattern.fullmatch(name)
            if found is None:
                continue
            parts = tuple(_filled(part, found.groupdict()) for part in rule.parts)
            if all(part in left for part in parts):
                moves.append(Move(_filled(rule.theirs, found.groupdict()), parts, rule.layout))
                for part in parts:
                    del left[part]
    return Plan(moves, list(left))


def matches(pattern: str, name: str) -> bool:
    """Whether a name is of this pattern."""
    return _pattern(pattern).fullmatch(name) is not None


def _pattern(name: str) -> re.Pattern[str]:
    escaped = re.escape(name)
    for hole, regex in HOLES.items():
        escaped = escaped.replace(re.escape(hole), regex, 1)
        escaped = escaped.replace(re.escape(hole), f"(?P={hole[1]})")
    return re.compile(escaped)


def _filled(name: str, holes: Mapping[str, str]) -> str:
    for hole, value in holes.items():
        name = name.replace(f"{{{hole}}}", value)
    return name
