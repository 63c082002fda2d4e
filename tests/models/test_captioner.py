"""Captioners: which modules they consist of, and settings that are refused."""

import pytest

from regard.errors import ConfigError
from regard.models import seq2seq
from regard.models.build import build_model, resolve


def test_a_recurrent_captioner_builds_no_recurrent_encoder(monkeypatch):
    built = []
    recurrent = seq2seq.Recurrent

    def record(*args, **settings):
        built.append(args)
        return recurrent(*args, **settings)

    monkeypatch.setattr(seq2seq, "Recurrent", record)
    build_model(resolve({"preset": "luong", "vocab_size": 9, "dim": 8}))
    assert len(built) == 1
    model = build_model(resolve({"preset": "show-attend-tell", "vocab_size": 9, "dim": 8}))
    assert len(built) == 1
    assert not hasattr(model, "encoder")


@pytest.mark.parametrize("preset", ["show-attend-tell", "tiny-captioner"])
def test_regions_of_no_pixels_are_refused(preset):
    with pytest.raises(ConfigError, match="patch_size=0 must be at least 1"):
        resolve({"preset": preset, "patch_size": 0})
