"""Settings that are refused before the data is read."""

import math

import pytest

from regard.errors import ConfigError
from regard.training.parallel import launch
from regard.training.setup.configure import configure
from regard.training.setup.setting_checks import check_settings, check_values
from training.runs import config


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 0),
        ("batch", -1),
        ("tokens", 0),
        ("accumulate", 0),
        ("keep_checkpoints", 0),
        ("patience", 0),
        ("evaluate_every", -3),
        ("evaluate_targets", 0),
        ("save_every", 0),
        ("lr", -1.0),
        ("lr", math.nan),
        ("lr", math.inf),
        ("max_grad_norm", -1.0),
        ("ema", 1.0),
    ],
)
def test_a_number_with_which_nothing_is_learned_is_refused(data, name, value):
    with pytest.raises(ConfigError, match=f"train.{name}={value} must be at least"):
        check_settings(config(data / "cats.txt", **{name: value}))


def test_patience_needs_something_to_wait_for(data):
    with pytest.raises(ConfigError, match="patience has no effect with"):
        check_settings(config(data / "cats.txt", patience=2, best_metric="last"))


def test_batch_norm_is_refused_where_its_averages_would_not_be_those_of_the_weights(
    data, monkeypatch
):
    over = {"task": "masked", "model": {"preset": "bert", "norm": "batch"}}
    chosen = configure(str(data / "cats.txt"), over)
    assert configure(str(data / "cats.txt"), {"task": "masked"}).train.ema > 0
    assert chosen.train.ema == 0  # left out of the automatic settings
    check_values(chosen)
    for name, value in {"ema": 0.9, "activation_checkpointing": True}.items():
        refused = configure(str(data / "cats.txt"), {**over, "train": {name: value}})
        with pytest.raises(ConfigError, match=f"model.norm=batch with train.{name}"):
            check_values(refused)
    monkeypatch.setattr(launch, "world_size", lambda: 2)
    with pytest.raises(ConfigError, match=r"norm=batch with 2 ranks"):
        check_values(chosen)
