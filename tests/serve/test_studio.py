"""The studio: its page, its routes, and the training in a child process."""

import asyncio
import gc
import json
import math
import os
import re
import shutil
import signal
import sys
import textwrap
import threading
import time
import urllib.error
import urllib.request
import weakref
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from cli.conftest import TINY, trained
from hub.runs import make_checkpoint, model_config
from regard import api, pipelines
from regard.cli import training_process
from regard.cli.studio import _exit_on_hangup
from regard.config import kind_of
from regard.errors import ConfigError
from regard.generate.chain import DEFAULT_SAMPLERS
from regard.generate.sampler_spec import parse_sampler
from regard.serve.engine import EngineConfig
from regard.serve.middleware import MAX_BODY, LimitsMiddleware
from regard.serve.models import Models, ServedModel
from regard.serve.studio import folder as folder_module
from regard.serve.studio import routes
from regard.serve.studio import trainer as trainer_module
from regard.serve.studio.app import create_studio
from regard.serve.studio.folder import FolderModels, RunsFolder
from regard.serve.studio.trainer import SUFFIXES, Busy, Trainer
from regard.serve.worker import EngineThread
from regard.text.chat_template import CHATML, render
from serve.conftest import serving

PAGE = Path(routes.__file__).with_name("page")
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def folder(text_run, pair_run, tmp_path_factory):
    """A folder with two runs, which each test may add to."""
    path = tmp_path_factory.mktemp("studio") / "runs"
    shutil.copytree(pair_run, path / "pairs")
    shutil.copytree(text_run, path / "cats")
    return path


@pytest.fixture(scope="module")
def studio(folder):
    with serving([folder], create=create_studio) as (address, server):
        yield address, server


def ask(address, path, body=None, **headers):
    """The status, the headers and the content of an answer; JSON is read."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **headers}
    request = urllib.request.Request(address + path, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            content, status = answer.read().decode(), answer.status
            found = answer.headers
    except urllib.error.HTTPError as error:
        content, status, found = error.read().decode(), error.code, error.headers
    json_answer = found.get_content_type() == "application/json"
    return status, found, json.loads(content) if json_answer else content


def test_the_page_and_its_files_name_nothing_outside(studio):
    address, _ = studio
    status, headers, html = ask(address, "/")
    assert status == 200
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for path in PAGE.iterdir():
        status, headers, text = ask(address, f"/page/{path.name}")
        assert status == 200
        assert headers["Content-Security-Policy"] == policy
        outside = set(re.findall(r"https?://[^\s\"'`<)]+", text))
        assert outside <= {"http://www.w3.org/2000/svg"}  # a name, not an address
        for name in re.findall(r"[\"'(]/page/([^\"'#)]+)", text):
            assert (PAGE / name).is_file()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    assert ask(address, "/page/..%2fapp.py")[0] == 404
    notes = (PAGE / "notes.html").read_text("utf-8")
    for anchor in re.findall(r"notes\.html#([a-z-]+)", html):
        assert f'id="{anchor}"' in notes
    for name in re.findall(r"docs/[a-z/-]+\.md", notes):
        assert (Path(__file__).parents[2] / name).is_file()


def test_a_request_for_many_ranges_gets_the_file_once(studio):
    address, _ = studio
    whole = ask(address, "/page/main.js")
    for ranges in ("0-0,1-1", ",".join(["0-"] * 500), "-1,0-,junk"):
        status, _, content = ask(address, "/page/main.js", Range=f"bytes={ranges}")
        assert (status, content) == (whole[0], whole[2])


def test_every_id_that_the_scripts_use_is_in_the_page():
    html = (PAGE / "index.html").read_text("utf-8")
    for script in PAGE.glob("*.js"):
        for name in re.findall(r'\$\("([a-z-]+)"\)', script.read_text("utf-8")):
            assert f'id="{name}"' in html, f"{script.name} uses #{name}"


def test_no_name_leaves_the_folder(studio, folder, text_run):
    address, _ = studio
    shutil.copytree(text_run, folder.parent / "outside")
    for name in ("..", ".hidden", "a/b", "../outside", "texts", "", "x" * 65, "a b", "/etc"):
        quoted = urllib.request.quote(name, safe="")
        if name:  # without one, it is the list
            assert ask(address, f"/studio/runs/{quoted}")[0] in (400, 404)
        body = {"name": name, "text": "a text"}
        status, _, answer = ask(address, "/studio/train", body)
        assert status == 400
        assert "name" in answer["error"]["message"]
        assert ask(address, "/studio/resume", {"name": name})[0] == 400
        assert ask(address, f"/studio/structure?name={quoted}")[0] == 400
        assert ask(address, f"/studio/structure?name=run:{quoted}")[0] == 400
        assert ask(address, f"/studio/diff?first=gpt2&second={quoted}")[0] == 400
    assert sorted(path.name for path in folder.iterdir()) == ["cats", "pairs"]


def test_settings_that_name_files_are_refused(studio):
    address, _ = studio
    for word in ("data.path=/etc/passwd", "train.start=runs/x", "name=x", "--out", "model.x"):
        body = {"name": "new", "text": "a text", "settings": [word]}
        status, _, answer = ask(address, "/studio/train", body)
        assert status == 400
        assert word in answer["error"]["message"]
    assert "train.seed" in answer["error"]["message"]
    for body in (
        {"name": "new", "text": " \n"},
        {"name": "new"},
        {"name": "new", "recipe": "century"},
        {"name": "new", "recipe": "/etc/passwd"},
        {"name": "new", "text": "a", "suffix": "/../x"},
        {"name": "cats", "text": "a text"},
        {"name": "new", "text": "a text", "settings": ["data.tokenizer=char\0"]},
    ):
        assert ask(address, "/studio/train", body)[0] == 400
    choices = ask(address, "/studio/choices")[2]
    assert choices["max_bytes"] < MAX_BODY - 1024  # the page says so before the middleware refuses
    assert choices["suffixes"] == list(SUFFIXES)
    for slider in choices["sliders"]:  # at `off` a sampler does nothing
        assert parse_sampler(f"{slider['name']}={slider['off']}").is_off
    shown = {s["name"]: s["value"] for s in choices["sliders"] if s["value"] != s["off"]}
    assert [f"{name}={value}" for name, value in shown.items()] == list(DEFAULT_SAMPLERS)


def test_pages_of_other_sites_cannot_write(studio):
    address, _ = studio
    body = {"name": "new", "text": "a text"}
    for path in ("/studio/train", "/studio/resume", "/studio/stop", "/studio/distribution"):
        assert ask(address, path, body, Origin="http://elsewhere.example")[0] == 403
        assert ask(address, path, body, Origin="null")[0] == 403
        assert ask(address, path, body, **{"Content-Type": "text/plain"})[0] == 415
        assert ask(address, path, body, Host="elsewhere.example")[0] == 403
    assert ask(address, "/studio/stop", {}, Origin=address)[0] == 200
    assert "frame-ancestors 'none'" in ask(address, "/")[1]["Content-Security-Policy"]


def test_a_key_protects_all_but_the_page(folder):
    app = create_studio([folder], api_key="secret")
    middleware = next(m for m in app.user_middleware if "public_paths" in m.kwargs)
    refuses = LimitsMiddleware(app, **middleware.kwargs)._refusal
    for path in ("/", "/page/main.js", "/maps/x", "/health"):
        assert refuses({"path": path, "method": "GET"}, {b"host": "a"}) is None
    for path in ("/studio/runs", "/studio/choices", "/v1/models", "/pagex", "/openapi.json"):
        assert refuses({"path": path, "method": "GET"}, {b"host": "a"})[0] == 401
    with pytest.raises(ConfigError, match="is a run; give the folder that it is in"):
        create_studio([folder / "cats"])


def test_runs_and_their_curves_are_listed(studio, folder):
    address, _ = studio
    _, _, answer = ask(address, "/studio/runs")
    assert {run["name"] for run in answer["runs"]} == {"cats", "pairs"}
    run = next(run for run in answer["runs"] if run["name"] == "cats")
    assert (run["name"], run["ready"], run["task"]) == ("cats", True, "causal")
    assert "generate" in run["methods"]
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text("{")
    broken = ask(address, "/studio/runs")[2]["runs"][0]
    assert broken["problem"]
    shutil.rmtree(folder / "broken")
    _, _, progress = ask(address, "/studio/runs/cats")
    assert progress["step"] == progress["steps"] == 2
    assert progress["finished"]
    assert [step for step, _ in progress["loss"]] == [1, 2]
    assert progress["validation"]["loss"][-1][0] == 2
    assert progress["metrics"]["perplexity"] > 1
    assert [sample["step"] for sample in progress["samples"]] == [2, 0]
    samples = folder / "cats" / "samples.txt"
    kept = samples.read_text("utf-8")
    samples.write_text("".join(f"--- step {n}\nsample {n}\nends\n" for n in range(0, 101, 10)))
    found = ask(address, "/studio/runs/cats")[2]["samples"]
    samples.write_text(kept, "utf-8")
    assert [sample["step"] for sample in found] == [100, 80, 60, 40, 20, 0]
    assert found[0]["text"] == "sample 100\nends"


def test_each_stage_shows_what_it_leaves(studio):
    address, _ = studio
    body = {"model": "cats", "text": "the cat", "sampler": ["temperature=0.5", "top_k=2"], "top": 5}
    _, _, answer = ask(address, "/studio/distribution", body)
    model, warm, cut = answer["stages"]
    assert [stage["sampler"] for stage in answer["stages"]] == [
        "the model",
        "temperature=0.5",
        "top_k=2",
    ]
    assert cut["remaining"] == 2 < warm["remaining"] == answer["vocab_size"]
    assert sum(cut["probabilities"]) == pytest.approx(1, abs=1e-5)
    assert cut["probabilities"][2:] == [0, 0, 0]
    ratio = model["probabilities"][0] / model["probabilities"][1]
    assert warm["probabilities"][0] / warm["probabilities"][1] == pytest.approx(ratio**2, rel=1e-3)
    assert cut["bits"] < warm["bits"] < model["bits"]
    _, _, explained = ask(address, "/explain", {"model": "cats", "text": "the cat", "top": 5})
    assert [token["id"] for token in answer["tokens"]] == [each["id"] for each in explained["next"]]
    expected = [each["probability"] for each in explained["next"]]
    assert model["probabilities"] == pytest.approx(expected, abs=1e-5)
    pairs = {"model": "pairs", "text": "100 cats", "sampler": ["top_k=1"]}
    assert ask(address, "/studio/distribution", pairs)[2]["stages"][1]["remaining"] == 1
    status, _, wrong = ask(address, "/studio/distribution", {**body, "sampler": ["top_p=2"]})
    assert (status, wrong["error"]["message"]) == (400, "top_p=2.0 must lie in [0, 1]")


def test_a_token_of_tiny_probability_is_not_removed(studio):
    body = {"model": "cats", "text": "the cat", "sampler": ["temperature=0.001", "top_k=2"]}
    model, cold, cut = ask(studio[0], "/studio/distribution", {**body, "top": 5})[2]["stages"]
    assert min(model["probabilities"]) > 0 == min(cold["probabilities"])
    assert cold["removed"] == model["removed"] == [False] * 5
    assert cut["removed"] == [False, False, True, True, True]


def test_a_prompt_is_put_into_the_chat_template(studio, folder, chat_run):
    """The first token of the response has the probabilities of /v1/chat/completions."""
    address, _ = studio
    shutil.copytree(chat_run, folder / "chat")
    try:
        runs = {run["name"]: run for run in ask(address, "/studio/runs")[2]["runs"]}
        assert [runs[name]["has_template"] for name in ("chat", "cats")] == [True, False]
        body = {"model": "chat", "text": "7 cats", "sampler": ["top_k=3"], "top": 3}
        raw = ask(address, "/studio/distribution", body)[2]
        answer = ask(address, "/studio/distribution", {**body, "chat": True})[2]
        assert raw["formatted"] is None
        assert answer["formatted"] == render(
            CHATML, [("user", "7 cats")], add_generation_prompt=True
        )
        messages = [{"role": "user", "content": "7 cats"}]
        options = {"logprobs": True, "top_logprobs": 3, "max_tokens": 1, "ignore_eos": True}
        chat = {"model": "chat", "messages": messages, **options}
        _, _, response = ask(address, "/v1/chat/completions", chat)
        (first,) = response["choices"][0]["logprobs"]["content"]
        expected = [math.exp(entry["logprob"]) for entry in first["top_logprobs"]]
        assert answer["stages"][0]["probabilities"] == pytest.approx(expected, rel=1e-4)
        assert answer["stages"] != raw["stages"]
        # of a run without a template, what /v1/chat/completions makes of it
        plain = {**body, "model": "cats", "chat": True}
        assert ask(address, "/studio/distribution", plain)[2]["formatted"] is None
    finally:
        shutil.rmtree(folder / "chat")


def test_two_texts_have_attention_maps_too(studio, folder, entailment_run):
    address, _ = studio
    shutil.copytree(entailment_run, folder / "entails")
    try:
        body = {"name": "entails", "text": "cat 1"}
        status, _, refused = ask(address, "/studio/attention", body)
        assert (status, refused["error"]["param"]) == (400, "second_text")
        assert "reads premise and hypothesis, not 1 text" in refused["error"]["message"]
        status, _, answer = ask(address, "/studio/attention", {**body, "second_text": "dog 1"})
        assert status == 200, answer
        assert "dog" in ask(address, answer["page"])[2]
        two = {"name": "cats", "text": "the", "second_text": "cat"}
        assert ask(address, "/studio/attention", two)[0] == 400
        two = {**body, "second_text": "dog " * 600}
        assert "the limit is 512" in ask(address, "/studio/attention", two)[2]["error"]["message"]
    finally:
        shutil.rmtree(folder / "entails")


def test_attention_maps_are_a_page_without_access_to_the_studio(studio):
    address, server = studio
    body = {"name": "cats", "text": f"the cat {HOSTILE}"}
    _, _, answer = ask(address, "/studio/attention", body)
    status, headers, page = ask(address, answer["page"])
    assert status == 200
    assert "sandbox allow-scripts" in headers["Content-Security-Policy"]
    assert "frame-ancestors 'self'" in headers["Content-Security-Policy"]
    assert HOSTILE not in page
    assert answer["unknown"]  # characters that the run has not seen
    studio = server.app.state.studio
    for _ in range(routes.MAX_MAPS):
        studio.store_page("another")
    assert ask(address, answer["page"])[0] == 404
    studio.store_page("x" * routes.MAX_MAP_CHARACTERS)
    assert len(studio.maps) == 1
    status, _, refused = ask(address, "/studio/attention", {"name": "cats", "text": "cat " * 199})
    assert status == 400
    assert "the limit is" in refused["error"]["message"]


def test_a_model_without_attention_is_named(studio, folder, materials):
    run = trained(folder / "counts", materials / "cats.txt", ["model.preset=ngram"])
    status, _, refused = ask(studio[0], "/studio/attention", {"name": "counts", "text": "the cat"})
    shutil.rmtree(run)
    assert status == 400
    assert refused["error"]["message"] == (
        "the run 'counts' is a model of the family ngram, which has no attention, so there are no "
        "maps"
    )


def test_a_text_without_a_token_is_refused(studio, folder, materials):
    """A tokenizer of words finds none in a space."""
    words = [*TINY, "model.context=16", "train.steps=1", "data.tokenizer=word"]
    run = trained(folder / "words", materials / "cats.txt", words)
    try:
        for path, name in (("/studio/attention", "name"), ("/explain", "model")):
            status, _, refused = ask(studio[0], path, {name: "words", "text": " "})
            assert (status, refused["error"]["message"]) == (
                400,
                "text: it has no token; give some text",
            )
    finally:
        shutil.rmtree(run)


def test_figures_take_a_text_and_never_a_file(studio, folder):
    address, _ = studio
    body = {"figure": "next-token", "name": "cats", "text": "the cat"}
    _, _, answer = ask(address, "/studio/figure", body)
    (table,) = answer["tables"]
    assert table["header"][:2] == ["token", "P"]
    secret = folder / "secret.txt"
    secret.write_text("zebra zebra")
    _, _, drawn = ask(address, "/studio/figure", {"figure": "bag-of-words", "text": str(secret)})
    secret.unlink()
    assert "zebra" not in json.dumps(drawn)
    status, _, answer = ask(address, "/studio/figure", {"figure": "gates", "name": "cats"})
    assert status == 400
    assert ask(address, "/studio/figure", {"figure": "gates", "name": "/etc"})[0] == 404
    figures = ask(address, "/studio/choices")[2]["figures"]
    assert [figure["name"] for figure in figures] == list(api.figures())


def test_structures_and_differences_are_those_of_the_commands(studio, folder):
    address, _ = studio
    _, _, gpt2 = ask(address, "/studio/structure?name=gpt2")
    assert gpt2["diagram"].splitlines() == api.info("gpt2").diagram()
    _, _, answer = ask(address, "/studio/diff?first=gpt2&second=run:cats")
    assert answer["groups"]["sizes"]["layers"][0] == 12
    (folder / "gpt2").symlink_to(folder / "cats")  # a run with the name of a preset
    assert ask(address, "/studio/structure?name=gpt2")[2] == gpt2
    assert ask(address, "/studio/structure?name=run:gpt2")[2]["kind"] == "run"
    (folder / "gpt2").unlink()
    _, _, answer = ask(address, "/studio/diff?first=gpt2&second=gpt2")
    assert not any(answer["groups"].values())


def test_new_weights_are_loaded_again(studio, folder):
    address, server = studio
    models = server.app.state.service.models
    body = {"model": "cats", "prompt": "the", "max_tokens": 1}
    assert ask(address, "/v1/completions", body)[0] == 200
    before = models.loaded["cats"]
    assert ask(address, "/v1/completions", body)[0] == 200
    assert models.loaded["cats"] is before
    weights = weakref.ref(before.run.model)
    del before
    os.utime(folder / "cats" / "model.safetensors", ns=(1, 1))
    assert ask(address, "/v1/completions", body)[0] == 200
    assert weights() is None  # the old ones are not in memory any more


def test_runs_that_appear_and_vanish(studio, folder):
    address, server = studio
    models = server.app.state.service.models
    shutil.copytree(folder / "cats", folder / "copy")
    names = [card["id"] for card in ask(address, "/v1/models")[2]["data"]]
    assert {*names} == {"cats", "pairs", "copy"}
    body = {"model": "copy", "prompt": "the", "max_tokens": 1}
    assert ask(address, "/v1/completions", body)[0] == 200
    weights = weakref.ref(models.loaded["copy"].run.model)
    wait_for(lambda: not models.loaded["copy"].active_requests)
    shutil.rmtree(folder / "copy")
    assert ask(address, "/v1/completions", body)[0] == 404
    assert "copy" not in models.loaded
    wait_for(lambda: gc.collect() or weights() is None)


def test_an_empty_folder_has_no_model(tmp_path):
    with serving([tmp_path / "none"], create=create_studio) as (address, _):
        status, _, answer = ask(address, "/v1/completions", {"prompt": "the"})
        assert (status, answer["error"]["message"]) == (404, "there is no model yet")


def test_weights_that_change_while_they_are_loaded_are_loaded_again(folder, monkeypatch):
    """A second request arrives after the change, while the first still loads the old weights."""
    begun, release, loads = threading.Event(), threading.Event(), []

    def load(models, name):
        loads.append(name)
        begun.set()
        assert release.wait(60)
        return ServedModel(name, None, None)

    monkeypatch.setattr(Models, "_load", load)
    models = FolderModels([folder], EngineThread(lambda events: None), EngineConfig())

    async def visit():
        first = asyncio.create_task(models.get("cats"))
        await asyncio.to_thread(begun.wait, 60)
        os.utime(folder / "cats" / "model.safetensors", ns=(2, 2))
        second = asyncio.create_task(models.get("cats"))
        await asyncio.sleep(0)
        release.set()
        for task in (first, second):
            models.release(await task)
        await models.get("cats")

    asyncio.run(visit())
    assert len(loads) == 2


def test_an_imported_run_without_a_task_is_listed(tmp_path):
    make_checkpoint(tmp_path / "theirs", model_config(head="none"))
    api.import_checkpoint(tmp_path / "theirs", tmp_path / "runs" / "imported")
    (run,) = RunsFolder(tmp_path / "runs").list()
    assert (run["name"], run["task"], run["methods"]) == ("imported", "none", [])
    assert run["problem"] is None


def test_one_broken_run_does_not_hide_the_others(studio, monkeypatch):
    def pipeline_of(config):
        if kind_of(config.task)[0] == "causal":
            raise ConfigError("data.kind='x' is unknown")
        return pipelines.pipeline_of(config)

    monkeypatch.setattr(folder_module, "pipeline_of", pipeline_of)
    runs = {run["name"]: run for run in ask(studio[0], "/studio/runs")[2]["runs"]}
    assert runs["cats"]["problem"] == "data.kind='x' is unknown"
    assert runs["pairs"]["problem"] is None


CHILD = """
import json, signal, sys, time
print("data  what was chosen", sys.argv[1:], file=sys.stderr, flush=True)
if "fail" in sys.argv[2]:
    print("regard: the text is too short;\\ngive a longer one", file=sys.stderr)
    sys.exit(3)
def stop(*_):
    print("regard: stopped by SIGTERM at step 1 of 2; checkpoint saved;", file=sys.stderr)
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
time.sleep(60)
"""


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_closed_terminal_ends_the_studio_as_sigterm_does():
    numbers = (signal.SIGHUP, signal.SIGTERM)
    before, got = [signal.getsignal(number) for number in numbers], []
    try:
        signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
        _exit_on_hangup()
        signal.raise_signal(signal.SIGHUP)
        assert not got
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        _exit_on_hangup()
        signal.raise_signal(signal.SIGHUP)
        assert got == [signal.SIGTERM]
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def test_a_run_that_is_deleted_meanwhile_is_not_listed(tmp_path, monkeypatch):
    for name in ("gone", "kept"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")

    def is_file(path):
        if path.parent.name == "gone":
            path.unlink()
        return True

    monkeypatch.setattr(Path, "is_file", is_file)
    assert RunsFolder(tmp_path).names() == ["kept"]


def test_a_training_stops_when_the_studio_is_killed(tmp_path):
    """What SIGKILL leaves of the studio is a closed pipe."""
    assert trainer_module.COMMAND[-1] == training_process.__name__
    script = tmp_path / "child.py"
    script.write_text(
        f"import runpy, time\npath = {training_process.__file__!r}\n"
        "runpy.run_path(path)['stop_with_parent'](0)\nprint('begun', flush=True)\ntime.sleep(60)"
    )
    trainer = Trainer(RunsFolder(tmp_path / "runs"), (sys.executable, "-S", str(script)))
    trainer.train_text("first", "text", ".txt", [])
    while "begun" not in trainer.state()["output"]:
        time.sleep(0.02)
    assert trainer.state()["running"]
    trainer._process.stdin.close()
    assert trainer._process.wait(60) == -signal.SIGTERM
    trainer.close()


def test_one_training_at_a_time_in_a_child_process(tmp_path):
    script = tmp_path / "child.py"
    script.write_text(textwrap.dedent(CHILD))
    trainer = Trainer(RunsFolder(tmp_path / "runs"), (sys.executable, "-S", str(script)))
    assert trainer.state()["running"] is False
    (outside := tmp_path / "outside").write_text("kept")
    (tmp_path / "runs" / "texts").mkdir(parents=True)
    (tmp_path / "runs" / "texts" / "first.txt").symlink_to(outside)  # replaced, not followed
    trainer.train_text("first", "été\n", ".txt", ["minutes=1"])
    wait_for(lambda: "ready" in trainer.state()["output"])
    text = tmp_path / "runs" / "texts" / "first.txt"
    assert text.read_bytes() == "été\n".encode()
    assert outside.read_text() == "kept"
    words = ["train", str(text), "minutes=1", "--out", str(tmp_path / "runs" / "first")]
    assert str(words) in trainer.state()["output"]
    for start in (
        lambda: trainer.train_text("second", "a", ".txt", []),
        lambda: trainer.train_recipe("second", "quickstart", []),
    ):
        with pytest.raises(
            Busy, match="'first' is being trained, and one run is trained at a time"
        ):
            start()
    trainer.stop()
    wait_for(lambda: not trainer.state()["running"])
    state = trainer.state()
    assert state["message"] == "first is stopped and saved; resume continues it."
    assert not state["failed"]
    trainer.train_text("fail", "a", ".tsv", [])
    wait_for(lambda: not trainer.state()["running"])
    state = trainer.state()
    assert (state["failed"], state["message"]) == (
        True,
        "the text is too short;\ngive a longer one",
    )
    trainer.train_recipe("third", "quickstart", [])
    wait_for(lambda: "ready" in trainer.state()["output"])
    trainer.close()
    assert trainer.state()["running"] is False
