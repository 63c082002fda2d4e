"""Tokenizers of pretrained models: `tokenizer.json`, or the older files of each model type.

The ids are those that transformers (or llama2.c) computes from the same files.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, normalizers, processors

from regard.errors import CheckpointError
from regard.files.untrusted import JSONObject, as_checkpoint_error
from regard.text import sentencepiece
from regard.text.pair_tokenizers import JOINT, SOURCE, TARGET, PairTokenizers
from regard.text.special_tokens import HF_KEYS, SpecialTokens, read_tables
from regard.text.tokenizer import CONFIG_FILES, Tokenizer
from regard.text.tokenizer_limits import check_added_tokens, check_token_lengths
from regard.text.vocab_files import read_bpe, read_vocab, read_wordpiece

SETTINGS_FILES = ("tokenizer_config.json", *CONFIG_FILES)
TARGET_VOCAB = "target_vocab.json"

# Templates: special tokens around one text and around two; `:1` is the second segment.
NO_SPECIAL = ("A", "A B:1")
BOS = ("bos A", "bos A bos:1 B:1")
EOS = ("A eos", "A eos B eos")
CLS = ("cls A sep", "cls A sep B:1 sep:1")


@dataclass(frozen=True)
class TokenizerDefaults:
    """The settings of a model type's tokenizer, where its files do not have them."""

    special_tokens: Mapping[str, str]
    template: tuple[str, str] = NO_SPECIAL
    sentinels: int = 0  # T5's <extra_id_99> … <extra_id_0>, after all other ids
    # Normalizers that run before those of the file.
    normalizers: Callable[[JSONObject], list[Any]] = lambda settings: []


def _albert_normalizers(settings: JSONObject) -> list[Any]:
    steps: list[Any] = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    if not settings.get("keep_accents", False):
        steps += [normalizers.NFKD(), normalizers.StripAccents()]
    if settings.get("do_lower_case", True):
        steps.append(normalizers.Lowercase())
    return steps


def _deberta_normalizers(settings: JSONObject) -> list[Any]:
    if settings.get("split_by_punct", False):
        raise CheckpointError(
            "split_by_punct=true is not supported;\n"
            "save the tokenizer with transformers as a tokenizer.json first"
        )
    return [normalizers.Lowercase()] if settings.get("do_lower_case", False) else []


SENTENCEPIECE_TOKENS = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "pad": "<pad>"}
BERT_TOKENS = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
ALBERT_TOKENS = BERT_TOKENS | {"bos": "[CLS]", "eos": "[SEP]", "unk": "<unk>", "pad": "<pad>"}
ROBERTA_TOKENS = SENTENCEPIECE_TOKENS | {"cls": "<s>", "sep": "</s>", "mask": "<mask>"}
T5_TOKENS = {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"}

SENTENCEPIECE = TokenizerDefaults(SENTENCEPIECE_TOKENS)
GPT2 = TokenizerDefaults(dict.fromkeys(("bos", "eos", "unk"), "<|endoftext|>"))
QWEN = TokenizerDefaults(dict.fromkeys(("eos", "pad", "unk"), "<|endoftext|>"))
OPT = TokenizerDefaults(SENTENCEPIECE_TOKENS | {"bos": "</s>", "unk": "</s>"}, BOS)
BERT = TokenizerDefaults(BERT_TOKENS, CLS)
ALBERT = TokenizerDefaults(ALBERT_TOKENS, CLS, normalizers=_albert_normalizers)
ROBERTA = TokenizerDefaults(ROBERTA_TOKENS, ("cls A sep", "cls A sep sep B sep"))
LLAMA = TokenizerDefaults({"bos": "<s>", "eos": "</s>", "unk": "<unk>"}, BOS)
GEMMA = TokenizerDefaults(SENTENCEPIECE_TOKENS | {"bos": "<bos>", "eos": "<eos>"}, BOS)
CAMEMBERT = ROBERTA
DEBERTA_TOKENS = BERT_TOKENS | {"bos": "[CLS]", "eos": "[SEP]"}
DEBERTA = TokenizerDefaults(DEBERTA_TOKENS, CLS)
DEBERTA_V2 = TokenizerDefaults(DEBERTA_TOKENS, CLS, normalizers=_deberta_normalizers)
MARIAN = TokenizerDefaults(T5_TOKENS, ("A eos", "A B eos"))
T5 = TokenizerDefaults(T5_TOKENS, EOS, sentinels=100)

DEFAULTS = {  # by model_type
    "albert": ALBERT,
    "bart": ROBERTA,
    "bert": BERT,
    "camembert": CAMEMBERT,
    "deberta": DEBERTA,
    "deberta-v2": DEBERTA_V2,
    "distilbert": BERT,
    "gemma": GEMMA,
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "gpt2": GPT2,
    "gpt_neox": GPT2,
    "llama": LLAMA,
    "marian": MARIAN,
    "mbart": ROBERTA,
    "mistral": LLAMA,
    "opt": OPT,
    "phi": GPT2,
    "phi3": LLAMA,
    "qwen2": QWEN,
    "qwen3": QWEN,
    "roberta": ROBERTA,
    "t5": T5,
}


def load_pretrained(folder: Path, config: JSONObject) -> Tokenizer | PairTokenizers | None:
    """The tokenizer of a folder, or those of source and target; None if there is none.

    `config` is the folder's config.json, which names the `model_type`.
    """
    if (folder / SOURCE).exists():
        return PairTokenizers.load(folder)
    settings = dict(config)
    for table in reversed(read_tables(folder, *SETTINGS_FILES)):
        settings |= table
    if (folder / JOINT).exists():
        tokenizer = _with_bos_eos(Tokenizer.load(folder / JOINT), settings)
        target = Tokenizer.load(folder / TARGET) if (folder / TARGET).exists() else None
        return PairTokenizers(tokenizer, target) if target else tokenizer
    for names, read, fallback in READERS:
        paths = [path for name in names for path in sorted(folder.glob(name))[:1]]
        if len(paths) == len(names):
            with as_checkpoint_error(f"{paths[0]} cannot be used"):
                defaults = DEFAULTS.get(str(settings.get("model_type")), fallback)
                return read(paths, settings, defaults)
    for path in (path for name in UNSUPPORTED for path in folder.glob(name)):
        raise CheckpointError(
            f"{path} is a vocabulary of an unsupported format, or a file that belongs to it is "
            "missing;\nsave the tokenizer with transformers as a tokenizer.json first"
        )
    return None


def _make_tokenizer(
    backend: tokenizers.Tokenizer, settings: JSONObject, defaults: TokenizerDefaults, folder: Path
) -> Tokenizer:
    """A `Tokenizer` with the added tokens, special tokens and template of the other files."""
    _add_tokens(backend, settings, folder)
    default_tokens = {HF_KEYS[name]: token for name, token in defaults.special_tokens.items()}
    tables = [*read_tables(folder, *SETTINGS_FILES[:2]), default_tokens, settings]
    special_tokens = SpecialTokens.read(backend, tables)
    tokens = special_tokens.tokens
    added = [AddedToken(token, special=True, normalized=False) for token in tokens.values()]
    backend.add_special_tokens(added)
    backend.post_processor = _post_processor(backend, *defaults.template, tokens)
    return _with_bos_eos(Tokenizer(backend, special_tokens).check_round_trip(folder), settings)


def _with_bos_eos(tokenizer: Tokenizer, settings: JSONObject) -> Tokenizer:
    """Let `add_bos_token` and `add_eos_token` override the template, as transformers does."""
    options = {"bos": settings.get("add_bos_token"), "eos": settings.get("add_eos_token")}
    tokens = tokenizer.special_tokens.tokens
    if "cls" in tokens or all(value is None for value in options.values()):
        return tokenizer
    before, after = ([name] if options[name] and name in tokens else [] for name in options)
    single = " ".join([*before, "A", *after])
    pair = " ".join([single, *(f"{part}:1" for part in [*before, "B", *after])])
    return with_post_processor(tokenizer, single, pair)


def with_post_processor(tokenizer: Tokenizer, single: str, pair: str) -> Tokenizer:
    """A copy whose post-processor adds special tokens by these templates, written as in `CLS`."""
    backend = tokenizer.backend
    tokens = tokenizer.special_tokens.tokens
    backend.post_processor = _post_processor(backend, single, pair, tokens)
    return Tokenizer(backend, tokenizer.special_tokens)


def _post_processor(
    backend: tokenizers.Tokenizer, single: str, pair: str, tokens: Mapping[str, str]
) -> Any:
    names = {part.partition(":")[0] for part in pair.split()} - {"A", "B"}
    if not names or not names <= tokens.keys():
        return None

    def template(parts: str) -> list[str]:
        split = [part.partition(":") for part in parts.split()]
        return [f"{tokens.get(name, f'${name}')}:{segment or 0}" for name, _, segment in split]

    return processors.TemplateProcessing(
        single=template(single),
        pair=template(pair),
        special_tokens=[(tokens[name], backend.token_to_id(tokens[name])) for name in names],
    )


def _add_tokens(backend: tokenizers.Tokenizer, settings: JSONObject, folder: Path) -> None:
    """Add the tokens of added_tokens.json and `added_tokens_decoder` under their ids."""
    added_tokens: dict[int, AddedToken] = {}
    if (folder / "added_tokens.json").exists():
        for token, id in read_vocab(folder / "added_tokens.json").items():
            added_tokens[id] = AddedToken(token, normalized=False)
    for id, entry in dict(settings.get("added_tokens_decoder") or {}).items():
        flags = {key: entry[key] for key in entry if key not in ("content", "__type")}
        added_tokens[int(id)] = AddedToken(entry["content"], **flags)
    texts = [token.content for token in added_tokens.values()]
    check_token_lengths(texts)
    check_added_tokens(texts)
    for id, added in sorted(added_tokens.items()):
        backend.add_tokens([added])
        if backend.token_to_id(added.content) != id:
            raise CheckpointError(
                f"{folder}: token {added.content!r} must have id {id}, but the next free id "
                f"is {backend.token_to_id(added.content)}; save it with transformers as a "
                "tokenizer.json first"
            )


def _read_bpe(paths: list[Path], settings: JSONObject, defaults: TokenizerDefaults) -> Tokenizer:
    vocab, merges = paths
    return _make_tokenizer(read_bpe(vocab, merges, settings), settings, defaults, vocab.parent)


def _read_wordpiece(
    paths: list[Path], settings: JSONObject, defaults: TokenizerDefaults
) -> Tokenizer:
    return _make_tokenizer(read_wordpiece(paths[0], settings), settings, defaults, paths[0].parent)


def _read_sentencepiece(
    paths: list[Path], settings: JSONObject, defaults: TokenizerDefaults
) -> Tokenizer:
    model = sentencepiece.read_model(paths[0])
    sentinels = settings.get("extra_ids", defaults.sentinels)
    if type(sentinels) is not int or not 0 <= sentinels <= 10_000:
        raise CheckpointError(
            f"{paths[0].parent}: extra_ids={sentinels!r} must be an integer from 0 to 10,000"
        )
    names = [f"<extra_id_{index}>" for index in reversed(range(sentinels))]
    existing = {piece.text for piece in model.pieces}
    new = [name for name in names if name not in existing]
    model.pieces += [sentencepiece.Piece(name, 0.0, sentencepiece.CONTROL) for name in new]
    backend = sentencepiece.build_tokenizer(model)
    if first_steps := defaults.normalizers(settings):
        file_steps = [backend.normalizer] if backend.normalizer else []
        backend.normalizer = normalizers.Sequence([*first_steps, *file_steps])
    return _make_tokenizer(backend, settings, defaults, paths[0].parent)


def _read_fairseq(
    paths: list[Path], settings: JSONObject, defaults: TokenizerDefaults
) -> Tokenizer:
    """A SentencePiece model of fairseq; CamemBERT's lacks the special tokens, which are added."""
    model = sentencepiece.read_model(paths[0])
    first = [piece.text for piece in model.pieces[:4]]
    if first[:3] == ["<unk>", "<s>", "</s>"]:
        if settings.get("model_type") != "camembert":
            raise CheckpointError(
                f"{paths[0]} begins with {', '.join(first)}: the ids of its pieces depend on the "
                "model;\nsave the tokenizer with transformers as a tokenizer.json first"
            )
        unknown, *others = model.pieces
        names = ("<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>NOTUSED")
        added = [sentencepiece.Piece(name, 0.0, sentencepiece.CONTROL) for name in names]
        model.pieces = [*added[:3], unknown, added[3], *others]
    elif first != ["<s>", "<pad>", "</s>", "<unk>"]:
        raise CheckpointError(
            f"{paths[0]} begins with {', '.join(first)}, not with the tokens of fairseq;\n"
            "save the tokenizer with transformers as a tokenizer.json first"
        )
    return _make_tokenizer(
        sentencepiece.build_tokenizer(model), settings, defaults, paths[0].parent
    )


def _read_llama2c(
    paths: list[Path], settings: JSONObject, defaults: TokenizerDefaults
) -> Tokenizer:
    model = sentencepiece.read_llama2c(paths[0])
    tokenizer = _make_tokenizer(
        sentencepiece.build_tokenizer(model), settings, LLAMA, paths[0].parent
    )
    # Its training texts begin with <s>, and none ends with </s>.
    special_tokens = SpecialTokens(
        tokens=tokenizer.special_tokens.tokens, stop_tokens=("</s>", "<s>")
    )
    return Tokenizer(tokenizer.backend, special_tokens)


def _read_marian(
    paths: list[Path], settings: JSONObject, defaults: TokenizerDefaults
) -> PairTokenizers:
    """Source and target have different pieces; the ids of all are in one vocab.json.

    With `separate_vocabs`, those of the target are in target_vocab.json.
    """
    source, target, vocab = paths
    target_vocab = vocab.with_name(TARGET_VOCAB) if settings.get("separate_vocabs") else vocab
    if not target_vocab.exists():
        raise CheckpointError(
            f"{vocab.parent} has no {TARGET_VOCAB}, but separate_vocabs=true in its "
            "tokenizer_config.json"
        )
    pair = []
    for side, id_file in ((source, vocab), (target, target_vocab)):
        ids = read_vocab(id_file)
        if sorted(ids.values()) != list(range(len(ids))):
            raise CheckpointError(
                f"{id_file} is corrupted: its ids must be 0 to {len(ids) - 1} without gaps"
            )
        backend = sentencepiece.build_tokenizer(sentencepiece.read_model(side), ids)
        languages = [token for token in ids if token.startswith(">>") and token.endswith("<<")]
        backend.add_tokens([AddedToken(token, normalized=False) for token in languages])
        pair.append(_make_tokenizer(backend, settings, MARIAN, vocab.parent))
    return PairTokenizers(*pair)


UNSUPPORTED = ("*.model", "*.tiktoken", "tekken.json", "vocab.json", "merges.txt")
Reader = Callable[[list[Path], JSONObject, TokenizerDefaults], Tokenizer | PairTokenizers]
# The first entry whose files exist is used.
READERS: tuple[tuple[tuple[str, ...], Reader, TokenizerDefaults], ...] = (
    (("source.spm", "target.spm", "vocab.json"), _read_marian, MARIAN),
    (("vocab.json", "merges.txt"), _read_bpe, GPT2),
    (("*encoder.json", "*vocab.bpe"), _read_bpe, GPT2),
    (("vocab.txt",), _read_wordpiece, BERT),
    (("tokenizer.model",), _read_sentencepiece, LLAMA),
    (("spiece.model",), _read_sentencepiece, SENTENCEPIECE),
    (("spm.model",), _read_sentencepiece, DEBERTA_V2),
    (("sentencepiece.bpe.model",), _read_fairseq, CAMEMBERT),
    (("*.spm",), _read_sentencepiece, SENTENCEPIECE),
    (("tok*.bin",), _read_llama2c, LLAMA),
)
