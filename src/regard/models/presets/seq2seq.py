"""Recurrent encoder-decoders for translation."""

from collections.abc import Callable

from regard.models.seq2seq import Seq2SeqConfig


def sutskever() -> Seq2SeqConfig:
    """Four encoder and four decoder layers, the source reversed (Sutskever et al. 2014).

    The vocabularies are words, 160,000 of the source and 80,000 of the target.
    """
    return Seq2SeqConfig(
        vocab_size=80_000,
        source_vocab_size=160_000,
        dim=1000,
        layers=4,
        bidirectional=False,
        reversed_source=True,
        tied=False,
    )


def bahdanau() -> Seq2SeqConfig:
    """RNNsearch: a bidirectional GRU encoder and additive attention (Bahdanau et al. 2015).

    The paper's layers are 1000 wide and its embeddings 620; here both have one width.
    """
    return Seq2SeqConfig(
        vocab_size=30_000,
        source_vocab_size=30_000,
        cell={"kind": "gru", "reset": "after"},
        dim=1000,
        score="additive",
        attention_placement="bahdanau",
        tied=False,
    )


def luong() -> Seq2SeqConfig:
    """LSTMs with the general score and input feeding (Luong et al. 2015).

    The paper's best single model has local attention, within a predicted window; this is global.
    """
    return Seq2SeqConfig(
        vocab_size=50_000,
        source_vocab_size=50_000,
        dim=1000,
        layers=4,
        bidirectional=False,
        reversed_source=True,
        score="general",
        attention_placement="luong",
        input_feeding=True,
        dropout=0.2,
        tied=False,
    )


SEQ2SEQ: dict[str, Callable[[], Seq2SeqConfig]] = {
    "sutskever": sutskever,
    "bahdanau": bahdanau,
    "luong": luong,
}
