"""The commands in Python: settings from a name or a path, and what a run can do."""

import inspect
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import regard
from regard.accel import pack
from regard.api.explanation import source_and_translation
from regard.api.overrides import read_overrides
from regard.config import RunConfig, TrainConfig, build, to_table
from regard.errors import CheckpointError, ConfigError, DataError, RegardError
from regard.explain import ablate, trace
from regard.generate import PromptLookup, generate, parse_chain
from regard.models.build import resolve
from regard.models.presets import PRESETS
from regard.pipelines import prepare_training, run_name
from regard.training.setup.configure import RECIPES, configure, configure_study, recipes
from training.runs import write_data

TINY = {"dim": 8, "layers": 1, "heads": 2, "context": 32}
SHORT = {"steps": 4, "batch": 2, "evaluate_every": 4}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with data and a trained run on each kind of it; not to be changed."""
    folder = write_data(tmp_path_factory.mktemp("api"))
    for name in ("cats.txt", "pairs.tsv"):
        regard.train(
            str(folder / name),
            "data.tokenizer=char",
            out=folder / "runs" / name,
            model=TINY,
            train=SHORT,
            device="cpu",
        )
    return folder


def test_several_prompts_are_continued_as_each_alone(place):
    run = regard.load(place / "runs" / "cats.txt")
    prompts = ["the cat", "", "a dog sat on the mat and", "the cat"]
    for settings in ({}, {"stop_strings": "t"}, {"draft": PromptLookup()}, {"amateur": run}):
        texts = run.generate(prompts, max_new_tokens=6, seed=5, **settings)
        alone = [
            run.generate(p, max_new_tokens=6, seed=5 + n, **settings) for n, p in enumerate(prompts)
        ]
        assert texts == alone
    assert run.generate([], max_new_tokens=6) == []


@pytest.fixture
def recipe(tmp_path, place):
    """A recipe that changes some defaults."""
    path = tmp_path / "mine.toml"
    path.write_text(
        f"""
        task = {{ kind = "causal", label_smoothing = 0.1 }}
        [data]
        path = "{place / "cats.txt"}"
        tokenizer = {{ kind = "bpe", vocab_size = 300 }}
        [model]
        preset = "tiny-decoder"
        dim = 16
        [train]
        steps = 77
        schedule = {{ kind = "cosine", warmup = 5, min_lr_factor = 0.2 }}
        """
    )
    return str(path)


def test_defaults_yield_to_the_recipe_and_the_recipe_to_what_is_asked_for(recipe):
    settings = configure(recipe, {"train": {"lr": 0.5, "schedule": {"warmup": 9}}})
    assert settings.name == "mine"
    assert settings.train.max_grad_norm == TrainConfig().max_grad_norm  # a default
    assert settings.train.steps == 77  # the recipe's
    assert settings.train.lr == 0.5  # asked for
    assert settings.train.schedule == {"kind": "cosine", "warmup": 9, "min_lr_factor": 0.2}
    assert settings.model == {"preset": "tiny-decoder", "dim": 16}
    assert configure(recipe, {"model": {"dim": 32}}).model["dim"] == 32
    assert configure(recipe, {"train": {"schedule": "linear"}}).train.schedule == "linear"


def test_words_and_tables_ask_for_the_same(recipe, tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'steps'"):
        regard.train(recipe, "train.stepps=3", out=tmp_path / "run")
    with pytest.raises(ConfigError, match="did you mean 'steps'"):
        regard.train(recipe, train={"stepps": 3}, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("over", "complaint"),
    [
        ({"trian": {}}, "did you mean 'train'"),
        ({"data": {"tokeniser": "char"}}, "did you mean 'tokenizer'"),
        ({"train": {"steps": "many"}}, "train.steps must be an integer"),
        ({"device": "gpu"}, "device: unknown value 'gpu'"),
    ],
)
def test_a_key_or_value_that_is_wrong_is_named(recipe, over, complaint):
    with pytest.raises(ConfigError, match=complaint):
        configure(recipe, over)


def test_own_data_gets_settings_of_its_own(place):
    text, pairs = (configure(str(place / name)) for name in ("cats.txt", "pairs.tsv"))
    assert (text.name, pairs.name) == ("cats", "pairs")
    assert text.task == "causal"
    assert pairs.task == "seq2seq"
    assert resolve(text.model).architecture == "decoder"
    assert resolve(pairs.model).architecture == "encoder-decoder"
    over = {"model": {"layers": 9}, "train": {"steps": 5}}
    asked = configure(str(place / "cats.txt"), over)
    assert asked.model["layers"] == 9
    assert asked.train.steps == 5
    assert asked.train.batch == text.train.batch


def test_paths_are_saved_so_that_they_hold_from_everywhere(place, monkeypatch):
    monkeypatch.chdir(place)
    assert configure("cats.txt").data.path == str(place / "cats.txt")
    (place / "a.en").write_text("one\ntwo\n")
    (place / "b.fr").write_text("un\ndeux\n")
    files = {"source": "a.en", "target": "b.fr"}
    both = configure(None, {"data": {**files, "validation": ["a.en", "b.fr"]}}).data
    assert (both.source, both.target) == (str(place / "a.en"), str(place / "b.fr"))
    assert both.validation == [str(place / "a.en"), str(place / "b.fr")]
    one = configure("cats.txt", {"data": {"validation": "cats.txt"}}).data
    assert one.validation == [str(place / "cats.txt")]


def test_data_that_is_always_there_keeps_its_name():
    assert configure("numbers").data.path == "numbers"


def test_an_unset_variable_is_named(monkeypatch):
    monkeypatch.delenv("REGARD_DATA", raising=False)
    with pytest.raises(ConfigError, match=r"the environment variable \$REGARD_DATA is not set"):
        configure("translate-multi30k")


def test_a_name_that_is_nothing_gets_a_suggestion():
    with pytest.raises(ConfigError, match="did you mean 'translate-multi30k'"):
        configure("translate-multi30")
    with pytest.raises(ConfigError, match=r"progress=False must be .*quiet=True turns"):
        regard.train("quickstart", progress=False)
    with pytest.raises(ConfigError, match="no data to train on"):
        configure(None)
    with pytest.raises(ConfigError, match="no recipe at nowhere"):
        configure("nowhere.toml")


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_makes_settings_and_a_model(name, monkeypatch, tmp_path):
    monkeypatch.setenv("REGARD_DATA", str(tmp_path))
    runs = configure_study(name) or {name: configure(name)}
    for run, settings in runs.items():
        assert isinstance(settings, RunConfig)
        assert settings.name == run
        resolve(settings.model, vocab_size=100)
        assert build(RunConfig, json.loads(json.dumps(to_table(settings)))) == settings


def test_recipes_come_with_the_library():
    assert recipes()
    assert all((RECIPES / f"{name}.toml").exists() for name in recipes())


def test_a_run_is_opened_with_its_model_and_tokenizer(place):
    ran = regard.load(place / "runs" / "cats.txt", device="cpu")
    assert not ran.model.training
    assert ran.config.model["dim"] == 8
    assert ran.tokenizer.decode(ran.tokenizer.encode("the cat")) == "the cat"
    assert ran.metrics["loss"] > 0
    with pytest.raises(CheckpointError, match="no run at nowhere"):
        regard.load("nowhere")


def test_a_text_run_continues_text_and_does_not_translate(place):
    ran = regard.load(place / "runs" / "cats.txt", device="cpu")
    assert ran.generate("the ", max_new_tokens=12, seed=3) == ran.generate(
        "the ", max_new_tokens=12, seed=3
    )
    assert len(ran.generate("", max_new_tokens=5, seed=3)) <= 5
    assert "".join(ran.stream("the ", max_new_tokens=12, seed=3)) == ran.generate(
        "the ", max_new_tokens=12, seed=3
    )
    assert ran.generate("a", max_new_tokens=3, sampler="greedy") == ran.generate(
        "a", max_new_tokens=3, sampler=["greedy"]
    )
    with pytest.raises(
        ConfigError, match=r"cats.txt is 'causal', which cannot translate; use `gene"
    ):
        ran.translate("one")


def test_the_decoder_follows_changed_weights(place):
    ran = regard.load(place / "runs" / "cats.txt", device="cpu")
    greedy = {"max_new_tokens": 12, "sampler": ["greedy"]}
    text, ready = ran.generate("the ", **greedy), ran._decoder()
    assert ran._decoder() is ready
    ids, stop = ran._prompt("the "), set(ran.tokenizer.stop_ids)
    for through_data in (False, True):
        with torch.no_grad():
            for parameter in ran.model.parameters():
                written = parameter.data if through_data else parameter
                written.copy_(torch.randn_like(parameter))
        (expected,) = generate(
            ran.model, [ids], parse_chain(["greedy"]), max_new_tokens=12, stop=stop
        )
        before, text = text, ran.generate("the ", **greedy)
        assert text == ran.tokenizer.decode(expected) != before
    ran.model.double()
    assert ran._decoder() is not ready
    ran.generate("the ", **greedy)


def test_a_decoder_generates_with_int8_weights_where_asked(place):
    ran = regard.load(place / "runs" / "cats.txt", device="cpu")
    ran.generate("the ", max_new_tokens=4, seed=1)
    plain = ran._decoder()
    assert len(ran.generate("the ", max_new_tokens=12, seed=1, int8=True)) > 0
    eight, ids = ran._decoder(int8=True), ran._prompt("the cat ")
    assert eight is not plain
    assert eight.model.head.weight.dtype == torch.int8
    (expected,) = generate(
        pack(ran.model, int8=True), [ids], parse_chain(["greedy"]), max_new_tokens=9, stop=set()
    )
    found = ran.generate("the cat ", max_new_tokens=9, sampler=["greedy"], int8=True)
    assert found == ran.tokenizer.decode(expected)
    with pytest.raises(ConfigError, match="cannot be combined with draft or amateur"):
        ran.generate("the ", draft=PromptLookup(), int8=True)
    greedy = {"max_new_tokens": 20, "sampler": ["greedy"]}
    assert ran.generate("the cat ", **greedy, float16=True) == ran.generate("the cat ", **greedy)
    assert ran._decoder(float16=True).model.head.weight.dtype == torch.float16
    with pytest.raises(ConfigError, match="int8 and float16 cannot be combined"):
        ran.generate("the ", float16=True, int8=True)
    with pytest.raises(ConfigError, match="float16 and int4 cannot be combined"):
        ran.generate("the ", float16=True, int4=True)
    ran.model.bfloat16()
    with pytest.raises(
        ConfigError, match="float16 converts float32 weights on a CPU; these are bfl"
    ):
        ran.generate("the ", float16=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"prompt": 7}, "prompt=7 must be a string"),
        (
            {"draft": "prompt-lookup"},
            "the draft must be a run, as regard.load returns, not 'prompt-lookup'",
        ),
        ({"amateur": "runs/small"}, "the amateur must be a run"),
        ({"seed": 1.7}, "seed=1.7 must be an integer"),
        ({"seed": "x"}, "seed='x' must be an integer"),
        ({"max_new_tokens": "9"}, "max_new_tokens='9' must be an integer"),
        ({"sampler": "greedy=1"}, "'greedy=1': greedy takes no value"),
    ],
)
def test_words_of_the_wrong_kind_are_named(place, words, message):
    ran = regard.load(place / "runs" / "cats.txt", device="cpu")
    with pytest.raises(ConfigError, match=message):
        ran.generate(**{"prompt": "the ", **words})


def test_a_search_wants_whole_numbers_too(place):
    with pytest.raises(ConfigError, match=r"max_new_tokens=2\.5 must be an integer"):
        regard.load(place / "runs" / "cats.txt", device="cpu").search("the ", max_new_tokens=2.5)


def test_one_word_needs_no_list(place):
    ran = regard.load(place / "runs" / "cats.txt", device="cpu")
    long = ran.generate("the ", max_new_tokens=30, seed=1)
    ending = next(letter for letter in long[4:] if letter.isalpha())
    assert (
        ran.generate("the ", max_new_tokens=30, seed=1, stop_strings=ending)
        == long.partition(ending)[0]
    )
    assert ran.chain(f"ban={ending}") == ran.chain([f'ban=["{ending}"]'])


def test_a_forced_text_is_generated_exactly(place):
    ran = regard.load(place / "runs" / "cats.txt", device="cpu")
    text = ran.generate("a ", max_new_tokens=7, sampler=['force=["the cat"]', "greedy"])
    assert text == "the cat"


def test_a_pair_run_translates_and_does_not_continue(place):
    ran = regard.load(place / "runs" / "pairs.tsv", device="cpu")
    for wrong in (3, None, ["117 cats", 118]):
        with pytest.raises(DataError, match="a text must be a string, not"):
            ran.translate(wrong)
    one = ran.translate("117 cats", beam=2)
    assert isinstance(one, str)
    assert ran.translate(["117 cats", "5 cats"], beam=2)[0] == one
    assert ran.translate([], beam=2) == []
    with pytest.raises(ConfigError, match="give either `search` or `beam` and `length_penalty`"):
        ran.translate("117 cats", search="beam=2", length_penalty=0.5)
    with pytest.raises(ConfigError, match="n_best=2: a translation is one text per sentence"):
        ran.translate("117 cats", search="beam={width=3, n_best=2}")
    with pytest.raises(ConfigError, match="cannot generate; use `translate`"):
        ran.generate("one")


def test_a_run_is_evaluated_on_its_validation_data_or_on_other(place, tmp_path):
    ran = regard.load(place / "runs" / "cats.txt", device="cpu")
    assert {"loss", "perplexity", "bits_per_byte"} <= set(ran.evaluate())
    (tmp_path / "other.txt").write_text("the dog sat on the cat\n" * 9)
    assert ran.evaluate(str(tmp_path / "other.txt"))["loss"] != ran.evaluate()["loss"]
    with pytest.raises(DataError, match="holds pairs; the run learns from text"):
        ran.evaluate(str(place / "pairs.tsv"))
    pairs = regard.load(place / "runs" / "pairs.tsv", device="cpu")
    assert {"loss", "chrf", "exact_match", "signatures"} <= set(pairs.evaluate(beam=1))


def test_events_are_passed_to_a_callback(place, tmp_path):
    seen = []
    ran = regard.train(
        str(place / "cats.txt"),
        out=tmp_path / "run",
        on_event=seen.append,
        model=TINY,
        train=SHORT,
        device="cpu",
    )
    names = [type(event).__name__ for event in seen]
    assert (names[0], names[-1]) == ("RunStarted", "RunFinished")
    regard.resume(tmp_path / "run", "train.steps=5", on_event=seen.append)
    assert seen[-1].step == 5
    assert ran.folder.path == tmp_path / "run"


def test_the_default_folder_is_new(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = configure(str(place / "cats.txt"), {"model": TINY, "train": SHORT, "device": "cpu"})
    assert [regard.train(settings).folder.path for _ in range(2)] == [
        Path("runs/cats"),
        Path("runs/cats-2"),
    ]


def test_weights_of_another_model_are_refused_and_listed(place, tmp_path):
    table = json.loads((place / "runs" / "cats.txt" / "config.json").read_text())
    table["model"]["dim"] = 16
    run = tmp_path / "run"
    run.mkdir()
    for name in ("tokenizer.json", "model.safetensors", "environment.json"):
        (run / name).write_bytes((place / "runs" / "cats.txt" / name).read_bytes())
    (run / "config.json").write_text(json.dumps(table))
    with pytest.raises(CheckpointError, match=r"model\.dim: 8 → 16"):
        regard.load(run)
    save_file(load_file(run / "model.safetensors"), run / "model.safetensors")  # no settings
    with pytest.raises(CheckpointError, match="has shape") as raised:
        regard.load(run)
    assert "more" in str(raised.value)


def test_explaining_needs_attention_and_a_text(place):
    ran = regard.load(place / "runs" / "cats.txt", device="cpu")
    maps = ran.explain("the cat")
    assert maps
    for found in maps.values():
        assert torch.as_tensor(found.weights).shape[-2:] == (7, 7)
    with pytest.raises(ConfigError, match="the text is empty"):
        ran.explain("")


def test_a_recurrent_network_names_what_shows_its_inside(place, tmp_path):
    words = ["model.preset=lstm", "model.dim=8", "train.steps=1", "device=cpu"]
    ran = regard.train(place / "cats.txt", *words, out=tmp_path / "lstm", quiet=True)
    for method in (ran.attention, ran.logit_lens, ran.head_effects):
        with pytest.raises(ConfigError, match=r"has no attention.*run\.gradients.*run\.states"):
            method("the cat")


def test_a_small_table_of_pairs_gets_a_tokenizer_that_can_be(tmp_path):
    table = tmp_path / "few.tsv"
    table.write_text("".join(f"number {n}\tnombre {n}\n" for n in range(100)))
    config = configure(str(table), {"train": {"steps": 1}, "model": {"dim": 8, "layers": 1}})
    prepare_training(config)  # a vocabulary too small for the bytes would be refused here


def test_asking_for_tokens_replaces_the_rows_that_were_chosen(place):
    config = configure(str(place / "cats.txt"), {"train": {"tokens": 96}})
    assert (config.train.batch, config.train.tokens) == (None, 96)


def test_settings_in_hand_can_still_be_changed_by_words(place, tmp_path):
    config = configure(str(place / "cats.txt"), {"model": {"dim": 8, "layers": 1, "heads": 2}})
    ran = regard.train(config, "train.steps=2", "device=cpu", out=tmp_path / "two")
    assert ran.config.train.steps == 2


def test_a_path_object_and_a_home_are_paths_too(place, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(place))
    assert configure("~/cats.txt").data.path == str(place / "cats.txt")
    words = ["train.steps=1", "model.dim=8", "model.layers=1", "model.heads=2", "device=cpu"]
    assert regard.train(place / "cats.txt", *words, out=tmp_path / "path").config.name == "cats"


def test_a_folder_named_by_a_dot_has_a_name(place, monkeypatch):
    monkeypatch.chdir(place)
    assert run_name(".", None) == place.name


def test_prompts_are_folded_as_the_text_was(place, tmp_path):
    words = ["train.steps=1", "model.dim=8", "model.layers=1", "model.heads=2", "device=cpu"]
    ran = regard.train(place / "cats.txt", *words, "data.lower=true", out=tmp_path / "low")
    shouted, whispered = (
        ran.generate(text, max_new_tokens=9, seed=1) for text in ("THE CAT", "the cat")
    )
    assert shouted == whispered
    assert ran.attribution("the ca", output="T").output == "t"


@pytest.mark.parametrize("over", [{"device": "gpu"}, {"data": "x"}, {"minutes": "x"}])
def test_what_is_no_setting_is_refused(place, over):
    with pytest.raises(ConfigError):
        configure(str(place / "cats.txt"), over)


def test_another_tokenizer_or_corrupted_facts_are_noticed_when_a_run_is_opened(place, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(place / "runs" / "cats.txt", run)
    (run / "environment.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"the tokenizer in .* has changed"):
        regard.load(run)
    (run / "environment.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"environment\.json is corrupted"):
        regard.load(run)


def test_a_second_start_trains_no_tokenizer(place, monkeypatch):
    config = configure(
        str(place / "cats.txt"), {"data": {"tokenizer": {"kind": "bpe", "vocab_size": 300}}}
    )
    first = prepare_training(config).tokenizers
    monkeypatch.setattr("regard.pipelines.text.train_tokenizer", None)
    assert prepare_training(config).tokenizers.fingerprint() == first.fingerprint()


def test_a_model_is_not_data():
    with pytest.raises(ConfigError, match=r"regard train DATA model\.preset=bert-base"):
        configure("bert-base")


STUDY = """
[data]
path = "cats.txt"
tokenizer = "char"
[model]
context = 16
[train]
steps = 2
batch = 2
[study.ngram]
model.family = "ngram"
[study.gru]
model = { preset = "gru", dim = 8 }
"""


def test_a_study_is_trained_continued_and_compared_in_python(place, tmp_path, monkeypatch):
    monkeypatch.chdir(place)
    recipe = tmp_path / "cells.toml"
    recipe.write_text(STUDY)
    events = []
    study = regard.train(recipe, out=tmp_path / "cells", on_event=events.append)
    finished = [event.folder.name for event in events if type(event).__name__ == "RunFinished"]
    assert finished == ["ngram", "gru"]
    assert study.remaining() == []
    assert study.runs("cpu")["gru"].config.model["dim"] == 8
    again = regard.train(recipe, out=tmp_path / "cells", on_event=lambda event: 1 / 0)
    assert again.paths() == study.paths()
    comparison = regard.compare(*study.paths())
    assert comparison.names == ["ngram", "gru"]
    assert comparison.settings["model.family"] == ("ngram", "recurrent")
    assert all(loss > 0 for loss in comparison.metrics["loss"])
    assert comparison.figure().get_label() == "curves of ngram, gru"
    assert repr(comparison).startswith("Comparison(validation loss: ngram ")
    table = comparison.to_pandas()
    assert list(table.index) == ["ngram", "gru"]
    assert table.loc["gru", "steps"] == 2
    comparison.save(tmp_path / "cells.html")
    assert "<td>model.family</td><td>ngram</td>" in (tmp_path / "cells.html").read_text()
    assert comparison.notes == []


def test_two_parallel_files_need_no_name_in_python(tmp_path):
    (tmp_path / "a.en").write_text("".join(f"{n} cats\n" for n in range(50)))
    (tmp_path / "b.fr").write_text("".join(f"{n} chats\n" for n in range(50)))
    data = {"source": str(tmp_path / "a.en"), "target": str(tmp_path / "b.fr")}
    run = regard.train(
        None,
        "data.tokenizer=char",
        out=tmp_path / "run",
        data=data,
        model=TINY,
        train=SHORT,
        device="cpu",
    )
    assert run.validation_pairs(2)[0][0].endswith(" cats")


def test_models_are_described_compared_and_planned_in_python(place):
    gpt2 = regard.info("gpt2", "model.layers=2")
    assert (gpt2.kind, gpt2.family, gpt2.settings["layers"]) == ("preset", "transformer", 2)
    assert gpt2.parameters == sum(gpt2.cost.parts.values())
    assert regard.info("gpt2").published_difference == 0
    assert "attention" in "\n".join(gpt2.diagram())
    run = regard.info(place / "runs" / "cats.txt")
    assert (run.kind, run.settings["dim"]) == ("run", 8)
    assert run.metrics["loss"] > 0
    assert regard.diff("llama", "llama-7b").is_equal
    assert regard.diff("gpt2", "gpt2-medium").sizes["layers"] == (12, 24)
    plan = regard.plan("llama-7b", gpus=8)
    assert plan.best.sharded
    assert plan.tokens == 20 * plan.cost.parameters
    with pytest.raises(ConfigError, match="llama-65b does not fit"):
        regard.plan("llama-65b")


def test_forecasts_are_drawn_over_the_true_values(tmp_path):
    for order in (3, 24):
        words = ["model.family=autoregression", f"model.order={order}", "task.horizon=12"]
        regard.train("sines", *words, out=tmp_path / f"ar{order}", quiet=True)
    figure = regard.compare(tmp_path / "ar3", tmp_path / "ar24").figure()
    forecast, error = figure.axes
    assert forecast.get_title(loc="left") == "forecast of the last 12 validation values"
    truth, *forecasts = [line for line in forecast.lines if len(line.get_xdata())]
    assert (truth.get_xdata()[0], truth.get_xdata()[-1]) == (3965, 4000)  # rows of the series
    run = regard.load(tmp_path / "ar24")
    assert run.predict() == run.forecast() == run.forecast("sines")  # all rows that it has seen
    with pytest.raises(ConfigError, match="data is for by_length"):
        regard.compare(run, data=["sines"])
    end = run.backtest()
    title = run.draw_evaluation().axes[0].get_title(loc="left")
    assert title == "value: forecast of the last 12 values"
    assert list(truth.get_ydata())[-12:] == end.truth
    assert list(forecasts[1].get_ydata()) == [end.history[-1], *end.forecast]
    steps = [list(line.get_xdata()) for line in error.lines if len(line.get_xdata())]
    assert steps == [[*range(1, 13)]] * 2


def test_a_forecast_continues_the_validation_data(tmp_path):
    rows = [n % 7 + n / 100 for n in range(300)]
    for name, part in (("train", rows[:200]), ("later", rows[200:])):
        (tmp_path / f"{name}.csv").write_text("\n".join(["height", *map(str, part)]))
    words = ["model.family=autoregression", "model.order=7", "task.horizon=3"]
    words.append(f"data.validation={tmp_path / 'later.csv'}")
    run = regard.train(tmp_path / "train.csv", *words, out=tmp_path / "run", quiet=True)
    assert run.forecast() == run.forecast(tmp_path / "later.csv")
    assert run.forecast() != run.forecast(tmp_path / "train.csv")


def test_displays_are_short_and_escaped(place):
    run = regard.load(place / "runs" / "cats.txt", device="cpu")
    assert re.fullmatch(
        r"Run\('.*cats.txt': transformer, [\d,]+ parameters, causal, validation loss [\d.]+\)",
        repr(run),
    )
    assert "<td>task</td><td>causal</td>" in run._repr_html_()
    model = regard.preset("gpt2", layers=2)
    assert repr(model) == (
        "TransformerConfig(dim=768, layers=2, heads=12, ffn='gelu_tanh', vocab_size=50257)"
    )
    assert model._repr_html_().index("layers") < model._repr_html_().index("<details>")
    text = RunConfig(name="<b>")
    assert repr(text) == "RunConfig(name='<b>')"
    assert "&lt;b&gt;" in text._repr_html_()
    assert repr(regard.info("gpt2")) == "ModelInfo('gpt2': transformer, 124,439,808 parameters)"
    difference = regard.diff("gpt2", model)
    assert repr(difference) == "ModelDiff(gpt2, transformer: layers 12 → 2)"
    assert "<td>layers</td><td>12</td><td>2</td>" in difference._repr_html_()


def test_every_name_of_the_api_can_be_imported():
    from regard import api

    assert all(getattr(api, name) is not None for name in api.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        api.nothing  # noqa: B018


def test_a_configuration_is_trained_and_keywords_are_settings(place, tmp_path, capsys):
    model = regard.preset("tiny-decoder", dim=16, heads=2, layers=1)
    keywords = {"steps": 2, "batch": 2, "tokenizer": "char", "device": "cpu", "quiet": True}
    run = regard.train(
        place / "cats.txt", "train.max_grad_norm=0.5", model=model, out=tmp_path / "run", **keywords
    )
    assert (run.config.train.steps, run.config.train.max_grad_norm) == (2, 0.5)
    assert run.config.data.tokenizer == "char"
    assert resolve(run.config.model) == regard.preset(
        "tiny-decoder", dim=16, heads=2, layers=1, vocab_size=run.tokenizer.vocab_size
    )
    assert capsys.readouterr().err == ""
    regard.resume(run.folder.path, steps=3)
    assert "validation: loss" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"stepz": 3}, "unknown keyword 'stepz'; did you mean 'steps'"),
        ({"layers": 3}, r"layers is a setting of the model: write model=\{'layers': …\}"),
        ({"steps": "many"}, "train.steps must be an integer"),
        ({"model": "gpt9"}, "unknown preset 'gpt9'"),
        ({"train": {"stepz": 3}}, "did you mean 'steps'"),
    ],
)
def test_keywords_are_checked_like_settings(place, tmp_path, keywords, message):
    with pytest.raises(ConfigError, match=message):
        regard.train(place / "cats.txt", out=tmp_path / "run", **keywords)
    assert not (tmp_path / "run").exists()


def test_a_configuration_as_a_keyword_is_the_same_model():
    for name in [*PRESETS][::9]:
        model = regard.preset(name)
        assert resolve(read_overrides([], {"model": model})["model"]) == model


def test_completion_lists_the_public_names_only():
    assert dir(regard) == sorted(regard.__all__)


def public_functions():
    for name in regard.__all__:
        item = getattr(regard, name)
        yield name, item
        if isinstance(item, type):
            yield from (
                (f"{name}.{method}", function)
                for method, function in vars(item).items()
                if not method.startswith("_") and inspect.isfunction(function)
            )


@pytest.mark.parametrize(("name", "function"), list(public_functions()))
def test_every_public_name_has_a_signature_and_an_example(name, function):
    assert inspect.signature(function)
    if "Study" not in name:
        assert ">>> " in function.__doc__


def test_all_attention_of_texts_and_pairs_has_the_labels_of_its_tokens(place):
    text = regard.load(place / "runs" / "cats.txt", device="cpu")
    (tokens,) = text.attention("the cat sat", layers=[0], rows=[2, 5]).values()
    assert (tokens.rows, tokens.columns) == (["e", "a"], list("the cat sat"))
    (words,) = text.attention("the cat sat", layers=[0], words=True).values()
    assert words.rows == words.columns == ["the", "cat", "sat"]
    torch.testing.assert_close(words.weights.sum(-1), torch.ones(words.weights.shape[:2]))
    pair = regard.load(place / "runs" / "pairs.tsv", device="cpu")
    source, _ = pair.validation_pairs(1)[0]
    maps = pair.attention(source, target="12 chats")
    kinds = {name.rsplit(".", 1)[1]: each for name, each in maps.items()}
    assert "".join(kinds["cross"].rows[:8]) == "12 chats"
    assert "".join(kinds["cross"].columns).startswith(source)
    (encoder,) = pair.attention(source, target="12 chats", pattern="encoder.blocks.0.*").values()
    assert encoder.rows == encoder.columns == kinds["cross"].columns
    decoder = maps["decoder.blocks.0.attention"]
    assert decoder.columns[1:] == kinds["cross"].rows[:-1]  # it has read BOS, not EOS
    for wrong, message in (
        ({"layers": [7]}, "layer 7: there is only layer 0"),
        ({"heads": [9]}, "head 9: there are"),
        ({"pattern": "*.cross"}, r"no attention module matches '\*.cross'; available: decoder"),
    ):
        with pytest.raises(RegardError, match=message):
            text.attention("the cat", **wrong)
    with pytest.raises(
        RegardError, match=r"no attention module matches '\*\.7\.\*'; available: encoder"
    ):
        pair.attention(source, layers=[0, 7])
    with pytest.raises(ConfigError, match="this run reads no target; leave out target"):
        text.attention("the cat", target="le chat")
    with pytest.raises(ConfigError, match=r"500 tokens exceed context=\d+; shorten the input"):
        text.attention("a" * 500)
    for refused in (pair.find_heads, lambda: pair.logit_lens(source)):
        with pytest.raises(ConfigError, match="needs a decoder that continues a text; this run"):
            refused()


def test_a_translator_whose_layers_share_weights_is_explained_layer_by_layer(place, tmp_path):
    run = regard.train(
        str(place / "pairs.tsv"),
        "data.tokenizer=char",
        out=tmp_path / "run",
        model={"preset": "tiny-encoder-decoder", "dim": 8, "layers": 2, "shared_layers": True},
        train=SHORT,
        device="cpu",
    )
    text, _ = run.validation_pairs(1)[0]
    assert list(run.explain(text)) == ["decoder.blocks.0.cross#1"]
    every = run.attention(text)
    first = run.attention(text, layers=[0])
    assert list(first) == [name for name in every if name.endswith("#0")]
    assert len(every) == 2 * len(first) == 6


def test_the_states_of_a_translator_are_those_of_encoder_and_decoder(place, tmp_path):
    run = regard.train(
        str(place / "pairs.tsv"),
        "data.tokenizer=char",
        out=tmp_path / "run",
        model={"preset": "bahdanau", "dim": 8},
        train=SHORT,
        device="cpu",
    )
    text, _ = run.validation_pairs(1)[0]
    maps = run.states(text)
    encoder = maps["encoder.0.forward_layer"]
    assert "".join(encoder.rows).startswith(text)
    assert maps["encoder.0.backward_layer"].rows == encoder.rows
    (attention,) = run.attention(text).values()
    decoder = maps["decoder.0"]
    assert decoder.rows == ["<start>", *attention.rows[:-1]]  # what it reads, not what it predicts
    with trace(run.model, "decoder.0.state_hook") as activations, torch.no_grad():
        source, ids = source_and_translation(run, text)
        run.model(torch.tensor([ids[:-1]]), source=source)
    torch.testing.assert_close(decoder.values[-1], activations["decoder.0.state_hook"][0])


def test_the_effect_of_a_head_of_a_translator_is_the_loss_of_its_translation(place):
    run = regard.load(place / "runs" / "pairs.tsv", device="cpu")
    text, _ = run.validation_pairs(1)[0]
    source, ids = source_and_translation(run, text)
    path, head = "decoder.blocks.0.cross", 1

    def loss():
        with torch.no_grad():
            logits = run.model.head(run.model(torch.tensor([ids[:-1]]), source=source))
        return float(torch.nn.functional.cross_entropy(logits[0], torch.tensor(ids[1:])))

    before = loss()
    with trace(run.model, (), edit={f"{path}.heads_hook": ablate(heads=[head])}):
        without = loss()
    effect = float(run.head_effects(text)[path][head])
    assert effect == pytest.approx(without - before, abs=1e-5)
    assert effect != 0


def test_a_run_generates_with_its_edited_model_inside_a_trace(place):
    run = regard.load(place / "runs" / "cats.txt", device="cpu")
    before = run.generate("the ", max_new_tokens=12, sampler="greedy")
    with trace(
        run.model, "*.0.out_hook", edit={"*.heads_hook": lambda x: 50 * x.flip(-1)}
    ) as activations:
        edited = run.generate("the ", max_new_tokens=12, sampler="greedy")
    assert "decoder.blocks.0.out_hook" in activations
    assert edited != before
    assert run.generate("the ", max_new_tokens=12, sampler="greedy") == before


def test_what_a_text_run_says_of_its_inside(place):
    run = regard.load(place / "runs" / "cats.txt", device="cpu")
    lens = run.logit_lens("the cat")
    logits = run.model.head(run.model(torch.tensor([run.tokenizer.encode("the cat")])))
    assert lens.predictions[-1][-1] == run.tokenizer.piece(int(logits[0, -1].argmax()))
    assert (lens.final_rank[-1] == 0).all()
    attribution = run.attribution("the cat", output="s")
    assert attribution.output == "s"
    assert len(attribution.values) == 7
    assert "contribution" in attribution.to_pandas()
    assert run.find_heads().layers[0] == "decoder.blocks.0.attention"
    with pytest.raises(RegardError, match="Transformer has none"):
        run.states("the cat")


def test_calls_without_an_input_are_refused(place):
    run = regard.load(place / "runs" / "cats.txt")
    with pytest.raises(ConfigError, match="no run to compare"):
        regard.compare()
    with pytest.raises(ConfigError, match="at least 2 are needed"):
        run.head_effects("a")  # nothing is predicted: the loss would be NaN


@pytest.mark.parametrize("top", [0, -1, True, 1.5, "2", None])
def test_top_is_an_integer_of_at_least_1(place, top):
    run = regard.load(place / "runs" / "cats.txt")
    with pytest.raises(ConfigError, match="must be an integer of at least 1"):
        run.neighbours("c", top=top)


def test_a_path_may_begin_with_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "cats.txt").write_text("cats")
    assert run_name("~/cats.txt", None) == run_name(None, "~/cats.txt") == "cats"
