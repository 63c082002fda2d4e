"""From a model and a prompt to a text: samplers, searches and decoding."""

from regard.generate.chain import DEFAULT_SAMPLERS, Chain, draw, parse_chain
from regard.generate.contrastive_decoding import ContrastiveDecoding
from regard.generate.decode import generate, stream, stream_text
from regard.generate.decode_loop import Engine
from regard.generate.sampler_context import Sampler, SamplerContext
from regard.generate.sampler_orders import SAMPLER_ORDERS
from regard.generate.sampler_trace import TracedChain
from regard.generate.samplers import SAMPLERS, Temperature, TopK, TopP
from regard.generate.search import SEARCHES, parse_search
from regard.generate.search.beam_search import BeamSearch
from regard.generate.search.contrastive_search import ContrastiveSearch
from regard.generate.search.protocol import Hypothesis, Search
from regard.generate.speculative_decoding import PromptLookup, speculate, stream_speculated
from regard.generate.transformers_processor import ChainProcessor

__all__ = [
    "DEFAULT_SAMPLERS",
    "SAMPLERS",
    "SAMPLER_ORDERS",
    "SEARCHES",
    "BeamSearch",
    "Chain",
    "ChainProcessor",
    "ContrastiveDecoding",
    "ContrastiveSearch",
    "Engine",
    "Hypothesis",
    "PromptLookup",
    "Sampler",
    "SamplerContext",
    "Search",
    "Temperature",
    "TopK",
    "TopP",
    "TracedChain",
    "draw",
    "generate",
    "parse_chain",
    "parse_search",
    "speculate",
    "stream",
    "stream_speculated",
    "stream_text",
]
