"""Text and ids: five kinds of tokenizers, trained here, each kept in one `tokenizer.json`."""

from regard.text.base import Tokenizer
from regard.text.kinds import TOKENIZERS, load_tokenizer, train_tokenizer
from regard.text.pairs import PairTokenizers, train_pair
from regard.text.roles import SPECIALS, Roles

__all__ = [
    "SPECIALS",
    "TOKENIZERS",
    "PairTokenizers",
    "Roles",
    "Tokenizer",
    "load_tokenizer",
    "train_pair",
    "train_tokenizer",
]
