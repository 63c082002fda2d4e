"""Models from before the Transformer."""

from regard.models.hmm import HMMConfig
from regard.models.ngram import NGramConfig


def ngram() -> NGramConfig:
    """Shannon's chain with a memory of three tokens, interpolated (Witten & Bell 1991)."""
    return NGramConfig(vocab_size=256, order=4)


def hmm() -> HMMConfig:
    """A hidden Markov model of 32 states (Baum et al. 1970)."""
    return HMMConfig(vocab_size=256, states=32)
