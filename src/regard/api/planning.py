"""What fits on given GPUs, how to shard it, and how long training takes: computed, not measured."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.api.model_info import info
from regard.api.units import with_prefix
from regard.errors import ConfigError, unknown
from regard.models.cost import Cost
from regard.models.plan import (
    CARDS,
    PER_MACHINE,
    TOKENS,
    Machine,
    Way,
    fastest,
    gpus_needed,
    host_bytes,
    ways,
)


@dataclass(frozen=True, slots=True)
class GenerationMemory:
    """Memory of bfloat16 inference on one GPU."""

    weight_bytes: int
    state_bytes: int  # the KV cache of one row
    rows: int  # that fit at a time


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """All ways to place a model on a machine, and the fastest of them."""

    name: str
    cost: Cost
    card: str
    machine: Machine
    tokens: float  # to train on
    strategies: list[Way]
    best: Way
    host_bytes: int  # of one machine
    generation: GenerationMemory

    def seconds(self, strategy: Way) -> float | None:
        """How long training takes; None where the model does not fit."""
        return self.tokens / strategy.tokens_per_second if strategy.rows else None


def plan(
    what: str | Path,
    *words: str,
    gpus: int = 1,
    card: str = "h100",
    memory: float | None = None,
    peak: float | None = None,
    reached: float | None = None,
    link: float | None = None,
    tokens: float | None = None,
    rows: int | None = None,
    **overrides: Any,
) -> TrainingPlan:
    """Plan the training of a preset, a run's model or a recipe on `gpus` GPUs.

    `memory` in GB and `peak` in TFLOP/s of each GPU and `link` in GB/s replace the card's
    data sheet; `reached` is the share of the peak that is reached (MFU). By default there are 20
    `tokens` per parameter (Hoffmann et al. 2022), and as many `rows` per GPU as fit.
    """
    if card not in CARDS:
        raise ConfigError(unknown("card", card, CARDS))
    sheet = CARDS[card]
    sheet_link = sheet.link if gpus <= PER_MACHINE else sheet.network
    machine = Machine(
        gpus=gpus,
        memory=sheet.memory if memory is None else memory * 1e9,
        peak=sheet.peak if peak is None else peak * 1e12,
        link=sheet_link if link is None else link * 1e9,
        **({} if reached is None else {"reached": reached}),
    )
    if tokens is not None and not 0 < tokens < math.inf:
        raise ConfigError(f"tokens={tokens:g} must be a number above 0")
    model_cost = info(what, *words, **overrides).cost
    strategies = ways(model_cost, machine, rows)
    best = fastest(strategies)
    if best is None:
        raise ConfigError(_too_large(str(what), model_cost, machine, rows))
    return TrainingPlan(
        name=str(what),
        cost=model_cost,
        card=card,
        machine=machine,
        tokens=TOKENS * model_cost.parameters if tokens is None else tokens,
        strategies=strategies,
        best=best,
        host_bytes=host_bytes(model_cost, machine),
        generation=_generation_memory(model_cost, machine),
    )


def _generation_memory(cost: Cost, machine: Machine) -> GenerationMemory:
    weights, state = cost.weight_bytes // 2, cost.state_bytes // 2
    room = max(0, machine.usable - weights)
    return GenerationMemory(weights, state, int(room // state) if state else 0)


def _too_large(what: str, cost: Cost, machine: Machine, rows: int | None) -> str:
    memory, least = with_prefix(machine.memory, "B"), ways(cost, machine)[-1]
    if rows is not None and least.rows:
        return f"rows={rows} do not fit on {machine.gpus} × {memory}; at most {least.rows} do"
    message = f"{what} does not fit on {machine.gpus} × {memory}: each GPU holds at least "
    advice = "a smaller model"
    if least.sharded and least.evaluating_bytes > machine.usable:
        message += f"{with_prefix(least.own_bytes, 'B')},\n"
        gathered = with_prefix(least.borrowed_bytes, "B")
        message += f"and gathers {gathered} of weights for an evaluation\n"
    else:
        advice = "a smaller model.context"
        row = with_prefix(least.activation_bytes + least.logits_bytes, "B")
        message += f"{with_prefix(least.held_bytes, 'B')},\n"
        message += f"and {row} more for a row of {cost.context or 1:,} tokens\n"
    needed = gpus_needed(cost, machine)
    if needed is None:
        return f"{message}no number of GPUs helps; use GPUs with more memory or {advice}"
    return f"{message}it fits on {needed} GPUs: gpus={needed}"
