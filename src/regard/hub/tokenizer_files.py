"""Tokenizers from and for a Hugging Face folder."""

import json
import logging
from pathlib import Path
from typing import Any

from regard.errors import CheckpointError, ConfigError
from regard.models.transformer import TransformerConfig
from regard.text import PairTokenizers, Tokenizer
from regard.text.pair_tokenizers import JOINT, TARGET
from regard.text.pretrained import CLS, EOS, load_pretrained, with_template
from regard.text.special_tokens import HF_KEYS

logger = logging.getLogger(__name__)

Table = dict[str, Any]

PAIRS = ("t5", "bart", "marian")  # model_type of those that read one text and write another
ENCODERS = ("bert", "roberta", "distilbert", "albert")  # … and that read one text
NUMBERED = {"pad": "pad_token_id", "start": "bos_token_id", "stop": "eos_token_id"}


def read_tokenizers(folder: Path, config: Table) -> Tokenizer | PairTokenizers | None:
    """The tokenizer of a folder, whatever files it lies in, or those of its two sides.

    None where there is no tokenizer at all, as for images. `config` is the folder's config.json.
    """
    found = load_pretrained(folder, config)
    if not isinstance(found, Tokenizer):
        return found
    writes = config.get("is_encoder_decoder", config.get("model_type") in PAIRS)
    only_reads = any(
        str(name).endswith("EncoderModel") for name in config.get("architectures") or ()
    )
    return PairTokenizers(found, found) if writes and not only_reads else found


def check_tokenizers(
    tokenizers: Tokenizer | PairTokenizers | None, config: Any, folder: Path
) -> Tokenizer | PairTokenizers | None:
    """Them again, if the model has a vector for every id that they make of a text.

    A special token that no text becomes may lie above, as a [PAD] that was added later does.
    """
    if tokenizers is None or not isinstance(config, TransformerConfig):
        return tokenizers
    size = config.vocab_size
    if isinstance(tokenizers, Tokenizer):
        sides = [(tokenizers, size)]
    else:
        source = tokenizers.source, config.source_vocab_size or size
        sides = [source, (tokenizers.target, size)]
    for side, size in sides:
        if side.max_id >= size:
            raise CheckpointError(
                f"{folder}: the tokenizer is not that of the model: it gives id {side.max_id}, "
                f"and the model has {size} (0 to {size - 1})"
            )
    return tokenizers


def write_tokenizers(tokenizers: Tokenizer | PairTokenizers, folder: Path, config: Table) -> Table:
    """Write what `AutoTokenizer.from_pretrained` opens; what config.json must say comes back.

    Where two sides share their ids but not their pieces, `tokenizer.json` reads the source and
    `tokenizer.target.json` stands beside it for the way back. `config` is what config.json says.
    """
    if isinstance(tokenizers, Tokenizer):
        reads = config.get("model_type") in ENCODERS
        return _write(_dressed(tokenizers, *CLS) if reads else tokenizers, folder, config)
    if not tokenizers.shared:
        raise ConfigError(
            "source and target have vocabularies of their own, and no family that is written "
            "has two;\ntrain with data.tokenizer.shared=true to have one"
        )
    if not tokenizers.joint:
        tokenizers.target.save(folder / TARGET)
    numbers = _write(_dressed(tokenizers.source, *EOS), folder, config)
    return numbers | {"decoder_start_token_id": tokenizers.target.start_id}


def _dressed(tokenizer: Tokenizer, single: str, pair: str) -> Tokenizer:
    """What our tasks put around texts themselves, other libraries leave to the tokenizer."""
    return with_template(tokenizer, single, pair) if tokenizer.is_native else tokenizer


def _write(tokenizer: Tokenizer, folder: Path, config: Table) -> Table:
    if config.get("model_type") == "qwen2" and tokenizer.is_native:
        logger.warning(
            "AutoTokenizer of transformers 5 cuts text as Qwen's makers do in every qwen2 folder; "
            "open this one with PreTrainedTokenizerFast.from_pretrained"
        )
    tokenizer.save(folder / JOINT)
    roles = tokenizer.special_tokens
    special = {HF_KEYS[role]: token for role, token in roles.tokens.items()}
    context = config.get("max_position_embeddings", config.get("n_positions"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **roles.config(),
        "clean_up_tokenization_spaces": False,
        # Text never becomes a special token of a vocabulary learned here; elsewhere it may.
        "split_special_tokens": tokenizer.is_native,
        **({"model_max_length": context} if isinstance(context, int) else {}),
    }
    _write_json(folder / "tokenizer_config.json", settings)
    _write_json(folder / "special_tokens_map.json", special)
    ids = {key: tokenizer.hf_special_id(role) for role, key in NUMBERED.items()}
    numbers: Table = {key: id for key, id in ids.items() if id is not None}
    if len(tokenizer.stop_ids) > 1:
        numbers[NUMBERED["stop"]] = tokenizer.stop_ids
    return numbers


def _write_json(path: Path, table: Table) -> None:
    try:
        text = json.dumps(table, indent=2, ensure_ascii=False) + "\n"
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror}") from error
