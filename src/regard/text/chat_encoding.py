"""Dialogues as ids: special tokens of the chat template become their ids, those in messages do not.

A message that contains "<|im_end|>" must not end its turn (prompt injection). Special tokens in
messages are therefore replaced by placeholders before the template is rendered, and are encoded as
plain text afterwards. All other text is encoded as a whole, as transformers' `apply_chat_template`
does.

Special tokens also remain plain text in the responses of training data, so a template that searches
a message for one (for example to remove the reasoning of a response) does not find it. A template
that changes placeholders is refused.
"""

import re
import secrets
from collections.abc import Sequence

from regard.errors import ConfigError
from regard.text.chat_template import (
    ASSISTANT,
    CHATML,
    Message,
    render,
    split_responses,
    turn_end,
)
from regard.text.special_tokens import HF_KEYS
from regard.text.tokenizer import Tokenizer

_DELIMITER = "\ufdd0"  # at both ends of a placeholder; a Unicode noncharacter
# Index of the placeholder that separates a message from the template, where a special token could
# form across the boundary.
_SEPARATOR = 0
# Special tokens that are variables of chat templates.
TEMPLATE_TOKENS = ("bos", "eos", "unk", "pad")


def template_variables(tokenizer: Tokenizer | None) -> dict[str, str]:
    """The texts of special tokens that a chat template may use; "" for those that are missing."""
    variables = {HF_KEYS[name]: "" for name in TEMPLATE_TOKENS}
    if tokenizer is not None:
        for name in TEMPLATE_TOKENS:
            id = tokenizer.special_id(name)
            variables[HF_KEYS[name]] = "" if id is None else tokenizer.piece(id)
    return variables


def dialogue_ids(
    tokenizer: Tokenizer, template: str, messages: Sequence[Message]
) -> tuple[list[int], list[bool]]:
    """The ids of a dialogue, and which of them belong to responses.

    Where a token would span a prompt and its response, they are encoded separately: a model
    continues the ids of a prompt, not its text.
    """
    ids = _prefix_ids(tokenizer, template)
    scored, prefix_length, text = [False] * len(ids), len(ids), ""
    placeholders = _Placeholders(tokenizer, messages)
    for part, is_response in split_responses(
        template, placeholders.messages, template_variables(tokenizer)
    ):
        text += part
        new_ids = [*ids[:prefix_length], *placeholders.encode(text)]
        if new_ids[: len(ids)] != ids:
            new_ids = [*ids, *placeholders.encode(part)]
        scored += [is_response] * (len(new_ids) - len(ids))
        ids = new_ids
    return ids, scored


def chat_prompt_ids(tokenizer: Tokenizer, template: str, messages: Sequence[Message]) -> list[int]:
    """The ids of a dialogue up to where the next response begins."""
    placeholders, variables = _Placeholders(tokenizer, messages), template_variables(tokenizer)
    text = render(template, placeholders.messages, add_generation_prompt=True, variables=variables)
    return [*_prefix_ids(tokenizer, template), *placeholders.encode(text)]


def response_end(tokenizer: Tokenizer, template: str) -> tuple[set[int], str]:
    """The ids that end a response, and the text that the chat template puts at its end.

    The text ends a response too, since it may be several tokens.
    """
    end = turn_end(template, template_variables(tokenizer))
    first = tokenizer.encode_special(end)[:1]
    is_one_token = first and tokenizer.piece(first[0]).strip() == end.strip()
    return {*tokenizer.stop_ids, *(first if is_one_token else [])}, end.strip()


def unknown_template_parts(tokenizer: Tokenizer, template: str) -> list[str]:
    """The distinct parts of the template's own text that are not in the vocabulary."""
    messages = [("user", _DELIMITER), (ASSISTANT, _DELIMITER)]
    text = "".join(
        part for part, _ in split_responses(template, messages, template_variables(tokenizer))
    )
    special_tokens = _pattern(tokenizer.special_texts)
    template_texts = text.split(_DELIMITER)
    plain_texts = [plain for part in template_texts for plain in special_tokens.split(part)]
    return list(
        dict.fromkeys(part for plain in plain_texts for part in tokenizer.unknown_parts(plain))
    )


def special_stop_ids(tokenizer: Tokenizer, end: str) -> set[int]:
    """The id of a stop string that is a special token, which decoding skips; else empty."""
    return {id for id in tokenizer.special_ids if tokenizer.piece(id) == end}


def _prefix_ids(tokenizer: Tokenizer, template: str) -> list[int]:
    """The ids before a dialogue; a Jinja template writes the BOS token itself."""
    return list(tokenizer.prefix_ids) if template == CHATML else []


class _Placeholders:
    """Messages with placeholders for special tokens, and the ids of a text rendered from them.

    A placeholder is a delimiter, a key, an index and a delimiter. The key is new for every
    dialogue, so that no message can contain one; key and index are digits, so that no template
    changes their case.
    """

    def __init__(self, tokenizer: Tokenizer, messages: Sequence[Message]) -> None:
        self.tokenizer, self.tokens = tokenizer, tokenizer.special_texts
        self.key = f"{secrets.randbelow(10**18):018}"
        self.separator = self._placeholder(_SEPARATOR)
        self.delimiter_in_messages = any(_DELIMITER in content for _, content in messages)
        self.messages = self._replace(messages)

    def encode(self, text: str) -> list[int]:
        """The ids of a rendered text; its placeholders become the ids of plain text."""
        joined = text.replace(self.separator, "")
        if _count(self.tokens, joined) == _count(self.tokens, text):
            text = joined  # no special token consists of parts of messages
        if self.key not in text:
            parts = [text]
        else:
            parts = re.split(f"{_DELIMITER}{self.key}([0-9]{{6}}){_DELIMITER}", text)
        ids: list[int] = []
        for index, part in enumerate(parts):
            if index % 2 == 0:
                if self.key in part or (_DELIMITER in part and not self.delimiter_in_messages):
                    raise ConfigError(
                        "the chat template changes messages with special tokens (it cuts or "
                        "escapes them), so they cannot be kept as text; "
                        "set task.chat_template=chatml"
                    )
                ids += self.tokenizer.encode_special(part)
            elif int(part) != _SEPARATOR:
                ids += self.tokenizer.encode(self.tokens[int(part) - 1])
        return ids

    def _placeholder(self, index: int) -> str:
        return f"{_DELIMITER}{self.key}{index:06}{_DELIMITER}"

    def _replace(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with placeholders, and separators where a special token could form."""
        indices = {token: index for index, token in enumerate(self.tokens, 1)}
        pattern = _pattern(self.tokens)
        longest = max(map(len, indices), default=0)
        prefixes = {token[:size] for token in indices for size in range(1, len(token))}
        suffixes = {token[size:] for token in indices for size in range(1, len(token))}

        def replace(content: str) -> str:
            replaced = pattern.sub(lambda match: self._placeholder(indices[match[0]]), content)
            text = replaced.strip()
            in_token = any(text in token for token in indices)
            may_end_token = in_token or any(text[:size] in suffixes for size in range(1, longest))
            may_begin_token = in_token or any(
                text[-size:] in prefixes for size in range(1, longest)
            )
            separated = self.separator * may_end_token + text + self.separator * may_begin_token
            return replaced.replace(text, separated) if text else replaced

        if not indices:
            return list(messages)
        return [(role, replace(content)) for role, content in messages]


def _pattern(tokens: Sequence[str]) -> re.Pattern[str]:
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _count(tokens: Sequence[str], text: str) -> int:
    return len(_pattern(tokens).findall(text))
