"""A server in a thread of this process, with the small runs that the command line's tests train."""

import contextlib
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
def live(text_run, pair_run):  # noqa: F811
    """The address of a server with both runs."""
    pytest.importorskip("fastapi")
    with serving([text_run, pair_run], config=EngineConfig(sequences=8, queue=32)) as (
        address,
        server,
    ):
        yield address, server
