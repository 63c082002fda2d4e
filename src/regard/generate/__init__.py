"""Text generation: samplers (logits processors), decoding, searches, speculative decoding.

decode                  generate, stream: autoregressive decoding
decode_loop             eager and CUDA-graph decode loops
chain                   a chain of samplers, and the sampling of a token
fused_chain             the end of a chain as fused GPU kernels
samplers/               temperature, top-k, nucleus (top-p), penalties, mirostat, constraints
sampler_spec            samplers from strings such as `top_p=0.9`, and back
sampler_orders          the order of samplers, as in other systems
traced_chain            a chain that records the effect of each sampler
sampling_state          the token history and the random numbers that samplers use
stop_strings            end a text before a given string
search/                 beam search, contrastive search
speculative_decoding    with a draft model or prompt lookup
contrastive_decoding    an expert model contrasted with an amateur model
transformers_processor  a chain as a logits processor of Hugging Face transformers
"""

from regard.generate.chain import DEFAULT_SAMPLERS, Chain, parse_chain, sample_token
from regard.generate.contrastive_decoding import ContrastiveDecoding
from regard.generate.decode import detokenize_stream, generate, stream
from regard.generate.decode_loop import CudaGraphDecoder
from regard.generate.sampler_orders import SAMPLER_ORDERS
from regard.generate.samplers import SAMPLERS
from regard.generate.samplers.logits_processor import LogitsProcessor, Sampler
from regard.generate.samplers.temperature import Temperature
from regard.generate.samplers.truncation import TopK, TopP
from regard.generate.sampling_state import SamplingState
from regard.generate.search import SEARCHES, BeamSearch, ContrastiveSearch, parse_search
from regard.generate.search.protocol import Hypothesis, Search
from regard.generate.speculative_decoding import (
    PromptLookup,
    generate_speculative,
    stream_speculative,
)
from regard.generate.traced_chain import TracedChain
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
    "CudaGraphDecoder",
    "Hypothesis",
    "LogitsProcessor",
    "PromptLookup",
    "Sampler",
    "SamplingState",
    "Search",
    "Temperature",
    "TopK",
    "TopP",
    "TracedChain",
    "detokenize_stream",
    "generate",
    "generate_speculative",
    "parse_chain",
    "parse_search",
    "sample_token",
    "stream",
    "stream_speculative",
]
