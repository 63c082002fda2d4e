"""Rules that map the tensor names and layouts of another library to those of a model here.

A rule works in both directions. `{i}` stands for the index of a layer, `{p}` for `weight` or
`bias`; both have the same value on the two sides. "External" names are those of the other
library, "internal" ones those of the model's state_dict.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

PLACEHOLDERS = {"{i}": r"(?P<i>\d+)", "{p}": r"(?P<p>weight|bias)"}


@runtime_checkable
class Layout(Protocol):
    """How one external tensor stores one or several internal tensors."""

    def split(self, external: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
        """Return the internal tensors, as views where possible; the model expects `shapes`."""

    def join(self, internal: Sequence[Tensor]) -> Tensor:
        """Return the external tensor."""


@dataclass(frozen=True, slots=True)
class Concatenated:
    """Concatenation along the first axis; a single tensor is stored unchanged.

    `transposed` is for weights stored as (in, out), as in GPT-2's Conv1D.
    """

    transposed: bool = False

    def split(self, external: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
        """Return the internal tensors."""
        joined = external.T if self.transposed and external.ndim == 2 else external
        return list(joined.split([shape[0] for shape in shapes])) if len(shapes) > 1 else [joined]

    def join(self, internal: Sequence[Tensor]) -> Tensor:
        """Return the external tensor."""
        joined = torch.cat(list(internal)) if len(internal) > 1 else internal[0]
        return joined.T if self.transposed and joined.ndim == 2 else joined


@dataclass(frozen=True, slots=True)
class GroupedByHead:
    """Query, key and value rows grouped by head: q_1 k_1 v_1 q_2 k_2 v_2 … (BLOOM, GPT-NeoX)."""

    heads: int

    def split(self, external: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
        """Return the internal tensors."""
        grouped = external.unflatten(0, (self.heads, len(shapes), -1))
        return [grouped[:, index].flatten(0, 1) for index in range(len(shapes))]

    def join(self, internal: Sequence[Tensor]) -> Tensor:
        """Return the external tensor."""
        grouped = [tensor.unflatten(0, (self.heads, -1)) for tensor in internal]
        return torch.stack(grouped, 1).flatten(0, 2)


@dataclass(frozen=True, slots=True)
class LeadingAxes:
    """One tensor with additional leading axes of length 1, for a total of `ndim` axes."""

    ndim: int

    def split(self, external: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
        """Return the internal tensor, in a list."""
        for _ in range(external.ndim - len(shapes[0])):
            external = external.squeeze(0)
        return [external]

    def join(self, internal: Sequence[Tensor]) -> Tensor:
        """Return the external tensor."""
        return internal[0][(None,) * (self.ndim - internal[0].ndim)]


CONCATENATED = Concatenated()
TRANSPOSED = Concatenated(transposed=True)


@dataclass(frozen=True, slots=True)
class Rule:
    """An external name pattern, the internal name pattern or patterns, and the layout."""

    external: str
    internal: str | tuple[str, ...]
    layout: Layout = field(default=CONCATENATED)

    @property
    def internal_names(self) -> tuple[str, ...]:
        """The internal patterns, as a tuple even if there is only one."""
        return (self.internal,) if isinstance(self.internal, str) else self.internal


def module_rules(
    modules: Mapping[str, str | tuple[str, ...]],
    external_prefix: str = "",
    internal_prefix: str = "",
    layout: Layout = CONCATENATED,
) -> list[Rule]:
    """Rules for the weights and biases of `modules`, a table of external to internal names.

    >>> module_rules({"ln_1": "attention_norm"}, "h.{i}.", "decoder.blocks.{i}.")[0].external
    'h.{i}.ln_1.{p}'
    """

    def parameters(names: str | tuple[str, ...]) -> tuple[str, ...]:
        names = (names,) if isinstance(names, str) else names
        return tuple(f"{internal_prefix}{name}.{{p}}" for name in names)

    return [
        Rule(f"{external_prefix}{external}.{{p}}", parameters(internal), layout)
        for external, internal in modules.items()
    ]


@dataclass(frozen=True, slots=True)
class TensorMapping:
    """One external tensor and the internal tensors that it stores, by full names."""

    external: str
    internal: tuple[str, ...]
    layout: Layout


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """The mapping of external to internal tensors, and the names without a match."""

    mappings: list[TensorMapping]
    missing: list[str]  # internal names that no external tensor fills
    unexpected: list[str] = field(default_factory=list)  # external names that no rule maps
    duplicates: dict[str, str] = field(default_factory=dict)  # second external name, to the first
    tied: set[str] = field(default_factory=set)  # external names of a tied output matrix


def plan_import(
    rules: Iterable[Rule],
    external_names: Iterable[str],
    internal_names: Iterable[str],
    aliases: Mapping[str, str] | None = None,
) -> WeightPlan:
    """Map external names to internal ones; `aliases` are second names of an internal tensor."""
    unfilled = set(internal_names)
    patterns = [(_compile(rule.external), rule) for rule in rules]
    filled: dict[tuple[str, ...], str] = {}
    plan = WeightPlan([], [])
    for name in external_names:
        for pattern, rule in patterns:
            match = pattern.fullmatch(name)
            if match is None:
                continue
            names = tuple(_substitute(part, match.groupdict()) for part in rule.internal_names)
            targets = tuple((aliases or {}).get(part, part) for part in names)
            if targets != names:
                plan.tied.add(name)
            if targets in filled:
                plan.duplicates[name] = filled[targets]
                break
            if unfilled.issuperset(targets):
                plan.mappings.append(TensorMapping(name, targets, rule.layout))
                unfilled.difference_update(targets)
                filled[targets] = name
                break
        else:
            plan.unexpected.append(name)
    plan.missing.extend(sorted(unfilled))
    return plan


def plan_export(rules: Iterable[Rule], internal_names: Iterable[str]) -> WeightPlan:
    """Map internal names to external ones; `missing` are internal names without a rule."""
    unmapped, mappings = dict.fromkeys(internal_names), []
    for rule in rules:
        pattern = _compile(rule.internal_names[0])
        for name in list(unmapped):
            match = pattern.fullmatch(name)
            if match is None:
                continue
            values = match.groupdict()
            parts = tuple(_substitute(part, values) for part in rule.internal_names)
            if all(part in unmapped for part in parts):
                external = _substitute(rule.external, values)
                mappings.append(TensorMapping(external, parts, rule.layout))
                for part in parts:
                    del unmapped[part]
    return WeightPlan(mappings, list(unmapped))


def matches(pattern: str, name: str) -> bool:
    """Whether a tensor name matches a pattern with placeholders."""
    return _compile(pattern).fullmatch(name) is not None


def _compile(pattern: str) -> re.Pattern[str]:
    escaped = re.escape(pattern)
    for placeholder, regex in PLACEHOLDERS.items():
        escaped = escaped.replace(re.escape(placeholder), regex, 1)
        escaped = escaped.replace(re.escape(placeholder), f"(?P={placeholder[1]})")
    return re.compile(escaped)


def _substitute(pattern: str, values: Mapping[str, str]) -> str:
    for placeholder, value in values.items():
        pattern = pattern.replace(f"{{{placeholder}}}", value)
    return pattern
