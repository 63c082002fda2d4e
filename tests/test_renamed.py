"""Former names: each is replaced in one step, and the current names exist."""

from regard.api.settings_reference import settings_page
from regard.models.build import build_on_meta, preset, weights
from regard.renamed import INVERTED, SETTINGS, VALUES, current_names, current_tensors


def test_no_current_name_is_a_former_one():
    assert not {*SETTINGS.values()} & {*SETTINGS}
    for table in VALUES.values():
        assert not {*table.values()} & {*table}


def test_every_renamed_setting_and_value_is_documented():
    documented = settings_page()
    names = {new for old, new in SETTINGS.items() if not old.startswith("time_plan.")}
    names |= {new for table in VALUES.values() for new in table.values() if isinstance(new, str)}
    assert [name for name in sorted(names) if name.rpartition(".")[2] not in documented] == []


def test_messages_suggest_the_current_names_of_all_tables():
    assert current_names("width") == ["scale_dim", "kernel_size"]
    assert current_names("classify") == ["image_classification", "classification"]
    assert current_names("rate") == ["lr"]  # of versions whose run folders are refused
    for old in INVERTED:
        assert current_names(old.rpartition(".")[2]) == []  # the value would have to change too


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
