"""Characters: every character is a token, as in Shannon's chain."""

from collections.abc import Iterable

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from regard.text.special_tokens import SPECIAL_TOKENS
from regard.text.tokenizer import CHARACTER, Tokenizer, characters, special_tokens


def train(pieces: Iterable[str], *, lower: bool = False) -> Tokenizer:
    """One token for each character that occurs, in the order of Unicode.

    Text made of characters seen here comes back exactly; any other becomes `<unk>`.

    >>> tokenizer = train(["to be"])
    >>> tokenizer.encode("be to")
    [8, 9, 7, 11, 10]
    >>> tokenizer.decode(tokenizer.encode("be to"))
    'be to'
    """
    tokens = [*SPECIAL_TOKENS, *sorted(characters(pieces, lower=lower))]
    vocab = {token: id for id, token in enumerate(tokens)}
    library = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    if lower:
        library.normalizer = normalizers.Lowercase()
    library.pre_tokenizer = pre_tokenizers.Split(Regex(CHARACTER), "isolated")
    library.decoder = decoders.Fuse()
    library.add_special_tokens(special_tokens())
    return Tokenizer(library)
