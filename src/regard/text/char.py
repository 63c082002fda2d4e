"""Character-level tokenizer."""

from collections.abc import Iterable

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from regard.text.special_tokens import SPECIAL_TOKENS
from regard.text.tokenizer import CHARACTER, Tokenizer, added_special_tokens, characters


def train(texts: Iterable[str], *, lower: bool = False) -> Tokenizer:
    """Train a tokenizer with one token for each character of the texts, in code point order.

    Decoding restores texts of these characters exactly; other characters become `<unk>`.

    >>> tokenizer = train(["to be"])
    >>> tokenizer.encode("be to")
    [8, 9, 7, 11, 10]
    >>> tokenizer.decode(tokenizer.encode("be to"))
    'be to'
    """
    tokens = [*SPECIAL_TOKENS, *sorted(characters(texts, lower=lower))]
    vocab = {token: id for id, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    if lower:
        backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(CHARACTER), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(added_special_tokens())
    return Tokenizer(backend)
