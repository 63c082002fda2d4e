"""A checkpoint folder becomes a run, whole or not at all; what is wrong with it is named."""

import json
import os
import struct
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import regard
from hub.runs import TEXT, make_checkpoint, model_config, tokenizer
from regard.cli import main
from regard.errors import CheckpointError, ConfigError
from regard.files.safetensors import TensorReader
from regard.hub.external_checkpoint import is_external_checkpoint, open_checkpoint
from regard.hub.model_types import llama2c
from regard.models.build import weights
from regard.training.import_export import import_run, imported_model_type

IDS = torch.arange(1, 9).unsqueeze(0)


def logits(model):
    with torch.no_grad():
        return model.head(model(IDS))


def nothing_left(tmp_path, *but):
    return sorted(path.name for path in tmp_path.iterdir()) == sorted(but)


def test_an_external_checkpoint_becomes_a_run_that_writes_and_learns(tmp_path):
    original = make_checkpoint(tmp_path / "theirs", bos_token_id=1, eos_token_id=2)
    tokenizer().save(tmp_path / "theirs" / "tokenizer.json")
    run = regard.import_model(tmp_path / "theirs", tmp_path / "run")
    assert torch.equal(logits(run.model.cpu()), logits(original))
    assert run.config.task == "causal"
    assert run.generate("the cat", max_new_tokens=5, sampler=["greedy"])

    text = tmp_path / "text.txt"
    text.write_text(" ".join(TEXT) * 20)
    learned = regard.train(
        text,
        f"train.start={tmp_path / 'run'}",
        "train.steps=1",
        "train.lr=0",
        "train.batch=2",
        "device=cpu",
        out=tmp_path / "tuned",
    )
    assert torch.equal(logits(learned.model), logits(original))
    assert learned.config.model["dim"] == 16
    assert learned.tokenizer.fingerprint() == run.tokenizer.fingerprint()


def test_a_vocabulary_padded_beyond_the_tokenizer_can_be_learned_on(tmp_path):
    make_checkpoint(tmp_path / "theirs", model_config(vocab_size=320))
    tokenizer().save(tmp_path / "theirs" / "tokenizer.json")
    import_run(tmp_path / "theirs", tmp_path / "run")
    text = tmp_path / "text.txt"
    text.write_text(" ".join(TEXT) * 20)
    learned = regard.train(
        text,
        f"train.start={tmp_path / 'run'}",
        "train.steps=1",
        "train.batch=2",
        "device=cpu",
        out=tmp_path / "tuned",
    )
    assert learned.config.model["vocab_size"] == 320


def test_an_external_checkpoint_opens_as_a_run_without_a_copy(tmp_path):
    original = make_checkpoint(tmp_path / "theirs")
    tokenizer().save(tmp_path / "theirs" / "tokenizer.json")
    assert is_external_checkpoint(tmp_path / "theirs")
    run = regard.load(tmp_path / "theirs", device="cpu")
    assert torch.equal(logits(run.model), logits(original))
    assert run.generate("the", max_new_tokens=8, seed=1)
    assert run.metrics == {}
    assert nothing_left(tmp_path, "theirs")


def test_what_only_changes_its_name_goes_from_disk_to_disk(tmp_path, monkeypatch):
    make_checkpoint(tmp_path / "theirs")

    def refuse(self, name):
        raise AssertionError(f"{name} was read whole")

    monkeypatch.setattr(TensorReader, "read", refuse)
    import_run(tmp_path / "theirs", tmp_path / "run")


def test_a_head_that_no_task_trains_says_so(tmp_path):
    make_checkpoint(tmp_path / "theirs", model_config(head="none"))
    tokenizer().save(tmp_path / "theirs" / "tokenizer.json")
    run = regard.import_model(tmp_path / "theirs", tmp_path / "run")
    assert run.config.task == "none"
    assert run.tokenizer.vocab_size == tokenizer().vocab_size
    for ask in (lambda: run.generate("the"), run.evaluate, lambda: run.evaluate("text.txt")):
        with pytest.raises(ConfigError, match="no task supports head"):
            ask()


def test_a_run_that_was_not_trained_here_is_trained_on_not_resumed(tmp_path):
    make_checkpoint(tmp_path / "theirs")
    regard.import_model(tmp_path / "theirs", tmp_path / "run")
    with pytest.raises(ConfigError, match=r"regard train DATA train\.start="):
        regard.resume(tmp_path / "run", "train.steps=5")


def test_a_folder_without_a_tokenizer_becomes_a_run_without_one(tmp_path):
    make_checkpoint(tmp_path / "theirs")
    run = regard.import_model(tmp_path / "theirs", tmp_path / "run")
    assert run.tokenizers is None
    with pytest.raises(ConfigError, match="has no tokenizer"):
        run.generate("the")


def test_an_imported_run_has_no_data_of_its_own_to_be_judged_by(tmp_path):
    make_checkpoint(tmp_path / "theirs")
    tokenizer().save(tmp_path / "theirs" / "tokenizer.json")
    run = regard.import_model(tmp_path / "theirs", tmp_path / "run")
    with pytest.raises(ConfigError, match="give the data to evaluate on"):
        run.evaluate()
    text = tmp_path / "text.txt"
    text.write_text(" ".join(TEXT) * 20)
    assert run.evaluate(str(text))["loss"] > 0


def remove(*names):
    return lambda tensors: {n: t for n, t in tensors.items() if n not in names}


def add(**more):
    return lambda tensors: tensors | {name.replace("__", "."): t for name, t in more.items()}


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (remove(NORM), f"{NORM} is missing"),
        (add(model__extra__weight=torch.zeros(2)), "'model.extra.weight' is unexpected"),
        (
            add(model__norm__weight=torch.ones(17)),
            r"norm.weight' has shape \(17,\), but the model has \(16,\)",
        ),
        (add(model__norm__weight=torch.ones(16).double()), "norm.weight' holds torch.float64"),
        (add(model__norm__weight=torch.ones(16, 1)), r"shape \(16, 1\)"),
    ],
)
def test_tensors_that_do_not_fit_are_named_and_nothing_is_left(change, problem, tmp_path):
    make_checkpoint(tmp_path / "theirs", change=change)
    for attempt in (
        lambda: import_run(tmp_path / "theirs", tmp_path / "run"),
        lambda: regard.load(tmp_path / "theirs"),
    ):
        with pytest.raises(CheckpointError, match=problem):
            attempt()
    assert nothing_left(tmp_path, "theirs")


def test_of_many_problems_five_are_named(tmp_path):
    make_checkpoint(tmp_path / "theirs", change=lambda tensors: dict([*tensors.items()][-3:]))
    with pytest.raises(CheckpointError, match=r"(?s)is missing.*… and \d+ more") as raised:
        open_checkpoint(tmp_path / "theirs")
    assert len(str(raised.value).splitlines()) == 7


def test_a_copy_of_the_embedding_is_accepted_and_another_output_matrix_is_not(tmp_path):
    def copied(tensors):
        return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}

    def changed(tensors):
        return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}

    original = make_checkpoint(tmp_path / "copied", change=copied)
    assert torch.equal(logits(open_checkpoint(tmp_path / "copied").load().eval()), logits(original))
    make_checkpoint(tmp_path / "changed", change=changed)
    with pytest.raises(
        CheckpointError, match=r"(?s)should be the same tensor.*tie_word_embeddings"
    ):
        open_checkpoint(tmp_path / "changed").load()
    with pytest.raises(CheckpointError, match="should be the same tensor"):
        import_run(tmp_path / "changed", tmp_path / "run")
    assert nothing_left(tmp_path, "changed", "copied")


def test_names_without_the_prefix_are_understood(tmp_path):
    """As in the published files of GPT-2, together with the masks that old ones hold."""

    def bare(tensors):
        named = {name.removeprefix("transformer."): t for name, t in tensors.items()}
        return named | {"h.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint8)}

    original = make_checkpoint(tmp_path / "theirs", model_config("gpt2"), change=bare)
    assert torch.equal(logits(open_checkpoint(tmp_path / "theirs").load().eval()), logits(original))


def test_a_config_without_a_class_takes_the_one_that_fits(tmp_path):
    head = {"kind": "classification", "classes": 3, "pool": "last", "bias": False}
    make_checkpoint(tmp_path / "theirs", model_config(head=head), architectures=None)
    assert open_checkpoint(tmp_path / "theirs").config.head == head


def test_numbers_of_several_types_become_the_widest(tmp_path):
    def mixed(tensors):
        return {n: t if n == NORM else t.to(torch.bfloat16) for n, t in tensors.items()}

    make_checkpoint(tmp_path / "theirs", change=mixed)
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    checkpoint = import_run(tmp_path / "theirs", tmp_path / "run")
    assert checkpoint.dtype == torch.float32
    actual = load_file(tmp_path / "run" / "model.safetensors")
    assert torch.equal(actual["decoder.norm.weight"], theirs[NORM])
    run = regard.load(tmp_path / "run", device="cpu")
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}
    assert torch.isfinite(logits(run.model).float()).all()


@pytest.mark.parametrize(
    "settings",
    [
        {"num_hidden_layers": 10**9},
        {"hidden_size": 2**40, "head_dim": 2**20},
        {"vocab_size": 2**62},
        {"intermediate_size": 2**100},
        {"num_hidden_layers": -1},
        {"num_hidden_layers": None},
        {"num_attention_heads": 0},
        {"max_position_embeddings": []},
        {"rms_norm_eps": {}},
        {"tie_word_embeddings": "yes"},
    ],
)
def test_absurd_sizes_are_refused_before_anything_is_made(settings, tmp_path):
    make_checkpoint(tmp_path / "theirs", **settings)
    with pytest.raises((CheckpointError, ConfigError)):
        open_checkpoint(tmp_path / "theirs")


@pytest.mark.parametrize("content", ["", "{", "[]", "\x00", "[" * 100_000])
def test_a_config_that_is_no_table_is_refused(content, tmp_path):
    make_checkpoint(tmp_path / "theirs")
    (tmp_path / "theirs" / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        import_run(tmp_path / "theirs", tmp_path / "run")
    assert nothing_left(tmp_path, "theirs")


@pytest.mark.parametrize("problem", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_disk_that_fills_or_a_key_that_stops_leaves_nothing(problem, tmp_path, monkeypatch):
    make_checkpoint(tmp_path / "theirs")
    calls = []

    def fail(handle, content, at):
        calls.append(at)
        if len(calls) > 3:
            raise problem
        return len(content)

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(
        KeyboardInterrupt if isinstance(problem, KeyboardInterrupt) else CheckpointError
    ):
        import_run(tmp_path / "theirs", tmp_path / "run")
    assert nothing_left(tmp_path, "theirs")


def test_a_run_is_never_written_over(tmp_path):
    make_checkpoint(tmp_path / "theirs")
    (tmp_path / "run").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        import_run(tmp_path / "theirs", tmp_path / "run")


def test_a_name_is_fetched_from_the_hub(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    make_checkpoint(tmp_path / "cached")
    asked = {}

    def snapshot_download(name, allow_patterns, ignore_patterns):
        asked[name] = allow_patterns
        return str(tmp_path / "cached")

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    import_run("some/model", tmp_path / "run")
    (patterns,) = asked.values()
    assert not {"*", "*.bin", "*.py"} & set(patterns)


@pytest.mark.parametrize("problem", [OSError("offline\nand more"), ValueError("no such name")])
def test_a_hub_that_does_not_answer_is_a_clear_error(problem, tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")

    def snapshot_download(name, allow_patterns, ignore_patterns):
        raise problem

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    with pytest.raises(CheckpointError, match=r"from the hub: (offline|no such name)$"):
        import_run("some/model", tmp_path / "run")


def test_without_the_library_of_the_hub_a_name_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match="pip install huggingface_hub"):
        import_run("some/model", tmp_path / "run")
    with pytest.raises(CheckpointError, match="not a repository name of the hub"):
        import_run("no such/folder at all", tmp_path / "run")


def test_the_command_tells_what_it_made(tmp_path, capsys):
    make_checkpoint(tmp_path / "theirs")
    tokenizer().save(tmp_path / "theirs" / "tokenizer.json")
    with pytest.raises(SystemExit) as ended:
        main(["import", str(tmp_path / "theirs"), str(tmp_path / "run"), "--json"])
    assert not ended.value.code
    result = json.loads(capsys.readouterr().out)
    assert (result["model_type"], result["task"], result["dtype"]) == ("llama", "causal", "float32")
    with pytest.raises(SystemExit) as ended:
        main(["import", str(tmp_path / "theirs"), str(tmp_path / "run")])
    assert ended.value.code == 2
    assert "exists already" in capsys.readouterr().err


def test_a_run_starts_from_an_external_checkpoint_as_from_the_imported_run(tmp_path):
    make_checkpoint(tmp_path / "theirs")
    tokenizer().save(tmp_path / "theirs" / "tokenizer.json")
    (tmp_path / "text.txt").write_text("the cat " * 500)
    start, options = tmp_path / "theirs", ("train.steps=1", "train.batch=2", "train.lr=0")
    run = regard.train(tmp_path / "text.txt", f"train.start={start}", *options, out=tmp_path / "a")
    for name, tensor in regard.load(start).model.state_dict().items():
        assert torch.equal(run.model.state_dict()[name], tensor), name


def legacy(path, *, tied=True):
    """A random model in llama2.c's first layout."""
    dim, hidden, layers, heads, kv_heads, vocabulary, context = header = (8, 20, 2, 2, 1, 30, 16)
    head_dim = dim // heads
    per_layer = 2 * dim + 2 * dim * dim + 2 * kv_heads * head_dim * dim + 3 * dim * hidden
    count = (
        vocabulary * dim
        + layers * per_layer
        + dim
        + context * head_dim
        + (not tied) * vocabulary * dim
    )
    numbers = torch.randn(count)
    words = (*header[:5], vocabulary if tied else -vocabulary, context)
    path.write_bytes(struct.pack("<7i", *words) + numbers.numpy().tobytes())
    return numbers


@pytest.mark.parametrize("tied", [True, False])
def test_the_first_layout_of_llama2c_is_read_in_order(tied, tmp_path):
    numbers = legacy(tmp_path / "stories.bin", tied=tied)
    (tmp_path / "config.json").write_text('{"dim": 8}')
    for path in (tmp_path, tmp_path / "stories.bin"):
        assert is_external_checkpoint(path)
        checkpoint = open_checkpoint(path)
        ours = weights(checkpoint.load())
        assert torch.equal(ours["embed.token.weight"].flatten(), numbers[:240])
        assert torch.equal(ours["decoder.blocks.0.attention_norm.weight"], numbers[240:248])
        assert torch.equal(ours["decoder.blocks.1.attention_norm.weight"], numbers[248:256])
        if not tied:
            assert torch.equal(ours["head.weight"].flatten(), numbers[-240:])
        assert ("head.weight" in ours) != tied


def test_the_model_type_of_an_import_is_one_that_transformers_has(tmp_path):
    legacy(tmp_path / "stories.bin")
    assert open_checkpoint(tmp_path / "stories.bin").model_type.name == "llama2.c"
    assert imported_model_type(str(tmp_path / "stories.bin")) is None  # then chosen by the settings


def test_a_file_of_another_size_is_not_of_that_layout(tmp_path):
    legacy(tmp_path / "stories.bin")
    content = (tmp_path / "stories.bin").read_bytes()
    for other in (
        content[:-4],
        content + b"\0\0\0\0",
        content[:20],
        struct.pack("<7i", *[1 << 30] * 7),
    ):
        (tmp_path / "stories.bin").write_bytes(other)
        assert llama2c.find_file(tmp_path) is None


@pytest.mark.real
def test_the_published_stories_are_told_word_for_word(tmp_path):
    if "REGARD_DATA" not in os.environ:
        pytest.skip("REGARD_DATA is not set")
    folder = Path(os.environ["REGARD_DATA"], "weights", "stories260k")
    run = regard.import_model(folder, tmp_path / "run")
    story = run.generate("", max_new_tokens=200, sampler=["greedy"])
    assert story == (folder / "expected_greedy_200.txt").read_text()
