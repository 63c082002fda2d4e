"""Recurrent models that translate, from before the Transformer."""

from collections.abc import Callable

from regard.models.seq2seq import Seq2SeqConfig


def sutskever() -> Seq2SeqConfig:
    """Four layers that read the source from its end, and four that write (Sutskever et al. 2014).

    The paper's vocabularies are words, 160,000 of the source and 80,000 of the target.
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
    """GRUs that read both ways and look by the additive score (RNNsearch, Bahdanau et al. 2015).

    The paper's layers are 1000 wide and its embeddings 620; here both have one width.
    """
    return Seq2SeqConfig(
        vocab_size=30_000,
        source_vocab_size=30_000,
        cell={"kind": "gru", "reset": "after"},
        dim=1000,
        score="additive",
        placement="bahdanau",
        tied=False,
    )


def luong() -> Seq2SeqConfig:
    """LSTMs that look by the general score and feed what they found (Luong et al. 2015).

    The paper's best single model also narrows the look to a window around a predicted place.
    """
    return Seq2SeqConfig(
        vocab_size=50_000,
        source_vocab_size=50_000,
        dim=1000,
        layers=4,
        bidirectional=False,
        reversed_source=True,
        score="general",
        placement="luong",
        input_feeding=True,
        dropout=0.2,
        tied=False,
    )


SEQ2SEQ: dict[str, Callable[[], Seq2SeqConfig]] = {
    "sutskever": sutskever,
    "bahdanau": bahdanau,
    "luong": luong,
}
