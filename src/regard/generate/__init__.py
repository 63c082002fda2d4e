"""From a model and a prompt to a text: samplers, decoding and beam search."""

from regard.generate.beam import Hypothesis, beam
from regard.generate.chain import Chain, draw, parse_chain
from regard.generate.context import Context, Sampler
from regard.generate.decode import generate, stream, stream_text
from regard.generate.samplers import SAMPLERS, Temperature, TopK, TopP

__all__ = [
    "SAMPLERS",
    "Chain",
    "Context",
    "Hypothesis",
    "Sampler",
    "Temperature",
    "TopK",
    "TopP",
    "beam",
    "draw",
    "generate",
    "parse_chain",
    "stream",
    "stream_text",
]
