"""Folders that are corrupted, misleading or out to harm: refused by name, and quickly."""

import json
import math
import os
from contextlib import suppress

import pytest
import torch
from safetensors.torch import save_file

import regard
from files.test_safetensors import write_raw
from hub.runs import make_checkpoint, make_run, model_config
from hub.test_import import legacy
from regard.cli import main
from regard.errors import CheckpointError, ConfigError, RegardError
from regard.files.safetensors import TensorReader, open_tensors, read_header
from regard.files.untrusted import quote
from regard.hub import MODEL_TYPES
from regard.hub.config_json import read_config, write_config
from regard.hub.external_checkpoint import is_external_checkpoint, open_checkpoint
from regard.hub.safetensors_writer import SafetensorsWriter
from regard.models.build import preset
from regard.training.import_export import import_run

FLOAT = (torch.float32, torch.Size([1]))
BAD = [math.nan, math.inf, -1, 0, 10**400, 10**12, "x", [], {}, None, True, [[]], 1.5, "\ud800"]
OTHERS = {"architectures", "id2label", "num_labels", "rope_scaling", "rope_theta", "layer_types"}


@pytest.mark.parametrize("name", MODEL_TYPES)
def test_no_value_of_any_setting_is_more_than_a_clear_error(name):
    model_type = MODEL_TYPES[name]
    for key in OTHERS.union(model_type.fields, model_type.defaults, model_type.supported_values):
        for value in BAD:
            with suppress(RegardError):
                read_config({"model_type": name, "use_sliding_window": True, key: value})


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "albert", "bart"])
def test_more_layers_than_anybody_builds_are_refused_at_once(name):
    key = next(key for key, ours in MODEL_TYPES[name].fields.items() if ours == "layers")
    table = {"model_type": name, "use_sliding_window": True, key: 10**12}
    with pytest.raises(ConfigError, match=f"{key}=1000000000000 .* at most 10,000"):
        read_config(table)


@pytest.mark.parametrize("settings", [{"rope_theta": math.inf}, {"rms_norm_eps": math.inf}])
def test_numbers_without_end_are_refused(settings, tmp_path):
    make_checkpoint(tmp_path / "theirs", **settings)
    with pytest.raises(ConfigError, match="inf must be more than 0 and finite"):
        open_checkpoint(tmp_path / "theirs")


KINDS = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize("model_type", ["gemma2", "qwen2", "qwen3"])
@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize(
    "kinds", ["full_attention", KINDS, [*KINDS, "chunked_attention", "x"], [], [[]] * 4, 4]
)
def test_kinds_of_layers_that_are_not_one_for_each_are_refused(model_type, window, kinds):
    table = {"model_type": model_type, "num_hidden_layers": 4, "sliding_window": window}
    with pytest.raises(ConfigError, match="for each of the 4 layers"):
        read_config({**table, "layer_types": kinds})


def test_a_class_that_is_no_list_is_refused_as_it_stands():
    with pytest.raises(ConfigError, match="architectures='LlamaForCausalLM' is not a list"):
        read_config({"model_type": "llama", "architectures": "LlamaForCausalLM"})


@pytest.mark.parametrize("place", [["a"], {"a": 1}, "\x1b[31m"])
def test_an_index_of_anything_else_is_refused(place, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": place}}))
    with pytest.raises(CheckpointError, match="not a safetensors file in its folder") as raised:
        open_tensors(tmp_path)
    assert "\x1b" not in str(raised.value)


@pytest.mark.parametrize("shape", [[0, 1 << 62, 1 << 62], [0, 1 << 70], [1] * 10_000])
def test_shapes_that_no_library_can_hold_are_refused(shape, tmp_path):
    size = 4 * math.prod(shape)
    header = {"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}
    with pytest.raises(CheckpointError, match="'x' has shape") as raised:
        read_header(write_raw(tmp_path / "model.safetensors", header, b"\0" * size))
    assert len(str(raised.value)) < 1000


def test_names_in_a_file_reach_no_terminal_as_they_are(tmp_path):
    def spoiled(tensors):
        more = {"\x1b[31mred\nregard: all is fine": torch.zeros(1), "x" * 10_000: torch.zeros(1)}
        return tensors | more

    make_checkpoint(tmp_path / "theirs", change=spoiled)
    with pytest.raises(
        CheckpointError, match=r"'\\x1b\[31mred\\nregard: .*' is unexpected"
    ) as raised:
        open_checkpoint(tmp_path / "theirs")
    assert "\x1b" not in str(raised.value)
    assert len(str(raised.value)) < 1000
    assert quote("short") == "'short'"


@pytest.mark.parametrize(
    ("architectures", "name"),
    [
        (["RobertaForMaskedLM"], "RobertaForMaskedLM"),
        (["import os; os.x"], "AutoModel"),
        ("Roberta", "AutoModel"),
        (None, "AutoModel"),
    ],
)
def test_a_pickle_is_converted_with_its_head_and_its_tokenizer(architectures, name, tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "roberta", "architectures": architectures})
    )
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(b"\x80\x02cos\nsystem\n")
    for attempt in (lambda: open_tensors(tmp_path), lambda: open_checkpoint(file)):
        with pytest.raises(CheckpointError, match="is a pickle") as raised:
            attempt()
        assert f"\n  {name}.from_pretrained({str(tmp_path)!r})" in str(raised.value)
        assert "AutoTokenizer.from_pretrained" in str(raised.value)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_file_instead_of_its_folder_is_refused(file, tmp_path):
    make_checkpoint(tmp_path / "theirs")
    with pytest.raises(CheckpointError, match=r"give its folder: .*theirs$"):
        import_run(tmp_path / "theirs" / file, tmp_path / "run")


def test_a_file_of_llama2c_beside_a_whole_checkpoint_is_not_taken_for_it(tmp_path):
    make_checkpoint(tmp_path / "theirs")
    legacy(tmp_path / "theirs" / "stories.bin")
    assert open_checkpoint(tmp_path / "theirs").model_type.name == "llama"
    assert open_checkpoint(tmp_path / "theirs" / "stories.bin").model_type.name == "llama2.c"


def test_of_two_files_of_llama2c_none_is_chosen(tmp_path):
    legacy(tmp_path / "a.bin")
    legacy(tmp_path / "b.bin")
    with pytest.raises(
        CheckpointError, match=r"several models .* give the path of one: a\.bin, b\.bin"
    ):
        open_checkpoint(tmp_path)
    assert open_checkpoint(tmp_path / "b.bin").model_type.name == "llama2.c"


def test_a_name_that_the_system_refuses_is_a_clear_error(tmp_path):
    make_checkpoint(tmp_path / "theirs")
    long = tmp_path / ("x" * 300)
    for attempt in (
        lambda: import_run(long, tmp_path / "run"),
        lambda: import_run(tmp_path / "theirs", long),
        lambda: is_external_checkpoint(long),
        lambda: open_checkpoint(long),
    ):
        with pytest.raises(CheckpointError, match=r"cannot (access|look at)"):
            attempt()


def test_only_an_output_matrix_is_advised_to_be_untied(tmp_path):
    def doubled(tensors):
        return tensors | {"encoder.embed_tokens.weight": tensors["model.shared.weight"] + 1}

    config = model_config("bart-base", encoder_layers=2)
    make_checkpoint(tmp_path / "theirs", config, "bart", change=doubled)
    with pytest.raises(CheckpointError, match="should be the same tensor") as raised:
        open_checkpoint(tmp_path / "theirs").load()
    assert "tie_word_embeddings" not in str(raised.value)


def test_a_model_without_a_tokenizer_is_not_advised_to_write(tmp_path, capsys):
    make_checkpoint(tmp_path / "theirs")
    with pytest.raises(SystemExit) as ended:
        main(["import", str(tmp_path / "theirs"), str(tmp_path / "run")])
    assert not ended.value.code
    assert "regard generate" not in capsys.readouterr().err
    assert regard.load(tmp_path / "run").tokenizers is None


def test_a_file_that_cannot_be_opened_is_named_and_none_is_left_open(tmp_path, monkeypatch):
    paths = [tmp_path / f"{number}.safetensors" for number in range(2)]
    for number, path in enumerate(paths):
        save_file({f"t{number}": torch.randn(3)}, path)
    tensors = TensorReader(read_header(paths[0]) | read_header(paths[1]))
    paths[1].unlink()
    opened, closed = _record_open_files(monkeypatch)
    with tensors, pytest.raises(CheckpointError, match=r"cannot read .*1\.safetensors"):
        [tensors.read(name) for name in tensors.entries]
    assert len(opened) == 1
    assert opened == closed


def test_a_file_that_cannot_be_written_leaves_none_open(tmp_path, monkeypatch):
    opened, closed = _record_open_files(monkeypatch)
    files = {tmp_path / "a": {"x": FLOAT}, tmp_path / "none" / "b": {"y": FLOAT}}
    with pytest.raises(FileNotFoundError), SafetensorsWriter(files) as writer:
        [writer.write(name, torch.zeros(1)) for name in "xy"]
    assert len(opened) == 1
    assert opened == closed


def _record_open_files(monkeypatch):
    """What os.open gives from now on, and what os.close takes."""
    opened, closed, open_, close = [], [], os.open, os.close

    def recording_open(*arguments):
        opened.append(open_(*arguments))
        return opened[-1]

    def recording_close(handle):
        closed.append(handle)
        close(handle)

    monkeypatch.setattr(os, "open", recording_open)
    monkeypatch.setattr(os, "close", recording_close)
    return opened, closed


def test_a_conditional_random_field_is_not_exported():
    config = preset("bert-base", vocab_size=11, head={"kind": "crf", "classes": 3})
    with pytest.raises(
        ConfigError, match=r"head='crf' cannot be exported;\ntrain with model.head=tag"
    ):
        write_config(config)


@pytest.mark.parametrize(
    ("name", "head", "data"),
    [
        ("tiny-encoder", "forecast", "the rows of a series"),
        ("tiny-decoder", "forecast", "the rows of a series"),
        ("tiny-decoder", "mixture", "pen strokes"),
    ],
)
def test_models_that_read_numbers_are_not_exported(name, head, data):
    config = preset(name, vocab_size=1, dim=8, layers=1, heads=2, input_dim=3, head=head)
    with pytest.raises(ConfigError, match=f"type takes {data} as input, so") as raised:
        write_config(config)
    assert "smallest change" not in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"input_dim": 2, "head": "forecast"}, "it reads vectors of 2 numbers"),
        (
            {"char_dim": 4, "head": {"kind": "tag", "classes": 3}},
            "it reads the characters of words, model.char_dim=4",
        ),
    ],
)
def test_onnx_files_of_models_with_other_inputs_are_refused(tmp_path, settings, reason):
    config = preset("tiny-encoder", vocab_size=1, dim=8, layers=1, heads=2, **settings)
    make_run(tmp_path / "run", config)
    with pytest.raises(ConfigError, match=reason):
        regard.load(tmp_path / "run").export(tmp_path / "out", format="onnx")
