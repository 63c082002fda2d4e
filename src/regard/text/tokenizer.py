"""The tokenizer that every kind shares: text to ids and back, kept in one `tokenizer.json`.

How each kind learns its vocabulary lives in the module of its name.
"""

import json
import re
from collections.abc import Iterable, Sequence
from hashlib import sha256
from itertools import takewhile
from pathlib import Path
from typing import Any, Self

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import AddedToken, normalizers

from regard.errors import CheckpointError, ConfigError, DataError, unknown
from regard.files.untrusted import (
    as_checkpoint_error,
    check_tokenizer_json,
    parse_json,
    read_text,
)
from regard.text.special_tokens import (
    ROLES,
    SPECIAL_TOKENS,
    Frame,
    SpecialTokens,
    beside,
    read_tables,
)

SPACE = "▁"  # how SentencePiece vocabularies write a space
GLUE = "￭"  # in word vocabularies: no space on this side
BESIDE = ("special_tokens_map.json", "generation_config.json", "config.json")  # tell roles too
CHARACTER = r"[\s\S]"  # the pattern that splits text into single characters
HIDDEN = "\uffff"  # begins the pieces of the other side, where two sides share their ids
TRIAL_TEXT = "a B 1.\n\U0010fffd"  # the last character is in no vocabulary
KINDS = {"BPE": "bpe", "WordPiece": "wordpiece", "Unigram": "unigram"}


class Tokenizer:
    r"""Turns text into the ids that a model reads, and ids back into text.

        text -> normalise -> split -> ids,      decode(ids) = text, as far as the kind keeps it

    Text never becomes a special token of a vocabulary learned here, whatever it says: "<stop>"
    typed by a user is six ordinary characters (or unknown ones). Special ids are put in by the
    one who needs them.

    >>> from regard.text import train_tokenizer
    >>> tokenizer = train_tokenizer("word", ["to be, or not to be"])
    >>> [tokenizer.piece(id) for id in tokenizer.encode("be not, <stop>")]
    ['be', 'not', ',', '<unk>', '<unk>', '<unk>']
    >>> tokenizer.decode([tokenizer.start_id, *tokenizer.encode("be not, "), tokenizer.stop_id])
    'be not,'
    """

    def __init__(self, library: tokenizers.Tokenizer, roles: SpecialTokens | None = None) -> None:
        # All three are settings of one call rather than of the vocabulary, and come in with
        # files of other origin; the first is not even stored in the file.
        library.encode_special_tokens = True
        library.no_padding()
        library.no_truncation()
        table = json.loads(library.to_str())
        self._library = library
        self._specials = {
            token["content"]: int(token["id"])
            for token in table["added_tokens"]
            if token["special"]
        }
        self._byte_level = '"ByteLevel"' in json.dumps([table["decoder"], table["pre_tokenizer"]])
        self._table: NDArray[np.uint32] | None = None  # of a char vocabulary, by code point
        self._frame = Frame.read(table["post_processor"])
        self.special_tokens = SpecialTokens.read(library, []) if roles is None else roles
        self.kind = _kind(table)
        self.size = max(1 + max(library.get_vocab().values(), default=-1), self.special_tokens.size)

    def __len__(self) -> int:
        return self.size

    def __repr__(self) -> str:
        return f"Tokenizer({self.kind!r}, size={self.size})"

    def __reduce__(self) -> tuple[Any, ...]:
        # The library's own way forgets a setting.
        return _from_json, (self._library.to_str(), self.special_tokens)

    def encode(self, text: str) -> list[int]:
        """The ids of a text; none of them special, save for `<unk>`."""
        if self.kind == "char":
            return self.encode_array(text).tolist()
        return self.encode_batch([text])[0]

    def unknown_parts(self, text: str) -> list[str]:
        """What of a text the vocabulary does not know and reads as `<unk>`, each once."""
        unk, found = self.special_id("unk"), self._library.encode(text, add_special_tokens=False)
        places = zip(found.ids, found.offsets, strict=True)
        return list(dict.fromkeys(text[begin:end] for id, (begin, end) in places if id == unk))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of many texts, on all cores."""
        if self.kind == "char":
            return [self.encode(text) for text in texts]
        for text in texts:
            check_text(text)
        encodings = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_array(self, text: str) -> NDArray[np.uint32]:
        """The ids of a text as an array; for characters one look into a table, fit for large files.

        ids_i = table[code point of character i]
        """
        if self.kind != "char":
            return np.array(self.encode(text), np.uint32)
        check_text(text)
        if self._table is None:
            self._table = self._code_points_to_ids()
        codes = _code_points(text)
        if self._library.normalizer is not None:
            codes = self._lower(text, codes)
        return self._table[codes]

    def with_special_tokens(
        self, ids: Sequence[int], pair: Sequence[int] | None = None
    ) -> tuple[list[int], list[int]]:
        """A text, or two, with the special ids that the vocabulary's makers put around it.

            [CLS] A [SEP],  [CLS] A [SEP] B [SEP]      BERT
            <s> A,          A </s>                     LLaMA, T5

        Beside the ids stand their segments: 0 for the first text, 1 for the second where they
        are told apart. Around a text of a vocabulary learned here stands nothing.
        """
        texts = {"A": list(ids)} if pair is None else {"A": list(ids), "B": list(pair)}
        return self._frame.around(**texts)

    @property
    def prefix_ids(self) -> list[int]:
        """The special ids that stand before every text."""
        parts = takewhile(lambda part: part[0] != "A", self._frame.single)
        return [id for id, _ in parts if isinstance(id, int)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids, without the special ones."""
        ids = list(ids)
        for id in {min(ids), max(ids)} if ids else ():
            self._check_id(id)
        text: str = self._library.decode(ids, skip_special_tokens=True)
        return text

    def piece(self, id: int) -> str:
        """What one id looks like to a reader: ' the', not 'Ġthe'; half a character as '<0xE2>'."""
        self._check_id(id)
        token: str = self._library.id_to_token(id) or ""  # foreign vocabularies may have gaps
        if token in self._specials:
            return token
        token = token.removeprefix(HIDDEN)
        if self._byte_level:
            return _byte_level_text(token)
        if self.kind == "word":
            return token.strip(GLUE)
        return token.replace(SPACE, " ") if self.kind in ("bpe", "unigram") else token

    def special_id(self, name: str) -> int | None:
        """The id of the token for `name`, `<name>` or any other; None where there is none.

        "start" is what a decoder is handed first: T5's is the token that also fills short rows.
        """
        if name not in ROLES:
            raise ConfigError(unknown("special token", name, ROLES))
        if name == "start" and self.special_tokens.first is not None:
            return self._library.token_to_id(self.special_tokens.first)
        return self.hf_special_id(name)

    def hf_special_id(self, name: str) -> int | None:
        """The id of the token that Hugging Face's files name for a role: "start" is the bos."""
        token = self.special_tokens.tokens.get(name)
        return None if token is None else self._library.token_to_id(token)

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """A copy of the tokenizer underneath, with nothing but the vocabulary's own settings."""
        return tokenizers.Tokenizer.from_str(self._library.to_str())

    @property
    def pad_id(self) -> int:
        """Fills short rows."""
        return self._needed("pad")

    @property
    def start_id(self) -> int:
        """Stands before the first token."""
        return self._needed("start")

    @property
    def stop_id(self) -> int:
        """Stands after the last token."""
        return self._needed("stop")

    @property
    def stop_ids(self) -> list[int]:
        """All ids that end a text; `stop_id` is the first."""
        ids = [
            self.special_id("stop"),
            *map(self._library.token_to_id, self.special_tokens.stops[1:]),
        ]
        return [id for id in ids if id is not None]

    @property
    def unk_id(self) -> int:
        """Stands for what the vocabulary does not know."""
        return self._needed("unk")

    @property
    def mask_id(self) -> int:
        """Stands where a token is hidden."""
        return self._needed("mask")

    @property
    def cls_id(self) -> int:
        """Stands before what an encoder reads."""
        return self._needed("cls")

    @property
    def sep_id(self) -> int:
        """Stands after each part of what an encoder reads."""
        return self._needed("sep")

    @property
    def special_ids(self) -> list[int]:
        """All ids that text never becomes, in order."""
        return sorted(self._specials.values())

    def save(self, path: Path | str) -> None:
        """Write `tokenizer.json`, and beside it the roles of special tokens not named by us."""
        path = Path(path)
        files = {path: self._library.to_str(pretty=True)}
        if not self.is_native:
            files[beside(path)] = json.dumps(
                self.special_tokens.config(), indent=2, ensure_ascii=False
            )
        for each, text in files.items():
            try:
                each.write_text(text, encoding="utf-8")
            except OSError as error:
                raise CheckpointError(f"cannot write {each}: {error.strerror}") from error

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a `tokenizer.json`, ours or one from elsewhere, and what stands beside it."""
        path = Path(path)
        try:
            text = read_text(path)
        except FileNotFoundError:
            raise CheckpointError(f"no tokenizer at {path}; training a run writes one") from None
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        except UnicodeDecodeError:
            raise CheckpointError(f"{path} is not a tokenizer.json: it is not UTF-8") from None
        more = BESIDE if path.name == "tokenizer.json" else ()
        tables = read_tables(path.parent, beside(path).name, *more)
        with as_checkpoint_error(f"{path} is not a tokenizer.json, or damaged"):
            check_tokenizer_json(parse_json(text))
            library = tokenizers.Tokenizer.from_str(text)
            found = cls(library, SpecialTokens.read(library, tables))
            try_encoding(library)
            return found

    def fingerprint(self) -> str:
        """The same for equal tokenizers only: the sha256 of the canonical JSON, and of roles."""
        table = json.loads(self._library.to_str())
        if not self.is_native:
            table["roles"] = self.special_tokens.config()
        text = json.dumps(table, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return sha256(text.encode()).hexdigest()

    @property
    def max_id(self) -> int:
        """The highest id of a text with what stands around it; special ones may lie above."""
        ordinary = {*self._library.get_vocab().values()} - {*self._specials.values()}
        parts = [id for id, _ in (*self._frame.single, *self._frame.pair) if isinstance(id, int)]
        needed = [id for id in map(self.special_id, ("start", "unk", "mask")) if id is not None]
        return max([*ordinary - {self.hf_special_id("pad")}, *parts, *needed], default=-1)

    @property
    def has_hidden_pieces(self) -> bool:
        """Whether some ids are pieces of the other side of a translation, never found in text."""
        return any(token.startswith(HIDDEN) for token in self._library.get_vocab())

    @property
    def is_native(self) -> bool:
        """Whether the names of the special tokens tell their roles."""
        return self.special_tokens == SpecialTokens.read(self._library, [])

    def _needed(self, name: str) -> int:
        id = self.special_id(name)
        if id is None:
            raise ConfigError(
                f"this {self.kind} vocabulary of {self.size} ids has no <{name}> token;\n"
                f"its special tokens: {', '.join(self._specials) or 'none'}"
            )
        return id

    def _check_id(self, id: int) -> None:
        if not 0 <= id < self.size:
            raise DataError(f"id {id} is not one of the {self.size} ids (0 to {self.size - 1})")

    def _code_points_to_ids(self) -> NDArray[np.uint32]:
        table = np.full(0x110000, self.unk_id, np.uint32)
        for token, id in self._library.get_vocab().items():
            if len(token) == 1:
                table[ord(token)] = id
        return table

    def _lower(self, text: str, codes: NDArray[np.uint32]) -> NDArray[np.uint32]:
        # Character by character, as the library does it (Python's lower() knows the final sigma);
        # 'İ' becomes two.
        seen = np.zeros(0x110000, bool)
        seen[codes] = True
        lower = {c: self._library.normalizer.normalize_str(chr(c)) for c in np.flatnonzero(seen)}
        changed = {int(c): small for c, small in lower.items() if small != chr(c)}
        return _code_points(text.translate(changed)) if changed else codes


def check_text(text: str) -> str:
    """The text, if it is one: half of a surrogate pair is not a character and has no bytes."""
    try:
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"character {error.start} of the text is a lone surrogate, {text[error.start]!a};\n"
            "read the file as UTF-8, or drop such characters with errors='replace'"
        ) from None
    return text


def try_encoding(library: tokenizers.Tokenizer) -> None:
    """Encode and decode a short text, so that a vocabulary that cannot do so fails when loaded."""
    library.decode(library.encode(TRIAL_TEXT, add_special_tokens=False).ids)


def check_size(size: int, needed: int, what: str) -> None:
    """Refuse a vocabulary that cannot even hold the special tokens and what else it must."""
    least = len(SPECIAL_TOKENS) + needed
    if not isinstance(size, int) or size < least:
        raise ConfigError(
            f"tokenizer size={size!r} must be a whole number of at least {least}:\n"
            f"{len(SPECIAL_TOKENS)} special tokens and {what}"
        )


def characters(pieces: Iterable[str], *, lower: bool) -> set[str]:
    """All characters that occur."""
    seen: set[str] = set()
    for piece in pieces:
        seen.update(check_text(piece))
    fold = normalizers.Lowercase().normalize_str
    return set("".join(map(fold, seen))) if lower else seen


def special_tokens() -> list[AddedToken]:
    """The special tokens as the library wants them."""
    return [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]


def _from_json(text: str, roles: SpecialTokens) -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_str(text), roles)


def _kind(table: dict[str, Any]) -> str:
    model = table["model"]
    if model["type"] in KINDS:
        return KINDS[model["type"]]
    characters = {"type": "Split", "pattern": {"Regex": CHARACTER}}
    splits = table["pre_tokenizer"] or {}
    one_by_one = {key: splits.get(key) for key in characters} == characters
    return "char" if one_by_one and "<unk>" in model["vocab"] else "word"


def _code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le"), "<u4")


def _byte_level_text(token: str) -> str:
    # GPT-2 writes each byte as one printable character: itself where that is visible in
    # Latin-1, and the others, in order, from U+0100 on.
    raw = bytes(_BYTES[character] for character in token if character in _BYTES)
    text = raw.decode("utf-8", errors="surrogateescape")
    return re.sub("[\udc80-\udcff]", lambda half: f"<0x{ord(half[0]) - 0xDC00:02X}>", text)


_VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = [byte for byte in range(0x100) if byte not in _VISIBLE]
_BYTES = {chr(byte): byte for byte in _VISIBLE} | {chr(256 + i): b for i, b in enumerate(_HIDDEN)}
