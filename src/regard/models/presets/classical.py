"""Classical models: bag of words, CBOW, n-gram, hidden Markov model."""

from regard.models.bag_of_words import BagOfWordsConfig
from regard.models.cbow import CBOWConfig
from regard.models.hmm import HMMConfig
from regard.models.ngram import NGramConfig


def bag() -> BagOfWordsConfig:
    """A linear classifier of word counts, with two classes."""
    return BagOfWordsConfig(vocab_size=20_000, head={"kind": "classification", "classes": 2})


def cbow() -> CBOWConfig:
    """Word vectors by negative sampling (word2vec, Mikolov et al. 2013)."""
    return CBOWConfig(vocab_size=20_000)


def ngram() -> NGramConfig:
    """A 4-gram model with interpolated Witten-Bell smoothing (Witten & Bell 1991)."""
    return NGramConfig(vocab_size=256, order=4)


def hmm() -> HMMConfig:
    """A hidden Markov model of 32 states (Baum et al. 1970)."""
    return HMMConfig(vocab_size=256, states=32)
