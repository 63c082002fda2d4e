"""Limits on tokenizers from untrusted files: on the content of a tokenizer.json and on speed.

A tokenizer is a small program: its normalizer may multiply a text, its regular expressions may
take exponential time, and its vocabulary is copied into tables. `check_tokenizer_json` refuses a
tokenizer without bounds on these; `SpeedCheck` measures its speed while texts are encoded and
decoded.
"""

import binascii
import json
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from regard.errors import DataError
from regard.files.untrusted import (
    MAX_REPLACEMENT,
    JSONObject,
    check_charsmap,
    check_vocab_ids,
    parse_json,
    quote,
    refuse_duplicates,
)

T = TypeVar("T", str, list[int])

MAX_TOKEN_LENGTH = 4096  # characters; GPT-2's longest token has 128
MAX_STEPS = 64  # normalizers, pre-tokenizers or decoders; real files have at most ten
MAX_DEPTH = 8  # of sequences in sequences
# Characters per character of a text, if every step has its worst case. NFKC turns one Arabic
# ligature into 18 characters, so that real tokenizers reach 2,000, though not for ordinary text.
MAX_EXPANSION = 10_000
MAX_TEMPLATE_PARTS = 256  # parts of a post-processor
# Prefixes of tokens, which are the nodes of the tries that the library builds: 340 bytes each for
# Unigram. mT5, of 250,000 pieces, has about a million.
MAX_UNIGRAM_PREFIXES = 1_400_000
MAX_ADDED_PREFIXES = 400_000
MAX_TOKENS = 400_000  # Gemma has 262,144
MAX_ADDED_TOKENS, MAX_ADDED_CHARACTERS = 100_000, 2_000_000  # the latter in all tokens together

UNICODE_FACTOR = {
    "NFC": 3,
    "NFD": 4,
    "NFKC": 18,
    "NFKD": 18,
    "Lowercase": 2,
    "BertNormalizer": 24,
}
NORMALIZERS = {*UNICODE_FACTOR, "Nmt", "Strip", "StripAccents"}
NORMALIZERS |= {"ByteLevel", "Precompiled", "Prepend", "Replace", "Sequence"}
PRE_TOKENIZERS = {"BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "FixedLength"}
PRE_TOKENIZERS |= {"Metaspace", "Punctuation", "Sequence", "Split", "UnicodeScripts", "Whitespace"}
PRE_TOKENIZERS |= {"WhitespaceSplit"}
DECODERS = {"BPEDecoder", "ByteFallback", "ByteLevel", "CTC", "Fuse", "Metaspace", "Replace"}
DECODERS |= {"Sequence", "Strip", "WordPiece"}
COMPONENTS = {  # of a tokenizer.json: the steps that each may have, and the key of nested steps
    "normalizer": (NORMALIZERS, "normalizers"),
    "pre_tokenizer": (PRE_TOKENIZERS, "pretokenizers"),
    "decoder": (DECODERS, "decoders"),
}


def parse_tokenizer_json(text: str) -> JSONObject:
    """Parse and check a tokenizer.json; raise ValueError if it cannot be used safely."""
    table = parse_json(text, refuse_duplicates)
    check_tokenizer_json(table)
    return table


def check_tokenizer_json(table: Any) -> None:
    """Raise ValueError for a tokenizer.json that is unbounded, or that makes the library panic."""
    if not isinstance(table, dict) or not isinstance(table.get("model"), dict):
        raise ValueError("it is not a JSON object with a model")
    _check_vocab(table["model"], _tables(table.get("added_tokens"), "added_tokens"))
    expansion = {name: _check_steps(table.get(name), name) for name in COMPONENTS}
    encoding, decoding = expansion["normalizer"] * expansion["pre_tokenizer"], expansion["decoder"]
    if encoding > MAX_EXPANSION or decoding > MAX_REPLACEMENT:
        raise ValueError(
            f"it may make a text {max(encoding, decoding):.0g} times as long, and the limit is "
            f"{MAX_EXPANSION:,} when encoding and {MAX_REPLACEMENT} when decoding"
        )
    processor = json.dumps(table.get("post_processor"))
    if processor.count('"type_id"') > MAX_TEMPLATE_PARTS:
        raise ValueError(f"its post_processor has more than {MAX_TEMPLATE_PARTS} parts")


def check_token_lengths(tokens: Iterable[Any]) -> None:
    """Raise ValueError for a token of more than `MAX_TOKEN_LENGTH` characters."""
    longest = max((token for token in tokens if isinstance(token, str)), key=len, default="")
    if len(longest) > MAX_TOKEN_LENGTH:
        raise ValueError(
            f"token {quote(longest, 40)} has {len(longest):,} characters, and the limit is "
            f"{MAX_TOKEN_LENGTH:,}"
        )


def check_added_tokens(tokens: Sequence[Any]) -> None:
    """Raise ValueError if added tokens are too many or too long to be found in a text quickly."""
    characters = sum(len(token) for token in tokens if isinstance(token, str))
    if len(tokens) > MAX_ADDED_TOKENS or characters > MAX_ADDED_CHARACTERS:
        raise ValueError(
            f"it has {len(tokens):,} added tokens of {characters:,} characters, and the limits are "
            f"{MAX_ADDED_TOKENS:,} and {MAX_ADDED_CHARACTERS:,}"
        )
    check_prefixes(tokens, MAX_ADDED_PREFIXES, "added_tokens")


def _check_vocab(model: JSONObject, added_tokens: list[JSONObject]) -> None:
    vocab = model.get("vocab")
    if isinstance(vocab, list):  # Unigram: pairs of token and score
        tokens = [pair[0] for pair in vocab if isinstance(pair, list) and pair]
        check_prefixes(tokens, MAX_UNIGRAM_PREFIXES, "vocab")
        ids: list[Any] = list(range(len(vocab)))
    else:
        tokens = list(vocab) if isinstance(vocab, dict) else []
        ids = list(vocab.values()) if isinstance(vocab, dict) else []
    added = [token.get("content") for token in added_tokens]
    check_vocab_ids([*ids, *(token.get("id") for token in added_tokens)])
    affixes = [model.get(key) for key in ("continuing_subword_prefix", "end_of_word_suffix")]
    check_token_lengths([*tokens, *added, *affixes])
    if len(tokens) > MAX_TOKENS:
        raise ValueError(f"it has {len(tokens):,} tokens, and the limit is {MAX_TOKENS:,}")
    check_added_tokens(added)
    word_length = model.get("max_input_chars_per_word")
    if isinstance(word_length, int) and word_length > MAX_TOKEN_LENGTH:
        raise ValueError(f"max_input_chars_per_word is more than {MAX_TOKEN_LENGTH:,}")


def check_prefixes(tokens: Collection[Any], limit: int, name: str) -> None:
    """Raise ValueError for tokens whose trie would have more than `limit` nodes."""
    texts = [token.encode("utf-8", "surrogatepass") for token in tokens if isinstance(token, str)]
    if sum(map(len, texts)) <= limit:
        return
    texts.sort()
    prefixes = 0
    for previous, text in pairwise([b"", *texts]):
        pairs = enumerate(zip(previous, text, strict=False))
        shared = next((i for i, (a, b) in pairs if a != b), min(len(previous), len(text)))
        prefixes += len(text) - shared
        if prefixes > limit:
            raise ValueError(f"the tokens in {name} have more than {limit:,} different prefixes")


def _tables(value: Any, name: str) -> list[JSONObject]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise ValueError(f"{name} is not a list of objects")
    return value


def _check_steps(step: Any, part: str) -> float:
    """The largest expansion factor of a text by a normalizer, pre-tokenizer or decoder."""
    if step is None:
        return 1.0
    known, nested_key = COMPONENTS[part]
    expansion, steps = 1.0, 0
    stack = [(step, 1)]
    while stack:
        step, depth = stack.pop()
        steps += 1
        if steps > MAX_STEPS or depth > MAX_DEPTH:
            raise ValueError(
                f"its {part} has more than {MAX_STEPS} steps, or more than {MAX_DEPTH} levels"
            )
        kind = step.get("type") if isinstance(step, dict) else None
        if not isinstance(kind, str) or kind not in known:
            raise ValueError(f"its {part} has a step of unknown type {quote(kind, 40)}")
        if kind == "Sequence":
            stack += [(inner, depth + 1) for inner in _tables(step.get(nested_key), nested_key)]
            continue
        factor = _expansion(step, part)
        if factor > MAX_REPLACEMENT:
            raise ValueError(
                f"a {kind} of its {part} turns one character into {factor:g}, and the limit is "
                f"{MAX_REPLACEMENT}"
            )
        expansion *= factor
    return expansion


def _expansion(step: JSONObject, part: str) -> float:
    """The expansion factor of a step: the maximum number of characters that one may become."""
    kind = step["type"]
    if kind in ("Replace", "Split"):
        return _replacement_expansion(step)
    if kind == "Prepend":  # once for each text, however short
        return 1.0 + len(_string(step, "prepend"))
    if kind == "Precompiled":
        charsmap = step.get("precompiled_charsmap")
        if not isinstance(charsmap, str):
            raise ValueError("precompiled_charsmap is not a string")
        return check_charsmap(binascii.a2b_base64(charsmap, strict_mode=True))
    if part == "decoder":
        texts = [value for value in step.values() if isinstance(value, str)]
        check_token_lengths(texts)
        if kind in ("BPEDecoder", "CTC") and not all(texts):  # matches between all characters
            raise ValueError(f"a {kind} of its decoder replaces an empty string")
        return 2.0 if kind in ("BPEDecoder", "CTC", "WordPiece") else 1.0  # they insert spaces
    if kind == "ByteLevel":  # a character for each byte, after one space
        return 5.0
    return 2.0 if kind == "Metaspace" else UNICODE_FACTOR.get(kind, 1)


def _replacement_expansion(step: JSONObject) -> float:
    pattern = step.get("pattern")
    if not isinstance(pattern, dict) or len(pattern) != 1:
        raise ValueError(f"the pattern of a {step['type']} is {quote(pattern, 40)}")
    ((syntax, expression),) = pattern.items()
    if not isinstance(expression, str) or not expression:
        raise ValueError(f"the pattern of a {step['type']} is empty")
    content = 0 if step["type"] == "Split" else len(_string(step, "content"))
    if syntax == "String":
        return max(1.0, content / len(expression))
    width = check_regex(expression)
    return max(1.0, content / width.shortest if width.shortest else 1.0 + content)


def _string(step: JSONObject, key: str) -> str:
    value = step.get(key)
    if not isinstance(value, str):
        raise ValueError(f"{key} of a {step['type']} is not a string")
    return value


MAX_REGEX_LENGTH = 10_000
# unbounded quantifiers one after the other: time = length ** quantifiers
MAX_UNBOUNDED_QUANTIFIERS = 3
MAX_REPETITIONS = 100  # a quantifier with a larger upper bound counts as unbounded
ANCHORS, CHARACTERS = "AzZbBGyY", "dDhHsSwWnrtfvaeNO0"


class Width(NamedTuple):
    """The lengths of the strings that a regular expression matches, and its complexity."""

    shortest: int
    longest: float
    unbounded: int  # quantifiers one after the other
    branches: int = 1  # maximum number of alternatives of a group


def check_regex(expression: str) -> Width:
    r"""Raise ValueError for a regular expression (Oniguruma) that may backtrack for a long time.

    An expression that an unbounded quantifier repeats must not contain another one, nor match the
    empty string: (a+)+ is refused. Backreferences, recursion and conditionals are refused too.

    >>> check_regex(r"\p{L}+|[^\s]{2}")
    Width(shortest=1, longest=inf, unbounded=1, branches=2)
    """
    if len(expression) > MAX_REGEX_LENGTH:
        raise ValueError(f"a regular expression has {len(expression):,} characters")
    reader = _RegexReader(expression)
    width = reader.alternatives(0)
    if reader.offset < len(expression):
        reader.refuse("has a ) without a (")
    return width


class _RegexReader:
    """Recursive descent over the part of Oniguruma's syntax that tokenizers use."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.offset = 0

    def refuse(self, problem: str) -> Any:
        raise ValueError(f"the regular expression {quote(self.text)} {problem}")

    def take(self, prefix: str) -> bool:
        """Skip a prefix; return whether the text has it here."""
        matches = self.text.startswith(prefix, self.offset)
        self.offset += len(prefix) * matches
        return matches

    def alternatives(self, depth: int) -> Width:
        if depth > 50:
            self.refuse("is nested too deeply")
        branches = [self.sequence(depth)]
        while self.take("|"):
            branches.append(self.sequence(depth))
        return Width(
            min(branch.shortest for branch in branches),
            max(branch.longest for branch in branches),
            max(branch.unbounded for branch in branches),
            max(len(branches), *(branch.branches for branch in branches)),
        )

    def sequence(self, depth: int) -> Width:
        shortest, longest, unbounded, branches = 0, 0.0, 0, 1
        while self.offset < len(self.text) and self.text[self.offset] not in "|)":
            part = self.repetition(self.atom(depth))
            shortest += part.shortest
            longest += part.longest
            unbounded += part.unbounded
            branches = max(branches, part.branches)
        if unbounded > MAX_UNBOUNDED_QUANTIFIERS:
            self.refuse(f"has more than {MAX_UNBOUNDED_QUANTIFIERS} unbounded quantifiers in a row")
        return Width(shortest, longest, unbounded, branches)

    def repetition(self, part: Width) -> Width:
        while True:
            bounds = self.quantifier()
            if bounds is None:
                return part
            minimum, maximum = bounds
            # `?` after a quantifier makes it lazy, `+` possessive.
            self.take("?") or self.take("+")
            if maximum > MAX_REPETITIONS:
                if part.unbounded or not part.shortest:
                    self.refuse(
                        "has nested unbounded quantifiers, or repeats an empty match without bound"
                    )
                # A repeated part with alternatives or of variable length counts twice; beyond that,
                # Oniguruma has its own limit on backtracking.
                varies = part.longest > part.shortest or part.branches > 1
                part = Width(minimum * part.shortest, math.inf, 2 if varies else 1)
            else:
                unbounded = part.unbounded * max(1, int(maximum))
                longest = maximum * part.longest if maximum else 0.0
                part = Width(minimum * part.shortest, longest, unbounded, part.branches)

    def quantifier(self) -> tuple[int, float] | None:
        for sign, bounds in {"*": (0, math.inf), "+": (1, math.inf), "?": (0, 1.0)}.items():
            if self.take(sign):
                return bounds
        end = self.text.find("}", self.offset)
        if not self.text.startswith("{", self.offset) or end < 0:
            return None
        minimum, comma, maximum = self.text[self.offset + 1 : end].partition(",")
        digits = minimum + maximum
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 12):
            return None  # a literal brace
        self.offset = end + 1
        first = int(minimum or 0)
        return first, float(maximum or math.inf) if comma else float(first)

    def atom(self, depth: int) -> Width:
        one = Width(1, 1.0, 0)
        character = self.text[self.offset]
        self.offset += 1
        if character == "(":
            return self.group(depth)
        if character == "[":
            self.skip_class(depth)
            return one
        if character == "\\":
            return self.escape()
        return Width(0, 0.0, 0) if character in "^$" else one

    def group(self, depth: int) -> Width:
        is_lookaround = any(map(self.take, ("?=", "?!", "?<=", "?<!")))
        if not is_lookaround and self.take("?") and not any(map(self.take, (":", ">"))):
            self.options_or_name()
            if self.take(")"):  # (?i): for the rest of the expression
                return Width(0, 0.0, 0)
        group = self.alternatives(depth + 1)
        if not self.take(")"):
            self.refuse("has a ( without a )")
        return Width(0, 0.0, group.unbounded, group.branches) if is_lookaround else group

    def options_or_name(self) -> None:
        if self.take("<") or self.take("P<"):
            end = self.text.find(">", self.offset)
            if end < 0:
                self.refuse("has an unknown group")
            self.offset = end + 1
            return
        while self.offset < len(self.text) and self.text[self.offset] in "im-":
            self.offset += 1
        if not self.take(":") and not self.text.startswith(")", self.offset):
            self.refuse("has an unknown group")

    def escape(self) -> Width:
        if self.offset == len(self.text):
            self.refuse("ends with a backslash")
        character = self.text[self.offset]
        self.offset += 1
        if character in "pPxu":
            end = self.text.find("}", self.offset)
            if self.text.startswith("{", self.offset) and end > 0:
                self.offset = end + 1
            elif character in "pP":
                self.refuse(f"has a \\{character} without a name in braces")
            else:
                self.offset += 2 if character == "x" else 4
        elif character == "R":
            return Width(1, 2.0, 0)
        elif character in ANCHORS:
            return Width(0, 0.0, 0)
        elif character.isalnum() and character not in CHARACTERS:
            self.refuse(f"has \\{character}, which is not supported")
        return Width(1, 1.0, 0)

    def skip_class(self, depth: int) -> None:
        """Skip a character class, which may contain others: [a-z&&[^x]], [[:alpha:]]."""
        if depth > 50:
            self.refuse("is nested too deeply")
        self.take("^")
        first = True
        while self.offset < len(self.text):
            character = self.text[self.offset]
            self.offset += 1
            if character == "\\":
                self.escape()
            elif character == "[":
                self.skip_class(depth + 1)
            elif character == "]" and not first:
                return
            first = False
        self.refuse("has a [ without a ]")


class SpeedCheck:
    """Refuses a text that would take a tokenizer too long, before all of it is encoded.

    The time of a malicious tokenizer grows faster than the length of the text. So if a text is
    longer than all earlier ones, its prefixes are timed first, each 1.5 times as long as the
    previous one. A prefix is fast enough if

        seconds <= FIXED_SECONDS + SECONDS_PER_ITEM * length
    """

    FIXED_SECONDS = 0.1
    SECONDS_PER_ITEM = 20e-6  # per character or id; the slowest tokenizers take 3e-6
    MIN_LENGTH = 16  # characters or ids that are not checked
    MAX_LENGTH = 1 << 16  # characters or ids after which a tokenizer counts as fast

    def __init__(self, unit: str) -> None:
        self.unit = unit  # "characters" or "ids"
        self.checked_length = self.MIN_LENGTH

    def check(self, call: Callable[[T], object], longest: T) -> None:
        """Time `call` on growing prefixes of `longest`; raise DataError if one takes too long."""
        while self.checked_length < min(len(longest), self.MAX_LENGTH):
            length = min(3 * self.checked_length // 2, len(longest))
            # The time of this thread: other programs and threads do not count.
            start = time.thread_time()
            call(longest[:length])
            seconds = time.thread_time() - start
            if seconds > self.FIXED_SECONDS + self.SECONDS_PER_ITEM * length:
                raise DataError(
                    f"the tokenizer takes {seconds:.1f} s for {length} {self.unit}; "
                    "it is corrupted or malicious, use another one"
                )
            self.checked_length = length
