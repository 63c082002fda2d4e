"""Models from before the Transformer."""

from regard.models.bag import BagConfig
from regard.models.cbow import CBOWConfig
from regard.models.hmm import HMMConfig
from regard.models.ngram import NGramConfig


def bag() -> BagConfig:
    """A linear classifier of two classes, on the counts of words."""
    return BagConfig(vocab_size=20_000, head={"kind": "classify", "classes": 2})


def cbow() -> CBOWConfig:
    """Word vectors by negative sampling (word2vec, Mikolov et al. 2013)."""
    return CBOWConfig(vocab_size=20_000)


def ngram() -> NGramConfig:
    """Shannon's chain with a memory of three tokens, interpolated (Witten & Bell 1991)."""
    return NGramConfig(vocab_size=256, order=4)


def hmm() -> HMMConfig:
    """A hidden Markov model of 32 states (Baum et al. 1970)."""
    return HMMConfig(vocab_size=256, states=32)
