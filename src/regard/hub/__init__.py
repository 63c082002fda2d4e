"""Read and write Hugging Face checkpoints: config.json, safetensors and tokenizer files.

    external_checkpoint   open a checkpoint, check every tensor, load or copy the weights
    config_json           config.json to a model configuration and back
    weight_mapping        rules that map tensor names and layouts; convert_weights applies them
    families/             one module per model family: its settings, heads and rules
    verify_export         compare an exported model with transformers

`hub` does not know run folders. `regard import` and `regard export` read and write them, so they
are in `training/import_export.py`, which calls this package.
"""

from regard.hub.families.albert import ALBERT
from regard.hub.families.bart import BART, MBART
from regard.hub.families.bert import BERT
from regard.hub.families.bloom import BLOOM
from regard.hub.families.deberta import DEBERTA, DEBERTA_1
from regard.hub.families.distilbert import DISTILBERT
from regard.hub.families.gemma import GEMMA, GEMMA2, GEMMA3
from regard.hub.families.gpt2 import GPT2
from regard.hub.families.gpt_neox import GPT_NEOX
from regard.hub.families.llama import LLAMA, MISTRAL, PHI3, QWEN2, QWEN3
from regard.hub.families.marian import MARIAN
from regard.hub.families.opt import OPT
from regard.hub.families.phi import PHI
from regard.hub.families.roberta import CAMEMBERT, ROBERTA
from regard.hub.families.t5 import T5
from regard.hub.families.vit import VIT
from regard.hub.family import Family

# By model_type of config.json. Export takes the first family that can express a model.
MODEL_TYPES: dict[str, Family] = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "phi": PHI,
    "phi3": PHI3,
    "gpt_neox": GPT_NEOX,
    "opt": OPT,
    "bloom": BLOOM,
    "bert": BERT,
    "roberta": ROBERTA,
    "camembert": CAMEMBERT,
    "distilbert": DISTILBERT,
    "albert": ALBERT,
    "deberta": DEBERTA_1,
    "deberta-v2": DEBERTA,
    "t5": T5,
    "bart": BART,
    "mbart": MBART,
    "marian": MARIAN,
    "vit": VIT,
}

__all__ = ["MODEL_TYPES", "Family"]
