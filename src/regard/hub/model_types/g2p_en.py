"""g2p_en (Park & Kim 2019): a GRU encoder-decoder from letters of a word to its phonemes.

It has no attention: the last state of the encoder is the initial state of the decoder, which
outputs phonemes of the CMU dictionary. The file is a NumPy archive without settings, recognized by
the names of its arrays.
"""

from pathlib import Path
from string import ascii_lowercase

from regard.files.safetensors import find_single_file
from regard.hub.model_type import CheckpointWithoutConfig, ModelType
from regard.hub.numpy_archive import array_names, open_archive
from regard.hub.weight_mapping import Rule
from regard.models.seq2seq import Seq2SeqConfig
from regard.text import PairTokenizers
from regard.text.token_list import from_token_list

ARRAYS = {
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
G2P = ModelType(
    name="g2p_en",
    heads={},
    fields={},
    rules=lambda config: [Rule(array, name) for array, name in ARRAYS.items()],
    family="seq2seq",
)
VOWELS = "AA AE AH AO AW AY EH ER EY IH IY OW OY UH UW"  # each with a stress of 0, 1 or 2
CONSONANTS = "B CH D DH F G HH JH K L M N NG P R S SH T TH V W Y Z ZH"
STRESSED_VOWELS = [vowel + stress for vowel in VOWELS.split() for stress in "012"]


def find_file(path: Path) -> Path | None:
    """The g2p_en archive at `path` or in the folder `path`; None if there is none."""
    return find_single_file(path, "*.npz", lambda file: array_names(file) == {*ARRAYS})


def open_file(path: Path) -> CheckpointWithoutConfig:
    """Open the tensors; the vocabularies are those of the g2p_en package."""
    # The package sorts its list and has one vowel a second time, without stress.
    phonemes = sorted([*STRESSED_VOWELS, *CONSONANTS.split(), "UW"])
    source_roles = {"pad": "<pad>", "unk": "<unk>", "eos": "</s>"}
    source = from_token_list([*source_roles.values(), *ascii_lowercase], source_roles)
    target_roles = {"pad": "<pad>", "unk": "<unk>", "bos": "<s>", "eos": "</s>"}
    target = from_token_list([*target_roles.values(), *phonemes], target_roles)
    tensors = open_archive(path)
    config = Seq2SeqConfig(
        vocab_size=target.vocab_size,
        source_vocab_size=source.vocab_size,
        cell={"kind": "gru", "reset": "after"},
        dim=tensors.entries["enc_w_hh"].shape[-1],
        bidirectional=False,
        tied=False,
    )
    return CheckpointWithoutConfig(G2P, config, tensors, PairTokenizers(source, target))
