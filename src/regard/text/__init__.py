"""Tokenizers: five kinds that are trained here, and those of pretrained models."""

from regard.text.pair_tokenizers import PairTokenizers, train_pair
from regard.text.special_tokens import SPECIAL_TOKENS, SpecialTokens
from regard.text.tokenizer import Tokenizer
from regard.text.trainers import TOKENIZERS, load_tokenizer, train_tokenizer

__all__ = [
    "SPECIAL_TOKENS",
    "TOKENIZERS",
    "PairTokenizers",
    "SpecialTokens",
    "Tokenizer",
    "load_tokenizer",
    "train_pair",
    "train_tokenizer",
]
