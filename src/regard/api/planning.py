"""Estimates of memory, sharding and training time on given GPUs; nothing is measured."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.api.formatting import with_prefix
from regard.api.model_info import info
from regard.errors import ConfigError, reject_options, unknown
from regard.models.cost import Cost
from regard.models.plan import (
    CHINCHILLA_TOKENS_PER_PARAMETER,
    GPU_SPECS,
    GPUS_PER_MACHINE,
    Cluster,
    TrainingPlan,
    decode_seconds,
    gpus_needed,
    host_bytes,
    prefill_seconds,
    recommended_plan,
    training_plans,
)
from regard.models.presets import ModelConfig


@dataclass(frozen=True, slots=True)
class GenerationEstimate:
    """Memory and speed of bfloat16 inference on one GPU."""

    weight_bytes: int
    state_bytes: int  # the KV cache of one sequence
    sequences: int  # number of sequences that fit into memory at a time
    tokens_per_second: float  # of one sequence, with a short prompt; 0 if it does not generate
    prefill_seconds: float  # of a prompt as long as the context; 0 if it does not generate


@dataclass(frozen=True, slots=True)
class Plan:
    """Every parallel strategy for a model on a cluster, and the fastest that fits."""

    name: str
    cost: Cost
    gpu_type: str
    cluster: Cluster
    tokens: float  # number of training tokens
    strategies: list[TrainingPlan]
    best: TrainingPlan
    host_bytes: int  # host memory of one machine
    generation: GenerationEstimate

    @property
    def spans_machines(self) -> bool:
        """Whether the GPUs are in several machines, so that they communicate over the network."""
        return self.cluster.gpus > GPUS_PER_MACHINE

    def seconds(self, strategy: TrainingPlan) -> float | None:
        """How long training takes; None where the model does not fit."""
        return self.tokens / strategy.tokens_per_second if strategy.sequences else None


def plan(
    name_or_config: str | Path | ModelConfig,
    *overrides: str,
    model: Mapping[str, Any] | None = None,
    gpus: int = 1,
    gpu_type: str = "h100",
    memory: float | None = None,
    peak: float | None = None,
    utilization: float | None = None,
    link: float | None = None,
    tokens: float | None = None,
    sequences: int | None = None,
) -> Plan:
    """Plan the training of a preset, a run's model or a recipe on `gpus` GPUs.

    `name_or_config` and `model` are those of `info`. `memory` in GB and `peak` in TFLOP/s of each
    GPU and the bandwidth `link` in GB/s replace those in the data sheet of `gpu_type`;
    `utilization` is the fraction of the peak that matmuls reach. By default there are 20 `tokens`
    per parameter (Hoffmann et al. 2022), and as many `sequences` per GPU as fit.

    >>> regard.plan("llama-7b", gpus=8).best.sharded
    True
    """
    if not isinstance(gpus, int):
        raise ConfigError(f"gpus={gpus!r} must be an integer")
    if gpus == 1:
        reject_options("a link is between two GPUs, and gpus=1", {"link": link})
    if gpu_type not in GPU_SPECS:
        raise ConfigError(unknown("GPU type", gpu_type, GPU_SPECS))
    spec = GPU_SPECS[gpu_type]
    spec_link = spec.link if gpus <= GPUS_PER_MACHINE else spec.network
    cluster = Cluster(
        gpus=gpus,
        memory=spec.memory if memory is None else memory * 1e9,
        bandwidth=spec.bandwidth,
        peak=spec.peak if peak is None else peak * 1e12,
        link=spec_link if link is None else link * 1e9,
        persistent=spec.persistent,
        **({} if utilization is None else {"utilization": utilization}),
    )
    if tokens is not None and not 0 < tokens < math.inf:
        raise ConfigError(f"tokens={tokens:g} must be a number above 0")
    model_info = info(name_or_config, *overrides, model=model)
    model_cost = model_info.cost
    strategies = training_plans(model_cost, cluster, sequences)
    best = recommended_plan(strategies)
    if best is None:
        raise ConfigError(_too_large_message(model_info.name, model_cost, cluster, sequences))
    return Plan(
        name=model_info.name,
        cost=model_cost,
        gpu_type=gpu_type,
        cluster=cluster,
        tokens=CHINCHILLA_TOKENS_PER_PARAMETER * model_cost.parameters
        if tokens is None
        else tokens,
        strategies=strategies,
        best=best,
        host_bytes=host_bytes(model_cost, cluster),
        generation=_estimate_generation(model_cost, cluster),
    )


def _estimate_generation(cost: Cost, cluster: Cluster) -> GenerationEstimate:
    weights, state = cost.weight_bytes // 2, cost.state_bytes // 2
    free = max(0, cluster.usable_memory - weights)
    speed = prefill = 0.0
    if cost.decode_flops_per_token:
        speed, prefill = 1 / decode_seconds(cost, cluster), prefill_seconds(cost, cluster)
    return GenerationEstimate(weights, state, int(free // state) if state else 0, speed, prefill)


def _too_large_message(name: str, cost: Cost, cluster: Cluster, sequences: int | None) -> str:
    memory, smallest = with_prefix(cluster.memory, "B"), training_plans(cost, cluster)[-1]
    if sequences is not None and smallest.sequences:
        limit = smallest.sequences
        return f"sequences={sequences} do not fit on each GPU of {memory}; at most {limit} fit"
    message = f"{name} does not fit on {cluster.gpus} × {memory}: each GPU holds at least "
    advice = "a smaller model"
    if smallest.sharded and smallest.evaluation_bytes > cluster.usable_memory:
        message += f"{with_prefix(smallest.persistent_bytes, 'B')},\n"
        gathered = with_prefix(smallest.evaluation_weight_bytes, "B")
        message += f"and gathers {gathered} of weights for an evaluation\n"
    else:
        advice = "a smaller model.context"
        size = with_prefix(smallest.activation_bytes + smallest.logits_bytes, "B")
        message += f"{with_prefix(smallest.static_bytes, 'B')},\n"
        message += f"and {size} more for a sequence of {cost.context or 1:,} tokens\n"
    needed = gpus_needed(cost, cluster)
    if needed is None:
        return f"{message}no number of GPUs helps; use GPUs with more memory or {advice}"
    return f"{message}it fits on {needed} GPUs"
