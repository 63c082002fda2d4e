"""Clients of others run unchanged; REGARD_CLIENTS is a Python that has them installed.

python -m venv clients && clients/bin/pip install openai langchain-openai 'lm-eval[api]'
REGARD_CLIENTS=clients/bin/python pytest -m real tests/serve/test_clients.py
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

import regard

pytest.importorskip("fastapi")
CLIENTS = os.environ.get("REGARD_CLIENTS")
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(CLIENTS is None, reason="REGARD_CLIENTS is not set"),
]
STOP_STRINGS = ["\nUser:", "\nSystem:"]


def use(name, address, *words):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    command = [CLIENTS, Path(__file__).with_name("clients.py"), name, address, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_openai_client(live, text_run):
    run, found = regard.load(text_run), use("openai", live[0])
    assert found["models"] == ["cats", "pairs"]
    expected = run.generate("the cat", max_new_tokens=20, seed=3, sampler=["min_p=0.1"])
    assert found["completion"] == found["streamed"] == expected
    prompt = "User: the cat\nAssistant:"
    expected = run.generate(
        prompt, max_new_tokens=20, seed=3, stop_strings=STOP_STRINGS
    ).removeprefix(" ")
    assert found["chat"] == found["chat streamed"] == expected
    assert found["response"] == found["response streamed"] == expected
    assert found["logprobs"] == found["used"]
    assert found["embedding"] == 16
    assert found["errors"] == [
        ["BadRequestError", "n", None],
        ["NotFoundError", "model", "model_not_found"],
    ]


def test_langchain(live, text_run):
    run, found = regard.load(text_run), use("langchain", live[0])
    expected = run.generate("the cat", max_new_tokens=20, seed=3, sampler=["temperature=0.5"])
    assert found["completion"] == expected
    prompt = "User: the cat\nAssistant:"
    expected = run.generate(
        prompt, max_new_tokens=20, seed=3, stop_strings=STOP_STRINGS
    ).removeprefix(" ")
    assert found["chat"] == found["chat streamed"] == expected
    assert found["embedding"] == 16


def test_lm_eval_gives_the_numbers_of_evaluate(live, text_run, materials, tmp_path):
    run = regard.load(text_run)
    documents = (materials / "cats.txt").read_text().splitlines()[:20]
    lines = [json.dumps({"first": each[:1], "rest": each[1:]}) for each in documents]
    (tmp_path / "documents.jsonl").write_text("\n".join(lines))
    found = use("lm-eval", live[0], tmp_path)["log_likelihoods"]
    expected = []
    for number, each in enumerate(documents):
        path = tmp_path / f"{number}.txt"
        path.write_text(each)
        expected.append(-run.evaluate(str(path))["loss"] * (len(each) - 1))
    assert found == pytest.approx(expected, abs=1e-3)
