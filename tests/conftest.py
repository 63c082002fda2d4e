"""What every test gets: the same random numbers each time, one thread, and a home of its own."""

import gc
import os
import shutil
import signal

import pytest
import torch

THREADS = 1  # tests run side by side; threads inside them only wait for each other
torch.set_num_threads(THREADS)

# Started by `nohup` or `&`, a process does not hear these, nor do those that it starts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


gc.disable()  # while tests are collected, which leaves no garbage


def pytest_collection_finish():
    gc.freeze()  # the collected tests and all modules are not looked through again
    gc.set_threshold(20_000, 20)
    gc.enable()


def pytest_configure(config):
    if os.environ.get("TRITON_INTERPRET") == "1":  # NumPy warns of what Triton's interpreter does
        config.addinivalue_line("filterwarnings", "ignore")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _threads():
    yield
    torch.set_num_threads(THREADS)  # training sets what its settings say


@pytest.fixture(autouse=True, scope="session")
def _home(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REGARD_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture
def float64():
    """Everything made in this test is float64, constants inside modules included."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(scope="module")
def browser():
    """Chromium, for the pages that regard writes and serves."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("chromium is not installed")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
