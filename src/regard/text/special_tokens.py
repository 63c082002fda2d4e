"""What the special tokens of a vocabulary are for, whatever they are called.

Kept in Hugging Face's own format, a `tokenizer_config.json` beside the `tokenizer.json`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeGuard

import tokenizers

from regard.errors import ConfigError
from regard.files.untrusted import read_json

SPECIAL_TOKENS = (
    "<pad>",
    "<start>",
    "<stop>",
    "<unk>",
    "<mask>",
    "<cls>",
    "<sep>",
)  # ids 0, 1, 2, …
ROLES = {  # ours to Hugging Face's
    "pad": "pad_token",
    "start": "bos_token",
    "stop": "eos_token",
    "unk": "unk_token",
    "mask": "mask_token",
    "cls": "cls_token",
    "sep": "sep_token",
}
OWN = {token[1:-1]: token for token in SPECIAL_TOKENS}  # the roles of vocabularies learned here
MORE = {  # what a tokenizer_config.json of ours says besides, and transformers passes over
    "first": "decoder_start_token",
    "stops": "stop_tokens",
    "size": "vocab_size",
}

Table = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """Which token has which role: "</s>" is what ends a text, "[MASK]" what hides a word."""

    tokens: Mapping[str, str] = field(default_factory=lambda: OWN)
    first: str | None = None  # what a decoder is handed first, where that is not `start`
    stops: tuple[str, ...] = ()  # all that end a text, where there are several
    size: int = 0  # how many ids the model has; often a round number above that of the tokens

    def config(self) -> Table:
        """These roles as a `tokenizer_config.json` says them."""
        table: Table = {ROLES[role]: token for role, token in self.tokens.items()}
        extra = {"first": self.first, "stops": list(self.stops), "size": self.size}
        return table | {MORE[name]: value for name, value in extra.items() if value}

    @classmethod
    def read(cls, library: tokenizers.Tokenizer, tables: Iterable[Table]) -> Self:
        """From the first of several tables that names the role, else by our own names.

        A table is a `tokenizer_config.json` or a `special_tokens_map.json`, which name tokens,
        or a `generation_config.json` or a `config.json`, which number them.
        """
        tables = list(tables)
        tokens = {}
        for role, key in ROLES.items():
            found = [token for table in tables for token in _named(library, table, key)]
            own = [OWN[role]] if library.token_to_id(OWN[role]) is not None else []
            if each := [*found, *own]:
                tokens[role] = each[0]
        first = [token for table in tables for token in _named(library, table, MORE["first"])]
        size = [table[MORE["size"]] for table in tables if _is_id(table.get(MORE["size"]))]
        return cls(
            tokens=tokens,
            first=first[0] if first else None,
            stops=_stops(library, tables, tokens),
            size=size[0] if size and size[0] > library.get_vocab_size() else 0,
        )


def beside(path: Path) -> Path:
    """Where the roles of a tokenizer are kept: `tokenizer.json` and `tokenizer_config.json`."""
    return path.with_name(f"tokenizer_config{path.name.removeprefix('tokenizer')}")


def read_tables(folder: Path, *names: str) -> list[Table]:
    """Those of the named JSON files that the folder has."""
    return [read_json(folder / name) for name in names if (folder / name).exists()]


def _named(library: tokenizers.Tokenizer, table: Table, key: str) -> list[str]:
    """The tokens of the vocabulary that a table gives for a key, by name or by number."""
    value, number = table.get(key), table.get(f"{key}_id")
    if isinstance(value, dict):  # an added token, with how it is found in text
        value = value.get("content")
    if value is None:
        numbers = number if isinstance(number, list) else [number]
        each = [library.id_to_token(id) for id in numbers if _is_id(id)]
    else:
        each = value if isinstance(value, list) else [value]
    return [
        token for token in each if isinstance(token, str) and library.token_to_id(token) is not None
    ]


def _stops(
    library: tokenizers.Tokenizer, tables: list[Table], tokens: Mapping[str, str]
) -> tuple[str, ...]:
    """The stop token, then any others that a table lists; nothing where it is alone."""
    if "stop" not in tokens:
        return ()
    listed = [token for table in tables for token in _named(library, table, MORE["stops"])]
    number = f"{ROLES['stop']}_id"  # generation_config.json, and config.json only without it
    numbered = next((each for each in tables if each.get(number) is not None), {})
    more = _named(library, {number: numbered.get(number)}, ROLES["stop"])
    all_of_them = tuple(dict.fromkeys([tokens["stop"], *listed, *more]))
    return all_of_them if len(all_of_them) > 1 else ()


def _is_id(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


Part = tuple[int | str, int]  # a special id, or "A" or "B" for a text; and its segment


@dataclass(frozen=True, kw_only=True)
class Frame:
    """What stands around a text, and around two of them, as the post-processor says it."""

    single: tuple[Part, ...] = (("A", 0),)
    pair: tuple[Part, ...] = (("A", 0), ("B", 1))

    def around(self, **texts: list[int]) -> tuple[list[int], list[int]]:
        """The ids of one text or two with all that belongs around them, and their segments."""
        ids: list[int] = []
        segments: list[int] = []
        for what, segment in self.pair if "B" in texts else self.single:
            some = texts[what] if isinstance(what, str) else [what]
            ids += some
            segments += [segment] * len(some)
        return ids, segments

    @classmethod
    def read(cls, processor: Table | None) -> Self:
        """Of the `post_processor` of a tokenizer.json."""
        if processor is None:
            return cls()
        kind = processor["type"]
        if kind not in FRAMES:
            raise ConfigError(f"post-processor {kind!r} is unknown; known: {', '.join(FRAMES)}")
        single, pair = FRAMES[kind](processor)
        if (texts := {what for what, _ in single if isinstance(what, str)}) != {"A"}:
            raise ConfigError(
                f"the frame of one text names {', '.join(sorted(texts)) or 'none'}, not A alone"
            )
        return cls(single=single, pair=pair)


Parts = tuple[Part, ...]


def _template(processor: Table) -> tuple[Parts, Parts]:
    def parts(pieces: list[Table]) -> Parts:
        found: list[Part] = []
        for piece in pieces:
            ((what, each),) = piece.items()
            if what == "Sequence":
                found.append((each["id"], each["type_id"]))
            else:
                ids = processor["special_tokens"][each["id"]]["ids"]
                found += [(id, each["type_id"]) for id in ids]
        return tuple(found)

    return parts(processor["single"]), parts(processor["pair"])


def _bert(processor: Table) -> tuple[Parts, Parts]:
    first, last = processor["cls"][1], processor["sep"][1]
    single: Parts = ((first, 0), ("A", 0), (last, 0))
    return single, (*single, ("B", 1), (last, 1))


def _roberta(processor: Table) -> tuple[Parts, Parts]:
    first, last = processor["cls"][1], processor["sep"][1]
    single: Parts = ((first, 0), ("A", 0), (last, 0))
    return single, (*single, (last, 0), ("B", 0), (last, 0))


def _bytes(processor: Table) -> tuple[Parts, Parts]:
    return Frame().single, Frame().pair  # it moves offsets only


def _sequence(processor: Table) -> tuple[Parts, Parts]:
    frames = [Frame.read(each) for each in processor["processors"]]
    telling = [frame for frame in frames if frame != Frame()] or [Frame()]
    return telling[0].single, telling[0].pair


FRAMES = {
    "TemplateProcessing": _template,
    "BertProcessing": _bert,
    "RobertaProcessing": _roberta,
    "ByteLevel": _bytes,
    "Sequence": _sequence,
}
