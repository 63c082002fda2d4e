"""The vocabulary of a GGUF file, with which llama.cpp tokenizes text."""

import base64
import json
from typing import Any, NoReturn

from regard.errors import ConfigError
from regard.text import Tokenizer
from regard.text.tokenizer import METASPACE
from regard.text.wordpiece import CONTINUATION

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # llama.cpp's token types
# llama.cpp's names of pre-tokenizers, by the regular expression that splits text before BPE.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PRE_TOKENIZERS = {
    f"{_WORDS}\\p{{N}}{_REST}": "qwen2",
    f"{_WORDS}\\p{{N}}{{1,3}}{_REST}": "llama-bpe",
}
SPECIAL_TOKEN_ROLES = ("bos", "eos", "unk", "pad", "mask", "sep")


def write_vocabulary(writer: Any, tokenizer: Tokenizer, size: int, architecture: str) -> None:
    """Add the tokens of a tokenizer to a GGUF writer; `size` is the vocabulary size of the model.

    Raises if llama.cpp has no tokenizer that gives the same ids.
    """
    table = json.loads(tokenizer._backend.to_str())
    kind = table["model"]["type"]
    writers = {"BPE": _write_bpe, "Unigram": _write_unigram, "WordPiece": _write_wordpiece}
    if kind not in writers or tokenizer.kind == "char":
        _refuse(tokenizer, f"llama.cpp has no tokenizer of the kind {tokenizer.kind!r}")
    if (kind == "WordPiece") != (architecture == "bert"):
        _refuse(tokenizer, f"llama.cpp's {architecture} does not use {tokenizer.kind}")
    if tokenizer.vocab_size > size:
        _refuse(tokenizer, f"it has {tokenizer.vocab_size} ids, and the model has {size}")
    vocab = {id: token for token, id in tokenizer._backend.get_vocab().items()}
    types = [NORMAL if id in vocab else UNUSED for id in range(size)]
    tokens = [vocab.get(id, f"[PAD{id}]") for id in range(size)]
    for added in table["added_tokens"]:
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    for id in tokenizer.special_ids:
        types[id] = CONTROL
    unknown = tokenizer.special_id("unk")
    if unknown is not None and kind != "BPE":
        types[unknown] = UNKNOWN
    writers[kind](writer, tokenizer, table, tokens, types)
    writer.add_token_types(types)
    for role in SPECIAL_TOKEN_ROLES:
        special = tokenizer.special_id(role)
        if special is not None:
            getattr(writer, f"add_{role}_token_id")(special)
    if architecture == "bert":
        cls = tokenizer.special_id("cls")
        if cls is not None:
            writer.add_bos_token_id(cls)
        return
    if tokenizer.special_id("eos") is None:
        _refuse(tokenizer, "it has no EOS token, so llama.cpp would stop at another token")
    prefix, bos = tokenizer.prefix_ids, tokenizer.special_id("bos")
    if prefix not in ([], [bos]):
        _refuse(tokenizer, "it puts several special tokens before a text")
    writer.add_add_bos_token(bool(prefix))
    writer.add_add_eos_token(False)


def _refuse(tokenizer: Tokenizer, reason: str) -> NoReturn:
    raise ConfigError(
        f"the tokenizer ({tokenizer.kind}) cannot be exported as GGUF: {reason};\n"
        "train with data.tokenizer=bpe, or export with --format transformers"
    )


def _steps(part: Any) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, with nested sequences flattened."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        inner = part.get("normalizers") or part.get("pretokenizers") or []
        return [step for component in inner for step in _steps(component)]
    return [part]


def _write_bpe(
    writer: Any, tokenizer: Tokenizer, table: Any, tokens: list[str], types: list[int]
) -> None:
    pre_tokenizers, normalizers = _steps(table["pre_tokenizer"]), _steps(table["normalizer"])
    merges = [
        pair.split(" ") if isinstance(pair, str) else pair for pair in table["model"]["merges"]
    ]
    if any(step["type"] == "ByteLevel" for step in pre_tokenizers):
        if others := [step["type"] for step in normalizers if step["type"] != "NFC"]:
            _refuse(tokenizer, f"llama.cpp has no normalizer {others[0]} before BPE")
        if not merges:  # GGUF cannot store an empty list
            _refuse(tokenizer, "it has no merges, which llama.cpp needs for BPE")
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_pre_tokenizer_name(tokenizer, pre_tokenizers))
        writer.add_token_list(tokens)
        writer.add_token_merges([" ".join(pair) for pair in merges])
        return
    if not table["model"].get("byte_fallback"):
        _refuse(tokenizer, "it is neither byte-level BPE nor BPE with byte fallback")
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair), rank)
    for id, token in enumerate(tokens):
        if len(token) == 6 and token.startswith("<0x") and types[id] == NORMAL:
            types[id] = BYTE
    # llama.cpp merges the pair whose token has the highest score
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([float(-ranks.get(token, len(ranks))) for token in tokens])
    _write_spaces(writer, tokenizer, normalizers, pre_tokenizers)


def _pre_tokenizer_name(tokenizer: Tokenizer, pre_tokenizers: list[dict[str, Any]]) -> str:
    patterns = [step["pattern"].get("Regex") for step in pre_tokenizers if step["type"] == "Split"]
    (byte_level,) = (step for step in pre_tokenizers if step["type"] == "ByteLevel")
    if byte_level.get("add_prefix_space"):
        _refuse(tokenizer, "it adds a space before a text")
    if not patterns and byte_level.get("use_regex", True):
        return "gpt-2"
    if len(patterns) == 1 and patterns[0] in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[patterns[0]]
    _refuse(tokenizer, f"llama.cpp has no pre-tokenizer with its patterns: {str(patterns)[:200]}")


def _write_unigram(
    writer: Any, tokenizer: Tokenizer, table: Any, tokens: list[str], types: list[int]
) -> None:
    pre_tokenizers, normalizers = _steps(table["pre_tokenizer"]), _steps(table["normalizer"])
    scores = dict(table["model"]["vocab"])
    if table["model"].get("byte_fallback"):
        _refuse(tokenizer, "llama.cpp's unigram tokenizer has no byte fallback")
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([float(scores.get(token, 0.0)) for token in tokens])
    charsmap = [step for step in normalizers if step["type"] == "Precompiled"]
    if charsmap:
        writer.add_precompiled_charsmap(base64.b64decode(charsmap[0]["precompiled_charsmap"]))
    _write_spaces(writer, tokenizer, normalizers, pre_tokenizers)


def _write_spaces(
    writer: Any,
    tokenizer: Tokenizer,
    normalizers: list[dict[str, Any]],
    pre_tokenizers: list[dict[str, Any]],
) -> None:
    """Write whether a space is put before a text, and whether repeated spaces are removed."""
    known = {"Precompiled", "Prepend", "Replace", "Strip", "Metaspace", "Split", "NFC"}
    others = [step["type"] for step in (*normalizers, *pre_tokenizers) if step["type"] not in known]
    if others:
        _refuse(tokenizer, f"llama.cpp has no {others[0]}")
    prepends_space = any(step["type"] == "Prepend" for step in normalizers)
    prepends_space |= any(
        step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never"
        for step in pre_tokenizers
    )
    removes_spaces = any(
        step["type"] == "Replace" and " {2,}" in str(step["pattern"]) for step in normalizers
    )
    writer.add_add_space_prefix(prepends_space)
    writer.add_remove_extra_whitespaces(removes_spaces)


def _write_wordpiece(
    writer: Any, tokenizer: Tokenizer, table: Any, tokens: list[str], types: list[int]
) -> None:
    normalizers = _steps(table["normalizer"])
    if not any(step["type"] == "BertNormalizer" and step["lowercase"] for step in normalizers):
        _refuse(tokenizer, "llama.cpp's WordPiece lowercases text, and this tokenizer does not")

    def to_llama_cpp(token: str, type: int) -> str:
        if type != NORMAL:
            return token
        if token.startswith(CONTINUATION):
            return token.removeprefix(CONTINUATION)
        return METASPACE + token

    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([to_llama_cpp(*pair) for pair in zip(tokens, types, strict=True)])
