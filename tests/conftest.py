"""What every test gets: the same random numbers each time, one thread, and a home of its own."""

import pytest
import torch

torch.set_num_threads(1)  # tests run side by side; threads inside them only wait for each other


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


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
