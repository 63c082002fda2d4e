"""Read and write the tokenizer files of a Hugging Face folder."""

import json
import logging
from pathlib import Path
from typing import Any

from regard.errors import CheckpointError, ConfigError
from regard.hub.model_type import ConfigDict
from regard.models.transformer import TransformerConfig
from regard.text import PairTokenizers, Tokenizer
from regard.text.pair_tokenizers import JOINT, TARGET
from regard.text.pretrained import CLS, EOS, load_pretrained, with_post_processor
from regard.text.special_tokens import HF_KEYS

logger = logging.getLogger(__name__)

ENCODER_DECODER_TYPES = ("t5", "bart", "mbart", "marian")  # values of model_type
ENCODER_TYPES = ("bert", "roberta", "camembert", "distilbert", "albert", "deberta", "deberta-v2")
ID_KEYS = {"pad": "pad_token_id", "bos": "bos_token_id", "eos": "eos_token_id"}


def read_tokenizers(folder: Path, config_json: ConfigDict) -> Tokenizer | PairTokenizers | None:
    """The tokenizer of a folder, or for an encoder-decoder the tokenizers of both sides.

    None if the folder has no tokenizer files, as for images.
    """
    tokenizers = load_pretrained(folder, config_json)
    if not isinstance(tokenizers, Tokenizer):
        return tokenizers
    model_type, classes = config_json.get("model_type"), config_json.get("architectures") or ()
    has_decoder = config_json.get("is_encoder_decoder", model_type in ENCODER_DECODER_TYPES)
    encoder_only = any(str(name).endswith("EncoderModel") for name in classes)
    return (
        PairTokenizers(tokenizers, tokenizers) if has_decoder and not encoder_only else tokenizers
    )


def check_tokenizers(
    tokenizers: Tokenizer | PairTokenizers | None, config: Any, folder: Path
) -> Tokenizer | PairTokenizers | None:
    """Return the tokenizers after checking that the model has an embedding for every id of a text.

    A special token that no text contains may have a larger id, such as a [PAD] added later.
    """
    if tokenizers is None or not isinstance(config, TransformerConfig):
        return tokenizers
    vocab_size = config.vocab_size
    if isinstance(tokenizers, Tokenizer):
        sides = [(tokenizers, vocab_size)]
    else:
        source = tokenizers.source, config.source_vocab_size or vocab_size
        sides = [source, (tokenizers.target, vocab_size)]
    for tokenizer, size in sides:
        if tokenizer.max_id >= size:
            raise CheckpointError(
                f"{folder}: the tokenizer does not belong to the model: it returns id "
                f"{tokenizer.max_id}, and the model has {size} ids (0 to {size - 1})"
            )
    return tokenizers


def write_tokenizers(
    tokenizers: Tokenizer | PairTokenizers, folder: Path, config_json: ConfigDict
) -> ConfigDict:
    """Write the files that `AutoTokenizer.from_pretrained` opens; returns ids for config.json.

    If two sides share their ids but not their pieces, `tokenizer.json` is that of the source, and
    `tokenizer.target.json` is written so that the folder can be imported again.
    """
    if isinstance(tokenizers, Tokenizer):
        is_encoder = config_json.get("model_type") in ENCODER_TYPES
        tokenizer = _add_template(tokenizers, *CLS) if is_encoder else tokenizers
        return _write(tokenizer, folder, config_json)
    if not tokenizers.shares_ids:
        raise ConfigError(
            "source and target have separate vocabularies, and no model type that can be exported "
            "has two;\ntrain with data.tokenizer.shared=true to have one"
        )
    if not tokenizers.joint:
        tokenizers.target.save(folder / TARGET)
    ids = _write(_add_template(tokenizers.source, *EOS), folder, config_json)
    return ids | {"decoder_start_token_id": tokenizers.target.bos_id}


def _add_template(tokenizer: Tokenizer, single: str, pair: str) -> Tokenizer:
    """Let a tokenizer trained here add special tokens itself; in regard, the task adds them."""
    return with_post_processor(tokenizer, single, pair) if tokenizer.is_native else tokenizer


def _write(tokenizer: Tokenizer, folder: Path, config_json: ConfigDict) -> ConfigDict:
    if config_json.get("model_type") == "qwen2" and tokenizer.is_native:
        logger.warning(
            "AutoTokenizer of transformers 5 replaces the pre-tokenizer in every qwen2 folder; "
            "open this one with PreTrainedTokenizerFast.from_pretrained"
        )
    tokenizer.save(folder / JOINT)
    special_tokens = tokenizer.special_tokens
    names = {HF_KEYS[role]: token for role, token in special_tokens.tokens.items()}
    context = config_json.get("max_position_embeddings", config_json.get("n_positions"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special_tokens.config(),
        "clean_up_tokenization_spaces": False,
        # A tokenizer trained here never encodes text as a special token; others may.
        "split_special_tokens": tokenizer.is_native,
        **({"model_max_length": context} if isinstance(context, int) else {}),
    }
    _write_json(folder / "tokenizer_config.json", settings)
    _write_json(folder / "special_tokens_map.json", names)
    ids = {key: tokenizer.hf_special_id(role) for role, key in ID_KEYS.items()}
    config_ids: ConfigDict = {key: id for key, id in ids.items() if id is not None}
    if len(tokenizer.stop_ids) > 1:
        config_ids[ID_KEYS["eos"]] = tokenizer.stop_ids
    return config_ids


def _write_json(path: Path, value: ConfigDict) -> None:
    try:
        text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror}") from error
