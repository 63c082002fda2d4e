"""Weights from and for the Hugging Face world. A family is a table; these are all of them."""

from regard.hub.families.albert import ALBERT
from regard.hub.families.bart import BART
from regard.hub.families.bert import BERT
from regard.hub.families.bloom import BLOOM
from regard.hub.families.distilbert import DISTILBERT
from regard.hub.families.gemma import GEMMA, GEMMA2
from regard.hub.families.gpt2 import GPT2
from regard.hub.families.gpt_neox import GPT_NEOX
from regard.hub.families.llama import LLAMA, MISTRAL, PHI3, QWEN2, QWEN3
from regard.hub.families.marian import MARIAN
from regard.hub.families.opt import OPT
from regard.hub.families.phi import PHI
from regard.hub.families.roberta import ROBERTA
from regard.hub.families.t5 import T5
from regard.hub.families.vit import VIT
from regard.hub.family import Family

MODEL_TYPES: dict[
    str, Family
] = {  # by model_type; of those that can express a model, the first exports it
    "gpt2": GPT2,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "phi": PHI,
    "phi3": PHI3,
    "gpt_neox": GPT_NEOX,
    "opt": OPT,
    "bloom": BLOOM,
    "bert": BERT,
    "roberta": ROBERTA,
    "distilbert": DISTILBERT,
    "albert": ALBERT,
    "t5": T5,
    "bart": BART,
    "marian": MARIAN,
    "vit": VIT,
}

__all__ = ["MODEL_TYPES", "Family"]
