"""Tokenizers from a plain list of tokens: characters, or words separated by spaces."""

import re
from collections.abc import Mapping, Sequence

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from regard.errors import CheckpointError
from regard.files.untrusted import quote
from regard.text.pretrained import with_post_processor
from regard.text.special_tokens import SpecialTokens
from regard.text.tokenizer import CHARACTER, Tokenizer


def from_token_list(
    tokens: Sequence[str], special_tokens: Mapping[str, str], template: str = "A"
) -> Tokenizer:
    """A tokenizer whose ids are the positions in `tokens`; `special_tokens` are some of them.

    It splits into characters if every token but the special ones is one character, else at spaces.
    Without an "unk" token, unknown characters or words are dropped. Text is lowercased if the
    vocabulary has no upper-case letters. `template` places special tokens around each text:
    "bos A eos".

    >>> tokenizer = from_token_list(["<s>", "</s>", "a", "b"], {"bos": "<s>", "eos": "</s>"})
    >>> tokenizer.encode("Ab, ba"), tokenizer.decode([0, 3, 2, 1])
    ([2, 3, 3, 2], 'ba')
    """
    ordinary = [token for token in tokens if token not in special_tokens.values()]
    if missing := {*special_tokens.values()} - {*tokens}:
        raise CheckpointError(f"the vocabulary lacks its special token {quote(min(missing))}")
    if len(set(tokens)) < len(tokens) or not ordinary:
        raise CheckpointError(
            f"the vocabulary has {len(tokens):,} tokens, {len(set(tokens)):,} of them distinct and "
            f"{len(ordinary):,} not special; all must be distinct, and one or more not special"
        )
    single_characters, unk = all(len(token) == 1 for token in ordinary), special_tokens.get("unk")
    vocab = {token: id for id, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=unk or "none"))
    steps: list[normalizers.Normalizer] = []
    if all(token == token.lower() for token in ordinary):
        steps.append(normalizers.Lowercase())
    if unk is None:
        steps.append(normalizers.Replace(Regex(_unknown(ordinary, single_characters)), ""))
    if steps:
        backend.normalizer = normalizers.Sequence(steps) if len(steps) > 1 else steps[0]
    if single_characters:
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(CHARACTER), "isolated")
        backend.decoder = decoders.Fuse()
    else:
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    added = [AddedToken(token, special=True, normalized=False) for token in special_tokens.values()]
    backend.add_special_tokens(added)
    tokenizer = Tokenizer(backend, SpecialTokens(tokens=dict(special_tokens)))
    return with_post_processor(tokenizer, template, f"{template} B")


def _unknown(tokens: Sequence[str], single_characters: bool) -> str:
    """A pattern for the characters, or the words between spaces, that are not among `tokens`."""
    known = list(map(re.escape, tokens))
    if single_characters:
        return f"[^{''.join(known)}]"
    return rf"(?<!\S)(?!(?:{'|'.join(known)})(?!\S))\S+"
