"""Feed-forward, convolutional and recurrent language models; recurrent ones differ in the cell."""

from collections.abc import Callable

from regard.models.convolution import ConvolutionConfig
from regard.models.feedforward import FeedForwardConfig
from regard.models.recurrent import RecurrentConfig


def bengio() -> FeedForwardConfig:
    """The feed-forward neural language model over the last eight ids (Bengio et al. 2003)."""
    return FeedForwardConfig(vocab_size=256)


def convolution() -> ConvolutionConfig:
    """Eight gated convolutions, receptive field 256 (WaveNet, van den Oord et al. 2016)."""
    return ConvolutionConfig(vocab_size=256)


def elman() -> RecurrentConfig:
    """A two-layer Elman network (Elman 1990; as a language model Mikolov et al. 2010)."""
    return RecurrentConfig(vocab_size=256, cell="elman")


def update_gate() -> RecurrentConfig:
    """A two-layer RNN with an update gate, the step between Elman's network and the GRU."""
    return RecurrentConfig(vocab_size=256, cell="update_gate")


def gru() -> RecurrentConfig:
    """A two-layer GRU language model (Cho et al. 2014).

    With model.cell.reset=after torch's fused kernel computes it, which is faster.
    """
    return RecurrentConfig(vocab_size=256, cell="gru")


def lstm() -> RecurrentConfig:
    """A two-layer LSTM language model (Hochreiter & Schmidhuber 1997; Gers et al. 2000)."""
    return RecurrentConfig(vocab_size=256, cell="lstm")


RECURRENT: dict[str, Callable[[], RecurrentConfig | FeedForwardConfig | ConvolutionConfig]] = {
    "bengio": bengio,
    "convolution": convolution,
    "elman": elman,
    "update-gate": update_gate,
    "gru": gru,
    "lstm": lstm,
}
