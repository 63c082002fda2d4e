import hashlib

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def home(tmp_path_factory, monkeypatch):
    """A cache folder of its own for every test."""
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("REGARD_HOME", str(folder))
    return folder


class Bytes:
    """A tokenizer whose ids are bytes, 256 is EOS; it counts how often it is asked."""

    kind = "bytes"
    eos_id = 256

    def __init__(self, size: int = 257):
        self.vocab_size = size
        self.calls = 0

    def encode_batch(self, texts):
        self.calls += 1
        return [list(text.encode()) for text in texts]

    def encode_array(self, text):
        self.calls += 1
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)

    def fingerprint(self):
        return hashlib.sha256(f"{self.kind} {self.vocab_size}".encode()).hexdigest()


@pytest.fixture
def tokenizer():
    return Bytes()
