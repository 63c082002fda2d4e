"""What trains when a run starts from another one, and with which learning rate."""

import json
import warnings
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import regard
from regard.cli import main
from regard.config import RunConfig, TrainConfig
from regard.errors import ConfigError, RegardWarning
from regard.models.build import build_model, preset, resolve, weights
from regard.tasks import TextClassification
from regard.training.fine_tuning import (
    TUNINGS,
    cast_frozen_weights,
    check_tuning,
    layer_depths,
    lr_scales,
    tuning,
)
from regard.training.loop import Objective
from regard.training.loop import train as training_steps
from regard.training.optim import optimizers
from regard.training.setup.start_settings import settings_from
from regard.training.storage import initial_weights
from regard.training.storage.run_folder import RunFolder
from training.objectives import text_batch

MODEL = {"preset": "tiny-encoder", "dim": 8, "layers": 3, "heads": 2, "context": 16}


def model(**fields):
    return build_model(preset("tiny-decoder", vocab_size=23, dim=8, layers=3, heads=2, **fields))


def trained(choice, step=0, **fields):
    built = model(**fields)
    tuning(choice).prepare(built, step)
    return {name for name, p in built.named_parameters() if p.requires_grad}


def test_depths_count_layers_from_the_output():
    found = layer_depths(model(tied=False))
    assert found["head.weight"] == found["decoder.norm.weight"] == 0
    assert [found[f"decoder.blocks.{i}.ffn.up.weight"] for i in (2, 1, 0)] == [1, 2, 3]
    assert found["embed.token.weight"] == 4
    pair = build_model(
        preset("bahdanau", vocab_size=9, dim=8, layers=2, encoder_layers=1, bridge=False)
    )
    found = layer_depths(pair)
    assert (found["encoder.0.forward_layer.input.weight"], found["decoder.0.input.weight"]) == (
        1,
        2,
    )


def test_what_follows_the_last_layer_has_depth_0_and_what_embeds_an_image_is_deepest():
    luong = layer_depths(build_model(preset("luong", vocab_size=9, dim=8)))
    assert (luong["readout.weight"], luong["decoder.3.input.weight"]) == (0, 1)
    wavenet = layer_depths(build_model(preset("convolution", vocab_size=9, dim=8, layers=2)))
    assert (wavenet["mix.weight"], wavenet["layers.1.out.weight"]) == (0, 1)
    captioner = layer_depths(build_model(preset("tiny-captioner", vocab_size=9, dim=8, heads=2)))
    images = {depth for name, depth in captioner.items() if name.startswith("image_embed.")}
    assert images == {captioner["embed.token.weight"]} == {3}


def test_each_tuning_trains_what_it_says():
    everything = {name for name, _ in model(tied=False).named_parameters()}
    block = {name for name in everything if ".blocks.2." in name}
    norm = {"decoder.norm.weight"}
    assert trained("all", tied=False) == everything
    assert trained("head", tied=False) == {"head.weight"}
    last = {"kind": "last_layers", "layers": 1}
    assert trained(last, tied=False) == {"head.weight"} | norm | block
    gradual = {"kind": "gradual_unfreezing", "every": 10}
    assert trained(gradual, 9, tied=False) == {"head.weight"} | norm
    assert trained(gradual, 10, tied=False) == {"head.weight"} | norm | block
    assert trained(gradual, 40, tied=False) == everything
    assert {name.rpartition(".")[2] for name in trained("lora")} == {"lora_A", "lora_B"}
    with pytest.raises(ConfigError, match="no parameter is trainable"):
        trained("head")
    without = build_model(preset("tiny-encoder", vocab_size=9, dim=8, heads=2, head="none"))
    with pytest.raises(ConfigError, match="the head has no parameters of its own"):
        tuning("head").prepare(without)
    assert trained({"kind": "last_layers", "layers": 3}, tied=False) < everything
    with pytest.raises(ConfigError, match="layers=4, but the model has 3 layers"):
        trained({"kind": "last_layers", "layers": 4}, tied=False)
    for choice in (
        {"kind": "last_layers", "layers": 0},
        {"kind": "gradual_unfreezing", "every": 0},
    ):
        with pytest.raises(ConfigError, match="must be at least 1"):
            tuning(choice)


def test_an_adapter_needs_a_run_to_start_from_and_one_process():
    for choice in TUNINGS:
        tune = (
            {"kind": "gradual_unfreezing", "every": 1} if choice == "gradual_unfreezing" else choice
        )
        config = RunConfig(name="x", train=TrainConfig(tune=tune, start="y"))
        check_tuning(config, 1)
        if choice in ("gradual_unfreezing", "lora"):
            with pytest.raises(ConfigError, match="without torchrun"):
                check_tuning(config, 2)
    with pytest.raises(ConfigError, match=r"train\.start=RUN"):
        check_tuning(RunConfig(name="x", train=TrainConfig(tune="lora")), 1)


def test_layer_decay_scales_the_learning_rate_of_a_step():
    """Without gradient clipping Adam's first step is the learning rate, whatever the gradient."""
    built = model(tied=False)
    before = {name: p.detach().clone() for name, p in built.named_parameters()}
    objective, scales = Objective(built, regard.tasks.Causal()), lr_scales(built, 0.5)
    adamw = optimizers({"kind": "adamw", "weight_decay": 0.0}, built, 1e-3, scales)
    list(training_steps(objective, [text_batch()], adamw, lambda step: 1e-3, max_grad_norm=0.0))
    for name, p in built.named_parameters():
        step = (p - before[name]).abs().max().item()
        assert step == pytest.approx(1e-3 * 0.5 ** layer_depths(built)[name], rel=0.01), name
    assert lr_scales(built, 1.0) is None


def test_frozen_weights_have_no_gradient_no_optimizer_state_and_half_the_bytes():
    built = model()
    tuning("lora").prepare(built)
    cast_frozen_weights(built, torch.bfloat16)
    (adamw,) = optimizers("adamw", built, 1e-3)
    with torch.autocast("cpu", torch.bfloat16):
        objective = Objective(built, regard.tasks.Causal())
        objective(text_batch()).backward()
    adamw.step()
    names = {p: name for name, p in built.named_parameters()}
    assert {names[p].rpartition(".")[2] for p in adamw.state} == {"lora_A", "lora_B"}
    assert all((p.grad is None) == ("lora" not in name) for p, name in names.items())
    frozen = {p: n for p, n in names.items() if p.dim() > 1 and not p.requires_grad}
    assert {n for p, n in frozen.items() if p.dtype != torch.bfloat16} == {"embed.token.weight"}
    assert built.embed.token.weight.dtype == torch.float32  # that of the residual stream


def test_class_weights_multiply_the_loss_in_training_only():
    task = TextClassification(class_weights="balanced")
    weights = task.resolve_class_weights([0, 0, 0, 1], ["a", "b", "c"])
    assert weights == pytest.approx([4 / 9, 4 / 3, 4 / 3])
    with pytest.raises(ConfigError, match="2 weights, and there are 3 classes: a, b, c"):
        TextClassification(class_weights=[1.0, 2.0]).resolve_class_weights([0], ["a", "b", "c"])
    with pytest.raises(ConfigError, match="at least 0"):
        TextClassification(class_weights=[-1.0])
    head = {"kind": "classification", "classes": 2}
    built = build_model(preset("tiny-encoder", vocab_size=9, dim=8, heads=2, head=head))
    batch = regard.data.batch.LabelBatch(
        torch.tensor([[1, 2], [3, 4]]), torch.tensor([2, 2]), torch.tensor([0, 1])
    )
    plain, weighted = TextClassification(), TextClassification(class_weights=[0.0, 3.0])
    single = plain.loss(
        built.train(), type(batch)(batch.ids[1:], batch.lengths[1:], batch.targets[1:])
    )
    assert weighted.loss(built, batch).item() == pytest.approx(3 * single.item(), rel=1e-5)
    assert weighted.loss(built.eval(), batch) == plain.loss(built, batch)


def test_facts_of_the_old_data_are_not_inherited():
    facts = {"class_names": ["a", "b"], "paired": True, "class_weights": [1.0, 2.0]}
    start = RunConfig(name="x", task={"kind": "text_classification", "word_dropout": 0.1, **facts})
    kept = settings_from({"task": "text_classification"}, start, ["a"])["task"]
    assert kept == {"kind": "text_classification", "word_dropout": 0.1, "class_names": ["a", "b"]}
    other = settings_from({"task": "text_classification"}, start, ["c"])["task"]
    assert other == {"kind": "text_classification", "word_dropout": 0.1}
    start = RunConfig(name="x", task={"kind": "span", "no_answer": True})
    assert settings_from({"task": "span"}, start, None)["task"] == "span"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A labelled table and a run on it."""
    folder = tmp_path_factory.mktemp("tuning")
    rows = [f"{a} {b} {c},{b}" for a in "xyz" for b in ("good", "bad") for c in "klmno"]
    (folder / "data.csv").write_text("\n".join(["text,label", *rows]))
    options = {"tokenizer": "word", "steps": 2, "batch": 8, "quiet": True}
    regard.train(folder / "data.csv", model=MODEL, out=folder / "base", **options)
    return folder


def tune(world, name, choice, steps=4, **settings):
    table = {"start": str(world / "base"), "tune": choice, "best_metric": "last", **settings}
    return regard.train(
        world / "data.csv", out=world / name, steps=steps, batch=8, quiet=True, train=table
    )


def test_a_layer_over_characters_is_new_where_the_base_has_none(world):
    config = RunFolder(world / "base").load_config()
    train = replace(config.train, start=str(world / "base"))
    config = replace(config, train=train, model={**config.model, "char_dim": 3})
    model = build_model(resolve(config.model))
    before = {name: tensor.clone() for name, tensor in weights(model).items()}
    initial_weights.load_initial_weights(config, model)
    new = {name for name, tensor in weights(model).items() if torch.equal(tensor, before[name])}
    assert {n for n in before if n.startswith("characters.")} <= new
    assert "embed.token.weight" not in new
    assert layer_depths(model)["characters.project.weight"] == 0
    for tune in ({"kind": "lora", "rank": 2}, "head"):
        frozen = replace(config, train=replace(train, tune=tune))
        with pytest.raises(ConfigError, match="does not train a new character-level layer"):
            initial_weights.load_initial_weights(frozen, model)


def test_a_run_with_an_adapter_saves_only_it_and_resumes_to_the_bit(world):
    choice = {"kind": "lora", "rank": 2, "targets": ["*.query", "*.up"], "dropout": 0.1}
    events = []
    run = regard.train(
        world / "data.csv",
        out=world / "whole",
        batch=8,
        steps=4,
        quiet=True,
        on_event=events.append,
        train={
            "start": str(world / "base"),
            "tune": choice,
            "best_metric": "last",
            "save_every": 2,
        },
    )
    (line,) = [line for line in events[0].description if line.startswith("trainable")]
    assert "lora rank=2 alpha=16 dropout=0.1 targets=*.query,*.up lr=0.001: " in line
    saved = load_file(world / "whole" / "model.safetensors")
    assert set(saved) == {
        *(
            f"encoder.blocks.{i}.{n}.lora_{p}"
            for i in range(3)
            for p in "AB"
            for n in ("attention.query", "ffn.up")
        ),
        "head.out.weight",
        "head.out.bias",
    }
    base = load_file(world / "base" / "model.safetensors")
    merged = weights(run.model)
    assert torch.equal(merged["embed.token.weight"], base["embed.token.weight"])
    assert not torch.equal(
        merged["encoder.blocks.0.ffn.up.weight"], base["encoder.blocks.0.ffn.up.weight"]
    )
    assert run.evaluate() == pytest.approx(run.metrics, abs=1e-5)
    again = regard.resume(world / "whole", step=2, steps=4, quiet=True)
    for name, tensor in weights(again.model).items():
        assert torch.equal(tensor, merged[name]), name
    assert regard.edit(world / "whole", train={"keep_checkpoints": 2}) == [
        "train.keep_checkpoints: 3 → 2"
    ]
    config = json.loads((world / "whole" / "config.json").read_text())
    config["train"]["tune"]["alpha"] = 99.0
    (world / "whole" / "config.json").write_text(json.dumps(config))
    with pytest.raises(regard.errors.CheckpointError, match=r"train\.tune\.alpha"):
        regard.load(world / "whole")


def test_a_run_starts_from_an_adapter_merged(world, monkeypatch):
    first = tune(world, "adapter", {"kind": "lora", "rank": 2}, lr=0.01)
    start = initial_weights.open_initial_run(
        world / "base"
    )  # a base in half precision is trained in float32
    half = replace(start, tensors=lambda: {n: t.half() for n, t in start.tensors().items()})
    monkeypatch.setattr(initial_weights, "open_initial_run", lambda path: half)
    halved = weights(regard.load(world / "adapter").model)
    assert {tensor.dtype for tensor in halved.values()} == {torch.float32}
    monkeypatch.undo()
    second = tune(world, "second", "head", steps=1, lr=0.0, start=str(world / "adapter"))
    for name, tensor in weights(second.model).items():
        torch.testing.assert_close(tensor, weights(first.model)[name], rtol=0, atol=1e-6)
    (world / "adapter").rename(world / "moved")
    (world / "base").rename(world / "base2")
    with pytest.raises(
        regard.errors.CheckpointError, match=r"is an adapter of .*[\s\S]*train\.start=PATH"
    ):
        regard.load(world / "moved")
    (world / "base2").rename(world / "base")


def test_adapters_are_merged_and_chosen_by_name(world, capsys):
    runs = [tune(world, f"lora{n}", {"kind": "lora", "rank": n}, lr=0.01) for n in (1, 2)]
    (world / "base" / "adapters").mkdir()
    (world / "base" / "adapters" / "two").symlink_to(world / "lora2")
    by_path = regard.load(world / "base", adapter=world / "lora1")
    by_name = regard.load(world / "base", adapter="two")

    def command(*words):
        with pytest.raises(SystemExit) as ended:
            main([*map(str, words), "--json"])
        assert not ended.value.code
        return json.loads(capsys.readouterr().out)

    (world / "lora2" / "chat_template.jinja").write_text("{{ messages }}")
    merged = command("merge", world / "lora2", world / "merged")
    assert len(merged["layers"]) == 6
    assert (world / "merged" / "chat_template.jinja").read_text() == "{{ messages }}"
    with pytest.raises(ConfigError, match="no validation data, because it was imported or merged"):
        regard.load(world / "merged").evaluate()
    for run, others in ((runs[0], [by_path]), (runs[1], [by_name, regard.load(world / "merged")])):
        for other in others:
            for name, tensor in weights(run.model).items():
                assert torch.equal(tensor, weights(other.model)[name]), name
    text = "x good k"
    shown = command("predict", world / "base", text, "--adapter", "two")
    assert runs[1].predict(text)[0][0][0] in json.dumps(shown)
    with pytest.raises(ConfigError, match=r"no adapter at three.*[\s\S]*: two"):
        regard.load(world / "base", adapter="three")
    with pytest.raises(ConfigError, match="without an adapter"):
        regard.load(world / "base", adapter=world / "merged")
    with pytest.warns(UserWarning, match="lora1 is an adapter of .*base, and is used with .*merg"):
        regard.load(world / "merged", adapter=world / "lora1")
    with warnings.catch_warnings():
        warnings.simplefilter("default", RegardWarning)
        with pytest.raises(SystemExit):
            main(["predict", *map(str, (world / "merged", text, "--adapter", world / "lora1"))])
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "warning" in line.lower())
    assert line.startswith("warning: ")
    assert line.endswith(f"train.start={world / 'merged'}")
    with pytest.raises(ConfigError, match="has no adapter to merge"):
        regard.merge(world / "base", world / "never")


def test_only_what_trains_changes(world):
    base = load_file(world / "base" / "model.safetensors")
    run = tune(world, "last", {"kind": "last_layers", "layers": 1}, lr=0.01, ema=0.9)
    changed = {n for n, t in weights(run.model).items() if not torch.equal(t, base[n])}
    assert changed
    assert all(layer_depths(run.model)[name] <= 1 for name in changed)
    run = tune(world, "gradual", {"kind": "gradual_unfreezing", "every": 3}, lr=0.01)
    changed = {n for n, t in weights(run.model).items() if not torch.equal(t, base[n])}
    assert max(layer_depths(run.model)[name] for name in changed) == 1
