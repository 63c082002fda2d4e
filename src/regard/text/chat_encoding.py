"""Dialogues as ids. Special tokens of the chat template become their ids, those in messages do not.

A message that contains "<|im_end|>" must not end its turn (prompt injection). Special tokens in
messages are therefore replaced by marks before the template is rendered, and are encoded as plain
text afterwards. All other text is encoded as a whole, as transformers' `apply_chat_template` does.

In answers of training data too, special tokens stay text, and a template that looks for one in a
message (to cut off the thoughts of an answer, say) does not find it. A template that changes marks
is refused.
"""

import re
import secrets
from collections.abc import Sequence

from regard.errors import ConfigError
from regard.text.chat_template import CHATML, Message, render, segments, turn_end
from regard.text.tokenizer import Tokenizer

_EDGE = "\ufdd0"  # of a mark; not a character of any text
_GUARD = 0  # the number of a mark beside a part of a special token at the edge of a message
ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unk", "pad_token": "pad"}


def special_texts(tokenizer: Tokenizer | None) -> dict[str, str]:
    """The texts of the special tokens that chat templates name; empty without a tokenizer."""
    if tokenizer is None:
        return dict.fromkeys(ROLES, "")
    ids = {key: tokenizer.special_id(name) for key, name in ROLES.items()}
    return {key: "" if id is None else tokenizer.piece(id) for key, id in ids.items()}


def dialogue_ids(
    tokenizer: Tokenizer, template: str, messages: Sequence[Message]
) -> tuple[list[int], list[bool]]:
    """The ids of a dialogue, and which of them belong to answers.

    Where a token would span a prompt and its answer, they are encoded separately: a model
    continues the ids of a prompt, not its text.
    """
    ids = _prefix(tokenizer, template)
    scored, prefix, text = [False] * len(ids), len(ids), ""
    marks = _Marks(tokenizer, messages)
    for part, is_answer in segments(template, marks.messages, special_texts(tokenizer)):
        text += part
        whole = [*ids[:prefix], *marks.encode(text)]
        if whole[: len(ids)] != ids:
            whole = [*ids, *marks.encode(part)]
        scored += [is_answer] * (len(whole) - len(ids))
        ids = whole
    return ids, scored


def chat_prompt_ids(tokenizer: Tokenizer, template: str, messages: Sequence[Message]) -> list[int]:
    """The ids of a dialogue up to where the next answer begins."""
    marks, texts = _Marks(tokenizer, messages), special_texts(tokenizer)
    text = render(template, marks.messages, prompt=True, tokens=texts)
    return [*_prefix(tokenizer, template), *marks.encode(text)]


def answer_end(tokenizer: Tokenizer, template: str) -> tuple[set[int], str]:
    """The ids that end an answer, and the text that does where it is several tokens."""
    end = turn_end(template, special_texts(tokenizer))
    first = tokenizer.encode_special(end)[:1]
    is_whole = first and tokenizer.piece(first[0]).strip() == end.strip()
    return {*tokenizer.stop_ids, *(first if is_whole else [])}, end.strip()


def special_end(tokenizer: Tokenizer, end: str) -> set[int]:
    """The id of the text at the end of a turn, if it is a special token, which is not decoded."""
    return {id for id in tokenizer.special_ids if tokenizer.piece(id) == end}


def _prefix(tokenizer: Tokenizer, template: str) -> list[int]:
    """The ids before a dialogue; a Jinja template writes the BOS token itself."""
    return list(tokenizer.prefix_ids) if template == CHATML else []


class _Marks:
    """Messages with marks in place of special tokens, and the ids of a text rendered from them.

    A mark is an edge, a key, a number and an edge. The key is new for every dialogue, so that no
    message can contain a mark; all are digits, so that a template cannot change their case.
    """

    def __init__(self, tokenizer: Tokenizer, messages: Sequence[Message]) -> None:
        self.tokenizer, self.tokens = tokenizer, tokenizer.special_texts
        self.key = f"{secrets.randbelow(10**18):018}"
        self.guard = self._mark(_GUARD)
        self.knows_edges = not any(_EDGE in content for _, content in messages)
        self.messages = self._replace(messages)

    def encode(self, text: str) -> list[int]:
        """The ids of a rendered text, whose marks stand for special tokens that are plain text."""
        joined = text.replace(self.guard, "")
        if _count(self.tokens, joined) == _count(self.tokens, text):
            text = joined  # no special token consists of parts of messages
        if self.key not in text:
            parts = [text]
        else:
            parts = re.split(f"{_EDGE}{self.key}([0-9]{{6}}){_EDGE}", text)
        ids: list[int] = []
        for number, part in enumerate(parts):
            if number % 2 == 0:
                if self.key in part or (self.knows_edges and _EDGE in part):
                    raise ConfigError(
                        "the chat template changes messages with special tokens (it cuts or "
                        "escapes them), so they cannot be kept as text; set task.template=chatml"
                    )
                ids += self.tokenizer.encode_special(part)
            elif int(part) != _GUARD:
                ids += self.tokenizer.encode(self.tokens[int(part) - 1])
        return ids

    def _mark(self, number: int) -> str:
        return f"{_EDGE}{self.key}{number:06}{_EDGE}"

    def _replace(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with marks for special tokens, and guards beside parts of them."""
        numbers = {token: number for number, token in enumerate(self.tokens, 1)}
        pattern = _pattern(self.tokens)
        longest = max(map(len, numbers), default=0)
        heads = {token[:size] for token in numbers for size in range(1, len(token))}
        tails = {token[size:] for token in numbers for size in range(1, len(token))}

        def mark(content: str) -> str:
            marked = pattern.sub(lambda match: self._mark(numbers[match[0]]), content)
            core = marked.strip()
            within = any(core in token for token in numbers)
            before = within or any(core[:size] in tails for size in range(1, longest))
            after = within or any(core[-size:] in heads for size in range(1, longest))
            guarded = self.guard * before + core + self.guard * after
            return marked.replace(core, guarded) if core else marked

        return [(role, mark(content)) for role, content in messages] if numbers else list(messages)


def _pattern(tokens: Sequence[str]) -> re.Pattern[str]:
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _count(tokens: Sequence[str], text: str) -> int:
    return len(_pattern(tokens).findall(text))
