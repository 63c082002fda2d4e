"""Former names: each is replaced in one step, and the current names exist."""

import pytest

from regard.api.settings_reference import settings_page
from regard.config import make
from regard.data.builtin import BUILTINS
from regard.errors import ConfigError
from regard.generate.chain import parse_chain
from regard.models.build import build_on_meta, preset, weights
from regard.nn.head import HEADS
from regard.renamed import INVERTED, SETTINGS, VALUES, current_names, current_tensors
from regard.tasks import TASKS


def test_no_current_name_is_a_former_one():
    assert not {*SETTINGS.values()} & {*SETTINGS}
    for table in VALUES.values():
        assert not {*table.values()} & {*table}


def test_every_renamed_setting_and_value_is_documented():
    documented = settings_page()
    of_state = ("best.", "time_plan.", "evaluation.")  # in state.json and evaluation.json
    names = {new for old, new in SETTINGS.items() if not old.startswith(of_state)}
    names |= {new for table in VALUES.values() for new in table.values() if isinstance(new, str)}
    assert [name for name in sorted(names) if name.rpartition(".")[2] not in documented] == []


def test_messages_suggest_the_current_names_of_all_tables():
    assert current_names("width") == ["scale_dim", "kernel_size"]
    tasks = ["image_classification", "text_classification"]
    assert sorted(current_names("classify")) == sorted([*tasks, "classification"])
    assert current_names("rate") == ["lr"]  # of versions whose run folders are refused
    for old in INVERTED:
        assert current_names(old.rpartition(".")[2]) == []  # the value would have to change too


@pytest.mark.parametrize(
    ("entries", "kind", "old", "new"),
    [
        (TASKS, "text_classification", "names", "class_names"),
        (TASKS, "tag", "names", "class_names"),
        (TASKS, "image_classification", "names", "class_names"),
        (TASKS, "handwriting", "names", "class_names"),
        (TASKS, "image_classification", "crop", "crop_padding"),
        (TASKS, "instruct", "template", "chat_template"),
        (TASKS, "forecast", "patch", "patch_length"),
        (TASKS, "forecast", "stride", "patch_stride"),
        (HEADS, "forecast", "steps", "horizon"),
        (BUILTINS, "reversal", "shortest", "min_length"),
        (BUILTINS, "dyck", "longest", "max_length"),
        (BUILTINS, "numbers", "highest", "max_number"),
    ],
)
def test_a_former_name_of_an_option_is_refused_with_the_current_one(entries, kind, old, new):
    with pytest.raises(ConfigError, match=f"unknown option '{old}'; it is called '{new}' now"):
        make({"kind": kind, old: 1}, entries, "entry")


def test_a_former_setting_of_a_sampler_is_refused_with_the_current_one():
    assert parse_chain(["min_p=0.05"]) == parse_chain(["min_p={p=0.05}"])
    with pytest.raises(ConfigError, match=r"min_p\.m: unknown key 'm'; it is called 'p' now"):
        parse_chain(["min_p={m=0.05}"])
    with pytest.raises(ConfigError, match="'min_length'; it is called 'min_new_tokens' now"):
        parse_chain(["min_length=2"])


def test_former_names_of_tensors_become_names_of_the_current_models():
    head = {"kind": "masked", "next_sentence": True}
    for config, old in (
        (preset("tiny-encoder", head=head), "head.follows.weight"),
        (preset("bahdanau"), "attention.0.score.weigh.weight"),
        (preset("luong", score="location"), "attention.0.score.place.weight"),
    ):
        (new,) = current_tensors({old: None})
        assert new != old
        assert new in weights(build_on_meta(config))
