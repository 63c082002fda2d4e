"""Read and write Hugging Face checkpoints: config.json, safetensors and tokenizer files.

    external_checkpoint   open a checkpoint, check every tensor, load or copy the weights
    config_json           config.json to a model configuration and back
    weight_mapping        rules that map tensor names and layouts; convert_weights applies them
    model_types/          `model_type` values of config.json: their settings, heads and rules
    tokenizer_files       the tokenizer files of a folder
    peft                  LoRA adapters of PEFT
    gguf, onnx            other formats to export to
    verify_export         compare an exported model with transformers

`hub` does not know run folders. `regard import` and `regard export` read and write them, so they
are in `training/import_export.py`, which calls this package.
"""

from regard.hub.model_type import ModelType
from regard.hub.model_types.albert import ALBERT
from regard.hub.model_types.bart import BART, MBART
from regard.hub.model_types.bert import BERT
from regard.hub.model_types.bloom import BLOOM
from regard.hub.model_types.deberta import DEBERTA, DEBERTA_V2
from regard.hub.model_types.distilbert import DISTILBERT
from regard.hub.model_types.gemma import GEMMA, GEMMA2, GEMMA3
from regard.hub.model_types.gpt2 import GPT2
from regard.hub.model_types.gpt_neox import GPT_NEOX
from regard.hub.model_types.llama import LLAMA, MISTRAL, PHI3, QWEN2, QWEN3
from regard.hub.model_types.marian import MARIAN
from regard.hub.model_types.opt import OPT
from regard.hub.model_types.phi import PHI
from regard.hub.model_types.roberta import CAMEMBERT, ROBERTA
from regard.hub.model_types.t5 import T5
from regard.hub.model_types.vit import VIT

# By model_type of config.json. Export takes the first that can express a model.
MODEL_TYPES: dict[str, ModelType] = {
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
    "deberta": DEBERTA,
    "deberta-v2": DEBERTA_V2,
    "t5": T5,
    "bart": BART,
    "mbart": MBART,
    "marian": MARIAN,
    "vit": VIT,
}

__all__ = ["MODEL_TYPES", "ModelType"]
