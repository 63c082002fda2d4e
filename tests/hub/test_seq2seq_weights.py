"""Recurrent models that others trained: read without pickle, computed as torch computes them."""

import json
import os
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import regard
from regard.errors import CheckpointError
from regard.hub.external_checkpoint import is_external_checkpoint, open_checkpoint
from regard.hub.model_types import g2p_en
from regard.hub.numpy_archive import open_archive
from regard.nn.state import Source

DIM = 8
LETTERS = ["<pad>", "<sos>", "<eos>", *"abcdefghijklmnopqrstuvwxyz '"]
KANA = ["<pad>", "<sos>", "<eos>", *"アイウエオカキクケコッー"]
FACTS = {
    "in_table": "\0".join(LETTERS),
    "out_table": "\0".join(KANA),
    "sos_idx": "1",
    "eos_idx": "2",
}


class Katakana(nn.Module):
    """e2k's network as its makers' description has it, of modules of torch."""

    def __init__(self):
        super().__init__()
        self.e_emb = nn.Embedding(len(LETTERS), DIM)
        self.k_emb = nn.Embedding(len(KANA), DIM)
        self.encoder = nn.GRU(DIM, DIM, batch_first=True, bidirectional=True)
        self.encoder_fc = nn.Sequential(nn.Linear(2 * DIM, DIM), nn.Tanh())
        self.pre_decoder = nn.GRU(DIM, DIM, batch_first=True)
        self.post_decoder = nn.GRU(2 * DIM, DIM, batch_first=True)
        self.attn = nn.MultiheadAttention(DIM, 4, batch_first=True)
        self.fc = nn.Linear(DIM, len(KANA))

    def forward(self, source, target):
        memory = self.encoder_fc(self.encoder(self.e_emb(source))[0])
        a, _ = self.pre_decoder(self.k_emb(target))
        c, weights = self.attn(a, memory, memory, average_attn_weights=False)
        return self.fc(self.post_decoder(torch.cat([a, c], -1))[0]), weights


def write_e2k(folder, facts=FACTS, **change):
    model = Katakana()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.5)
    folder.mkdir(exist_ok=True)
    save_file({**model.state_dict(), **change}, folder / "model-c2k.safetensors", metadata=facts)
    return model


def g2p_arrays():
    sizes = {"enc_emb": (29, DIM), "dec_emb": (74, DIM), "fc_w": (74, DIM), "fc_b": (74,)}
    for side in ("enc", "dec"):
        sizes |= {f"{side}_w_{kind}": (3 * DIM, DIM) for kind in ("ih", "hh")}
        sizes |= {f"{side}_b_{kind}": (3 * DIM,) for kind in ("ih", "hh")}
    random = np.random.default_rng(1)
    return {name: random.normal(0, 0.5, size).astype("f4") for name, size in sizes.items()}


def write_g2p(folder, save=np.savez, **change):
    arrays = g2p_arrays() | change
    folder.mkdir(exist_ok=True)
    save(folder / "checkpoint20.npz", **arrays)
    return {name: torch.tensor(array) for name, array in arrays.items() if array.dtype == "f4"}


def gru(arrays, side):
    cell = nn.GRU(DIM, DIM, batch_first=True)
    names = {"weight_ih_l0": "w_ih", "weight_hh_l0": "w_hh", "bias_ih_l0": "b_ih"}
    names["bias_hh_l0"] = "b_hh"
    cell.load_state_dict({theirs: arrays[f"{side}_{ours}"] for theirs, ours in names.items()})
    return cell


def test_the_network_with_attention_computes_what_modules_of_torch_compute(tmp_path):
    theirs = write_e2k(tmp_path / "e2k")
    run = regard.load(tmp_path / "e2k", device="cpu")
    words, target = ["doggy", "a cat"], torch.tensor([[1, 5, 9, 3], [1, 4, 4, 7]])
    read = [[1, *(LETTERS.index(letter) for letter in word), 2] for word in words]
    source = Source(torch.tensor(read), torch.tensor([7, 7]))
    with torch.no_grad():
        ours = run.model.head(run.model(target, source=source))
        logits, _ = theirs(source.ids, target)
    torch.testing.assert_close(ours, logits, atol=1e-5, rtol=0)  # float32 through two GRUs


def test_the_alignment_is_that_of_the_attention_of_torch(tmp_path):
    theirs = write_e2k(tmp_path / "e2k")
    run = regard.import_model(tmp_path / "e2k", tmp_path / "run")
    ((_, seen),) = run.explain("cab").items()
    assert seen.columns == ["<sos>", "c", "a", "b", "<eos>"]
    wrote = [KANA.index(kana) for kana in seen.rows[:-1]]
    source = torch.tensor([[1, *map(LETTERS.index, "cab"), 2]])
    with torch.no_grad():
        _, weights = theirs(source, torch.tensor([[1, *wrote]]))
    torch.testing.assert_close(seen.weights, weights[0], atol=1e-5, rtol=0)  # as above


def test_the_network_without_attention_computes_what_modules_of_torch_compute(tmp_path):
    arrays = write_g2p(tmp_path / "g2p")
    run = regard.import_model(tmp_path / "g2p", tmp_path / "run")
    ids, target = torch.tensor([[5, 3, 22, 2]]), torch.tensor([[2, 30, 41, 7]])
    with torch.no_grad():
        source = Source(ids, torch.tensor([4]))
        ours = run.model.head(run.model(target, source=source))
        _, last = gru(arrays, "enc")(arrays["enc_emb"][ids])
        h, _ = gru(arrays, "dec")(arrays["dec_emb"][target], last)
    torch.testing.assert_close(ours, h @ arrays["fc_w"].T + arrays["fc_b"], atol=1e-5, rtol=0)


def test_letters_become_the_ids_of_their_makers(tmp_path):
    write_e2k(tmp_path / "e2k")
    write_g2p(tmp_path / "g2p")
    katakana = regard.import_model(tmp_path / "e2k", tmp_path / "run").tokenizers
    assert katakana.source.encode("Don't, é") == [6, 17, 16, 30, 22, 29]
    assert (katakana.source.prefix_ids, katakana.target.prefix_ids) == ([1], [])
    assert katakana.target.decode([1, 3, 14, 2]) == "アー"
    sounds = open_checkpoint(tmp_path / "g2p").tokenizers
    assert sounds.source.encode("aZ?") == [3, 28, 1]
    assert (sounds.source.eos_id, sounds.target.bos_id, sounds.target.eos_id) == (2, 2, 3)
    assert sounds.target.decode([2, *sounds.target.encode("HH AH0 L OW1"), 3]) == "HH AH0 L OW1"


def test_phonemes_without_an_unknown_one_are_read(tmp_path):
    """e2k's p2k: phonemes of the CMU dictionary to katakana."""
    phonemes = [*LETTERS[:3], *(f"P{n}" for n in range(len(LETTERS) - 3))]
    theirs = write_e2k(tmp_path / "p2k", FACTS | {"in_table": "\0".join(phonemes)})
    run = regard.import_model(tmp_path / "p2k", tmp_path / "run")
    source = run.tokenizers.source
    assert source.encode("P0 P12 xx P1") == [3, 15, 4]  # and not P1, P2 for P12
    assert run.unknown_parts("P0 xx P1") == ["xx"]
    ids = Source(torch.tensor([[1, 3, 15, 4, 2]]), torch.tensor([5]))
    target = torch.tensor([[1, 5, 9]])
    with torch.no_grad():
        ours = run.model.head(run.model(target, source=ids))
        logits, _ = theirs(ids.ids, target)
    torch.testing.assert_close(ours, logits, atol=1e-5, rtol=0)  # float32 through two GRUs
    assert run.translate("P0 P12 P1", beam=1) == run.translate("P0 P12 xx P1", beam=1)


def test_a_file_is_named_alone_or_by_its_folder(tmp_path):
    write_e2k(tmp_path / "e2k")
    for path in (tmp_path / "e2k", tmp_path / "e2k" / "model-c2k.safetensors"):
        assert is_external_checkpoint(path)
        assert open_checkpoint(path).model_type.name == "e2k"
    assert g2p_en.find_file(tmp_path / "e2k") is None


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (FACTS | {"sos_idx": "99"}, "vocabulary"),
        (FACTS | {"eos_idx": "two"}, "vocabulary"),
        (FACTS | {"in_table": "<pad>\0<sos>\0<eos>\0a\0a"}, "5 tokens, 4 of them distinct"),
        (FACTS | {"in_table": FACTS["in_table"] + "\0é"}, r"e_emb.* has shape"),
    ],
)
def test_a_vocabulary_that_cannot_be_is_refused(facts, message, tmp_path):
    write_e2k(tmp_path / "e2k", facts)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path / "e2k")


def test_a_tensor_of_another_shape_is_named(tmp_path):
    write_e2k(tmp_path / "e2k", **{"fc.bias": torch.zeros(3)})
    with pytest.raises(CheckpointError, match=r"fc\.bias"):
        open_checkpoint(tmp_path / "e2k")
    write_g2p(tmp_path / "g2p", dec_b_ih=np.zeros(5, "f4"))
    with pytest.raises(CheckpointError, match="dec_b_ih"):
        open_checkpoint(tmp_path / "g2p")


@pytest.mark.parametrize(
    ("save", "change", "message"),
    [
        (np.savez_compressed, {}, "compressed"),
        (np.savez, {"fc_b": np.array([{}] * 74, object)}, "fc_b"),
        (np.savez, {"fc_b": np.zeros(74, "f8")}, "fc_b"),
        (np.savez, {"fc_w": np.zeros((DIM, 74), "f4").T}, "fc_w"),
    ],
)
def test_arrays_that_are_not_plain_are_refused(save, change, message, tmp_path):
    write_g2p(tmp_path / "g2p", save, **change)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path / "g2p")


def test_no_corrupted_archive_gets_further_than_its_header(tmp_path):
    write_g2p(tmp_path / "g2p")
    path = tmp_path / "g2p" / "checkpoint20.npz"
    whole = path.read_bytes()
    first = zipfile.ZipFile(path).infolist()[0]
    places = range(first.header_offset, first.header_offset + 200, 7)
    for at in places:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        with suppress(CheckpointError):
            for entry in open_archive(path).entries.values():
                assert 0 <= entry.start <= entry.start + entry.size <= len(whole)
    path.write_bytes(whole[: len(whole) // 2])
    assert g2p_en.find_file(path) is None


def test_an_array_that_is_not_as_long_as_it_says_is_refused(tmp_path):
    write_g2p(tmp_path / "g2p")
    path = tmp_path / "g2p" / "checkpoint20.npz"
    whole = path.read_bytes()
    for other in (b"(99, 8)", b"(19, 8)"):
        path.write_bytes(whole.replace(b"(29, 8)", other))
        with pytest.raises(CheckpointError, match=r"enc_emb.* does not have the size"):
            open_archive(path)


def shared(name):
    if "REGARD_DATA" not in os.environ:
        pytest.skip("REGARD_DATA is not set")
    return Path(os.environ["REGARD_DATA"], "weights", name)


@pytest.mark.real
def test_the_golden_words_are_written_in_katakana_and_the_look_moves_on(tmp_path):
    folder = shared("e2k_gru_attn")
    run = regard.import_model(folder, tmp_path / "run")
    for word, wanted in json.loads((folder / "golden.json").read_text())["cases"].items():
        assert run.translate(word, beam=1) == wanted
        ((_, seen),) = run.explain(word).items()
        assert "".join(seen.rows[:-1]) == wanted
        looks = seen.mean().argmax(-1).tolist()
        assert looks == sorted(looks)
        assert seen.columns[looks[-1]] == "<eos>"


@pytest.mark.real
def test_the_golden_words_are_pronounced(tmp_path):
    folder = shared("g2p_en_gru")
    run = regard.import_model(folder, tmp_path / "run")
    for word, wanted in json.loads((folder / "golden.json").read_text()).items():
        assert run.translate(word, beam=1) == wanted
