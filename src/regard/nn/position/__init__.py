"""Position encodings: vectors added, queries and keys rotated, or scores biased."""

from collections.abc import Callable

from regard.nn.position.absolute import Learned, Sinusoidal
from regard.nn.position.base import Position, Rotation
from regard.nn.position.bias import T5, ALiBi
from regard.nn.position.rotary import Rotary

POSITIONS: dict[str, Callable[..., Position]] = {
    "none": Position,
    "sinusoidal": Sinusoidal,
    "learned": Learned,
    "rotary": Rotary,
    "alibi": ALiBi,
    "t5": T5,
}

__all__ = ["POSITIONS", "T5", "ALiBi", "Learned", "Position", "Rotary", "Rotation", "Sinusoidal"]
