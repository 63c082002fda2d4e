"""g2p_en's network: from the letters of an English word to its sounds, without attention.

One GRU reads the letters and hands its last state to another, which writes the phonemes of the
CMU dictionary. An archive of arrays with names but no settings; it is known by these names.
Park & Kim 2019.
"""

from pathlib import Path
from string import ascii_lowercase

from regard.files.safetensors import find_single_file
from regard.hub.family import CheckpointWithoutConfig, Family
from regard.hub.numpy_archive import names_in, open_archive
from regard.hub.weight_mapping import Rule
from regard.models.seq2seq import Seq2SeqConfig
from regard.text import PairTokenizers
from regard.text.token_list import from_token_list

NAMES = {
    "enc_emb": "source_embed.weight",
    "enc_w_ih": "encoder.0.input.weight",
    "enc_w_hh": "encoder.0.hidden.weight",
    "enc_b_ih": "encoder.0.input.bias",
    "enc_b_hh": "encoder.0.hidden.bias",
    "dec_emb": "embed.weight",
    "dec_w_ih": "decoder.0.input.weight",
    "dec_w_hh": "decoder.0.hidden.weight",
    "dec_b_ih": "decoder.0.input.bias",
    "dec_b_hh": "decoder.0.hidden.bias",
    "fc_w": "head.weight",
    "fc_b": "head.bias",
}
G2P = Family(
    name="g2p_en",
    heads={},
    fields={},
    rules=lambda config: [Rule(theirs, ours) for theirs, ours in NAMES.items()],
    model="seq2seq",
)
VOWELS = "AA AE AH AO AW AY EH ER EY IH IY OW OY UH UW"  # each with a stress of 0, 1 or 2
CONSONANTS = "B CH D DH F G HH JH K L M N NG P R S SH T TH V W Y Z ZH"
SOUNDS = [vowel + stress for vowel in VOWELS.split() for stress in "012"]


def find(path: Path) -> Path | None:
    """The archive of these arrays that `path` is, or that lies in it."""
    return find_single_file(path, "*.npz", lambda each: names_in(each) == {*NAMES})


def open_file(path: Path) -> CheckpointWithoutConfig:
    """What it holds; sizes and vocabularies are those of the package."""
    # Their list is in order, and has one vowel once more without a stress.
    sounds = sorted([*SOUNDS, *CONSONANTS.split(), "UW"])
    letters = {"pad": "<pad>", "unk": "<unk>", "stop": "</s>"}
    source = from_token_list([*letters.values(), *ascii_lowercase], letters)
    roles = {"pad": "<pad>", "unk": "<unk>", "start": "<s>", "stop": "</s>"}
    target = from_token_list([*roles.values(), *sounds], roles)
    tensors = open_archive(path)
    config = Seq2SeqConfig(
        vocab_size=target.size,
        source_vocab_size=source.size,
        cell={"kind": "gru", "reset": "after"},
        dim=tensors.entries["enc_w_hh"].shape[-1],
        bidirectional=False,
        tied=False,
    )
    return CheckpointWithoutConfig(G2P, config, tensors, PairTokenizers(source, target))
