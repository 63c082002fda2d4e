"""`regard doctor` and `regard --version`."""

import json
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from regard.api import OPTIONAL_PACKAGES, doctor, machine


def test_the_version_is_that_of_the_installed_package(regard):
    completed = regard("--version")
    assert completed.code == 0
    assert completed.out == f"regard {version('regard')}\n"


def test_every_extra_of_users_is_reported():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    installs = [each.install for each in OPTIONAL_PACKAGES]
    for extra in set(extras) - {"dev", "docs"}:
        assert f"pip install 'regard[{extra}]'" in installs


def test_it_shows_versions_machine_and_what_is_missing_for_which_command(regard, monkeypatch):
    def installed(package):
        return None if package == "transformers" else "1.2.3"

    monkeypatch.setattr("regard.api.diagnosis.installed_version", installed)
    out = regard("doctor").out
    for line in ("torch", "Python", "cores", "memory", "GPU", "cache"):
        assert f"\n  {line} " in out
    missing = out.partition("needed only for")[2]
    assert "regard export" in missing
    assert "pip install 'regard[hf]'" in missing
    assert "pillow" not in missing
    found = json.loads(regard("doctor", "--json").out)
    assert found["packages"]["transformers"] is None
    assert found["packages"]["pillow"] == "1.2.3"
    assert found["cores"] >= 1


@pytest.mark.parametrize(
    ("cuda", "reason"),
    [(None, "is a build without CUDA"), ("12.8", "does not work with the driver")],
)
def test_a_gpu_that_torch_cannot_use_is_a_problem(monkeypatch, tmp_path, cuda, reason):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", cuda)
    monkeypatch.setattr(machine, "NVIDIA", tmp_path)
    assert doctor().problems == []
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:01:00.0" / "information").write_text("Model: \t\t NVIDIA H200\n")
    (problem,) = doctor().problems
    assert problem.startswith("NVIDIA H200 is not used")
    assert reason in problem
