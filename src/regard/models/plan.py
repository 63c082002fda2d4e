"""What training takes on so many GPUs: what fits, how to shard it, and how long it lasts.

Nothing is measured here. Bytes and FLOPs are those of `models.cost`; what a card can do is taken
from its data sheet; how much of that is reached is an assumption, and every assumption is a field.
"""

import math
from dataclasses import dataclass

from regard.errors import ConfigError
from regard.models.cost import BACKWARD, FLOAT, HALF, Cost
from regard.nn.loss import CHUNK_ELEMENTS_CUDA

USABLE = 0.95  # of the memory; the rest is for the driver, kernels and gaps
TOKENS = 20  # per parameter: Hoffmann et al. 2022, "Chinchilla"
PER_MACHINE = 8  # GPUs


@dataclass(frozen=True, slots=True)
class Card:
    """What a data sheet says: bytes, dense bfloat16 FLOP/s, and bytes a second each way."""

    memory: float
    peak: float
    link: float  # of one GPU to the others of its machine
    network: float  # of one machine of 8 to the other machines


CARDS: dict[str, Card] = {
    "a100": Card(80e9, 312e12, 300e9, 200e9),
    "h100": Card(80e9, 989e12, 450e9, 400e9),
    "h200": Card(141e9, 989e12, 450e9, 400e9),
    "b200": Card(180e9, 2250e12, 900e9, 400e9),
    "l40s": Card(48e9, 362e12, 32e9, 100e9),
    "rtx4090": Card(24e9, 165e12, 32e9, 12e9),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """GPUs, and how much of what they could do they will."""

    gpus: int
    memory: float  # bytes of each
    peak: float  # FLOP/s of each
    link: float  # bytes a second between any two, each way
    reached: float = 0.45  # share of the peak, of all arithmetic that is done
    link_reached: float = 0.7  # share of the link

    def __post_init__(self) -> None:
        for name, value in (
            ("gpus", self.gpus),
            ("memory", self.memory),
            ("peak", self.peak),
            ("link", self.link),
        ):
            if not 0 < value < math.inf:
                raise ConfigError(f"{name}={value:g} must be a number above 0")
        for name in ("reached", "link_reached"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name):g} is a share, from 0 to 1")

    @property
    def usable(self) -> float:
        """Bytes of one GPU that a program gets."""
        return USABLE * self.memory


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train: what it takes of each GPU, and how fast all of them are."""

    name: str
    sharded: bool
    recomputed: bool
    weight_bytes: int  # float32, as all but the next
    copy_bytes: int  # bfloat16 copies, or what is gathered of the others' shards
    gradient_bytes: int
    optimizer_bytes: int
    borrowed_bytes: (
        int  # of all bfloat16 weights at once, for an evaluation; 0 if none are borrowed
    )
    activation_bytes: int  # of one row
    logits_bytes: int  # the chunk that the loss holds
    rows: int  # at a time on each GPU; 0 where not even one fits, or no evaluation
    used_bytes: int  # with so many, at most
    tokens_per_second: float
    limit: str  # "arithmetic" or "link": what it waits for

    @property
    def held_bytes(self) -> int:
        """Bytes before the first row."""
        return self.own_bytes + self.copy_bytes

    @property
    def own_bytes(self) -> int:
        """Bytes that stay here all the time."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def evaluating_bytes(self) -> int:
        """Bytes in an evaluation."""
        return self.own_bytes + self.borrowed_bytes + self.logits_bytes


def ways(cost: Cost, machine: Machine, rows: int | None = None) -> list[Way]:
    r"""All ways, the simplest first; `rows` at a time, or as many as fit.

    N GPUs, P parameters, rows of T tokens that take F FLOPs each; bytes of each GPU:

        DDP     16 P + 2 of each weight that multiplies + rows · activations
        FSDP    16 P / N + 8 (outside + 2 of the largest layer) + rows · activations
                16 P / N + 2 P  for an evaluation, for which all weights are borrowed at once

    A step takes the longer of

        arithmetic    rows · T · F / (peak · reached);  with recomputation 4/3 of it
        link          8 P (N-1)/N / (link · reached)

    since the two overlap. Over the link go, for DDP, the gradients in float32 there and back;
    for FSDP the weights in bfloat16 twice and the gradients in float32 once: 8 bytes each.
    """
    if not cost.layer_parameters:
        raise ConfigError(
            "only a model that reads a whole row at once can be planned; one that counts or steps "
            "through time is not bound by its FLOPs"
        )
    if rows is not None and rows < 1:
        raise ConfigError(f"rows={rows} must be more than 0")
    return [
        _way(cost, machine, rows, sharded, recomputed)
        for sharded in ([False, True] if machine.gpus > 1 else [False])
        for recomputed in (False, True)
    ]


def fastest(found: list[Way]) -> Way | None:
    """The way to take: the fastest that fits, the simplest of equals."""
    fitting = [way for way in found if way.rows]
    return max(fitting, key=lambda way: way.tokens_per_second, default=None)


def gpus_needed(cost: Cost, machine: Machine) -> int | None:
    """The fewest GPUs of this kind that can hold it at all; None if no number of them can."""
    shards = cost.weight_bytes + cost.gradient_bytes + cost.optimizer_bytes
    row = cost.mixed_recomputed_bytes + _logits_bytes(cost, 1)
    if cost.mixed_training_bytes + row <= machine.usable:
        return 1
    most = max(_gathered(cost) + row, HALF * cost.parameters + _logits_bytes(cost, 1))
    room = machine.usable - most
    return max(2, math.ceil(shards / room)) if room > 0 else None


def host_bytes(cost: Cost, machine: Machine) -> int:
    """Bytes of a machine's own memory: each of its ranks makes the whole model there first."""
    return cost.weight_bytes * min(machine.gpus, PER_MACHINE)


def _way(cost: Cost, machine: Machine, rows: int | None, sharded: bool, recomputed: bool) -> Way:
    gpus = machine.gpus
    shards = gpus if sharded else 1
    weights, gradients, moments = (
        -(-size // shards)
        for size in (cost.weight_bytes, cost.gradient_bytes, cost.optimizer_bytes)
    )
    copies = _gathered(cost) if sharded else cost.mixed_training_bytes - cost.training_bytes
    row = cost.mixed_recomputed_bytes if recomputed else cost.mixed_activation_bytes
    own = weights + gradients + moments
    borrowed = HALF * cost.parameters if sharded else 0
    most = _most_rows(cost, machine.usable - own - copies, row)
    if own + borrowed + _logits_bytes(cost, 1) > machine.usable:
        most = 0
    rows = most if rows is None else rows if rows <= most else 0
    logits = _logits_bytes(cost, max(rows, 1))

    tokens = rows * (cost.context or 1)
    flops = cost.training_flops_per_token * ((2 + BACKWARD) / (1 + BACKWARD) if recomputed else 1)
    arithmetic = tokens * flops / (machine.peak * machine.reached)
    sent = (2 * FLOAT if not sharded else 2 * HALF + FLOAT) * cost.parameters * (gpus - 1) / gpus
    link = sent / (machine.link * machine.link_reached)
    plain = "FSDP" if sharded else "DDP" if gpus > 1 else "one GPU"
    return Way(
        name=f"{plain} + recompute" if recomputed else plain,
        sharded=sharded,
        recomputed=recomputed,
        weight_bytes=weights,
        copy_bytes=copies,
        gradient_bytes=gradients,
        optimizer_bytes=moments,
        borrowed_bytes=borrowed,
        activation_bytes=row,
        logits_bytes=logits,
        rows=rows,
        used_bytes=own + max(copies + rows * row + logits, borrowed + _logits_bytes(cost, 1)),
        tokens_per_second=gpus * tokens / max(arithmetic, link) if rows else 0.0,
        limit="link" if link > arithmetic else "arithmetic",
    )


def _gathered(cost: Cost) -> int:
    """Bytes of whole weights and their gradients: outside the layers, of a layer and the next."""
    return (HALF + HALF + FLOAT) * (cost.outside_parameters + 2 * cost.layer_parameters)


def _logits_bytes(cost: Cost, rows: int) -> int:
    tokens = rows * (cost.context or 1)
    return HALF * min(tokens * cost.logits_per_token, CHUNK_ELEMENTS_CUDA)


def _most_rows(cost: Cost, room: float, row: int) -> int:
    """How many rows and their logits have room; these grow with the rows up to a whole chunk."""
    chunk = HALF * CHUNK_ELEMENTS_CUDA if cost.logits_per_token else 0
    return max(0, int((room - chunk) // row), int(room // (row + _logits_bytes(cost, 1))))
