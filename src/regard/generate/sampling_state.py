"""`SamplingState`, the input of a sampler besides the logits: token history, random numbers."""

import secrets
from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.errors import ConfigError
from regard.seeds import row_key

# SplitMix64: the increment, then (shift, multiplier) of its rounds, as signed 64-bit integers
_INCREMENT = 0x9E3779B97F4A7C15 - 2**64
_ROUNDS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


@dataclass(slots=True)
class RowGenerators:
    r"""A counter-based random number generator per row, on the device of the logits.

        number n of a row = hash(key + n * increment)

    (SplitMix64; Steele et al. 2014). A row's numbers depend on its key and on how many it has
    used, not on the other rows; they are the same on every device and need no host
    synchronization.
    """

    keys: Int[Tensor, " rows"]
    counters: Int[Tensor, " rows"]  # how many numbers each row has used

    @classmethod
    def from_seed(
        cls, seed: int | Sequence[int] | None, rows: int, device: torch.device | str = "cpu"
    ) -> "RowGenerators":
        """Generators for the pairs (seed, row), or (seed, 0) where each row has a seed.

        A row with its own seed gets the same random numbers as if it were alone in the batch.
        """
        if seed is None:
            seed = secrets.randbits(62)
        pairs = (
            [(row_seed, 0) for row_seed in seed]
            if isinstance(seed, Sequence)
            else [(seed, row) for row in range(rows)]
        )
        if not all(isinstance(row_seed, int) for row_seed, _ in pairs):
            raise ConfigError(f"seed={seed!r} must be an integer, or a sequence with one per row")
        if len(pairs) != rows:
            raise ConfigError(f"{len(pairs)} seeds for {rows} rows; give one seed, or one per row")
        keys = torch.tensor([row_key(*pair) for pair in pairs], dtype=torch.long, device=device)
        return cls(keys, torch.zeros_like(keys))

    def uniform(self, where: Bool[Tensor, " rows"] | None = None) -> Float[Tensor, " rows"]:
        """The next number of each row, in [0, 1); only rows in `where` advance."""
        mixed = self.keys + self.counters * _INCREMENT
        for shift, factor in _ROUNDS:
            mixed = (mixed ^ _shift_right(mixed, shift)) * factor
        mixed = mixed ^ _shift_right(mixed, 31)
        self.counters += 1 if where is None else where
        if mixed.device.type == "mps":  # the Metal backend has no float64
            return _shift_right(mixed, 40).float() * 2.0**-24
        return _shift_right(mixed, 11).double() * 2.0**-53

    def select(self, rows: Int[Tensor, " selected"]) -> "RowGenerators":
        """The generators of a subset of the rows."""
        return RowGenerators(self.keys[rows], self.counters[rows])


def pad_rows(rows: Sequence[Sequence[int]], width: int) -> Int[Tensor, "rows time"]:
    """Rows of token ids as one tensor on the CPU, padded with zeros on the right."""
    if not width:
        return torch.zeros(len(rows), 0, dtype=torch.long)
    flat = array("q")  # torch.frombuffer is many times faster than a tensor from nested lists
    for row in rows:
        flat.extend(row)
        flat.extend(bytes(width - len(row)))
    return torch.frombuffer(flat, dtype=torch.long).view(-1, width)


def _shift_right(x: Tensor, by: int) -> Tensor:
    """A logical right shift, which fills with zeros."""
    return (x >> by) & (2 ** (64 - by) - 1)


@dataclass(slots=True)
class SamplingState:
    """The tokens of each row so far, its random number generator, and the samplers' state."""

    history: Int[Tensor, "rows capacity"]  # prompt and generated ids; only `lengths` ids are valid
    lengths: Int[Tensor, " rows"]  # ids in each row's history
    prompt_lengths: Int[Tensor, " rows"]  # ids of each row's prompt
    generators: RowGenerators
    stop: tuple[int, ...] = ()  # the ids that end a sequence
    row_states: dict[Hashable, Tensor] = field(default_factory=dict)  # the state of samplers
    constants: dict[Hashable, Tensor] = field(default_factory=dict)  # settings as tensors

    @classmethod
    def from_prompts(
        cls,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        seed: int | Sequence[int] | None = None,
        stop: Sequence[int] = (),
        device: torch.device | str = "cpu",
    ) -> "SamplingState":
        """The state of these prompts, with space for `max_new_tokens` more ids in each row."""
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        capacity = max(map(len, prompts)) + max_new_tokens
        return cls(
            history=pad_rows(prompts, capacity).to(device),
            lengths=lengths,
            prompt_lengths=lengths.clone(),
            generators=RowGenerators.from_seed(seed, len(prompts), device),
            stop=tuple(stop),
        )

    def append(self, ids: Int[Tensor, " rows"]) -> None:
        """Append the sampled id of each row."""
        self.history.scatter_(1, self.lengths.unsqueeze(1), ids.unsqueeze(1))
        self.lengths += 1

    def select(self, rows: Int[Tensor, " selected"]) -> "SamplingState":
        """The state of a subset of the rows."""
        return SamplingState(
            self.history[rows],
            self.lengths[rows],
            self.prompt_lengths[rows],
            self.generators.select(rows),
            self.stop,
            {key: tensor[rows] for key, tensor in self.row_states.items()},
            self.constants,
        )

    def update_rows(self, rows: Int[Tensor, " selected"], selected: "SamplingState") -> None:
        """Copy back the rows of a state that `select` made and that has changed since."""
        self.history[rows], self.lengths[rows] = selected.history, selected.lengths
        self.generators.counters[rows] = selected.generators.counters
        for key, tensor in selected.row_states.items():
            self.row_states.setdefault(key, tensor.clone())[rows] = tensor

    def row_state(self, key: Hashable, initial: Callable[[], Tensor]) -> Tensor:
        """A sampler's state: a tensor with one entry per batch row, to be updated in place."""
        if key not in self.row_states:
            self.row_states[key] = initial()
        return self.row_states[key]

    def constant(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """A tensor that is made once and kept on the device."""
        if key not in self.constants:
            self.constants[key] = make()
        return self.constants[key]
