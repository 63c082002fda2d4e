"""Dialogues as ids. Special tokens of the chat template become their ids, those in messages do not.

A message that contains "<|im_end|>" must not end its turn (prompt injection). Special tokens in
messages are therefore replaced by marks before the template is rendered, and are encoded as plain
text afterwards. All other text is encoded as a whole, as transformers' `apply_chat_template` does.
"""

import re
import secrets
from collections.abc import Sequence

from regard.text.chat_template import CHATML, Message, render, segments, turn_end
from regard.text.tokenizer import Tokenizer

# Unguessable, so that a message cannot contain a mark; digits, so that a template cannot change
# their case.
_KEY = f"\ufdd0{secrets.randbelow(10**18):018}"
_MARK = re.compile(f"{_KEY}([0-9]+){_KEY}")  # in place of the special token with this number
_GUARD = f"{_KEY}{_KEY}"  # before or after a part of a special token at the edge of a message
ROLES = {"bos_token": "start", "eos_token": "stop", "unk_token": "unk", "pad_token": "pad"}


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
    marked = _mark(tokenizer, messages)
    for part, is_answer in segments(template, marked, special_texts(tokenizer)):
        text += part
        whole = [*ids[:prefix], *_encode(tokenizer, text)]
        if whole[: len(ids)] != ids:
            whole = [*ids, *_encode(tokenizer, part)]
        scored += [is_answer] * (len(whole) - len(ids))
        ids = whole
    return ids, scored


def chat_prompt_ids(tokenizer: Tokenizer, template: str, messages: Sequence[Message]) -> list[int]:
    """The ids of a dialogue up to where the next answer begins."""
    marked, texts = _mark(tokenizer, messages), special_texts(tokenizer)
    text = render(template, marked, prompt=True, tokens=texts)
    return [*_prefix(tokenizer, template), *_encode(tokenizer, text)]


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
    """The ids before a dialogue; a Jinja template writes the start token itself."""
    return list(tokenizer.prefix_ids) if template == CHATML else []


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a rendered text, whose marks stand for special tokens that are plain text."""
    tokens = tokenizer.special_texts
    joined = text.replace(_GUARD, "")
    if _count(tokens, joined) == _count(tokens, text):
        text = joined  # no special token consists of parts of messages
    ids: list[int] = []
    for piece in text.split(_GUARD):
        for number, part in enumerate(_MARK.split(piece)):
            if number % 2:
                ids += tokenizer.encode(tokens[int(part)])
            else:
                ids += tokenizer.encode_special(part)
    return ids


def _mark(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[Message]:
    """The messages with marks in place of special tokens, and guards beside parts of them."""
    numbers = {token: number for number, token in enumerate(tokenizer.special_texts)}
    pattern = _pattern(tokenizer.special_texts)
    longest = max(map(len, numbers), default=0)
    heads = {token[:size] for token in numbers for size in range(1, len(token))}
    tails = {token[size:] for token in numbers for size in range(1, len(token))}

    def mark(content: str) -> str:
        marked = pattern.sub(lambda match: f"{_KEY}{numbers[match[0]]}{_KEY}", content)
        core = marked.strip()
        within = any(core in token for token in numbers)
        before = within or any(core[:size] in tails for size in range(1, longest))
        after = within or any(core[-size:] in heads for size in range(1, longest))
        guarded = _GUARD * before + core + _GUARD * after
        return marked.replace(core, guarded) if core else marked

    return [(role, mark(content)) for role, content in messages] if numbers else list(messages)


def _pattern(tokens: Sequence[str]) -> re.Pattern[str]:
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _count(tokens: Sequence[str], text: str) -> int:
    return len(_pattern(tokens).findall(text))
