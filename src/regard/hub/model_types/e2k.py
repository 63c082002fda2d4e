"""e2k: a GRU with attention that converts the letters of an English word to katakana.

    memory  = tanh(W [forward; backward])         a bidirectional GRU
    a_t     = GRU(embed(y_{t-1}), a_{t-1})
    c_t     = attention with 4 heads, a_t attends to memory
    s_t     = GRU([a_t; c_t], s_{t-1}),           logits = W s_t

A safetensors file without a config.json. It is recognized by its metadata, which lists both
vocabularies. The number of heads is not stored in the file. By Patchethium.
"""

from pathlib import Path

from regard.errors import CheckpointError
from regard.files.safetensors import TensorReader, find_single_file, read_header, read_metadata
from regard.files.untrusted import quote
from regard.hub.model_type import CheckpointWithoutConfig, ModelType
from regard.hub.weight_mapping import Rule, module_rules
from regard.models.seq2seq import Seq2SeqConfig
from regard.text import PairTokenizers, Tokenizer
from regard.text.token_list import from_token_list

METADATA_KEYS = {"in_table", "out_table", "sos_idx", "eos_idx"}
ATTENTION_HEADS = 4
CELLS = {
    "encoder.{}_l0": "encoder.0.forward_layer.",
    "encoder.{}_l0_reverse": "encoder.0.backward_layer.",
    "pre_decoder.{}_l0": "decoder.0.",
    "post_decoder.{}_l0": "decoder.1.",
}
GRU = {
    "weight_ih": "input.weight",
    "weight_hh": "hidden.weight",
    "bias_ih": "input.bias",
    "bias_hh": "hidden.bias",
}
QKV = ("query", "key", "value")
E2K = ModelType(
    name="e2k",
    heads={},
    fields={},
    rules=lambda config: [
        *module_rules(
            {
                "e_emb": "source_embed",
                "k_emb": "embed",
                "encoder_fc.0": "direction_projection",
                "fc": "head",
            }
        ),
        *module_rules({"attn.out_proj": "attention.0.out"}),
        Rule("attn.in_proj_{p}", tuple(f"attention.0.{name}.{{p}}" for name in QKV)),
        *(
            Rule(cell.format(external), prefix + name)
            for cell, prefix in CELLS.items()
            for external, name in GRU.items()
        ),
    ],
    family="seq2seq",
)


def find_file(path: Path) -> Path | None:
    """The e2k file at `path` or in the folder `path`; None if there is none."""
    return find_single_file(path, "*.safetensors", _has_vocabularies)


def _has_vocabularies(path: Path) -> bool:
    try:
        return read_metadata(path).keys() >= METADATA_KEYS
    except CheckpointError:  # not a safetensors file
        return False


def open_file(path: Path) -> CheckpointWithoutConfig:
    """Read the configuration and the vocabularies, and open the tensors."""
    metadata, tensors = read_metadata(path), TensorReader(read_header(path))
    vocabularies = [metadata[key].split("\0") for key in ("in_table", "out_table")]
    hidden = tensors.entries.get("pre_decoder.weight_hh_l0")
    if hidden is None:
        raise CheckpointError(f"{path} has the vocabularies of e2k but not its tensors")
    config = Seq2SeqConfig(
        vocab_size=len(vocabularies[1]),
        source_vocab_size=len(vocabularies[0]),
        cell={"kind": "gru", "reset": "after"},
        dim=hidden.shape[-1],
        layers=2,
        encoder_layers=1,
        bridge=False,
        score="scaled_dot",
        attention_placement="between",
        heads=ATTENTION_HEADS,
        tied=False,
    )
    source = _tokenizer(path, vocabularies[0], "bos A eos", metadata)
    target = _tokenizer(path, vocabularies[1], "A", metadata)
    return CheckpointWithoutConfig(E2K, config, tensors, PairTokenizers(source, target))


def _tokenizer(path: Path, tokens: list[str], template: str, metadata: dict[str, str]) -> Tokenizer:
    """The tokenizer of one side; `template` says which special tokens surround a text."""
    try:
        bos, eos = (tokens[int(metadata[key])] for key in ("sos_idx", "eos_idx"))
        return from_token_list(tokens, {"pad": tokens[0], "bos": bos, "eos": eos}, template)
    except (ValueError, IndexError, CheckpointError) as error:
        listed_tokens = quote(", ".join(tokens))
        raise CheckpointError(f"{path}: invalid vocabulary {listed_tokens}: {error}") from None
