"""Presets: published and useful configurations by name; each cites its source."""

from collections.abc import Callable

from regard.models.autoregression import AutoregressionConfig
from regard.models.bag_of_words import BagOfWordsConfig
from regard.models.captioner import CaptionerConfig, RecurrentCaptionerConfig
from regard.models.cbow import CBOWConfig
from regard.models.convolution import ConvolutionConfig
from regard.models.feedforward import FeedForwardConfig
from regard.models.hmm import HMMConfig
from regard.models.ngram import NGramConfig
from regard.models.nlinear import NLinearConfig
from regard.models.presets import captioners, classical, gpt, vaswani, vit
from regard.models.presets.decoders import DECODERS
from regard.models.presets.encoder_decoders import ENCODER_DECODERS
from regard.models.presets.encoders import ENCODERS
from regard.models.presets.large_decoders import LARGE_DECODERS
from regard.models.presets.llama import LLAMAS
from regard.models.presets.published import PUBLISHED, Published
from regard.models.presets.recurrent import RECURRENT
from regard.models.presets.seq2seq import SEQ2SEQ
from regard.models.recurrent import RecurrentConfig
from regard.models.seq2seq import Seq2SeqConfig
from regard.models.soft_window import SoftWindowConfig
from regard.models.transformer import TransformerConfig
from regard.models.vision import VisionConfig

ModelConfig = (
    TransformerConfig
    | RecurrentConfig
    | Seq2SeqConfig
    | FeedForwardConfig
    | ConvolutionConfig
    | BagOfWordsConfig
    | CBOWConfig
    | NGramConfig
    | HMMConfig
    | AutoregressionConfig
    | NLinearConfig
    | VisionConfig
    | CaptionerConfig
    | RecurrentCaptionerConfig
    | SoftWindowConfig
)

PRESETS: dict[str, Callable[[], ModelConfig]] = {
    "gpt1": gpt.gpt1,
    "gpt2": gpt.gpt2,
    "gpt2-medium": gpt.gpt2_medium,
    "gpt2-large": gpt.gpt2_large,
    "gpt2-xl": gpt.gpt2_xl,
    "modern": gpt.modern,
    "tiny-decoder": gpt.tiny_decoder,
    "transformer-base": vaswani.transformer_base,
    "transformer-big": vaswani.transformer_big,
    "tiny-encoder": vaswani.tiny_encoder,
    "tiny-encoder-decoder": vaswani.tiny_encoder_decoder,
    "vit-b16": vit.vit_b16,
    "vit-l16": vit.vit_l16,
    "vit-h14": vit.vit_h14,
    "tiny-vit": vit.tiny_vit,
    "tiny-captioner": captioners.tiny_captioner,
    "show-attend-tell": captioners.show_attend_tell,
    **RECURRENT,
    **SEQ2SEQ,
    "bag": classical.bag,
    "cbow": classical.cbow,
    "ngram": classical.ngram,
    "hmm": classical.hmm,
    **ENCODERS,
    **ENCODER_DECODERS,
    **DECODERS,
    **LLAMAS,
    **LARGE_DECODERS,
}

ALIASES = {  # a name without a size is an alias of one size
    "transformer": "transformer-base",
    "bert": "bert-base",
    "roberta": "roberta-base",
    "albert": "albert-base",
    "camembert": "camembert-base",
    "deberta": "deberta-v3-base",
    "t5": "t5-base",
    "bart": "bart-base",
    "marian": "marian-en-de",
    "gpt3": "gpt3-175b",
    "gpt-neox": "gpt-neox-20b",
    "pythia": "pythia-1.4b",
    "opt": "opt-175b",
    "bloom": "bloom-176b",
    "llama": "llama-7b",
    "llama-2": "llama-2-7b",
    "llama-3": "llama-3-8b",
    "mistral": "mistral-7b",
    "qwen2": "qwen2-7b",
    "qwen3": "qwen3-8b",
    "gemma": "gemma-2b",
    "gemma-2": "gemma-2-2b",
    "phi": "phi-2",
    "phi-3": "phi-3-mini",
    "glm": "glm-130b",
    "glm-4": "glm-4-9b",
    "vit": "vit-b16",
    "palm": "palm-540b",
    "gopher": "gopher-280b",
    "chinchilla": "chinchilla-70b",
}
PRESETS |= {alias: PRESETS[name] for alias, name in ALIASES.items()}
PUBLISHED |= {alias: PUBLISHED[name] for alias, name in ALIASES.items()}

__all__ = ["ALIASES", "PRESETS", "PUBLISHED", "ModelConfig", "Published"]
