"""Structured output: decoding constrained by a JSON schema, with llguidance."""

import json
from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regard.errors import ConfigError, RegardError
from regard.text import Tokenizer

MAX_SCHEMA = 64 * 1024  # characters
# product of all multipleOf, of those below 1 the inverse: states of an automaton, 0.2 s to compile
MAX_MULTIPLE = 100_000


class JsonConstraint:
    """Allows only the tokens with which the text can still match a JSON schema."""

    def __init__(self, matcher: Any, eos_id: int) -> None:
        self.matcher, self.eos_id = matcher, eos_id

    def copy(self) -> "JsonConstraint":
        """The same constraint for another sequence."""
        return JsonConstraint(self.matcher.deep_copy(), self.eos_id)

    def mask(self, logits: Float[Tensor, " vocab"]) -> Float[Tensor, " vocab"]:
        """Set the logits of tokens that the schema forbids to -inf; at its end, all but EOS.

        No token is allowed if none in the vocabulary continues the text.
        """
        allowed = torch.zeros(len(logits), dtype=torch.bool)
        if self.matcher.is_stopped():
            allowed[self.eos_id] = True
        else:
            bias = torch.frombuffer(bytearray(self.matcher.compute_logit_bias()), dtype=torch.uint8)
            size = min(len(bias), len(logits))
            allowed[:size] = bias[:size] > 0
        if self.matcher.is_error():  # llguidance would allow EOS then
            allowed[:] = False
        return logits.masked_fill(~allowed.to(logits.device), -torch.inf)

    def append(self, token: int) -> None:
        """Advance by a sampled token."""
        if not self.matcher.consume_token(token):
            problem = self.matcher.get_error().split("\n")[0]
            raise RegardError(f"response_format: token {token} is refused: {problem}")


class JsonSchemas:
    """Makes constraints for the vocabulary of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        try:
            from llguidance import LLTokenizer
            from llguidance._tokenizer import TokenizerWrapper
        except ImportError:
            raise ConfigError(
                "a response_format needs llguidance; install it on the server: "
                "pip install 'regard[serve]'"
            ) from None
        if tokenizer.kind in ("word", "wordpiece"):
            raise ConfigError(
                f"response_format: a {tokenizer.kind} tokenizer cannot represent all of JSON; "
                "use a model with a char, bpe or unigram tokenizer"
            )
        self.eos_id = tokenizer.eos_id
        self.tokenizer = LLTokenizer(TokenizerWrapper(_Vocabulary(tokenizer)))

    def constraint(self, response_format: dict[str, Any]) -> JsonConstraint | None:
        """The constraint of a `response_format`; None for plain text."""
        kind = response_format.get("type")
        if kind in (None, "text"):
            return None
        if kind == "json_object":
            schema: Any = {"type": "object"}
        elif kind == "json_schema":
            table = response_format.get("json_schema", response_format)
            schema = table.get("schema") if isinstance(table, dict) else None
        else:
            raise ConfigError(
                f"response_format: type={str(kind)[:50]!r} must be text, json_object or json_schema"
            )
        if not isinstance(schema, dict):
            raise ConfigError("response_format: json_schema needs an object `schema`")
        text = json.dumps(schema)
        if len(text) > MAX_SCHEMA:
            raise ConfigError(
                f"response_format: the schema has more than {MAX_SCHEMA} characters; shorten it"
            )
        if prod(_multiples(schema)) > MAX_MULTIPLE:
            raise ConfigError(
                "response_format: the product of all multipleOf, or of 1 / multipleOf where it is "
                f"below 1, is more than {MAX_MULTIPLE:,}; use values closer to 1, or fewer of them"
            )
        from llguidance import LLMatcher

        try:
            # without whitespace: a small model would write spaces until its last token
            grammar = LLMatcher.grammar_from_json_schema(text, {"whitespace_flexible": False})
        except ValueError as error:
            raise ConfigError(f"response_format: {error}") from None
        if problem := LLMatcher.validate_grammar(grammar, self.tokenizer):
            raise ConfigError(f"response_format: {problem}")
        return JsonConstraint(LLMatcher(self.tokenizer, grammar), self.eos_id)


def _multiples(schema: Any) -> Iterator[float]:
    """The values of all multipleOf in a schema; of those below 1, the inverse."""
    if isinstance(schema, list):
        for item in schema:
            yield from _multiples(item)
    elif isinstance(schema, dict):
        value = schema.get("multipleOf")
        if isinstance(value, int | float) and value > 0:
            # an integer may be too large for a float, and a product of floats ends at infinity
            yield float(min(max(value, 1 / value), MAX_MULTIPLE + 1))
        for item in schema.values():
            yield from _multiples(item)


class _Vocabulary:
    """A vocabulary as llguidance reads it: the bytes of each token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = tokenizer.eos_id, None
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.tokens = [
            tokenizer.token_bytes(id) or f"<special {id}>".encode()
            for id in range(tokenizer.vocab_size)
        ]

    def __call__(self, text: str) -> list[int]:
        """The ids whose bytes are exactly a text; none if there are no such ids.

        SentencePiece puts a space before a text, which may join its first token; then the ids
        after a control character are taken.
        """
        for before in ("", "\x02"):
            ids: list[int] = []
            size = 0
            for id in reversed(self._tokenizer.encode(before + text)):
                if size == len(text.encode()):
                    break
                ids.insert(0, id)
                size += len(self.tokens[id])
            if b"".join(self.tokens[id] for id in ids) == text.encode():
                return ids
        return []
