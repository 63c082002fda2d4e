"""A command in this process, by its exit code."""

import pytest

from regard.cli import main


def command(*words):
    with pytest.raises(SystemExit) as exit:
        main([str(word) for word in words])
    return exit.value.code or 0
