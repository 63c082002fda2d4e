"""Estimates of training and generation on GPUs: memory, speed and time of each parallel strategy.

Nothing is measured. Bytes and FLOPs come from `models.cost`, peak FLOP/s and bandwidths from the
GPU's data sheet. The assumed utilization is a field of `Cluster`; it and the constants below were
fitted to nine measured and five published models (docs/results.md).
"""

import math
from dataclasses import dataclass

from regard.errors import ConfigError
from regard.models.cost import BACKWARD_FLOPS_RATIO, Cost
from regard.models.cost.parts import BFLOAT16_BYTES, FLOAT32_BYTES
from regard.nn.loss import CHUNK_ELEMENTS_CUDA

USABLE_MEMORY = 0.95  # fraction; the rest is for the driver, kernels and fragmentation
CHINCHILLA_TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022
GPUS_PER_MACHINE = 8
ATTENTION_UTILIZATION = 0.92  # of the peak; FLOPs of a causal mask are counted in full
ACTIVATION_PASSES = 1  # memory traffic between matmuls, as a multiple of the saved activations
OPTIMIZER_BYTES = 28  # read and written per parameter and step
LAYER_SECONDS = 4.1e-4  # fixed overhead of a step for each attention layer
SCALING_EFFICIENCY = 0.87  # speed of each of several GPUs, relative to a single one
DECODE_BANDWIDTH_UTILIZATION = 0.77  # fraction of the data sheet's bandwidth, reading weights
# fixed overhead of a decode step for each layer, and for each norm of queries and keys or after a
# branch
DECODE_LAYER_SECONDS = 9e-6
DECODE_BIAS_SECONDS = 6e-6  # fixed overhead of a decode step for each layer with biases
# The same where a step of one row is one kernel: of decoder-only models with layers up to this
# size, on some GPUs. Larger layers were not measured.
PERSISTENT_LAYER_BYTES = 448 << 20  # weights of linear layers, in bfloat16
PERSISTENT_BANDWIDTH_UTILIZATION = 0.875
PERSISTENT_LAYER_SECONDS = 15e-6  # of a layer whose weights take no time to read
# Weights of smaller layers are copied more slowly, which makes the exchange of activations faster.
PERSISTENT_SMALL_LAYER_BYTES = 32 << 20
PERSISTENT_SMALL_LAYER_SECONDS = 10.5e-6
# by which both times are multiplied in layers with parallel branches, which exchange less often
PERSISTENT_PARALLEL_FACTOR = 0.7
PERSISTENT_NORM_SECONDS = 3e-6  # for each norm after a branch, as measured with gemma-2-2b
SAMPLING_SECONDS = 3.5e-5  # embedding, temperature and top-k
PREFILL_UTILIZATION = 0.79  # fraction of the peak that matmuls reach in a forward pass
PREFILL_ATTENTION_UTILIZATION = 0.88  # fraction of the peak that attention reaches in prefill
PREFILL_LAYER_SECONDS = 1e-4  # fixed overhead of a prefill for each attention layer
PREFILL_ACTIVATION_PASSES = 4.5  # memory traffic, as a multiple of the activations of training


@dataclass(frozen=True, slots=True)
class GPUSpec:
    """The data sheet of a GPU: bytes, dense bfloat16 FLOP/s, bytes per second in each direction."""

    memory: float
    bandwidth: float  # of its memory
    peak: float
    link: float  # of one GPU to the others of its machine
    network: float  # of one machine of 8 GPUs to the other machines
    persistent: bool = False  # whether a decode step can be one kernel: from Hopper on


GPU_SPECS: dict[str, GPUSpec] = {
    "a100": GPUSpec(80e9, 2.04e12, 312e12, 300e9, 200e9),
    "h100": GPUSpec(80e9, 3.35e12, 989e12, 450e9, 400e9, persistent=True),
    "h200": GPUSpec(141e9, 4.8e12, 989e12, 450e9, 400e9, persistent=True),
    "b200": GPUSpec(180e9, 8e12, 2250e12, 900e9, 400e9, persistent=True),
    "l40s": GPUSpec(48e9, 0.864e12, 362e12, 32e9, 100e9),
    "rtx4090": GPUSpec(24e9, 1.008e12, 165e12, 32e9, 12e9),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """GPUs of one kind and their assumed utilization."""

    gpus: int
    memory: float  # bytes of each
    bandwidth: float  # bytes per second of the memory of each
    peak: float  # FLOP/s of each
    link: float  # bytes per second between any two, in each direction
    utilization: float = 0.53  # fraction of the peak that matmuls reach
    link_utilization: float = 0.7  # fraction of the link's bandwidth
    persistent: bool = False  # see `GPUSpec`

    def __post_init__(self) -> None:
        for name, value in (
            ("gpus", self.gpus),
            ("memory", self.memory),
            ("bandwidth", self.bandwidth),
            ("peak", self.peak),
            ("link", self.link),
        ):
            if not 0 < value < math.inf:
                raise ConfigError(f"{name}={value:g} must be a number above 0")
        for name in ("utilization", "link_utilization"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name):g} must lie in (0, 1]")

    @property
    def usable_memory(self) -> float:
        """Bytes of one GPU that are available to training."""
        return USABLE_MEMORY * self.memory


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """One parallel strategy: the memory it needs on each GPU and the speed of all of them."""

    name: str
    sharded: bool
    activation_checkpointing: bool
    weight_bytes: int  # float32, as are gradients and optimizer state
    compute_weight_bytes: int  # bfloat16: DDP's autocast copies, or FSDP's all-gathered layers
    gradient_bytes: int
    optimizer_bytes: int
    evaluation_weight_bytes: int  # FSDP: all bfloat16 weights, gathered at once for an evaluation
    activation_bytes: int  # of one sequence
    logits_bytes: int  # of one chunk of the loss
    sequences: int  # per GPU; 0 if they, or one evaluation, do not fit in memory
    used_bytes: int  # peak memory with this number of sequences
    tokens_per_second: float
    bottleneck: str  # of a step: "compute" or "communication"

    @property
    def static_bytes(self) -> int:
        """Bytes in a training step that do not depend on the number of sequences."""
        return self.persistent_bytes + self.compute_weight_bytes

    @property
    def persistent_bytes(self) -> int:
        """Bytes of weights, gradients and optimizer state, which stay allocated."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def evaluation_bytes(self) -> int:
        """Bytes in an evaluation."""
        return self.persistent_bytes + self.evaluation_weight_bytes + self.logits_bytes


def training_plans(
    cost: Cost, cluster: Cluster, sequences: int | None = None
) -> list[TrainingPlan]:
    r"""A plan for every strategy, the simplest first.

    `sequences` is the number of sequences per GPU; None: as many as fit in memory.

    N GPUs, P parameters, n sequences of T tokens, F FLOPs per token; the activations are those of
    one sequence. Bytes per GPU:

        DDP     16 P + 2 per weight of a matmul + n · activations
        FSDP    16 P / N + 8 (P outside the layers + 2 P of the largest layer) + n · activations
                16 P / N + 2 P  in an evaluation, which gathers all weights at once

    A step takes the longer of

        compute          n (T F_matmul / (peak · utilization) + T F_attention / (0.92 peak)
                         + activations / bandwidth), times 4/3 with activation checkpointing,
                         + 28 P / bandwidth + 0.41 ms for each attention layer;
                         divided by 0.87 if N > 1
        communication    8 P (N-1)/N / (link · link_utilization)

    since the two overlap. DDP all-reduces the gradients in float32; FSDP all-gathers the weights
    in bfloat16 twice and reduce-scatters the gradients in float32: 8 bytes per parameter each.
    """
    if not cost.layer_parameters:
        raise ConfigError(
            "the estimate assumes that FLOPs determine the time of a step, which holds for "
            "Transformers only;\nchoose a preset of a Transformer, such as gpt2"
        )
    if sequences is not None and sequences < 1:
        raise ConfigError(f"sequences={sequences} must be more than 0")
    return [
        _plan(cost, cluster, sequences, sharded, activation_checkpointing)
        for sharded in ([False, True] if cluster.gpus > 1 else [False])
        for activation_checkpointing in (False, True)
    ]


def recommended_plan(plans: list[TrainingPlan]) -> TrainingPlan | None:
    """The simplest plan that fits in memory and is at most 3 % slower than the fastest; or None.

    `plans` are in the order of `training_plans`, the simplest first.
    """
    fitting = [plan for plan in plans if plan.sequences]
    min_speed = 0.97 * max((plan.tokens_per_second for plan in fitting), default=0)
    return next((plan for plan in fitting if plan.tokens_per_second >= min_speed), None)


def gpus_needed(cost: Cost, cluster: Cluster) -> int | None:
    """The fewest GPUs of this kind on which training fits; None if no number suffices."""
    sharded_bytes = cost.weight_bytes + cost.gradient_bytes + cost.optimizer_bytes
    sequence_bytes = cost.mixed_checkpointed_bytes + _logits_bytes(cost, 1)
    if cost.mixed_training_bytes + sequence_bytes <= cluster.usable_memory:
        return 1
    unsharded_bytes = max(
        _gathered_bytes(cost) + sequence_bytes,
        BFLOAT16_BYTES * cost.parameters + _logits_bytes(cost, 1),
    )
    available = cluster.usable_memory - unsharded_bytes
    return max(2, math.ceil(sharded_bytes / available)) if available > 0 else None


def host_bytes(cost: Cost, cluster: Cluster) -> int:
    """Host memory of one machine: each of its ranks first creates the whole model there."""
    return cost.weight_bytes * min(cluster.gpus, GPUS_PER_MACHINE)


def _plan(
    cost: Cost,
    cluster: Cluster,
    sequences: int | None,
    sharded: bool,
    activation_checkpointing: bool,
) -> TrainingPlan:
    gpus = cluster.gpus
    shards = gpus if sharded else 1
    weights, gradients, moments = (
        -(-size // shards)
        for size in (cost.weight_bytes, cost.gradient_bytes, cost.optimizer_bytes)
    )
    compute_weights = _gathered_bytes(cost) if sharded else _matmul_bytes(cost)
    sequence_bytes = cost.mixed_activation_bytes
    if activation_checkpointing:
        sequence_bytes = cost.mixed_checkpointed_bytes
    persistent = weights + gradients + moments
    evaluation = BFLOAT16_BYTES * cost.parameters if sharded else 0
    max_sequences = _max_sequences(
        cost, cluster.usable_memory - persistent - compute_weights, sequence_bytes
    )
    if persistent + evaluation + _logits_bytes(cost, 1) > cluster.usable_memory:
        max_sequences = 0
    if sequences is None:
        sequences = max_sequences
    elif sequences > max_sequences:
        sequences = 0
    logits = _logits_bytes(cost, max(sequences, 1))

    tokens = sequences * (cost.context or 1)
    passes = (
        (2 + BACKWARD_FLOPS_RATIO) / (1 + BACKWARD_FLOPS_RATIO) if activation_checkpointing else 1
    )
    compute_time = sequences * passes * _sequence_seconds(cost, cluster)
    compute_time += OPTIMIZER_BYTES * cost.parameters / cluster.bandwidth
    compute_time += LAYER_SECONDS * cost.attention_layers
    compute_time /= SCALING_EFFICIENCY if gpus > 1 else 1
    per_parameter = 2 * BFLOAT16_BYTES + FLOAT32_BYTES if sharded else 2 * FLOAT32_BYTES
    bytes_sent = per_parameter * cost.parameters * (gpus - 1) / gpus
    communication_time = bytes_sent / (cluster.link * cluster.link_utilization)
    strategy = "FSDP" if sharded else "DDP" if gpus > 1 else "one GPU"
    return TrainingPlan(
        name=f"{strategy} + activation checkpointing" if activation_checkpointing else strategy,
        sharded=sharded,
        activation_checkpointing=activation_checkpointing,
        weight_bytes=weights,
        compute_weight_bytes=compute_weights,
        gradient_bytes=gradients,
        optimizer_bytes=moments,
        evaluation_weight_bytes=evaluation,
        activation_bytes=sequence_bytes,
        logits_bytes=logits,
        sequences=sequences,
        used_bytes=persistent
        + max(
            compute_weights + sequences * sequence_bytes + logits,
            evaluation + _logits_bytes(cost, 1),
        ),
        tokens_per_second=gpus * tokens / max(compute_time, communication_time)
        if sequences
        else 0.0,
        bottleneck="communication" if communication_time > compute_time else "compute",
    )


def _sequence_seconds(cost: Cost, cluster: Cluster) -> float:
    """Compute time of one sequence: matmuls, attention, and everything between them."""
    total = cost.training_flops_per_token
    matmuls = min(2 * _matmul_weights(cost) * (1 + BACKWARD_FLOPS_RATIO), total)
    return (
        (cost.context or 1) * matmuls / (cluster.peak * cluster.utilization)
        + (cost.context or 1) * (total - matmuls) / (cluster.peak * ATTENTION_UTILIZATION)
        + ACTIVATION_PASSES * cost.mixed_activation_bytes / cluster.bandwidth
    )


def _matmul_bytes(cost: Cost) -> int:
    """The bytes of the weights of matmuls in bfloat16."""
    return cost.mixed_training_bytes - cost.training_bytes


def _matmul_weights(cost: Cost) -> int:
    """The number of weights of matmuls."""
    return _matmul_bytes(cost) // BFLOAT16_BYTES


def decode_seconds(cost: Cost, cluster: Cluster) -> float:
    """The time of a decode step of one sequence in bfloat16, which reads every weight once."""
    layer_bytes = BFLOAT16_BYTES * max(cost.decoder_layer_weights, default=0)
    if cluster.persistent and 0 < layer_bytes <= PERSISTENT_LAYER_BYTES:
        return persistent_step_seconds(cost, cluster) + SAMPLING_SECONDS
    bandwidth = cluster.bandwidth * DECODE_BANDWIDTH_UTILIZATION
    norms = cost.qk_norms + cost.branch_norms
    overhead = DECODE_LAYER_SECONDS * (cost.attention_layers + norms)
    return _matmul_bytes(cost) / bandwidth + overhead + DECODE_BIAS_SECONDS * cost.biased_layers


def persistent_step_seconds(cost: Cost, cluster: Cluster) -> float:
    """The time of a decode step that is one kernel, without sampling.

    Part of a layer's weights is read while multiprocessors exchange activations: a layer takes the
    square root of the sum of the squares of both times.
    """
    bandwidth = cluster.bandwidth * PERSISTENT_BANDWIDTH_UTILIZATION
    layer_seconds = 0.0
    for weights in cost.decoder_layer_weights:
        is_small = BFLOAT16_BYTES * weights < PERSISTENT_SMALL_LAYER_BYTES
        exchange = PERSISTENT_SMALL_LAYER_SECONDS if is_small else PERSISTENT_LAYER_SECONDS
        exchange *= PERSISTENT_PARALLEL_FACTOR if cost.parallel_layers else 1
        layer_seconds += math.hypot(BFLOAT16_BYTES * weights / bandwidth, exchange)
    other_bytes = _matmul_bytes(cost) - BFLOAT16_BYTES * cost.decoder_weights
    return layer_seconds + PERSISTENT_NORM_SECONDS * cost.branch_norms + other_bytes / bandwidth


def prefill_seconds(cost: Cost, cluster: Cluster) -> float:
    """The time to read a prompt as long as the context in bfloat16, up to the first logits."""
    tokens = cost.context or 1
    matmuls = 2 * (
        cost.parameters - cost.non_layer_parameters
    )  # the head reads the last token only
    attention = cost.flops_per_token - 2 * _matmul_weights(cost)
    return (
        tokens * matmuls / (cluster.peak * PREFILL_UTILIZATION)
        + tokens * max(attention, 0) / (cluster.peak * PREFILL_ATTENTION_UTILIZATION)
        + PREFILL_LAYER_SECONDS * cost.attention_layers
        + PREFILL_ACTIVATION_PASSES * cost.mixed_activation_bytes / cluster.bandwidth
    )


def _gathered_bytes(cost: Cost) -> int:
    """FSDP's unsharded weights and gradients: two layers, and the parameters outside layers."""
    return (BFLOAT16_BYTES + BFLOAT16_BYTES + FLOAT32_BYTES) * (
        cost.non_layer_parameters + 2 * cost.layer_parameters
    )


def _logits_bytes(cost: Cost, sequences: int) -> int:
    tokens = sequences * (cost.context or 1)
    return BFLOAT16_BYTES * min(tokens * cost.logits_per_token, CHUNK_ELEMENTS_CUDA)


def _max_sequences(cost: Cost, available: float, sequence_bytes: int) -> int:
    """The maximum number of sequences that fit in memory, with one chunk of their logits."""
    chunk = BFLOAT16_BYTES * CHUNK_ELEMENTS_CUDA if cost.logits_per_token else 0
    return max(
        0,
        int((available - chunk) // sequence_bytes),
        int(available // (sequence_bytes + _logits_bytes(cost, 1))),
    )
