"""e2k's network: from the letters of an English word to katakana, with attention.

    memory  = tanh(W [ahead; back])               a GRU in both directions
    a_t     = GRU(embed(y_{t-1}), a_{t-1})
    c_t     = attention of 4 heads, from a_t to memory
    s_t     = GRU([a_t; c_t], s_{t-1}),           logits = W s_t

A safetensors file without a config.json; its metadata lists both vocabularies, by which it is
known. How many heads it has nothing says. By Patchethium.
"""

from pathlib import Path

from regard.errors import CheckpointError
from regard.files.safetensors import Tensors, find_single_file, read_header, read_metadata
from regard.files.untrusted import quote
from regard.hub.family import CheckpointWithoutConfig, Family
from regard.hub.weight_mapping import Rule, renamed
from regard.models.seq2seq import Seq2SeqConfig
from regard.text import PairTokenizers, Tokenizer
from regard.text.token_list import from_token_list

KEYS = {"in_table", "out_table", "sos_idx", "eos_idx"}
HEADS = 4
CELLS = {
    "encoder.{}_l0": "encoder.0.ahead.",
    "encoder.{}_l0_reverse": "encoder.0.back.",
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
E2K = Family(
    name="e2k",
    heads={},
    fields={},
    rules=lambda config: [
        *renamed({"e_emb": "source_embed", "k_emb": "embed", "encoder_fc.0": "join", "fc": "head"}),
        *renamed({"attn.out_proj": "attention.0.out"}),
        Rule("attn.in_proj_{p}", tuple(f"attention.0.{name}.{{p}}" for name in QKV)),
        *(
            Rule(cell.format(theirs), ours + name)
            for cell, ours in CELLS.items()
            for theirs, name in GRU.items()
        ),
    ],
    model="seq2seq",
)


def find(path: Path) -> Path | None:
    """The file with such metadata that `path` is, or that lies in it."""
    return find_single_file(path, "*.safetensors", _listing)


def _listing(path: Path) -> bool:
    try:
        return read_metadata(path).keys() >= KEYS
    except CheckpointError:  # whatever it is, it is no such file
        return False


def open_file(path: Path) -> CheckpointWithoutConfig:
    """What it holds."""
    facts, tensors = read_metadata(path), Tensors(read_header(path))
    sides = [facts[key].split("\0") for key in ("in_table", "out_table")]
    hidden = tensors.entries.get("pre_decoder.weight_hh_l0")
    if hidden is None:
        raise CheckpointError(f"{path} has the vocabularies of e2k, and not its tensors")
    config = Seq2SeqConfig(
        vocab_size=len(sides[1]),
        source_vocab_size=len(sides[0]),
        cell={"kind": "gru", "reset": "after"},
        dim=hidden.shape[-1],
        layers=2,
        encoder_layers=1,
        bridge=False,
        score="scaled_dot",
        placement="between",
        heads=HEADS,
        tied=False,
    )
    around = "start A stop", "A"
    source, target = (_tokenizer(path, *side, facts) for side in zip(sides, around, strict=True))
    return CheckpointWithoutConfig(E2K, config, tensors, PairTokenizers(source, target))


def _tokenizer(path: Path, tokens: list[str], around: str, facts: dict[str, str]) -> Tokenizer:
    """The letters of one side, and what stands around a text of it."""
    try:
        start, stop = (tokens[int(facts[key])] for key in ("sos_idx", "eos_idx"))
        return from_token_list(tokens, {"pad": tokens[0], "start": start, "stop": stop}, around)
    except (ValueError, IndexError, CheckpointError) as error:
        listing = quote(", ".join(tokens))
        raise CheckpointError(f"{path} lists a vocabulary {listing}: {error}") from None
