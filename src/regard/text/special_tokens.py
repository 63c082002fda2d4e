"""Special tokens of a vocabulary by their role, and the template that inserts them.

They are saved in Hugging Face's format, a `tokenizer_config.json` next to `tokenizer.json`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, TypeGuard

import tokenizers

from regard.errors import ConfigError
from regard.files.untrusted import JSONObject, read_json

# Special tokens of vocabularies trained here; their ids are 0, 1, 2, … The texts of BOS and EOS are
# not <bos> and <eos>, which vocabularies trained elsewhere have (Gemma).
SPECIAL_TOKENS = ("<pad>", "<start>", "<stop>", "<unk>", "<mask>", "<cls>", "<sep>")
HF_KEYS = {  # name of a special token here: its key in Hugging Face files
    "pad": "pad_token",
    "bos": "bos_token",
    "eos": "eos_token",
    "unk": "unk_token",
    "mask": "mask_token",
    "cls": "cls_token",
    "sep": "sep_token",
}
DEFAULT_TOKENS = dict(zip(HF_KEYS, SPECIAL_TOKENS, strict=True))
# Further keys of the tokenizer_config.json written here; transformers ignores them.
DECODER_START_KEY, STOP_TOKENS_KEY, VOCAB_SIZE_KEY = (
    "decoder_start_token",
    "stop_tokens",
    "vocab_size",
)


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """The texts of a vocabulary's special tokens: "eos" may be "</s>", "mask" "[MASK]"."""

    tokens: Mapping[str, str] = field(default_factory=lambda: DEFAULT_TOKENS)
    decoder_start: str | None = None  # the first token that a decoder reads, if not the BOS token
    stop_tokens: tuple[str, ...] = ()  # all end-of-sequence tokens, if there are several
    vocab_size: int = 0  # of the model, if its embedding is padded to more ids than tokens

    def config(self) -> JSONObject:
        """The content of a `tokenizer_config.json`."""
        table: JSONObject = {HF_KEYS[name]: token for name, token in self.tokens.items()}
        extra = {
            DECODER_START_KEY: self.decoder_start,
            STOP_TOKENS_KEY: list(self.stop_tokens),
            VOCAB_SIZE_KEY: self.vocab_size,
        }
        return table | {key: value for key, value in extra.items() if value}

    @classmethod
    def read(cls, backend: tokenizers.Tokenizer, tables: Iterable[JSONObject]) -> Self:
        """Read each special token from the first table that has it.

        A token that no table has is taken from `SPECIAL_TOKENS`, if it is in the vocabulary.

        A table is a `tokenizer_config.json` or `special_tokens_map.json`, which give texts, or a
        `generation_config.json` or `config.json`, which give ids.
        """
        tables = list(tables)
        tokens = {}
        for name, key in HF_KEYS.items():
            candidates = [token for table in tables for token in _tokens(backend, table, key)]
            if backend.token_to_id(DEFAULT_TOKENS[name]) is not None:
                candidates.append(DEFAULT_TOKENS[name])
            if candidates:
                tokens[name] = candidates[0]
        starts = [token for table in tables for token in _tokens(backend, table, DECODER_START_KEY)]
        sizes = [table[VOCAB_SIZE_KEY] for table in tables if _is_id(table.get(VOCAB_SIZE_KEY))]
        return cls(
            tokens=tokens,
            decoder_start=starts[0] if starts else None,
            stop_tokens=_stop_tokens(backend, tables, tokens),
            vocab_size=sizes[0] if sizes and sizes[0] > backend.get_vocab_size() else 0,
        )


def config_path(path: Path) -> Path:
    """The config file of a tokenizer file: `tokenizer_config.json` of `tokenizer.json`."""
    return path.with_name(f"tokenizer_config{path.name.removeprefix('tokenizer')}")


def read_tables(folder: Path, *names: str) -> list[JSONObject]:
    """The contents of the named JSON files; missing files are skipped."""
    return [read_json(folder / name) for name in names if (folder / name).exists()]


def _tokens(backend: tokenizers.Tokenizer, table: JSONObject, key: str) -> list[str]:
    """The tokens of the vocabulary that a table gives for `key` (texts) or `key`_id (ids)."""
    value, ids = table.get(key), table.get(f"{key}_id")
    if isinstance(value, dict):  # an AddedToken with its options
        value = value.get("content")
    if value is None:
        ids = ids if isinstance(ids, list) else [ids]
        tokens = [backend.id_to_token(id) for id in ids if _is_id(id)]
    else:
        tokens = value if isinstance(value, list) else [value]
    return [
        token
        for token in tokens
        if isinstance(token, str) and backend.token_to_id(token) is not None
    ]


def _stop_tokens(
    backend: tokenizers.Tokenizer, tables: list[JSONObject], tokens: Mapping[str, str]
) -> tuple[str, ...]:
    """The EOS token and the others that a table lists; empty if there are no others."""
    if "eos" not in tokens:
        return ()
    by_text = [token for table in tables for token in _tokens(backend, table, STOP_TOKENS_KEY)]
    key = f"{HF_KEYS['eos']}_id"  # in generation_config.json, else in config.json
    first_table = next((table for table in tables if table.get(key) is not None), {})
    by_id = _tokens(backend, {key: first_table.get(key)}, HF_KEYS["eos"])
    stop_tokens = tuple(dict.fromkeys([tokens["eos"], *by_text, *by_id]))
    return stop_tokens if len(stop_tokens) > 1 else ()


def _is_id(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


Part = tuple[int | str, int]  # a special id, or "A" or "B" for a text; and its segment
Parts = tuple[Part, ...]


@dataclass(frozen=True, kw_only=True)
class PostProcessorTemplate:
    """Where a tokenizer's post-processor puts special ids around one text and around two."""

    single: Parts = (("A", 0),)
    pair: Parts = (("A", 0), ("B", 1))

    def apply(self, **texts: list[int]) -> tuple[list[int], list[int]]:
        """The ids of texts A and B with the special ids, and their segments."""
        ids: list[int] = []
        segments: list[int] = []
        for part, segment in self.pair if "B" in texts else self.single:
            part_ids = texts[part] if isinstance(part, str) else [part]
            ids += part_ids
            segments += [segment] * len(part_ids)
        return ids, segments

    @classmethod
    def from_post_processor(cls, processor: JSONObject | None) -> Self:
        """Read the template from the `post_processor` of a tokenizer.json."""
        if processor is None:
            return cls()
        kind = processor["type"]
        if kind not in POST_PROCESSORS:
            known = ", ".join(POST_PROCESSORS)
            raise ConfigError(f"post-processor {kind!r} is unknown; known: {known}")
        single, pair = POST_PROCESSORS[kind](processor)
        if (texts := {part for part, _ in single if isinstance(part, str)}) != {"A"}:
            raise ConfigError(
                "the template of a single text must contain text A only, not "
                f"{', '.join(sorted(texts)) or 'none'}"
            )
        return cls(single=single, pair=pair)


def _template_processing(processor: JSONObject) -> tuple[Parts, Parts]:
    def parse(pieces: list[JSONObject]) -> Parts:
        parts: list[Part] = []
        for piece in pieces:
            ((kind, options),) = piece.items()
            if kind == "Sequence":
                parts.append((options["id"], options["type_id"]))
            else:
                ids = processor["special_tokens"][options["id"]]["ids"]
                parts += [(id, options["type_id"]) for id in ids]
        return tuple(parts)

    return parse(processor["single"]), parse(processor["pair"])


def _bert_processing(processor: JSONObject) -> tuple[Parts, Parts]:
    cls, sep = processor["cls"][1], processor["sep"][1]
    single: Parts = ((cls, 0), ("A", 0), (sep, 0))
    return single, (*single, ("B", 1), (sep, 1))


def _roberta_processing(processor: JSONObject) -> tuple[Parts, Parts]:
    cls, sep = processor["cls"][1], processor["sep"][1]
    single: Parts = ((cls, 0), ("A", 0), (sep, 0))
    return single, (*single, (sep, 0), ("B", 0), (sep, 0))


def _byte_level(processor: JSONObject) -> tuple[Parts, Parts]:
    return PostProcessorTemplate().single, PostProcessorTemplate().pair  # changes offsets only


def _sequence(processor: JSONObject) -> tuple[Parts, Parts]:
    templates = [
        PostProcessorTemplate.from_post_processor(step) for step in processor["processors"]
    ]
    template = next(
        (step for step in templates if step != PostProcessorTemplate()), PostProcessorTemplate()
    )
    return template.single, template.pair


POST_PROCESSORS = {
    "TemplateProcessing": _template_processing,
    "BertProcessing": _bert_processing,
    "RobertaProcessing": _roberta_processing,
    "ByteLevel": _byte_level,
    "Sequence": _sequence,
}
