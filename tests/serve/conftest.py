"""A server in a thread of this process, with the small runs that the command line's tests train."""

import contextlib
import json
import threading

import pytest

from cli.conftest import TINY, materials, pair_run, trained  # noqa: F401 -- fixtures
from regard.serve.engine import EngineConfig


@contextlib.contextmanager
def serving(paths, **options):
    """Start a server on a free port; give its address and the server itself."""
    from regard.serve.server import make_server, run_server

    server, ready, address = make_server(paths, port=0, **options), threading.Event(), []

    def started(url):
        address.append(url)
        ready.set()

    thread = threading.Thread(target=run_server, args=(server, started), daemon=True)
    thread.start()
    assert ready.wait(60)
    try:
        yield address[0], server
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def text_run(materials, tmp_path_factory):  # noqa: F811
    """A run whose context has room for a conversation."""
    words = [*TINY, "model.context=64", "train.steps=2"]
    return trained(tmp_path_factory.mktemp("runs") / "cats", materials / "cats.txt", words)


@pytest.fixture(scope="session")
def chat_run(tmp_path_factory):
    """A run that is trained on dialogues, and so has a chat template."""
    folder = tmp_path_factory.mktemp("chat")
    rows = [{"prompt": f"{n} cats", "answer": f"{n} dogs"} for n in range(40)]
    (folder / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [*TINY, "task=instruct", "model.context=64", "train.steps=1"]
    return trained(folder / "chat", folder / "talks.jsonl", words)


@pytest.fixture(scope="session")
def entailment_run(tmp_path_factory):
    """A run that classifies pairs of a premise and a hypothesis."""
    folder = tmp_path_factory.mktemp("entailment")
    rows = [f"cat {n}\tdog {n}\t{'odd' if n % 2 else 'even'}" for n in range(60)]
    (folder / "pairs.tsv").write_text("\n".join(["premise\thypothesis\tlabel", *rows]))
    words = ["model.preset=tiny-encoder", "model.layers=1", "model.dim=16", "train.steps=2"]
    return trained(folder / "entails", folder / "pairs.tsv", words)


@pytest.fixture(scope="session")
def live(text_run, pair_run):  # noqa: F811
    """The address of a server with both runs."""
    pytest.importorskip("fastapi")
    with serving([text_run, pair_run], config=EngineConfig(max_sequences=8, max_queue=32)) as (
        address,
        server,
    ):
        yield address, server
