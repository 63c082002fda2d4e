"""Structured output: decoding constrained by a JSON schema, with llguidance."""

import json
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regard.errors import ConfigError, RegardError
from regard.text import Tokenizer

MAX_SCHEMA = 64 * 1024  # characters


class JsonConstraint:
    """Allows the tokens that continue a text which matches a JSON schema."""

    def __init__(self, tokenizer: Any, grammar: str, stop: int) -> None:
        from llguidance import LLMatcher

        self.stop = stop
        self.matcher = LLMatcher(tokenizer, grammar)

    def mask(self, logits: Float[Tensor, " vocab"]) -> Float[Tensor, " vocab"]:
        """Remove tokens that the schema forbids here; at its end, all but the stop id."""
        allowed = torch.zeros(len(logits), dtype=torch.bool)
        if self.matcher.is_stopped():
            allowed[self.stop] = True
        else:
            bias = torch.frombuffer(bytearray(self.matcher.compute_logit_bias()), dtype=torch.uint8)
            size = min(len(bias), len(logits))
            allowed[:size] = bias[:size] > 0
        return logits.masked_fill(~allowed.to(logits.device), -torch.inf)

    def append(self, token: int) -> None:
        """Advance by a sampled token."""
        if not self.matcher.consume_token(token):
            raise RegardError(f"response_format: token {token} was refused; ask again")


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
        self.stop = tokenizer.eos_id
        self.tokenizer = LLTokenizer(TokenizerWrapper(_Vocabulary(tokenizer)))

    def constraint(self, response_format: dict[str, Any]) -> JsonConstraint | None:
        """The constraint of a `response_format`; None for plain text."""
        kind = response_format.get("type")
        if kind in (None, "text"):
            return None
        if kind == "json_object":
            schema: Any = {"type": "object"}
        elif kind == "json_schema":
            given = response_format.get("json_schema", response_format)
            schema = given.get("schema") if isinstance(given, dict) else None
        else:
            raise ConfigError(
                f"response_format: type={str(kind)[:50]!r} must be text, json_object or json_schema"
            )
        if not isinstance(schema, dict):
            raise ConfigError("response_format: json_schema needs an object `schema`")
        text = json.dumps(schema)
        if len(text) > MAX_SCHEMA:
            raise ConfigError(f"response_format: the schema has more than {MAX_SCHEMA} characters")
        from llguidance import LLMatcher

        try:
            grammar = LLMatcher.grammar_from_json_schema(text)
        except ValueError as error:
            raise ConfigError(f"response_format: {error}") from None
        if problem := LLMatcher.validate_grammar(grammar, self.tokenizer):
            raise ConfigError(f"response_format: {problem}")
        return JsonConstraint(self.tokenizer, grammar, self.stop)


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
        return self._tokenizer.encode(text)
