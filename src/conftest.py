"""What the examples of docstrings can use: small data, and a run on each kind of it."""

import re

import numpy as np
import pytest
import torch

import regard

TINY = {"dim": 16, "layers": 1, "heads": 2, "context": 32, "position": "learned"}
SHORT = {"steps": 1, "batch": 2, "quiet": True}


class Examples:
    """The names that an example may use; each is made when it is first used."""

    def __init__(self, folder):
        self.folder = folder
        self.text, self.pairs, self.labelled = (
            folder / name for name in ("cats.txt", "pairs.tsv", "films.csv")
        )
        self.text.write_text("".join(f"the {n}th cat sat on the mat\n" for n in range(60)))
        self.pairs.write_text("".join(f"{n} cats\t{n} chats\n" for n in range(100, 160)))
        rows = (f"a {word} film {n},{word}\n" for n in range(30) for word in ("good", "bad"))
        self.labelled.write_text("text,label\n" + "".join(rows))
        self.image = np.full((8, 8), 20, np.uint8)
        self.made = {}

    def make(self, name):
        if name not in self.made:
            self.made[name] = getattr(self, name)
            self.made[name] = self.made[name]() if callable(self.made[name]) else self.made[name]
        return self.made[name]

    def train(self, what, name, **settings):
        return regard.train(what, out=self.folder / "runs" / name, **SHORT, **settings)

    def run(self):
        return self.train(self.text, "cats", model=TINY, tokenizer="char")

    def other(self):
        return self.train(self.text, "dogs", model={**TINY, "dim": 8}, tokenizer="char")

    def translator(self):
        return self.train(self.pairs, "pairs", model=TINY, tokenizer="char")

    def masked(self):
        return self.train(self.text, "masked", task="masked", model=TINY)

    def labels(self):
        return self.train(self.labelled, "films")

    def near(self):
        model = {**TINY, "head": "none"}
        return self.train(self.pairs, "near", task="contrastive", model=model, tokenizer="char")

    def talk(self):
        rows = (
            f'{{"messages": [{{"role": "user", "content": "{n}?"}}, '
            f'{{"role": "assistant", "content": "{n}!"}}]}}\n'
            for n in range(100, 130)
        )
        (self.folder / "talk.jsonl").write_text("".join(rows))
        model = {**TINY, "context": 96}
        return self.train(self.folder / "talk.jsonl", "talk", model=model, tokenizer="char")

    def series(self):
        return self.train("sines", "sines")

    def drawings(self):
        points = np.tile(np.array([[1, 0, 0], [0, 1, 0], [-1, -1, 1]], np.int16), (40, 1))
        np.savez(self.folder / "strokes.npz", xyp=points, off=np.arange(0, 121, 3))
        return self.train(self.folder / "strokes.npz", "drawings", model={"dim": 8, "layers": 1})

    def images(self):
        pixels = np.stack([np.full((8, 8), 20 + 200 * (n % 2) + n, np.uint8) for n in range(30)])
        classes = np.array(["dark", "light"] * 15)
        np.savez(self.folder / "images.npz", images=pixels, labels=classes)
        model = {"dim": 16, "layers": 1, "heads": 2, "patch_size": 4}
        return self.train(self.folder / "images.npz", "images", model=model)


NAMES = ("text", "pairs", "image", "run", "other", "translator", "masked", "labels", "series")
NAMES += ("images", "labelled", "talk", "near", "drawings")


@pytest.fixture(scope="session")
def _examples(tmp_path_factory):
    return Examples(tmp_path_factory.mktemp("examples"))


@pytest.fixture(autouse=True)
def _namespace(request, doctest_namespace, monkeypatch, tmp_path, tmp_path_factory, _examples):
    """Every example runs in an empty folder, with the same random numbers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REGARD_HOME", str(tmp_path_factory.getbasetemp() / "home"))
    torch.manual_seed(0)
    torch.set_num_threads(1)
    doctest_namespace.update(regard=regard, TINY=TINY)
    source = "".join(example.source for example in request.node.dtest.examples)
    for name in NAMES:
        if re.search(rf"\b{name}\b", source):
            doctest_namespace[name] = _examples.make(name)
