"""Vocabularies that others simply list: letters, or words between spaces."""

import re
from collections.abc import Mapping, Sequence

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from regard.errors import CheckpointError
from regard.text.pretrained import framed
from regard.text.special_tokens import SpecialTokens
from regard.text.tokenizer import CHARACTER, Tokenizer


def listed(tokens: Sequence[str], roles: Mapping[str, str], around: str = "A") -> Tokenizer:
    """A tokenizer of these tokens in this order; `roles` says which of them are special.

    Letters where every other token is one character, else words with spaces between them. Where
    no token stands for unknown letters, they are left out; large ones become small where the
    vocabulary has no large ones. `around` is what stands around every text, as "start A stop".

    >>> tokenizer = listed(["<s>", "</s>", "a", "b"], {"start": "<s>", "stop": "</s>"})
    >>> tokenizer.encode("Ab, ba"), tokenizer.decode([0, 3, 2, 1])
    ([2, 3, 3, 2], 'ba')
    """
    ordinary = [token for token in tokens if token not in roles.values()]
    if len(set(tokens)) < len(tokens) or not ordinary or not {*roles.values()} <= {*tokens}:
        raise CheckpointError("the vocabulary is no list of different tokens, or lacks its ends")
    letters, unk = all(len(token) == 1 for token in ordinary), roles.get("unk")
    if not letters and unk is None:
        raise CheckpointError("a vocabulary of words needs one for those that it does not know")
    vocab = {token: id for id, token in enumerate(tokens)}
    library = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=unk or "none"))
    steps: list[normalizers.Normalizer] = []
    if all(token == token.lower() for token in ordinary):
        steps.append(normalizers.Lowercase())
    if unk is None:
        known = "".join(map(re.escape, ordinary))
        steps.append(normalizers.Replace(Regex(f"[^{known}]"), ""))
    if steps:
        library.normalizer = normalizers.Sequence(steps) if len(steps) > 1 else steps[0]
    if letters:
        library.pre_tokenizer = pre_tokenizers.Split(Regex(CHARACTER), "isolated")
        library.decoder = decoders.Fuse()
    else:
        library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = [AddedToken(token, special=True, normalized=False) for token in roles.values()]
    library.add_special_tokens(special)
    return framed(Tokenizer(library, SpecialTokens(tokens=dict(roles))), around, f"{around} B")
