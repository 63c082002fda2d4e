"""From a model and a prompt to a text: samplers, searches and decoding."""

from regard.generate.beam import Beam
from regard.generate.chain import Chain, draw, parse_chain
from regard.generate.context import Context, Sampler
from regard.generate.contrastive_decoding import ContrastiveDecoding
from regard.generate.contrastive_search import ContrastiveSearch
from regard.generate.decode import generate, stream, stream_text
from regard.generate.decode_loop import Engine
from regard.generate.orders import DIALECTS
from regard.generate.processors import ChainProcessor
from regard.generate.sampler_trace import Traced
from regard.generate.samplers import SAMPLERS, Temperature, TopK, TopP
from regard.generate.search import Hypothesis, Search
from regard.generate.search_table import SEARCHES, parse_search
from regard.generate.speculative import LookUp, speculate, stream_speculated

__all__ = [
    "DIALECTS",
    "SAMPLERS",
    "SEARCHES",
    "Beam",
    "Chain",
    "ChainProcessor",
    "Context",
    "ContrastiveDecoding",
    "ContrastiveSearch",
    "Engine",
    "Hypothesis",
    "LookUp",
    "Sampler",
    "Search",
    "Temperature",
    "TopK",
    "TopP",
    "Traced",
    "draw",
    "generate",
    "parse_chain",
    "parse_search",
    "speculate",
    "stream",
    "stream_speculated",
    "stream_text",
]
