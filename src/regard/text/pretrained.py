"""Tokenizers of folders that others made: `tokenizer.json`, or the older files of each family.

What is read becomes a `tokenizers.Tokenizer` that gives the ids its makers' code gives.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, normalizers, processors

from regard.errors import CheckpointError
from regard.files.untrusted import as_checkpoint_error
from regard.text import sentencepiece
from regard.text.pair_tokenizers import JOINT, SOURCE, TARGET, PairTokenizers
from regard.text.special_tokens import ROLES, SpecialTokens, Table, read_tables
from regard.text.tokenizer import BESIDE, Tokenizer, try_encoding
from regard.text.vocab_files import byte_pairs, read_vocab, word_pieces

SETTINGS = ("tokenizer_config.json", *BESIDE)


NOTHING = ("A", "A B:1")  # what stands around a text, and around two; `:1` is the second segment
BOS = ("start A", "start A start:1 B:1")
EOS = ("A stop", "A stop B stop")
CLS = ("cls A sep", "cls A sep B:1 sep:1")


@dataclass(frozen=True)
class Style:
    """What a family's tokenizers have in common, where their files leave it out."""

    roles: Mapping[str, str]
    around: tuple[str, str] = NOTHING
    extra: int = 0  # T5's sentinels <extra_id_99> … <extra_id_0>, after all other ids
    before: Callable[[Table], list[Any]] = lambda settings: []  # normalizers before the file's own


def _albert(settings: Table) -> list[Any]:
    steps: list[Any] = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    if not settings.get("keep_accents", False):
        steps += [normalizers.NFKD(), normalizers.StripAccents()]
    if settings.get("do_lower_case", True):
        steps.append(normalizers.Lowercase())
    return steps


PIECES = {"start": "<s>", "stop": "</s>", "unk": "<unk>", "pad": "<pad>"}
BRACKETS = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
MIXED = BRACKETS | {"start": "[CLS]", "stop": "[SEP]", "unk": "<unk>", "pad": "<pad>"}
ANGLES = PIECES | {"cls": "<s>", "sep": "</s>", "mask": "<mask>"}
ENDS = {"stop": "</s>", "unk": "<unk>", "pad": "<pad>"}

PLAIN = Style(PIECES)
GPT2 = Style(dict.fromkeys(("start", "stop", "unk"), "<|endoftext|>"))
QWEN = Style(dict.fromkeys(("stop", "pad", "unk"), "<|endoftext|>"))
OPT = Style(PIECES | {"start": "</s>", "unk": "</s>"}, BOS)
BERT = Style(BRACKETS, CLS)
ALBERT = Style(MIXED, CLS, before=_albert)
ROBERTA = Style(ANGLES, ("cls A sep", "cls A sep sep B sep"))
LLAMA = Style({"start": "<s>", "stop": "</s>", "unk": "<unk>"}, BOS)
GEMMA = Style(PIECES | {"start": "<bos>", "stop": "<eos>"}, BOS)
MARIAN = Style(ENDS, ("A stop", "A B stop"))
T5 = Style(ENDS, EOS, extra=100)

STYLES = {  # by model_type
    "albert": ALBERT,
    "bart": ROBERTA,
    "bert": BERT,
    "distilbert": BERT,
    "gemma": GEMMA,
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "gpt2": GPT2,
    "gpt_neox": GPT2,
    "llama": LLAMA,
    "marian": MARIAN,
    "mistral": LLAMA,
    "opt": OPT,
    "phi": GPT2,
    "phi3": LLAMA,
    "qwen2": QWEN,
    "qwen3": QWEN,
    "roberta": ROBERTA,
    "t5": T5,
}


def load_folder(folder: Path, config: Table) -> Tokenizer | PairTokenizers | None:
    """The tokenizer of a folder, or those of its two sides; None where it holds none.

    `config` is the folder's config.json, which says what kind of model reads the ids.
    """
    if (folder / SOURCE).exists():
        return PairTokenizers.load(folder)
    settings = dict(config)
    for table in reversed(read_tables(folder, *SETTINGS)):
        settings |= table
    if (folder / JOINT).exists():
        found = _with_ends(Tokenizer.load(folder / JOINT), settings)
        other = Tokenizer.load(folder / TARGET) if (folder / TARGET).exists() else None
        return PairTokenizers(found, other) if other else found
    for names, read, style in READERS:
        paths = [path for name in names for path in sorted(folder.glob(name))[:1]]
        if len(paths) == len(names):
            with as_checkpoint_error(f"{paths[0]} cannot be used"):
                return read(paths, settings, STYLES.get(str(settings.get("model_type")), style))
    for left in (path for name in UNREAD for path in folder.glob(name)):
        raise CheckpointError(
            f"{left} is a vocabulary of a kind that is not read, or what belongs to it is missing;"
            "\nsave the tokenizer with transformers as a tokenizer.json first"
        )
    return None


def _finish(
    library: tokenizers.Tokenizer, settings: Table, style: Style, folder: Path
) -> Tokenizer:
    """Add what the other files of the folder say: more tokens, their roles, what goes around."""
    _add_tokens(library, settings, folder)
    named = {ROLES[role]: token for role, token in style.roles.items()}
    roles = SpecialTokens.read(library, [*read_tables(folder, *SETTINGS[:2]), named, settings])
    tokens = roles.tokens
    special = [AddedToken(token, special=True, normalized=False) for token in tokens.values()]
    library.add_special_tokens(special)
    library.post_processor = _processor(library, *style.around, tokens)
    try_encoding(library)
    return _with_ends(Tokenizer(library, roles), settings)


def _with_ends(tokenizer: Tokenizer, settings: Table) -> Tokenizer:
    """Put start and stop around a text where the folder says so, whatever its tokenizer.json does.

    That is what transformers does with `add_bos_token` and `add_eos_token`.
    """
    given = {"start": settings.get("add_bos_token"), "stop": settings.get("add_eos_token")}
    tokens = tokenizer.special_tokens.tokens
    if "cls" in tokens or all(each is None for each in given.values()):
        return tokenizer
    before, after = ([role] if given[role] and role in tokens else [] for role in given)
    single = " ".join([*before, "A", *after])
    pair = " ".join([single, *(f"{part}:1" for part in [*before, "B", *after])])
    return framed(tokenizer, single, pair)


def framed(tokenizer: Tokenizer, single: str, pair: str) -> Tokenizer:
    """The same vocabulary with something else around its texts, as in `CLS`."""
    library = tokenizer.backend
    library.post_processor = _processor(library, single, pair, tokenizer.special_tokens.tokens)
    return Tokenizer(library, tokenizer.special_tokens)


def _processor(
    library: tokenizers.Tokenizer, single: str, pair: str, tokens: Mapping[str, str]
) -> Any:
    wanted = {part.partition(":")[0] for part in pair.split()} - {"A", "B"}
    if not wanted or not wanted <= tokens.keys():
        return None

    def template(parts: str) -> list[str]:
        split = [part.partition(":") for part in parts.split()]
        return [f"{tokens.get(what, f'${what}')}:{segment or 0}" for what, _, segment in split]

    return processors.TemplateProcessing(
        single=template(single),
        pair=template(pair),
        special_tokens=[(tokens[role], library.token_to_id(tokens[role])) for role in wanted],
    )


def _add_tokens(library: tokenizers.Tokenizer, settings: Table, folder: Path) -> None:
    """Tokens that came in after the vocabulary was made, each with the id it was given."""
    given: dict[int, AddedToken] = {}
    if (folder / "added_tokens.json").exists():
        for token, id in read_vocab(folder / "added_tokens.json").items():
            given[id] = AddedToken(token, normalized=False)
    for id, entry in dict(settings.get("added_tokens_decoder") or {}).items():
        flags = {key: entry[key] for key in entry if key not in ("content", "__type")}
        given[int(id)] = AddedToken(entry["content"], **flags)
    for id, added in sorted(given.items()):
        library.add_tokens([added])
        if library.token_to_id(added.content) != id:
            raise CheckpointError(
                f"{folder}: token {added.content!r} must have id {id}, and the vocabulary has "
                f"room at {library.token_to_id(added.content)}; save it with transformers as a "
                "tokenizer.json first"
            )


def _read_byte_pairs(paths: list[Path], settings: Table, style: Style) -> Tokenizer:
    vocab, merges = paths
    return _finish(byte_pairs(vocab, merges, settings), settings, style, vocab.parent)


def _read_word_pieces(paths: list[Path], settings: Table, style: Style) -> Tokenizer:
    return _finish(word_pieces(paths[0], settings), settings, style, paths[0].parent)


def _read_pieces(paths: list[Path], settings: Table, style: Style) -> Tokenizer:
    spec = sentencepiece.read_pieces(paths[0])
    extra = settings.get("extra_ids", style.extra)
    if type(extra) is not int or not 0 <= extra <= 10_000:
        raise CheckpointError(f"{paths[0].parent}: extra_ids={extra!r} must lie in 0 to 10000")
    names = [f"<extra_id_{number}>" for number in reversed(range(extra))]
    there = {piece.text for piece in spec.pieces}
    new = [name for name in names if name not in there]
    spec.pieces += [sentencepiece.Piece(name, 0.0, sentencepiece.CONTROL) for name in new]
    library = sentencepiece.build(spec)
    if before := style.before(settings):
        own = [library.normalizer] if library.normalizer else []
        library.normalizer = normalizers.Sequence([*before, *own])
    return _finish(library, settings, style, paths[0].parent)


def _read_llama2c(paths: list[Path], settings: Table, style: Style) -> Tokenizer:
    spec = sentencepiece.read_llama2c(paths[0])
    found = _finish(sentencepiece.build(spec), settings, LLAMA, paths[0].parent)
    stops = ("</s>", "<s>")  # its training texts begin with <s>, and none ends in </s>
    return Tokenizer(found.backend, SpecialTokens(tokens=found.special_tokens.tokens, stops=stops))


def _read_marian(paths: list[Path], settings: Table, style: Style) -> PairTokenizers:
    """Each side is cut by its own pieces; the ids of all are in one vocab.json."""
    *sides, vocab = paths
    order = read_vocab(vocab)
    if sorted(order.values()) != list(range(len(order))):
        raise CheckpointError(f"{vocab} is damaged: its numbers have gaps")
    found = []
    for side in sides:
        library = sentencepiece.build(sentencepiece.read_pieces(side), order)
        codes = [token for token in order if token.startswith(">>") and token.endswith("<<")]
        library.add_tokens([AddedToken(code, normalized=False) for code in codes])
        found.append(_finish(library, settings, MARIAN, vocab.parent))
    return PairTokenizers(*found)


UNREAD = ("*.model", "*.tiktoken", "tekken.json", "vocab.json", "merges.txt")
Reader = Callable[[list[Path], Table, Style], Tokenizer | PairTokenizers]
READERS: tuple[tuple[tuple[str, ...], Reader, Style], ...] = (  # the first whose files are there
    (("source.spm", "target.spm", "vocab.json"), _read_marian, MARIAN),
    (("vocab.json", "merges.txt"), _read_byte_pairs, GPT2),
    (("*encoder.json", "*vocab.bpe"), _read_byte_pairs, GPT2),
    (("vocab.txt",), _read_word_pieces, BERT),
    (("tokenizer.model",), _read_pieces, LLAMA),
    (("spiece.model",), _read_pieces, PLAIN),
    (("*.spm",), _read_pieces, PLAIN),
    (("tok*.bin",), _read_llama2c, LLAMA),
)
