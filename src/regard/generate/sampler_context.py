"""What a sampler may know beside the logits, and what a sampler is."""

import secrets
from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.errors import ConfigError

_STEP = 0x9E3779B97F4A7C15 - 2**64  # as signed 64 bits
_MIX = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


@dataclass(slots=True)
class RowGenerators:
    r"""One source of chance per row, on the device of the logits.

        number n of a row = hash(key + n * step)

    (SplitMix64; Steele et al. 2014). A row's numbers depend on its key and on how many it has
    used, never on its neighbours; they are the same on every device, and nothing waits for one.
    """

    keys: Int[Tensor, " rows"]
    used: Int[Tensor, " rows"]

    @classmethod
    def from_seed(
        cls, seed: int | Sequence[int] | None, rows: int, device: torch.device | str = "cpu"
    ) -> "RowGenerators":
        """Sources for (seed, row); for a seed per row, those that it would have alone."""
        if seed is None:
            seed = secrets.randbits(62)
        pairs = (
            [(each, 0) for each in seed]
            if isinstance(seed, Sequence)
            else [(seed, row) for row in range(rows)]
        )
        if not all(isinstance(each, int) for each, _ in pairs):
            raise ConfigError(f"seed={seed!r} must be a whole number, or one for each row")
        if len(pairs) != rows:
            raise ConfigError(f"{len(pairs)} seeds do not match {rows} rows; give one, or one each")
        keys = torch.tensor([row_key(*pair) for pair in pairs], dtype=torch.long, device=device)
        return cls(keys, torch.zeros_like(keys))

    def uniform(self, where: Bool[Tensor, " rows"] | None = None) -> Float[Tensor, " rows"]:
        """The next number of each row, in [0, 1); it is used up only `where` it is wanted."""
        mixed = self.keys + self.used * _STEP
        for shift, factor in _MIX:
            mixed = (mixed ^ _shifted(mixed, shift)) * factor
        mixed = mixed ^ _shifted(mixed, 31)
        self.used += 1 if where is None else where
        if mixed.device.type == "mps":  # the Metal backend has no float64
            return _shifted(mixed, 40).float() * 2.0**-24
        return _shifted(mixed, 11).double() * 2.0**-53

    def select(self, rows: Int[Tensor, " some"]) -> "RowGenerators":
        """Those of some rows."""
        return RowGenerators(self.keys[rows], self.used[rows])


def rows_of(texts: Sequence[Sequence[int]], width: int) -> Int[Tensor, "rows width"]:
    """Texts of different lengths as one tensor on the CPU, with zeros at their ends."""
    if not width:
        return torch.zeros(len(texts), 0, dtype=torch.long)
    flat = array("q")  # of which a tensor is made many times faster than of lists
    for text in texts:
        flat.extend(text)
        flat.extend(bytes(width - len(text)))
    return torch.frombuffer(flat, dtype=torch.long).view(-1, width)


def _shifted(x: Tensor, by: int) -> Tensor:
    """A shift to the right that fills with zeros."""
    return (x >> by) & (2 ** (64 - by) - 1)


def row_key(seed: int, row: int) -> int:
    """64 bits of (seed, row), hashed, so that neighbouring seeds have nothing in common."""
    digest = blake2b(f"{seed} {row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


@dataclass(slots=True)
class SamplerContext:
    """The text of each row so far, its own source of chance, and what samplers remember."""

    history: Int[Tensor, "rows room"]  # prompt and answer; what lies beyond `lengths` is no text
    lengths: Int[Tensor, " rows"]  # ids in each row's history
    prompts: Int[Tensor, " rows"]  # of which the prompt
    generators: RowGenerators
    stop: tuple[int, ...] = ()  # the ids that end a text
    state: dict[Hashable, Tensor] = field(default_factory=dict)  # what samplers remember, by row
    constants: dict[Hashable, Tensor] = field(default_factory=dict)  # their settings as tensors

    @classmethod
    def from_prompts(
        cls,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        *,
        seed: int | Sequence[int] | None = None,
        stop: Sequence[int] = (),
        device: torch.device | str = "cpu",
    ) -> "SamplerContext":
        """The context of these prompts, with room for `tokens` more ids in each row."""
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        room = max(map(len, prompts)) + tokens
        return cls(
            history=rows_of(prompts, room).to(device),
            lengths=lengths,
            prompts=lengths.clone(),
            generators=RowGenerators.from_seed(seed, len(prompts), device),
            stop=tuple(stop),
        )

    def append(self, ids: Int[Tensor, " rows"]) -> None:
        """Note what was drawn."""
        self.history.scatter_(1, self.lengths.unsqueeze(1), ids.unsqueeze(1))
        self.lengths += 1

    def select(self, rows: Int[Tensor, " some"]) -> "SamplerContext":
        """The context of some rows, as if they had been alone from the beginning."""
        return SamplerContext(
            self.history[rows],
            self.lengths[rows],
            self.prompts[rows],
            self.generators.select(rows),
            self.stop,
            {key: kept[rows] for key, kept in self.state.items()},
            self.constants,
        )

    def put(self, rows: Int[Tensor, " some"], some: "SamplerContext") -> None:
        """Take over what has become of some rows since they were selected."""
        self.history[rows], self.lengths[rows] = some.history, some.lengths
        self.generators.used[rows] = some.generators.used
        for key, kept in some.state.items():
            self.state.setdefault(key, kept.clone())[rows] = kept

    def remembered(self, key: Hashable, begin: Callable[[], Tensor]) -> Tensor:
        """What a sampler keeps from token to token: a tensor by row, to be changed in place."""
        if key not in self.state:
            self.state[key] = begin()
        return self.state[key]

    def constant(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """A tensor made once and then kept on the device."""
        if key not in self.constants:
            self.constants[key] = make()
        return self.constants[key]


@runtime_checkable
class Sampler(Protocol):
    """One link of a chain: logits in, logits out, removed tokens at -inf.

    At a neutral value the very same logits come back. `context` may be None for samplers that
    look at nothing but the logits. See also `generate.samplers.logits_processor`.
    """

    def __call__(
        self, logits: Float[Tensor, "rows vocab"], context: SamplerContext | None = None
    ) -> Float[Tensor, "rows vocab"]:
        """Reshape or narrow what may be drawn."""
