"""One bit flipped in any file of a run or of the cache: noticed, or without effect."""

import json
import random
import shutil
from collections import Counter, defaultdict
from pathlib import Path

import pytest

import regard
from regard.errors import RegardError
from regard.training.events import RunStarted
from regard.training.run import begin, resume
from training.runs import config, contents


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """A run of six steps that is to have nine, and the cache that it filled."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REGARD_HOME", str(folder / "home"))
        settings = {"data": {"tokenizer": {"kind": "bpe", "vocab_size": 300}}}
        list(begin(config(data / "cats.txt", settings, steps=6), folder / "run"))
    return folder


def results(folder, monkeypatch):
    """What a resumed run computes and generates, and the changes that it lists when it begins."""
    monkeypatch.setenv("REGARD_HOME", str(folder / "home"))
    events = resume(folder / "run", {"train": {"steps": 9}})
    listed = next(event for event in events if isinstance(event, RunStarted)).description
    list(events)
    run = regard.load(folder / "run", device="cpu")
    # Of the checkpoints only the new one: an older one, which is not read, keeps its damage.
    new = ("model.safetensors", "checkpoints/step-9/")
    files = contents(folder / "run").items()
    weights = {name: digest for name, digest in files if name.startswith(new)}
    return (weights, run.generate("the cat", max_new_tokens=12, seed=1), run.evaluate()), listed


def flip(file, chance):
    content = bytearray(file.read_bytes())
    at = chance.randrange(len(content))
    content[at] ^= 1 << chance.randrange(8)
    file.write_bytes(content)
    return at


PARTS, EACH = 6, 5  # 30 flips for each file


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_a_flipped_bit_is_noticed_or_has_no_effect(part, whole, tmp_path, monkeypatch, caplog):
    shutil.copytree(whole, tmp_path / "sound")
    expected, usual = results(tmp_path / "sound", monkeypatch)
    files = [path.relative_to(whole) for path in whole.rglob("*") if path.is_file()]
    files = [path for path in files if (whole / path).stat().st_size]
    counts, undetected = defaultdict(Counter), []
    for path in sorted(files):
        chance = random.Random(f"{path} {part}")
        for number in range(EACH):
            folder = tmp_path / f"{path.name}-{number}"
            shutil.copytree(whole, folder)
            at = flip(folder / path, chance)
            caplog.clear()
            try:
                found, listed = results(folder, monkeypatch)
                outcome = "harmless" if found == expected else "undetected"
                if caplog.records or listed != usual:
                    outcome = "detected"
            except RegardError:
                outcome = "detected"
            counts[kind(path)][outcome] += 1
            if outcome == "undetected":
                undetected.append((str(path), at))
            shutil.rmtree(folder)
    print()
    for name, outcomes in sorted(counts.items()):
        print(f"{name}: {json.dumps(outcomes)}")
    assert not undetected


def kind(path):
    """The name of a file without what differs from one run to the next."""
    parts = Path(path).parts
    return "/".join(part for part in parts if len(part) < 40 and not part.startswith("step-"))
