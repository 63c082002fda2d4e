"""Models from before the Transformer."""

from regard.models.ngram import NGramConfig
from regard.models.recurrent import LSTMConfig


def ngram() -> NGramConfig:
    """Shannon's chain with a memory of three tokens, interpolated (Witten & Bell 1991)."""
    return NGramConfig(vocab_size=256, order=4)


def lstm() -> LSTMConfig:
    """A two-layer LSTM language model (Hochreiter & Schmidhuber 1997; Gers et al. 2000)."""
    return LSTMConfig(vocab_size=256, dim=256, layers=2)
