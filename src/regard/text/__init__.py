"""Text and ids: five kinds of tokenizers, trained here, each kept in one `tokenizer.json`."""

from regard.text.base import Tokenizer
from regard.text.pairs import PairTokenizers, train_pair
from regard.text.special_tokens import SPECIALS, Roles
from regard.text.training import TOKENIZERS, load_tokenizer, train_tokenizer

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
