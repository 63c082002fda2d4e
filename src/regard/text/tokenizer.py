"""`Tokenizer`, the class of all tokenizers: text to ids and back, saved as `tokenizer.json`.

Each kind is trained in the module of its name.
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
from tokenizers import AddedToken, models, normalizers

from regard.errors import CheckpointError, ConfigError, DataError, RegardError, unknown
from regard.files.untrusted import as_checkpoint_error, quote, read_text
from regard.text.special_tokens import (
    HF_KEYS,
    SPECIAL_TOKENS,
    PostProcessorTemplate,
    SpecialTokens,
    config_path,
    read_tables,
)
from regard.text.tokenizer_limits import SpeedCheck, parse_tokenizer_json

METASPACE = "▁"  # how SentencePiece vocabularies write a space
JOINER = "￭"  # in word vocabularies: no space on this side (OpenNMT's joiner)
# Files next to a tokenizer.json that name special tokens too.
CONFIG_FILES = ("special_tokens_map.json", "generation_config.json", "config.json")
CHARACTER = r"[\s\S]"  # the regular expression that splits text into characters
DECODE_ONLY_PREFIX = "\uffff"  # of the other language's pieces, where two languages share ids
FAILURE = "the tokenizer fails on this input; it is corrupted or malicious, use another one"
# This text is encoded and decoded when a tokenizer is loaded. Its first character is in no
# vocabulary.
ROUND_TRIP_TEXT = (
    '\U0010fffd a B 1.\nThe quick brown fox, aged 12, said: "It\'s 3,141.59 (or so)!"\r\n\t'
    f"{'a' * 50} {'0' * 50} {'_' * 50} Très cher Müller, "
    "Быстрая лиса, 敏捷的狐狸 素早い狐 여우 लोमड़ी ثعلب 🦊\n\n\n    def f(x_1): return [x_1] # end\n"
)
REPETITIONS = 8  # of the text above
KINDS = {  # by the model type in tokenizer.json
    "BPE": "bpe",
    "WordPiece": "wordpiece",
    "Unigram": "unigram",
}


class Tokenizer:
    r"""Converts text to token ids and back.

        text -> normalizer -> pre-tokenizer -> model -> ids

    decode(encode(text)) is the text, except for properties that a kind of tokenizer does not
    preserve, such as the number of spaces between words.

    `encode` never returns the special tokens of a vocabulary trained here: "<stop>" in a text is
    six ordinary (or unknown) characters. Callers insert special ids themselves.

    >>> from regard.text import train_tokenizer
    >>> tokenizer = train_tokenizer("word", ["to be, or not to be"])
    >>> [tokenizer.piece(id) for id in tokenizer.encode("be not, <stop>")]
    ['be', 'not', ',', '<unk>', '<unk>', '<unk>']
    >>> tokenizer.decode([tokenizer.bos_id, *tokenizer.encode("be not, "), tokenizer.eos_id])
    'be not,'
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, special_tokens: SpecialTokens | None = None
    ) -> None:
        # A tokenizer.json from elsewhere may set padding and truncation, which callers decide here.
        # `encode_special_tokens` is not stored in the file.
        backend.encode_special_tokens = True
        backend.no_padding()
        backend.no_truncation()
        if isinstance(backend.model, models.BPE):
            backend.model.dropout = None  # or the ids of a text would be random
        table = json.loads(backend.to_str())
        self._backend = backend
        self._special_token_ids = {
            token["content"]: int(token["id"])
            for token in table["added_tokens"]
            if token["special"]
        }
        self._byte_level = '"ByteLevel"' in json.dumps([table["decoder"], table["pre_tokenizer"]])
        self._special_backend: tokenizers.Tokenizer | None = None  # of `encode_special`
        self._code_point_ids: NDArray[np.uint32] | None = None  # char: id by code point
        self._encode_speed, self._decode_speed = SpeedCheck("characters"), SpeedCheck("ids")
        self._template = PostProcessorTemplate.from_post_processor(table["post_processor"])
        if special_tokens is None:
            special_tokens = SpecialTokens.read(backend, [])
        self.special_tokens = special_tokens
        self.kind = _kind(table)
        self.vocab_size = max(
            1 + max(backend.get_vocab().values(), default=-1), self.special_tokens.vocab_size
        )
        for part, _ in (*self._template.single, *self._template.pair):
            if isinstance(part, int):
                self._check_id(part)

    def __len__(self) -> int:
        return self.vocab_size

    def __repr__(self) -> str:
        return f"Tokenizer({self.kind!r}, vocab_size={self.vocab_size})"

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickling the backend would lose `encode_special_tokens`.
        return _from_json, (self._backend.to_str(), self.special_tokens)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special ids other than `<unk>`."""
        if self.kind == "char":
            return self.encode_array(text).tolist()
        return self.encode_batch([text])[0]

    def unknown_parts(self, text: str) -> list[str]:
        """The distinct parts of a text that become `<unk>`, or are dropped without an `<unk>`."""
        unk = self.special_id("unk")
        check_text(text)
        self._encode_speed.check(self._encode, text)
        encoding = self._encode(text)
        spans = list(zip(encoding.ids, encoding.offsets, strict=True))
        if unk is not None:
            # a space that the normalizer inserts has the offsets of the character before it
            ends = [0, *(end for _, (_, end) in spans)]
            parts = (
                text[max(begin, previous) : end]
                for previous, (id, (begin, end)) in zip(ends, spans, strict=False)
                if id == unk
            )
            return list(dict.fromkeys(parts))
        dropped = list(text)
        for _, (begin, end) in spans:
            dropped[begin:end] = " " * (end - begin)
        return list(dict.fromkeys("".join(dropped).split()))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of several texts, computed on all cores."""
        if self.kind == "char":
            return [self.encode(text) for text in texts]
        for text in texts:
            check_text(text)
        self._encode_speed.check(self._encode, max(texts, key=len, default=""))
        with as_checkpoint_error(FAILURE):
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_special(self, text: str) -> list[int]:
        """The ids of a text whose special tokens become their ids, as in a chat template.

        Not for user input, which could then contain control tokens; see `chat_encoding`.
        """
        check_text(text)
        self._encode_speed.check(self._encode, text)
        if self._special_backend is None:
            self._special_backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
            self._special_backend.encode_special_tokens = False
        with as_checkpoint_error(FAILURE):
            ids: list[int] = self._special_backend.encode(text, add_special_tokens=False).ids
        return ids

    def encode_with_offsets(
        self, texts: Sequence[str]
    ) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """The ids of texts, and for each id its offsets: where its characters begin and end."""
        for text in texts:
            check_text(text)
        self._encode_speed.check(self._encode, max(texts, key=len, default=""))
        with as_checkpoint_error(FAILURE):
            encodings = self._backend.encode_batch(list(texts), add_special_tokens=False)
        return [(encoding.ids, encoding.offsets) for encoding in encodings]

    def encode_array(self, text: str) -> NDArray[np.uint32]:
        """The ids of a text as an array; for a character-level tokenizer, one table lookup.

        ids_i = table[code point of character i]
        """
        if self.kind != "char":
            return np.array(self.encode(text), np.uint32)
        check_text(text)
        if self._code_point_ids is None:
            self._code_point_ids = self._code_points_to_ids()
        codes = _code_points(text)
        if self._backend.normalizer is not None:
            codes = self._lower(text, codes)
        return self._code_point_ids[codes]

    def with_special_tokens(
        self, ids: Sequence[int], pair: Sequence[int] | None = None
    ) -> tuple[list[int], list[int]]:
        """Add the special ids that the tokenizer's post-processor puts around one or two texts.

            [CLS] A [SEP],  [CLS] A [SEP] B [SEP]      BERT
            <s> A,          A </s>                     LLaMA, T5

        Returns the ids and their segments (Hugging Face: token_type_ids). A vocabulary trained
        here adds nothing.
        """
        texts = {"A": list(ids)} if pair is None else {"A": list(ids), "B": list(pair)}
        return self._template.apply(**texts)

    @property
    def prefix_ids(self) -> list[int]:
        """The special ids that `with_special_tokens` puts before a text."""
        parts = takewhile(lambda part: part[0] != "A", self._template.single)
        return [id for id, _ in parts if isinstance(id, int)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids; special ids are skipped."""
        ids = list(ids)
        for id in {min(ids), max(ids)} if ids else ():
            self._check_id(id)
        self._decode_speed.check(self._decode, ids)
        return self._decode(ids)

    def piece(self, id: int) -> str:
        """One token for display: ' the', not 'Ġthe'; an incomplete UTF-8 sequence as '<0xE2>'."""
        self._check_id(id)
        token: str = self._backend.id_to_token(id) or ""  # ids may have gaps
        if token in self._special_token_ids:
            return token
        token = token.removeprefix(DECODE_ONLY_PREFIX)
        if self._byte_level:
            return _byte_level_text(token)
        if self.kind == "word":
            return token.strip(JOINER)
        return token.replace(METASPACE, " ") if self.kind in ("bpe", "unigram") else token

    def token_bytes(self, id: int) -> bytes:
        """The bytes that a token adds to a text; they may be an incomplete character.

        The space that decoding inserts between two words is not included.
        """
        self._check_id(id)
        token: str = self._backend.id_to_token(id) or ""
        if token in self._special_token_ids:
            return b""
        if self._byte_level:
            return bytes(_BYTES[character] for character in token if character in _BYTES)
        if re.fullmatch("<0x[0-9A-F]{2}>", token):  # byte fallback
            return bytes([int(token[3:5], 16)])
        piece = self.piece(id)
        return (piece.removeprefix("##") if self.kind == "wordpiece" else piece).encode()

    def special_id(self, name: str) -> int | None:
        """The id of a special token by its role; None if the vocabulary has none.

        "bos" is the first id that a decoder reads, if that is another one (T5: the padding token).
        """
        if name not in HF_KEYS:
            raise ConfigError(unknown("special token", name, HF_KEYS))
        if name == "bos" and self.special_tokens.decoder_start is not None:
            return self._backend.token_to_id(self.special_tokens.decoder_start)
        return self.hf_special_id(name)

    def hf_special_id(self, name: str) -> int | None:
        """The id that Hugging Face's files give for a special token."""
        token = self.special_tokens.tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """A copy of the underlying `tokenizers.Tokenizer`, as it is stored in tokenizer.json."""
        return tokenizers.Tokenizer.from_str(self._backend.to_str())

    @property
    def pad_id(self) -> int:
        """Id of the padding token."""
        return self._required_id("pad")

    @property
    def bos_id(self) -> int:
        """Id of the beginning-of-sequence (BOS) token."""
        return self._required_id("bos")

    @property
    def eos_id(self) -> int:
        """Id of the end-of-sequence (EOS) token."""
        return self._required_id("eos")

    @property
    def stop_ids(self) -> list[int]:
        """All end-of-sequence ids; `eos_id` is the first."""
        ids = [
            self.special_id("eos"),
            *map(self._backend.token_to_id, self.special_tokens.stop_tokens[1:]),
        ]
        return [id for id in ids if id is not None]

    @property
    def unk_id(self) -> int:
        """Id of the unknown token."""
        return self._required_id("unk")

    @property
    def mask_id(self) -> int:
        """Id of the mask token."""
        return self._required_id("mask")

    @property
    def cls_id(self) -> int:
        """Id of the CLS token, the first of an encoder's input."""
        return self._required_id("cls")

    @property
    def sep_id(self) -> int:
        """Id of the SEP token, after each text of an encoder's input."""
        return self._required_id("sep")

    @property
    def special_ids(self) -> list[int]:
        """All special ids, sorted."""
        return sorted(self._special_token_ids.values())

    @property
    def special_texts(self) -> list[str]:
        """The texts of all special tokens."""
        return list(self._special_token_ids)

    def save(self, path: Path | str) -> None:
        """Write `tokenizer.json`; if not `is_native`, also the special tokens in a config file."""
        path = Path(path)
        files = {path: self._backend.to_str(pretty=True)}
        if not self.is_native:
            files[config_path(path)] = json.dumps(
                self.special_tokens.config(), indent=2, ensure_ascii=False
            )
        for file, text in files.items():
            try:
                file.write_text(text, encoding="utf-8")
            except OSError as error:
                raise CheckpointError(f"cannot write {file}: {error.strerror}") from error

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read an untrusted `tokenizer.json` and the config files next to it."""
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
        config_files = CONFIG_FILES if path.name == "tokenizer.json" else ()
        tables = read_tables(path.parent, config_path(path).name, *config_files)
        with as_checkpoint_error(f"{path} is not a tokenizer.json, or corrupted"):
            parse_tokenizer_json(text)
            backend = tokenizers.Tokenizer.from_str(text)
            return cls(backend, SpecialTokens.read(backend, tables)).check_round_trip(path)

    def check_round_trip(self, path: Path) -> Self:
        """Encode and decode a text, so that a tokenizer that fails is refused when it is loaded."""
        try:
            self.decode(self.encode(ROUND_TRIP_TEXT * REPETITIONS))
        except RegardError as error:
            raise CheckpointError(f"{path} cannot be used: {error}") from error
        return self

    def fingerprint(self) -> str:
        """sha256 of the canonical JSON; the special tokens are included unless `is_native`."""
        table = json.loads(self._backend.to_str())
        if not self.is_native:
            table["roles"] = self.special_tokens.config()
        text = json.dumps(table, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return sha256(text.encode()).hexdigest()

    @property
    def max_id(self) -> int:
        """The largest id that encoding a text can produce; other special ids may be larger."""
        ordinary = {*self._backend.get_vocab().values()} - {*self._special_token_ids.values()}
        parts = (*self._template.single, *self._template.pair)
        template = [id for id, _ in parts if isinstance(id, int)]
        special = [id for id in map(self.special_id, ("bos", "unk", "mask")) if id is not None]
        return max([*ordinary - {self.hf_special_id("pad")}, *template, *special], default=-1)

    @property
    def has_decode_only_pieces(self) -> bool:
        """Whether some ids are decoded but never encoded: those of the other language of a pair."""
        return any(token.startswith(DECODE_ONLY_PREFIX) for token in self._backend.get_vocab())

    @property
    def is_native(self) -> bool:
        """Whether the special tokens are `SPECIAL_TOKENS`, as in vocabularies trained here."""
        return self.special_tokens == SpecialTokens.read(self._backend, [])

    def _encode(self, text: str) -> Any:
        with as_checkpoint_error(FAILURE):
            return self._backend.encode(text, add_special_tokens=False)

    def _decode(self, ids: list[int]) -> str:
        with as_checkpoint_error(FAILURE):
            text: str = self._backend.decode(ids, skip_special_tokens=True)
        return text

    def _required_id(self, name: str) -> int:
        id = self.special_id(name)
        if id is None:
            raise ConfigError(
                f"this {self.kind} vocabulary of {self.vocab_size} ids has no {name} token;\n"
                f"its special tokens: {', '.join(self._special_token_ids) or 'none'}"
            )
        return id

    def _check_id(self, id: int) -> None:
        if not 0 <= id < self.vocab_size:
            raise DataError(
                f"id {id} is not one of the {self.vocab_size} ids (0 to {self.vocab_size - 1})"
            )

    def _code_points_to_ids(self) -> NDArray[np.uint32]:
        table = np.full(0x110000, self.unk_id, np.uint32)
        for token, id in self._backend.get_vocab().items():
            if len(token) == 1:
                table[ord(token)] = id
        return table

    def _lower(self, text: str, codes: NDArray[np.uint32]) -> NDArray[np.uint32]:
        # Per character, as the backend does it: str.lower() has a rule for the final sigma.
        # 'İ' becomes two characters.
        occurs = np.zeros(0x110000, bool)
        occurs[codes] = True
        lower = {c: self._backend.normalizer.normalize_str(chr(c)) for c in np.flatnonzero(occurs)}
        changed = {int(c): lowered for c, lowered in lower.items() if lowered != chr(c)}
        return _code_points(text.translate(changed)) if changed else codes


def check_text(text: str) -> str:
    """Return the text; raise DataError if it has a lone surrogate, which UTF-8 cannot encode."""
    if not isinstance(text, str):
        raise DataError(f"a text must be a string, not {type(text).__name__}: {quote(text, 40)}")
    try:
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"character {error.start} of the text is a lone surrogate, {text[error.start]!a};\n"
            "read the file as UTF-8, or replace such characters with errors='replace'"
        ) from None
    return text


def check_vocab_size(vocab_size: int, required: int, description: str) -> None:
    """Raise ConfigError if `vocab_size` is less than the special and the `required` tokens."""
    minimum = len(SPECIAL_TOKENS) + required
    if not isinstance(vocab_size, int) or vocab_size < minimum:
        raise ConfigError(
            f"tokenizer vocab_size={vocab_size!r} must be an integer of at least {minimum}:\n"
            f"{len(SPECIAL_TOKENS)} special tokens and {description}"
        )


def characters(texts: Iterable[str], *, lower: bool) -> set[str]:
    """The set of characters in the texts, in lower case if `lower`."""
    alphabet: set[str] = set()
    for text in texts:
        alphabet.update(check_text(text))
    lowercase = normalizers.Lowercase().normalize_str
    return set("".join(map(lowercase, alphabet))) if lower else alphabet


def added_special_tokens() -> list[AddedToken]:
    """`SPECIAL_TOKENS` for a trainer of the tokenizers library."""
    return [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]


def _from_json(text: str, special_tokens: SpecialTokens) -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_str(text), special_tokens)


def _kind(table: dict[str, Any]) -> str:
    model = table["model"]
    if model["type"] in KINDS:
        return KINDS[model["type"]]
    by_character = {"type": "Split", "pattern": {"Regex": CHARACTER}}
    pre_tokenizer = table["pre_tokenizer"] or {}
    is_char = {key: pre_tokenizer.get(key) for key in by_character} == by_character
    has_table_lookup = (
        table["normalizer"] in (None, {"type": "Lowercase"}) and "<unk>" in model["vocab"]
    )
    return "char" if is_char and has_table_lookup else "word"


def _code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le"), "<u4")


def _byte_level_text(token: str) -> str:
    # GPT-2 maps every byte to a printable character: bytes that are visible in Latin-1 to
    # themselves, the others, in order, to U+0100 and up.
    raw = bytes(_BYTES[character] for character in token if character in _BYTES)
    text = raw.decode("utf-8", errors="surrogateescape")
    return re.sub("[\udc80-\udcff]", lambda byte: f"<0x{ord(byte[0]) - 0xDC00:02X}>", text)


_VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_INVISIBLE = [byte for byte in range(0x100) if byte not in _VISIBLE]
_BYTES = {chr(byte): byte for byte in _VISIBLE}
_BYTES |= {chr(256 + i): byte for i, byte in enumerate(_INVISIBLE)}
