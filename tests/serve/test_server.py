"""The HTTP API: what clients of OpenAI's API send and expect, and what must not get through."""

import base64
import contextlib
import io
import json
import math
import re
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
import weakref
from array import array
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch

import regard
from cli.conftest import invoke, materials, trained  # noqa: F401 -- fixtures
from regard.errors import ConfigError
from regard.generate.chain import Chain
from regard.nn.attention import Attention
from regard.serve import jobs
from regard.serve.async_engine import Continuation
from regard.serve.engine import EngineConfig
from regard.serve.engine_request import prepare
from regard.serve.request import Event, Request, TokenLogprobs
from regard.serve.worker import (
    FIRST_STEP_SECONDS,
    FIRST_STEP_SECONDS_CPU,
    STALL_SECONDS,
    EngineStopped,
    EngineThread,
)
from serve.conftest import serving

pytest.importorskip("fastapi")


class Client:
    """Requests by the standard library."""

    def __init__(self, address):
        self.address = address

    def open(self, path, body=None, **headers):
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **headers}
        request = urllib.request.Request(self.address + path, data, headers)
        try:
            return urllib.request.urlopen(request, timeout=60)
        except urllib.error.HTTPError as error:
            return error

    def __call__(self, path, body=None, **headers):
        with self.open(path, body, **headers) as answer:
            content = answer.read()
        kind = answer.headers["Content-Type"] or ""
        return answer.status, json.loads(content) if "json" in kind else content.decode()

    def stream(self, path, body, failing=False):
        with self.open(path, {**body, "stream": True}) as answer:
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            lines = [line.decode().strip() for line in answer]
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        chunks = [json.loads(line) for line in data if line != "[DONE]"]
        assert failing or not any("error" in chunk for chunk in chunks), chunks
        return chunks


@pytest.fixture(scope="module")
def client(live):
    return Client(live[0])


@pytest.fixture(scope="module")
def run(text_run):
    return regard.load(text_run)


BODIES = [
    {"prompt": "the cat", "max_tokens": 90, "seed": 5},  # beyond the context
    {"prompt": "so did", "max_tokens": 12, "seed": 1, "temperature": 0.7, "top_k": 5},
    {"prompt": "a", "max_tokens": 40, "seed": 2, "sampler": ["min_p=0.05", "temperature=1.2"]},
    {"prompt": "mat,", "max_tokens": 20, "seed": 3, "dry": {"multiplier": 0.8}, "xtc": 0.4},
    {"prompt": "1", "max_tokens": 25, "seed": 4, "temperature": 0, "stop": ["t", "zz"]},
    {"prompt": "", "max_tokens": 9, "seed": 6, "repetition_penalty": 1.3, "typical": 0.9},
]
SAMPLERS = [
    ["temperature=0.8", "top_p=0.95"],
    ["temperature=0.7", "top_k=5"],
    ["min_p=0.05", "temperature=1.2"],
    ["dry=0.8", "xtc=0.4"],
    ["greedy"],
    ["repetition=1.3", "typical=0.9"],
]


def solo(run, number):
    body = BODIES[number]
    return run.generate(
        body["prompt"],
        max_new_tokens=body["max_tokens"],
        sampler=SAMPLERS[number],
        seed=body["seed"],
        stop_strings=body.get("stop", []),
    )


def test_many_clients_at_once_get_what_each_gets_alone(client, run):
    """20 clients, streaming or not; longer forms are below."""
    expected = [solo(run, number) for number in range(len(BODIES))]

    def ask(number):
        body = {"model": "cats", **BODIES[number % len(BODIES)]}
        if number % 2:
            chunks = client.stream("/v1/completions", body)
            assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")
            return "".join(chunk["choices"][0]["text"] for chunk in chunks)
        status, answer = client("/v1/completions", body)
        assert status == 200, answer
        return answer["choices"][0]["text"]

    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(ask, range(20)))
    assert answers == [expected[number % len(BODIES)] for number in range(20)]


def test_several_choices_have_the_seeds_that_follow(client, run):
    body = {"prompt": ["the", "cat"], "max_tokens": 10, "n": 2, "seed": 7, "best_of": 2}
    _, answer = client("/v1/completions", body)
    expected = [
        run.generate(prompt, max_new_tokens=10, seed=seed)
        for prompt in ("the", "cat")
        for seed in (7, 8)
    ]
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["completion_tokens"] <= 40
    texts = [""] * 4
    for chunk in client.stream("/v1/completions", body):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == expected
    many = client("/v1/completions", {**body, "prompt": "the", "best_of": 6, "n": 1, "logprobs": 0})
    (best,) = many[1]["choices"]
    singles = [
        client("/v1/completions", {"prompt": "the", "max_tokens": 10, "seed": seed, "logprobs": 0})
        for seed in range(7, 13)
    ]
    scores = {
        single["choices"][0]["text"]: fmean(single["choices"][0]["logprobs"]["token_logprobs"])
        for _, single in singles
    }
    assert best["text"] == max(scores, key=scores.get)


def test_an_empty_continuation_is_the_best_of_none():
    likely = Continuation(tokens=[1], logprobs=[TokenLogprobs(1, -0.1)])
    rare = Continuation(tokens=[2], logprobs=[TokenLogprobs(2, -9.0)])
    assert max([Continuation(), rare, likely], key=lambda c: c.mean_logprob) is likely
    assert max([Continuation(), rare], key=lambda c: c.mean_logprob) is rare


def test_log_probabilities_of_prompt_and_answer(client, live, run):
    from regard.serve.routes.completions import logprob_table

    ids = run.tokenizer.encode("the cat")
    body = {"prompt": [ids], "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
    _, answer = client("/v1/completions", body)
    (choice,) = answer["choices"]
    table = choice["logprobs"]
    assert "".join(table["tokens"]) == choice["text"]
    assert table["text_offset"] == list(range(8))
    assert table["token_logprobs"][0] is None
    assert table["top_logprobs"][0] is None
    for best, own in zip(table["top_logprobs"][1:], table["token_logprobs"][1:], strict=True):
        assert max(best.values()) >= own
    assert max(table["top_logprobs"][-1].values()) == table["token_logprobs"][-1]
    model = live[1].app.state.service.models.loaded["cats"]
    impossible = TokenLogprobs(1, -math.inf, array("q", [1]), array("d", [-math.inf]))
    json.dumps(logprob_table(model, None, [impossible], 1), allow_nan=False)
    _, only = client("/v1/completions", {**body, "max_tokens": 0})
    assert only["choices"][0]["text"] == "the cat"
    assert only["choices"][0]["logprobs"]["token_logprobs"] == table["token_logprobs"][:-1]
    assert only["usage"]["completion_tokens"] == 0
    chunks = client.stream("/v1/completions", {**body, "max_tokens": 0})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "the cat"


@pytest.mark.parametrize("echo", [False, True])
def test_log_probabilities_are_the_same_when_they_are_streamed(client, echo):
    body = {"prompt": ["the cat", "so"], "max_tokens": 8, "seed": 1, "logprobs": 1, "echo": echo}
    _, answer = client("/v1/completions", body)
    chunks = [chunk["choices"][0] for chunk in client.stream("/v1/completions", body)]
    for choice in answer["choices"]:
        parts = [chunk["logprobs"] for chunk in chunks if chunk["index"] == choice["index"]]
        for key, values in choice["logprobs"].items():
            assert [value for part in parts for value in part[key]] == values


def test_chat_and_responses_continue_a_conversation(client, run):
    messages = [{"role": "user", "content": "the cat"}]
    body = {"messages": messages, "max_tokens": 12, "seed": 3, "logprobs": True, "top_logprobs": 2}
    _, answer = client("/v1/chat/completions", body)
    text = answer["choices"][0]["message"]["content"]
    prompt = "User: the cat\nAssistant:"
    alone = run.generate(prompt, max_new_tokens=12, seed=3, stop_strings=["\nUser:", "\nSystem:"])
    assert text == alone.removeprefix(" ")
    used = answer["usage"]["completion_tokens"]
    assert len(answer["choices"][0]["logprobs"]["content"]) == used
    chunks = client.stream("/v1/chat/completions", {**body, "stream_options": {"include_usage": 1}})
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == used
    assert chunks[-2]["choices"][0]["finish_reason"] in ("length", "stop")
    pieces = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1]]
    assert "".join(pieces) == text
    body = {"input": "the cat", "max_output_tokens": 12, "seed": 3}
    _, answer = client("/v1/responses", body)
    assert answer["output"][0]["content"][0]["text"] == text
    assert answer["status"] in ("completed", "incomplete")
    assert answer["output"][0]["status"] == answer["status"]
    events = client.stream("/v1/responses", body)
    assert "".join(e["delta"] for e in events if e["type"].endswith("text.delta")) == text
    assert events[-1]["response"]["output"] == [
        {**answer["output"][0], "id": events[-1]["response"]["output"][0]["id"]}
    ]


def test_only_the_first_space_of_a_response_is_removed(client, monkeypatch):
    monkeypatch.setattr("regard.serve.async_engine.MAX_EVENTS", 1)  # a delta for every token
    space, end = client("/tokenize", {"prompt": " t"})[1]["tokens"]
    sampler = ["force={tokens=[%d, %d, %d]}" % (space, space, end)]  # noqa: UP031 -- braces
    body = {"input": "the cat", "max_output_tokens": 3, "sampler": sampler}
    _, answer = client("/v1/responses", body)
    assert answer["output"][0]["content"][0]["text"] == " t"
    events = client.stream("/v1/responses", body)
    assert "".join(e["delta"] for e in events if e["type"].endswith("text.delta")) == " t"


def test_text_and_ids(client, run):
    _, answer = client("/tokenize", {"prompt": "the cat"})
    assert answer["tokens"] == run.tokenizer.encode("the cat")
    assert client("/detokenize", {"tokens": answer["tokens"]}) == (200, {"prompt": "the cat"})
    assert client("/tokenizer_info")[1]["eos_token"] == "<stop>"
    assert [card["id"] for card in client("/v1/models")[1]["data"]] == ["cats", "pairs"]
    assert client("/v1/models/cats")[1]["id"] == "cats"


def test_translation_prediction_and_explanation(client, run, pair_run, monkeypatch):
    translator = regard.load(pair_run)
    body = {"model": "pairs", "text": ["117 cats", "118 cats"], "beam": 2}
    assert client("/translate", body)[1]["translations"] == translator.translate(
        body["text"], beam=2
    )
    _, answer = client("/predict", {"model": "pairs", "input": "117 cats"})
    assert answer["predictions"] == translator.predict(["117 cats"])
    body = {"model": "pairs", "prompt": "117 cats", "max_tokens": 50, "temperature": 0}
    status, greedy = client("/v1/completions", body)
    assert status == 200, greedy
    assert greedy["choices"][0]["text"] == translator.translate("117 cats", beam=1)
    for path, field in (("/translate", "text"), ("/predict", "input")):
        status, answer = client(path, {"model": "cats", field: "117 cats"})
        assert (status, answer["error"]["param"]) == (400, "model")
        assert answer["error"]["message"] == (
            f"model: 'cats' cannot {path[1:]}; use /v1/completions, or another model"
        )
    for path, name in (("/translate", "text"), ("/predict", "input"), ("/explain", "text")):
        status, answer = client(path, {"model": "pairs", name: "1 " * 1000})
        assert (status, "shorten it" in answer["error"]["message"]) == (400, True)
    with monkeypatch.context() as patch:
        patch.setattr("regard.serve.jobs.MAX_EXPLAINED", 1)
        _, answer = client("/explain", {"model": "pairs", "text": "117 cats"})
    assert "the limit is 1;" in answer["error"]["message"]
    _, answer = client("/explain", {"model": "pairs", "text": "117 cats", "temperature": 0})
    assert any("cross" in name for name in answer["attention"])
    assert answer["next"][0]["id"] == answer["trace"][0]["id"]
    _, scored = client("/v1/completions", {**body, "max_tokens": 1, "logprobs": 1})
    assert scored["choices"][0]["logprobs"]["tokens"] == [answer["next"][0]["piece"]]
    _, answer = client("/explain", {"text": "the cat", "top": 3, "top_k": 4, "seed": 1})
    ((_, shown),) = answer["attention"].items()
    assert shown["rows"] == list("the cat")
    assert sum(shown["weights"][0][-1]) == pytest.approx(1, abs=1e-4)
    assert len(answer["next"]) == 3
    assert answer["trace"][0]["samplers"][0]["sampler"] == "top_k=4"
    status, answer = client("/v1/embeddings", {"input": "the cat", "dimensions": 8})
    assert (status, answer["error"]["param"]) == (400, "dimensions")
    _, answer = client("/v1/embeddings", {"input": ["the cat", "a dog"]})
    vectors = [row["embedding"] for row in answer["data"]]
    assert [sum(x * x for x in vector) for vector in vectors] == pytest.approx([1, 1])


class Predictor:
    """A run of some kind of data that gives back what it predicts from."""

    takes_source, name, methods = False, "any", ("predict",)
    config = SimpleNamespace(task={"kind": "forecast", "column": ["a", "b"]})

    def __init__(self, kind, inputs=("text",)):
        self.run, self.pipeline, self.inputs = self, SimpleNamespace(name=kind), inputs

    def predict(self, what, *, top):
        return [each if isinstance(each, str | tuple) else each.read_bytes() for each in what]

    def forecast(self, path, *, steps):
        return path.read_text().split(), steps


@pytest.mark.parametrize(
    ("kind", "inputs", "body", "expected"),
    [
        ("labels", ("text",), {"input": "one"}, ["one"]),
        ("labels", ("first", "second"), {"input": [["one", "two"]]}, [("one", "two")]),
        ("labels", ("first", "second"), {"input": ["one", "two"]}, '[["the first", "the second"]]'),
        ("images", (), {"image": "data:image/png;base64,aWNl"}, [b"ice"]),
        ("images", (), {"image": "!"}, "must be a PNG, JPEG, WebP or GIF file in base64"),
        ("images", (), {"input": "/etc/passwd"}, "predicts from 'image'"),
        ("series", (), {"series": {"b": [2, 4], "a": [1, 3]}, "steps": 5}, ("a,b 1,2 3,4", 5)),
        ("series", (), {"series": [1, 2]}, "columns of equal length by name: a, b"),
        ("text", ("text",), {"input": "a", "steps": 3}, "only a forecast of a series has steps"),
    ],
)
def test_predictions_from_texts_images_and_series(kind, inputs, body, expected):
    from regard.serve import jobs
    from regard.serve.schema import PredictBody

    model, body = Predictor(kind, inputs), PredictBody(**body)
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=re.escape(expected)):
            jobs.predict(model, body)
        return
    if kind == "series":
        lines, steps = expected
        lines = re.sub(r"\b(\d)\b", r"\1.0", lines)
        expected = (lines.split(), steps)
    assert jobs.predict(model, body) == expected


def test_small_files_of_many_pixels_are_not_decoded():
    from regard.serve import jobs
    from regard.serve.schema import PredictBody

    file = io.BytesIO()
    pytest.importorskip("PIL.Image").new("1", (5000, 5000)).save(file, "PNG")
    image = base64.b64encode(file.getvalue()).decode()
    assert len(jobs.predict(Predictor("images"), PredictBody(image=[image] * 2))) == 2
    with pytest.raises(ConfigError, match="image: 75,000,000 pixels in all, and the limit is"):
        jobs.predict(Predictor("images"), PredictBody(image=[image] * 3))


def test_an_explanation_puts_no_hooks_on_the_model_of_the_engine(client, live, monkeypatch):
    hooked, register = [], Attention.register_forward_pre_hook

    def record(module, *args, **options):
        hooked.append(module)
        return register(module, *args, **options)

    monkeypatch.setattr(Attention, "register_forward_pre_hook", record)
    assert client("/explain", {"text": "the cat"})[0] == 200
    model = live[1].app.state.service.models.loaded["cats"].run.model
    assert hooked
    assert not {*hooked} & {*model.modules()}


def test_a_prefill_does_not_compare_all_weights(live):
    assert live[1].app.state.service.models.loaded["cats"].engine.language.frozen


def test_weights_are_copied_where_that_is_faster_and_fits(text_run, monkeypatch, run):
    monkeypatch.setattr("regard.accel.onednn.MIN_ELEMENTS", 64)
    monkeypatch.setattr("regard.accel.select.is_onednn_faster", lambda: True)
    for memory, copied in ((10**9, True), (10**4, False)):
        monkeypatch.setattr("regard.serve.models.free_memory", lambda device, m=memory: m)
        with serving([text_run]) as (address, server):
            language = server.app.state.service.models.loaded["cats"].engine.language
            assert bool(language.head.onednn) == copied
            _, answer = Client(address)("/v1/completions", {"model": "cats", **BODIES[1]})
            assert answer["choices"][0]["text"] == solo(run, 1)


def test_output_that_a_schema_allows(client):
    pytest.importorskip("llguidance")
    # the vocabulary of the run has no braces or quotes, so numbers must do
    schema = {"type": "integer", "minimum": 10, "maximum": 99}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    body = {"prompt": "the ", "max_tokens": 9, "n": 8, "seed": 0, "response_format": form}
    status, answer = client("/v1/completions", body)
    assert status == 200, answer
    for choice in answer["choices"]:
        assert 10 <= int(choice["text"]) <= 99
        assert choice["finish_reason"] == "stop"
    flat = {"type": "json_schema", "name": "n", "schema": schema}  # the place of the Responses API
    body = {"input": "the ", "max_output_tokens": 9, "seed": 0, "text": {"format": flat}}
    _, answer = client("/v1/responses", body)
    assert 10 <= int(answer["output"][0]["content"][0]["text"]) <= 99
    body = {"prompt": "the ", "max_tokens": 9}
    bad = {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}
    assert client("/v1/completions", {**body, "response_format": bad})[0] == 400
    braces = {"type": "json_object"}
    status, answer = client("/v1/completions", {**body, "response_format": braces})
    assert (status, answer["error"]["param"]) == (400, "response_format")
    assert "no token of the model's vocabulary continues the JSON" in answer["error"]["message"]


BAD = {
    "n": [10**9, 0, -1, "2"],
    "max_tokens": [10**12, -1, 1.5],
    "logprobs": [10**6, -1],
    "stop": [["x"] * 10**5, "", ["a" * 300]],
    "logit_bias": [{str(i): 1 for i in range(10**5)}, {"-1": 1}, {"1": 1e308}, {"99999": 1}],
    "temperature": [-1, 1e308],
    "top_p": [2],
    "top_k": [10**30],
    "seed": [2**200, "x"],
    "prompt": [[-1], [10**6], "\ud800", [], {"a": 1}, "x" * 200_001, "x" * 65, [[]] * 10**5],
    "best_of": [10**9],
    "min_tokens": [10**9, 5],
    "sampler": [["nonsense=1"], ["top_p=5"], ["ban=[1000000]"]],
    "order": ["nonsense"],
    "typical": [7],
    "dry": [{"nonsense": 1}, {"a\ud800": 1}],
    "tools": [[{"type": "function"}]],
    "previous_response_id": ["resp_1"],
    "guided_json": [{"type": "object"}],
    "include_stop_str_in_output": [True],
    "allowed_token_ids": [[1, 2]],
    "response_format": [{"type": "nonsense"}, {"type": "json_schema"}],
    "stop_token_ids": [[10**6]],
    "model": [17],
}


def test_bombs_are_refused_by_name(client, live):
    body = {"prompt": "the", "max_tokens": 4}
    for name, values in BAD.items():
        for value in values:
            status, answer = client("/v1/completions", {**body, name: value})
            assert status == 400, (name, answer)
            words = {name, name.removeprefix("logit_"), "top_p", "ban"}
            assert answer["error"]["param"] in words, answer
            assert any(word in answer["error"]["message"] for word in words), answer
    _, answer = client("/v1/completions", {**body, "prompt": [-1]})
    assert answer["error"]["message"] == "prompt.0: Input should be greater than or equal to 0"
    many = {**body, "max_tokens": 4096, "n": 16, "logprobs": 20}
    assert "the limit is 131,072" in client("/v1/completions", many)[1]["error"]["message"]
    assert client("/v1/completions", {**body, "model": "nobody"})[0] == 404
    assert client("/v1/completions", b'{"prompt": "the", "temperature": NaN}')[0] == 400
    assert client("/v1/completions", b"[" * 10**5)[0] == 400
    status, answer = client("/v1/completions", b'{"prompt": "the"')
    assert status == 400
    assert answer["error"]["message"].startswith("the body is not JSON: Expecting ',' delimiter")
    assert answer["error"]["message"].endswith(", at character 16")
    host, port = client.address.removeprefix("http://").split(":")
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for size in (b"Content-Length: 9999999999\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"):
        with socket.create_connection((host, int(port))) as huge:
            huge.sendall(head + size)
            with contextlib.suppress(OSError):  # it is refused before all has come
                for _ in range(50 if b"chunked" in size else 0):
                    huge.sendall(b"10000\r\n" + b" " * 2**16 + b"\r\n")
            assert huge.recv(100).startswith(b"HTTP/1.1 413")
    # a client that sends its whole body before it reads sees why it is refused
    assert client("/v1/completions", b" " * 10**7)[0] == 413
    assert client("/v1/completions", b'{"prompt": [' + b"[]," * 690_000 + b"[]]}")[0] == 413
    commas = {"name": "x", "text": "," * 400_000, "suffix": "/"}
    assert client("/tokenize", commas)[0] == 400  # they are in a string
    assert client("/tokenize", {"prompt": "a", **{str(n): 1 for n in range(300)}})[0] == 400
    with client.open("/health", **{f"X-{n}": "1" for n in range(200)}) as answer:
        assert answer.status == 431
    assert client("/v1/completions", b"{}", **{"Content-Type": "text/plain"})[0] == 415
    assert client("/v1/completions", b"{}", **{"Content-Encoding": "gzip"})[0] == 415
    assert client("/nowhere")[0] == 404
    with client.open("/v1/completions", {**body, "mirror": 1, "user": "me"}) as answer:
        assert answer.headers["x-regard-ignored"] == "mirror"
    for path, field in (("/tokenize", "prompt"), ("/explain", "text")):
        with client.open(path, {field: "the cat", " ": 1, "mirror": 1, "": 1}) as answer:
            assert answer.headers["x-regard-ignored"] == "mirror"
    _, answer = client("/v1/completions", {**body, "sampler": ["greedy"], "min_p": 0.1})
    assert answer["error"]["param"] == "sampler"
    assert "min_p is given too" in answer["error"]["message"]
    _, answer = client("/predict", {"model": "pairs", "input": [1.5]})
    assert answer["error"]["message"] == "input.0: Input should be a valid string"
    assert client("/health")[0] == 200


def test_only_this_machine_and_its_own_pages_are_answered(client, text_run):
    assert client("/v1/models", Host="evil.example")[0] == 403
    assert client("/v1/models", Host="testserver")[0] == 403
    assert client("/v1/models", Host="localhost:99")[0] == 200
    assert client("/v1/models", Origin="http://evil.example")[0] == 403
    assert client("/v1/models", Origin=client.address)[0] == 200
    with (
        pytest.raises(ConfigError, match="needs an API key"),
        serving([text_run], host="0.0.0.0"),
    ):
        pass


def test_every_route_but_health_wants_the_key(text_run):
    with serving([text_run], api_key="sesame") as (address, server):
        keyed = Client(address)
        for route in server.app.routes:
            path = getattr(route, "path", "").replace("{name}", "cats")
            for method in getattr(route, "methods", ()):
                body = b"{}" if method == "POST" else None
                expected = 200 if path == "/health" else 401
                assert keyed(path, body)[0] == expected, path
                assert keyed(path, body, Authorization="Bearer wrong")[0] == expected
        assert keyed("/v1/models", Authorization="Bearer sesame")[0] == 200
        assert keyed("/%2e%2e/v1/models")[0] == 401


def test_metrics_count_what_was_generated(client):
    before = client("/metrics")[1]
    client("/v1/completions", {"prompt": "the", "max_tokens": 5, "ignore_eos": True})
    after = client("/metrics")[1]
    counts = [
        int(re.search(r'^regard_generation_tokens_total\{model="cats"\} (\d+)$', text, re.M)[1])
        for text in (before, after)
    ]
    assert counts[1] - counts[0] == 5
    assert "regard_up 1" in after
    assert re.search(r'^regard_http_responses_total\{status="200"\} \d+$', after, re.M)


def wait_until(condition, seconds=60.0):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_a_full_queue_refuses_and_a_client_that_leaves_frees_its_row(text_run, monkeypatch):
    with serving([text_run], config=EngineConfig(max_sequences=1, max_queue=1)) as (
        address,
        server,
    ):
        client, shared = Client(address), server.app.state.service
        engine = shared.models.loaded["cats"].engine
        step = engine.step
        monkeypatch.setattr(engine, "step", lambda: time.sleep(0.01) or step())
        long = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True}
        content = json.dumps({**long, "stream": True}).encode()
        host, port = address.removeprefix("http://").split(":")
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        )
        request = f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
        sockets = []
        for expected in (1, 2):
            sockets.append(socket.create_connection((host, int(port))))
            sockets[-1].sendall(request)
            wait_until(lambda expected=expected: shared.async_engine.open_requests == expected)
        with client.open("/v1/completions", long) as answer:
            assert answer.status == 429
            assert answer.headers["Retry-After"] == "1"
            assert json.loads(answer.read())["error"]["type"] == "rate_limit_exceeded"
        sockets[1].close()  # it waits
        wait_until(lambda: shared.async_engine.open_requests == 1 and not engine.waiting)
        sockets[0].recv(100)
        sockets[0].close()  # it is being generated
        wait_until(lambda: not engine.busy)
        tokens = engine.counters.generation_tokens
        assert client("/v1/completions", {"prompt": "a", "max_tokens": 3})[0] == 200
        assert engine.counters.generation_tokens <= tokens + 3
        assert shared.async_engine.open_requests == 0


def test_a_dying_engine_is_seen(text_run, monkeypatch):
    """An exception outside of a request, then a step that does not end."""
    with serving([text_run]) as (address, server):
        client, shared = Client(address), server.app.state.service
        worker, engine = shared.async_engine.worker, shared.models.loaded["cats"].engine
        assert client("/health")[0] == 200
        limits, step = [], engine.step

        def record_limit():
            limits.append(worker._current_step[1])
            return step()

        monkeypatch.setattr(engine, "step", record_limit)
        body = {"prompt": "the", "max_tokens": 3, "ignore_eos": True}
        assert client("/v1/completions", body)[0] == 200
        assert limits[0] == FIRST_STEP_SECONDS_CPU
        assert max(limits[1:]) < FIRST_STEP_SECONDS_CPU
        wait_until(lambda: not engine.busy and worker._current_step is None)
        monkeypatch.setattr(worker, "slowest", 0.0)
        monkeypatch.setattr("regard.serve.async_engine.HANG_SECONDS", 1.0)
        hangs = threading.Event()
        monkeypatch.setattr(engine, "step", lambda: hangs.wait() and step())
        with ThreadPoolExecutor(1) as pool:
            stream = pool.submit(client.stream, "/v1/completions", body, failing=True)
            wait_until(lambda: client("/health")[0] == 503)
            assert "has not finished a step" in client("/health")[1]["message"]
            (chunk,) = stream.result()  # the open stream is told
        assert "has not finished a step" in chunk["error"]["message"]
        hangs.set()
        wait_until(lambda: client("/health")[0] == 200 and not engine.busy)

        def broken():
            raise MemoryError("the device is gone")

        monkeypatch.setattr(engine, "step", broken)
        (chunk,) = client.stream("/v1/completions", {"prompt": "the"}, failing=True)
        assert "the device is gone" in chunk["error"]["message"]
        status, answer = client("/health")
        assert (status, "MemoryError" in answer["message"]) == (503, True)
        status, answer = client("/v1/completions", {"prompt": "the"})
        assert (status, answer["error"]["code"]) == (503, "engine_stopped")


def test_a_slow_step_does_not_hide_later_ones_for_ever(monkeypatch):
    """A first step of 60 s, which compiles kernels, then quick ones, then a slow one."""
    monkeypatch.setattr("regard.serve.worker.RECENT_STEPS", 10)
    now = [0.0]
    monkeypatch.setattr("regard.serve.worker.time.monotonic", lambda: now[0])
    worker, engine = EngineThread(lambda events: None), on_device("cuda")

    def limit_of_step(seconds):
        return step_limit(worker, engine, lambda: now.append(now.pop() + seconds))

    assert limit_of_step(60) == FIRST_STEP_SECONDS
    assert limit_of_step(0.125) == 60  # as long as the first
    for _ in range(20):
        limit_of_step(0.125)
    assert limit_of_step(2) == STALL_SECONDS < 2  # /health reports a hanging step within 2 s
    assert limit_of_step(0.125) == 8


def on_device(name):
    """An engine that has not stepped yet."""
    device = SimpleNamespace(type=name)
    return SimpleNamespace(
        counters=SimpleNamespace(steps=0), language=SimpleNamespace(device=device), events=[]
    )


def step_limit(worker, engine, work=lambda: None):
    """Step an engine; return the seconds after which this step would have been seen as hanging."""
    limits = []

    def step():
        limits.append(worker._current_step[1])
        work()
        engine.counters.steps += 1

    engine.step = step
    worker._step(engine)
    return limits[0]


def test_a_first_step_that_hangs_is_seen_sooner_where_nothing_is_compiled():
    worker = EngineThread(lambda events: None)
    assert step_limit(worker, on_device("cuda")) == FIRST_STEP_SECONDS
    assert step_limit(worker, on_device("cpu")) == FIRST_STEP_SECONDS_CPU <= FIRST_STEP_SECONDS / 10


def test_a_request_that_ends_in_the_step_that_fails_gets_its_last_token():
    delivered = []
    worker, engine = EngineThread(delivered.extend), on_device("cpu")
    ended, running = (Request([1], Chain(), 1, 0) for _ in range(2))
    engine.events = [Event(ended, 0, token=5), Event(ended, 0, finish_reason="length")]
    engine.requests = lambda: [running]
    worker.add("model", engine, 1)
    worker._fail_all(MemoryError("the device is gone"))
    assert [(event.request, event.finish_reason) for event in delivered] == [
        (ended, None),
        (ended, "length"),
        (running, "error"),
    ]


def test_a_request_that_is_submitted_while_the_engine_fails_is_refused(monkeypatch):
    worker = EngineThread(lambda events: None)
    monkeypatch.setattr(worker._thread, "is_alive", lambda: True)

    def submit(request):
        worker.error = MemoryError("the device is gone")

    worker.add("model", SimpleNamespace(submit=submit), 1)
    with pytest.raises(EngineStopped, match="the device is gone"):
        worker.submit("model", Request([1], Chain(), 1, 0))


def test_steps_use_the_threads_of_the_largest_model(monkeypatch):
    """Two models that are loaded at the same time do not know of each other."""
    threads = []
    monkeypatch.setattr("regard.serve.worker.torch.set_num_threads", threads.append)
    worker, idle = EngineThread(lambda events: None), SimpleNamespace(busy=False)
    worker.add("large", idle, 4)
    worker.add("small", idle, 1)
    worker.start()
    wait_until(lambda: threads == [4])
    worker.remove("large")
    worker._wake.set()
    wait_until(lambda: threads == [4, 1])
    worker.stop()


def test_samplers_are_found_although_another_thread_clears_the_cache(live):
    class Cleared(dict):
        """A dict that another thread clears after each assignment."""

        def __setitem__(self, key, value):
            pass

        def setdefault(self, key, value):
            return value

    model = live[1].app.state.service.models.loaded["cats"]
    model = replace(model, chains=Cleared())
    assert str(model.chain(("top_k=2",), None)).startswith("top_k=2")


def test_a_job_that_waits_is_dropped_when_its_client_disconnects(text_run, monkeypatch):
    with serving([text_run]) as (address, server):
        service, begun, release = server.app.state.service, [], threading.Event()
        monkeypatch.setattr(jobs, "explain", lambda *args: begun.append(args))
        service._pool.submit(release.wait)  # the only thread for jobs is busy
        host, port = address.removeprefix("http://").split(":")
        content = json.dumps({"text": "the cat"}).encode()
        head = f"POST /explain HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        with socket.create_connection((host, int(port))) as waiting:
            waiting.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            wait_until(lambda: service._jobs == 1)
        wait_until(lambda: service._jobs == 0)
        release.set()
        assert service._pool.submit(lambda: "idle").result() == "idle"
        assert not begun


def test_a_model_that_does_not_fit_into_memory_is_503(text_run, pair_run, monkeypatch):
    with serving([text_run, pair_run]) as (address, _):
        client = Client(address)

        def load(*args, **options):
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr("regard.serve.models.load", load)
        status, answer = client("/tokenize", {"model": "pairs", "prompt": "1"})
        assert (status, "out of memory" in answer["error"]["message"]) == (503, True)


def test_a_wrong_method_is_told_the_right_one(client):
    with client.open("/v1/completions") as answer:
        assert (answer.status, answer.headers["Allow"]) == (405, "POST")


def test_numbers_that_json_does_not_have_are_null():
    from regard.serve.routes.tasks import FiniteJSONResponse

    content = {"predictions": [[math.inf, 1.5], (math.nan, "a")]}
    assert FiniteJSONResponse(content).body == b'{"predictions":[[null,1.5],[null,"a"]]}'


def test_requests_that_outlast_the_shutdown_are_told(text_run, monkeypatch):
    monkeypatch.setattr("regard.serve.server.DRAIN_SECONDS", 0.3)
    with serving([text_run]) as (address, server):
        service = server.app.state.service
        engine = service.models.loaded["cats"].engine
        step = engine.step
        monkeypatch.setattr(engine, "step", lambda: time.sleep(0.02) or step())
        body = {"prompt": "the", "max_tokens": 4000, "ignore_eos": True}
        with ThreadPoolExecutor(2) as pool:
            client = Client(address)
            stream = pool.submit(client.stream, "/v1/completions", body, failing=True)
            whole = pool.submit(client, "/v1/completions", body)
            wait_until(lambda: service.async_engine.open_requests == 2)
            server.handle_exit(signal.SIGTERM, None)
            assert stream.result()[-1]["error"]["message"] == "the server is shutting down"
            assert whole.result()[0] == 503


def test_slow_senders_are_dropped(live, monkeypatch):
    """Half of the headers, then half of a body."""
    monkeypatch.setattr("regard.serve.middleware.HEADER_SECONDS", 0.3)
    monkeypatch.setattr("regard.serve.middleware.BODY_SECONDS", 0.3)
    host, port = live[0].removeprefix("http://").split(":")
    slow = [socket.create_connection((host, int(port))) for _ in range(20)]
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n"
    for number, one in enumerate(slow):
        body = b"Content-Type: application/json\r\nContent-Length: 90\r\n\r\n{"
        one.sendall(head + (body if number % 2 else b""))
        one.settimeout(60)
    assert Client(live[0])("/health")[0] == 200
    for number, one in enumerate(slow):
        received = one.recv(1000)
        assert received.startswith(b"HTTP/1.1 408") if number % 2 else received == b""
        one.close()


def test_a_client_that_does_not_read_is_dropped(text_run, monkeypatch, caplog):
    """Its sequences are removed, and its connection is closed although bytes are unsent."""
    monkeypatch.setattr("regard.serve.middleware.SEND_SECONDS", 0.5)
    with serving([text_run]) as (address, server):
        host, port = address.removeprefix("http://").split(":")
        service = server.app.state.service
        body = {"prompt": "a", "max_tokens": 4096, "ignore_eos": True, "logprobs": 20}
        content = json.dumps({**body, "stream": True}).encode()
        with socket.socket() as unread:
            unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            unread.connect((host, int(port)))
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            unread.sendall(head % len(content) + content)
            engine = service.models.loaded["cats"].engine
            wait_until(lambda: engine.counters.requests == 1)
            wait_until(lambda: service.async_engine.open_requests == 0)
            wait_until(lambda: not server.server_state.connections)
            wait_until(lambda: not engine.busy)
            assert service.models.loaded["cats"].active_requests == 0
    assert not caplog.records


def test_too_many_connections_are_told_to_retry(live, monkeypatch):
    monkeypatch.setattr("regard.serve.middleware.MAX_CONNECTIONS", 0)
    with Client(live[0]).open("/health") as answer:
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")


def test_models_are_loaded_when_asked_and_unloaded_when_idle(text_run, pair_run, monkeypatch):
    users = []
    monkeypatch.setattr(
        "regard.serve.routes.completions.prepare",
        lambda model, *args, **options: (
            users.append(model.active_requests) or prepare(model, *args, **options)
        ),
    )
    with serving([text_run.parent, pair_run], idle=0.4) as (address, server):
        client, loaded = Client(address), server.app.state.service.models.loaded
        assert client("/v1/models/pairs")[1]["loaded"] is False
        assert client("/tokenize", {"model": "pairs", "prompt": "1"})[0] == 200
        assert client("/v1/models/pairs")[1]["loaded"] is True
        weights = weakref.ref(loaded["pairs"].run.model)
        wait_until(lambda: not loaded)
        wait_until(lambda: weights() is None)  # and no longer in memory
        assert 'regard_requests_total{model="pairs"} 0' in client("/metrics")[1]
        assert client("/v1/completions", {"model": "cats", "prompt": "the"})[0] == 200
        assert users == [1]  # from the time it is looked up
        wait_until(lambda: not loaded)


def test_adapters_are_models_by_name(text_run, materials, tmp_path, capsys):  # noqa: F811
    words = ["train.tune=lora", "train.steps=2", "train.lr=0.5", f"train.start={text_run}"]
    polite = trained(tmp_path / "polite", materials / "cats.txt", [*words, "train.batch=4"])
    (text_run / "adapters").mkdir()
    (text_run / "adapters" / "a:b").symlink_to(polite)
    with serving([text_run]) as (address, server):
        (text_run / "adapters" / "a:b").unlink()
        (text_run / "adapters").rmdir()  # the run is that of other tests too
        models, client = server.app.state.service.models, Client(address)
        assert list(models.adapters) == ["cats:a:b"]
        models.add_adapter("polite", polite)
        assert client("/v1/models/cats:polite")[1]["loaded"] is False
        body = {"prompt": "the ", "max_tokens": 20, "temperature": 0}
        answers = [
            client("/v1/completions", {**body, "model": name})[1]["choices"][0]["text"]
            for name in ("cats", "cats:polite")
        ]
        assert answers == [
            regard.load(text_run, adapter=adapter).generate(
                "the ", max_new_tokens=20, sampler="greedy"
            )
            for adapter in (None, polite)
        ]
        assert answers[0] != answers[1]
        for name, path, message in (
            ("polite", polite, "two models are called 'cats:polite'"),
            ("dogs:polite", polite, "no run 'dogs'"),
            ("rude", tmp_path / "rude", "no adapter at"),
        ):
            with pytest.raises(ConfigError, match=message):
                models.add_adapter(name, path)
    refused = invoke(capsys, "serve", text_run, "--adapter", "polite")
    assert (refused.code, "give NAME=PATH" in refused.err) == (2, True)


def test_the_command_says_what_is_missing(text_run, tmp_path, capsys, monkeypatch):
    refused = invoke(capsys, "serve", text_run, "--host", "0.0.0.0")
    assert (refused.code, "so the server needs an API key" in refused.err) == (2, True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        refused = invoke(capsys, "serve", text_run, "--port", taken.getsockname()[1])
    assert (refused.code, "another --port (0: any free one)" in refused.err) == (2, True)
    refused = invoke(capsys, "serve", tmp_path)
    assert (refused.code, "has no run in it" in refused.err) == (4, True)
    command = sys.modules["regard.cli.serve"]  # the name is that of the function
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    refused = invoke(capsys, "serve", text_run)
    assert (refused.code, "pip install 'regard[serve]'" in refused.err) == (2, True)


def test_explain_opens_no_file_that_a_client_names():
    model = SimpleNamespace(name="captions", run=SimpleNamespace(inputs=("file",)))
    with pytest.raises(ConfigError, match="reads images; /explain takes texts only"):
        jobs.explain(model, "/etc/hostname", None, 3, 0, None)
