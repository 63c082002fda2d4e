import pytest

from training.runs import write_data


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A folder with cats.txt and pairs.tsv; not to be changed."""
    return write_data(tmp_path_factory.mktemp("data"))
