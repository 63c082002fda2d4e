"""What a sampler may know beside the logits, and what a sampler is."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(slots=True)
class Context:
    """The text of each row so far, and its own source of chance.

    A row's random numbers depend on (seed, row) only, never on its neighbours in the batch.
    """

    history: Int[Tensor, "rows room"]  # prompt and answer; what lies beyond `lengths` is no text
    lengths: Int[Tensor, " rows"]  # ids in each row's history
    prompts: Int[Tensor, " rows"]  # of which the prompt
    generators: list[torch.Generator]
    state: list[dict[str, Any]]  # what samplers with a memory keep, one dict per row

    @classmethod
    def begin(
        cls,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        *,
        seed: int | None = None,
        device: torch.device | str = "cpu",
    ) -> "Context":
        """The context of these prompts, with room for `tokens` more ids in each row."""
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        room = max(map(len, prompts)) + tokens
        padded = [[*prompt, *[0] * (room - len(prompt))] for prompt in prompts]
        return cls(
            history=torch.tensor(padded, device=device),
            lengths=lengths,
            prompts=lengths.clone(),
            generators=[row_generator(seed, row) for row in range(len(prompts))],
            state=[{} for _ in prompts],
        )

    def append(self, ids: Int[Tensor, " rows"]) -> None:
        """Note what was drawn."""
        self.history.scatter_(1, self.lengths.unsqueeze(1), ids.unsqueeze(1))
        self.lengths += 1


@runtime_checkable
class Sampler(Protocol):
    """One link of a chain: logits in, logits out, removed tokens at -inf.

    At a neutral value the very same logits come back. `context` may be None for samplers that
    look at nothing but the logits.
    """

    def __call__(
        self, logits: Float[Tensor, "rows vocab"], context: Context | None = None
    ) -> Float[Tensor, "rows vocab"]:
        """Reshape or narrow what may be drawn."""


def row_generator(seed: int | None, row: int) -> torch.Generator:
    """The random numbers of one row: a function of (seed, row), or new ones without a seed."""
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:  # hashed, because torch's CPU generator is seeded by 32 bits: seed + row would overlap
        digest = blake2b(f"{seed} {row}".encode(), digest_size=4).digest()
        generator.manual_seed(int.from_bytes(digest, "big"))
    return generator
