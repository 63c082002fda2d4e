"""A run becomes a folder that transformers opens and that computes the same; or says why not."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import regard
from hub.runs import make_run, model_config, tokenizer
from regard.cli import main
from regard.errors import CheckpointError, ConfigError
from regard.hub import verify_export as check
from regard.hub.external_checkpoint import open_checkpoint
from regard.text import PairTokenizers
from regard.training.import_export import export_run

IDS = torch.arange(1, 9).unsqueeze(0)


@pytest.fixture
def unchecked(monkeypatch):
    """As where transformers is not installed."""
    monkeypatch.setitem(sys.modules, "transformers", None)


def logits(model):
    with torch.no_grad():
        return model.head(model(IDS))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parity
@pytest.mark.parametrize(
    ("name", "fields", "model_type"),
    [
        ("modern", {}, "llama"),
        ("gpt2", {}, "gpt2"),
        ("tiny-decoder", {}, "gpt_neox"),
        ("modern", {"position": {"kind": "rotary", "interleaved": True}}, "llama"),
        (
            "modern",
            {"position": {"kind": "rotary", "interleaved": True}, "qk_norm": True, "head_dim": 8},
            "qwen3",
        ),
        (
            "tiny-decoder",
            {
                "position": {"kind": "rotary", "interleaved": True, "partial_rotary_factor": 0.5},
                "tied": False,
            },
            "gpt_neox",
        ),
    ],
)
def test_a_model_of_ours_is_opened_by_transformers_with_nothing_of_ours(
    name, fields, model_type, tmp_path
):
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    config = model_config(name, **fields)
    ours = make_run(tmp_path / "run", config)
    done = regard.load(tmp_path / "run").export(tmp_path / "theirs")
    assert done.model_type == model_type
    assert done.difference < 1e-5
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    assert type(theirs).__name__ == done.architecture
    with torch.no_grad():
        assert (theirs(IDS).logits - logits(ours)).abs().max() < 1e-5
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    assert words("the cat sat", add_special_tokens=False).input_ids == tokenizer().encode(
        "the cat sat"
    )
    assert theirs.generation_config.eos_token_id == tokenizer().eos_id


@pytest.mark.usefixtures("unchecked")
def test_without_transformers_it_is_said_that_nobody_checked(tmp_path, capsys):
    make_run(tmp_path / "run", task={"kind": "causal", "label_smoothing": 0.1})
    with pytest.raises(SystemExit) as ended:
        main(["export", str(tmp_path / "run"), str(tmp_path / "theirs")])
    assert not ended.value.code
    assert "not verified" in capsys.readouterr().out
    assert names(tmp_path / "theirs") == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    table = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert table["architectures"] == ["LlamaForCausalLM"]
    assert table["dtype"] == "float32"
    assert table["eos_token_id"] == tokenizer().eos_id


@pytest.mark.usefixtures("unchecked")
def test_what_was_exported_can_be_imported_again(tmp_path):
    ours = make_run(tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "theirs")
    again = regard.import_model(tmp_path / "theirs", tmp_path / "again")
    assert torch.equal(logits(again.model.cpu()), logits(ours))
    first, second = (load_file(tmp_path / who / "model.safetensors") for who in ("run", "again"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert again.tokenizer.encode("the cat") == tokenizer().encode("the cat")


@pytest.mark.usefixtures("unchecked")
def test_a_large_model_is_written_in_shards(tmp_path, monkeypatch):
    monkeypatch.setattr("regard.hub.safetensors_writer.MAX_SHARD_BYTES", 5000)
    ours = make_run(tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "theirs")
    shards = list((tmp_path / "theirs").glob("model-*-of-*.safetensors"))
    assert len(shards) > 3
    assert not (tmp_path / "theirs" / "model.safetensors").exists()
    assert torch.equal(logits(open_checkpoint(tmp_path / "theirs").load().eval()), logits(ours))


def test_a_model_that_no_family_has_is_refused_and_nothing_is_left(tmp_path):
    make_run(tmp_path / "run", model_config("gpt2", position="alibi", norm="rms"))
    with pytest.raises(ConfigError, match=r"(?s)nearest, .*position = 'alibi'|norm = 'rms'"):
        export_run(tmp_path / "run", tmp_path / "theirs")
    assert names(tmp_path) == ["run"]


@pytest.mark.parity
def test_a_folder_that_computes_something_else_is_not_kept(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(check, "TOLERANCE", -1.0)
    make_run(tmp_path / "run")
    with pytest.raises(CheckpointError, match="its outputs differ by"):
        export_run(tmp_path / "run", tmp_path / "theirs")
    assert names(tmp_path) == ["run"]


@pytest.mark.usefixtures("unchecked")
def test_a_folder_is_never_written_over_and_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    make_run(tmp_path / "run")

    def fail(handle, content, at):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.pwrite", fail)
        with pytest.raises(CheckpointError, match="No space left"):
            export_run(tmp_path / "run", tmp_path / "theirs")
    assert names(tmp_path) == ["run"]
    (tmp_path / "theirs").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        export_run(tmp_path / "run", tmp_path / "theirs")


def test_a_model_that_is_no_transformer_is_refused(tmp_path):
    make_run(
        tmp_path / "run", regard.preset("lstm", vocab_size=tokenizer().vocab_size, dim=8, layers=1)
    )
    with pytest.raises(ConfigError, match=r"corresponds to model\.family=recurrent, so"):
        export_run(tmp_path / "run", tmp_path / "theirs")


NORM = "decoder.norm.weight"


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda tensors: {NORM: tensors[NORM]}, "embed.token.weight is missing"),
        (lambda tensors: tensors | {"extra": tensors[NORM]}, "extra is not a weight of this model"),
        (lambda tensors: tensors | {NORM: tensors[NORM][:1]}, r"has shape \(1,\)"),
        (lambda tensors: tensors | {NORM: tensors[NORM].half()}, r"torch\.float16, torch\.float32"),
        (lambda tensors: {n: t.double() for n, t in tensors.items()}, r"torch\.float64"),
        (lambda tensors: {}, "embed.token.weight is missing"),
    ],
)
def test_a_run_whose_weights_are_not_its_models_is_not_written(damage, problem, tmp_path):
    make_run(tmp_path / "run")
    path = tmp_path / "run" / "model.safetensors"
    tensors = damage(load_file(path))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path)
    with pytest.raises(CheckpointError, match=problem):
        export_run(tmp_path / "run", tmp_path / "theirs")
    assert names(tmp_path) == ["run"]


def encoder(offset):
    position = {"kind": "learned", "offset": offset}
    return model_config("roberta-base", position=position)


@pytest.mark.parity
@pytest.mark.parametrize("offset", [0, 1, 2, 5])
def test_positions_are_counted_from_the_row_after_that_of_the_padding(offset, tmp_path):
    transformers = pytest.importorskip("transformers")
    ours = make_run(tmp_path / "run", encoder(offset), "masked")
    done = export_run(tmp_path / "run", tmp_path / "theirs", "roberta")
    assert done.difference < 1e-5
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "theirs").eval()
    assert theirs.config.pad_token_id == tokenizer().hf_special_id("pad")
    ids = torch.tensor([[id for id in range(1, 12) if id != theirs.config.pad_token_id]])
    with torch.no_grad():  # among them all that begin and end a text
        assert (theirs(ids).logits - ours.head(ours(ids))).abs().max() < 1e-5


@pytest.mark.usefixtures("unchecked")
def test_what_reads_as_another_model_is_not_written(tmp_path, monkeypatch):
    make_run(tmp_path / "run", encoder(2), "masked")
    monkeypatch.setattr(
        "regard.training.import_export.write_tokenizers", lambda *arguments: {"pad_token_id": 7}
    )
    with pytest.raises(CheckpointError):
        export_run(tmp_path / "run", tmp_path / "theirs", "roberta")
    assert names(tmp_path) == ["run"]


@pytest.mark.parity
@pytest.mark.parametrize(
    ("name", "model_type"), [("marian-en-de", "marian"), ("bart-base", "bart"), ("t5-small", "t5")]
)
@pytest.mark.parametrize("bias", [True, False])
def test_a_translator_is_written_with_a_bias_of_zeros_where_it_has_none(
    name, model_type, bias, tmp_path
):
    pytest.importorskip("transformers")
    head = {"head": {"kind": "linear", "bias": bias}} if model_type != "t5" else {}
    config = model_config(name, encoder_layers=2, **head)
    joint = tokenizer()
    make_run(tmp_path / "run", config, "seq2seq", PairTokenizers(joint, joint))
    done = export_run(tmp_path / "run", tmp_path / "theirs")
    assert done.model_type == model_type
    assert done.difference < 1e-5
    table = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert table["decoder_start_token_id"] == joint.bos_id


@pytest.mark.parity
def test_what_transformers_raises_is_said_to_be_its_own(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    make_run(tmp_path / "run")

    def fail(*arguments, **options):
        raise RuntimeError("no such thing\nand more")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(CheckpointError, match=r"transformers \S+ cannot.*\nRuntimeError: no such"):
        export_run(tmp_path / "run", tmp_path / "theirs")
    assert names(tmp_path) == ["run"]


@pytest.mark.parity
def test_a_model_too_large_to_be_compared_is_written_and_that_is_said(
    tmp_path, monkeypatch, capsys
):
    pytest.importorskip("transformers")
    monkeypatch.setattr("regard.training.import_export.free_memory", lambda device: 1000)
    make_run(tmp_path / "run")
    with pytest.raises(SystemExit) as ended:
        main(["export", str(tmp_path / "run"), str(tmp_path / "theirs")])
    assert not ended.value.code
    assert "kB of memory, 1.0 kB are free" in capsys.readouterr().out
    assert (tmp_path / "theirs" / "config.json").exists()


def test_weights_that_were_changed_are_not_exported(tmp_path, unchecked):
    make_run(tmp_path / "run")
    file = tmp_path / "run" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors has changed since"):
        export_run(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_that_was_changed_is_not_exported(tmp_path):
    make_run(tmp_path / "run")
    tokenizer("word").save(tmp_path / "run" / "tokenizer.json")
    with pytest.raises(CheckpointError, match=r"the tokenizer in .* has changed"):
        export_run(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()
