import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.config import (
    TABLES,
    Choice,
    RunConfig,
    TrainConfig,
    build,
    kind_of,
    make,
    merge,
    parse_overrides,
    read_toml,
    to_table,
)
from regard.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DivergedError,
    RegardError,
    ShapeError,
    TrainingStopped,
    unknown,
)
from regard.models.build import preset, resolve
from regard.models.transformer import TransformerConfig


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: int = 1
    rate: float = 0.5


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    on: bool = False
    limit: int | None = None
    mode: Literal["fast", "slow"] = "fast"
    files: list[str] = field(default_factory=list)
    choice: Choice = "plain"
    maybe: Choice | None = None
    free: dict[str, Any] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)


def test_a_table_becomes_a_config_with_defaults_where_it_says_nothing():
    assert build(Outer, {"name": "a", "inner": {"size": 3}}) == Outer(name="a", inner=Inner(size=3))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"nmae": "a"}, r"^nmae: unknown key 'nmae'; did you mean 'name'\?$"),
        (
            {"name": "a", "inner": {"sise": 1}},
            r"^inner.sise: unknown key 'sise'; did you mean 'size'",
        ),
        ({}, "^name is missing$"),
        ({"name": 3}, "^name must be a string, not 3$"),
        ({"name": "a", "on": "yes"}, "^on must be true or false, not 'yes'$"),
        ({"name": "a", "on": 1}, "^on must be true or false, not 1$"),
        ({"name": "a", "limit": 2.5}, "^limit must be an integer, not 2.5$"),
        ({"name": "a", "limit": True}, "^limit must be an integer, not True$"),
        ({"name": "a", "mode": "fsat"}, r"^mode: unknown value 'fsat'; did you mean 'fast'\?$"),
        ({"name": "a", "files": 3}, "^files must be a list, not 3$"),
        ({"name": "a", "files": [3]}, "^files must be a string, not 3$"),
        ({"name": "a", "free": "x"}, "^free must be a table, not 'x'$"),
        ({"name": "a", "inner": 3}, "^inner must be a table of settings, not 3$"),
        ({"name": "a", "inner": {"rate": "x"}}, "^inner.rate must be a number, not 'x'$"),
        ({"name": "a", "inner": {"rate": True}}, "^inner.rate must be a number, not True$"),
        ({"name": "a", "choice": 3}, "^choice must be a string or a table, not 3$"),
    ],
)
def test_a_wrong_table_is_refused_with_key_value_and_rule(table, message):
    with pytest.raises(ConfigError, match=message):
        build(Outer, table)


def test_the_place_of_a_wrong_key_is_named_in_full():
    with pytest.raises(ConfigError, match=r"^model.inner.size must be an integer"):
        build(Outer, {"name": "a", "inner": {"size": "x"}}, "model")


@pytest.mark.parametrize("value", [None, "none"])
def test_none_can_be_said_where_it_is_allowed(value):
    assert build(Outer, {"name": "a", "limit": value, "maybe": value}) == Outer(name="a")


def test_a_whole_number_is_also_a_number():
    rate = build(Inner, {"rate": 1}).rate
    assert rate == 1.0
    assert isinstance(rate, float)


def test_a_single_word_is_also_a_list():
    assert build(Outer, {"name": "a", "files": "x.txt"}).files == ["x.txt"]


@pytest.mark.parametrize("choice", ["rotary", {"kind": "rotary", "base": 5}])
def test_a_choice_is_a_name_or_a_table(choice):
    assert build(Outer, {"name": "a", "choice": choice}).choice == choice


def test_a_config_equals_the_one_built_from_its_table():
    config = Outer(
        name="a", files=["x"], maybe={"kind": "b", "c": [1]}, free={"d": {"e": 2}}, limit=4
    )
    assert build(Outer, json.loads(json.dumps(to_table(config)))) == config
    run = RunConfig(name="r", train=TrainConfig(batch=4, schedule={"kind": "cosine", "warmup": 3}))
    assert build(RunConfig, json.loads(json.dumps(to_table(run)))) == run


# key=value words


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("x=3", 3),
        ("x=1e-3", 1e-3),
        ("x=true", True),
        ("x=none", "none"),
        ("x=char", "char"),
        ("x='3'", "3"),
        ("x=[1, 2]", [1, 2]),
        ("x={ kind = 'rotary', base = 5 }", {"kind": "rotary", "base": 5}),
        ("x=a=b", "a=b"),
        ("x=data/my file.txt", "data/my file.txt"),
        ("x=", ""),
        ("x=2024-11-01", "2024-11-01"),  # no setting is a date
        ("x=2024-11-01T08:30:00", "2024-11-01T08:30:00"),
        ("x=12:30:00", "12:30:00"),
        ("x=1\ny=2", "1\ny=2"),  # not the setting x alone
        ("x=[\n1,\n2]", [1, 2]),
    ],
)
def test_a_value_is_toml_or_else_a_plain_word(word, value):
    assert parse_overrides([word]) == {"x": value}


def test_dotted_keys_nest_and_the_last_word_wins():
    words = ["a.b.c=1", "a.b.d=2", "a.e=3", "a.b.c=4"]
    assert parse_overrides(words) == {"a": {"b": {"c": 4, "d": 2}, "e": 3}}


@pytest.mark.parametrize("word", ["steps", "=3", ""])
def test_a_word_without_key_or_value_is_refused(word):
    with pytest.raises(ConfigError, match=r"is not key=value, as in train\.steps=2000"):
        parse_overrides([word])


def test_a_key_cannot_be_both_a_value_and_a_table():
    with pytest.raises(ConfigError, match=r"a.b: 'a' already has a value"):
        parse_overrides(["a=1", "a.b=2"])


# Laying one table over another


@pytest.mark.parametrize(
    ("base", "over", "result"),
    [
        ({"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}, {"a": {"b": 3, "c": 2}}),
        ({"a": "cosine"}, {"a": {"warmup": 10}}, {"a": {"kind": "cosine", "warmup": 10}}),
        ({"a": {"kind": "x", "y": 1}}, {"a": {"y": 2}}, {"a": {"kind": "x", "y": 2}}),
        ({"a": {"kind": "x", "y": 1}}, {"a": {"kind": "z"}}, {"a": {"kind": "z"}}),
        ({"a": {"kind": "x", "y": 1}}, {"a": "z"}, {"a": "z"}),
        ({"a": 1}, {"a": {"b": 2}}, {"a": {"b": 2}}),
        ({"a": {"b": {"c": 1, "d": 1}}}, {"a": {"b": {"c": 2}}}, {"a": {"b": {"c": 2, "d": 1}}}),
    ],
)
def test_merging_keeps_what_is_not_said_again(base, over, result):
    before = json.dumps(base)
    assert merge(base, over) == result
    assert json.dumps(base) == before, "the tables themselves stay as they were"


tables = st.recursive(
    st.dictionaries(st.sampled_from("abc"), st.integers(), max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner | st.integers(), max_size=3),
    max_leaves=8,
)


@given(tables)
def test_merging_with_nothing_or_with_itself_changes_nothing(table):
    assert merge(table, {}) == merge({}, table) == merge(table, table) == table


# Choices


class Plain:
    def __init__(self, size: int) -> None:
        self.size = size


class Fancy(Plain):
    def __init__(self, size: int, colour: str = "red") -> None:
        super().__init__(size)
        self.colour = colour


TABLE = {"plain": Plain, "fancy": Fancy}


def test_a_part_is_made_with_the_facts_and_options_it_asks_for():
    part = make({"kind": "fancy", "colour": "blue"}, TABLE, "part", size=3, weight=9)
    assert (part.size, part.colour) == (3, "blue")


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("fancie", r"^unknown part 'fancie'; did you mean 'fancy'\?$"),
        ("zzz", "^unknown part 'zzz'; known: fancy, plain$"),
        (
            {"kind": "fancy", "color": 1},
            "^part 'fancy': unknown option 'color'; did you mean 'colour'",
        ),
        ({"kind": "fancy", "size": 1}, "^part 'fancy': unknown option 'size'; known: colour$"),
        ({"kind": "plain", "colour": 1}, "^part 'plain': unknown option 'colour'; there are none$"),
        ({"colour": 1}, "needs a 'kind'"),
    ],
)
def test_a_wrong_choice_is_refused(choice, message):
    with pytest.raises(ConfigError, match=message):
        make(choice, TABLE, "part", size=3)


def test_an_option_that_a_part_needs_must_be_given():
    with pytest.raises(ConfigError, match="part 'plain': missing a required argument: 'size'"):
        make("plain", TABLE, "part")


def test_the_options_of_a_choice_leave_the_table_as_it_was():
    choice: Mapping[str, Any] = {"kind": "fancy", "colour": "blue"}
    assert kind_of(choice) == ("fancy", {"colour": "blue"})
    assert choice == {"kind": "fancy", "colour": "blue"}


# Recipes


def test_a_recipe_that_is_not_there_or_not_toml_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no recipe at .*none\.toml"):
        read_toml(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("a = = 3")
    with pytest.raises(ConfigError, match=r"bad.toml is not a TOML file: .*line 1"):
        read_toml(tmp_path / "bad.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"binary\.toml is not a TOML file"):
        read_toml(tmp_path / "binary.toml")
    (tmp_path / "good.toml").write_text("[train]\nsteps = 3\n")
    assert read_toml(tmp_path / "good.toml") == {"train": {"steps": 3}}


# Models


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dim": 32, "heads": 5}, "heads=5 must divide dim=32, or give head_dim"),
        ({"heads": 4, "kv_heads": 3}, "kv_heads=3 must divide heads=4"),
    ],
)
def test_sizes_that_do_not_fit_together_are_refused(fields, message):
    with pytest.raises(ShapeError, match=message):
        TransformerConfig(vocab_size=8, **fields)


@pytest.mark.parametrize(
    "name",
    [
        "vocab_size",
        "dim",
        "layers",
        "heads",
        "kv_heads",
        "head_dim",
        "ffn_dim",
        "context",
        "window",
    ],
)
def test_a_size_of_nothing_is_refused(name):
    with pytest.raises(ConfigError, match=f"{name}=0 must be at least 1"):
        TransformerConfig(**{"vocab_size": 8, name: 0})


@pytest.mark.parametrize("name", ["source_vocab_size", "encoder_layers"])
def test_an_encoder_of_nothing_is_refused(name):
    with pytest.raises(ConfigError, match=f"{name}=0 must be at least 1"):
        TransformerConfig(vocab_size=8, architecture="encoder-decoder", **{name: 0})
    with pytest.raises(
        ConfigError, match="belong to an encoder-decoder, not to architecture='decoder'"
    ):
        TransformerConfig(vocab_size=8, **{name: 4})


@pytest.mark.parametrize("name", ["dropout", "attention_dropout", "ffn_dropout"])
@pytest.mark.parametrize("value", [-0.1, 1.0])
def test_dropout_is_a_probability_below_one(name, value):
    with pytest.raises(ConfigError, match=rf"{name}={value} must lie in \[0, 1\)"):
        TransformerConfig(vocab_size=8, **{name: value})


@pytest.mark.parametrize("name", ["score", "position", "norm", "ffn", "init"])
def test_an_unknown_choice_is_refused_before_anything_is_built(name):
    with pytest.raises(ConfigError, match=f"unknown {name} 'zzz'; known: "):
        TransformerConfig(vocab_size=8, **{name: "zzz"})


def test_a_feed_forward_is_four_times_as_wide_or_as_costly():
    plain = TransformerConfig(vocab_size=8, dim=512)
    assert plain.resolved_ffn_dim == 2048
    assert (
        TransformerConfig(vocab_size=8, dim=512, ffn="swiglu").resolved_ffn_dim == 1368
    )  # 3 of 8/3 dim
    assert TransformerConfig(vocab_size=8, ffn_dim=100).resolved_ffn_dim == 100


def test_a_preset_is_a_table_with_fields_laid_over_it():
    config = preset("gpt2", position={"kind": "rotary", "base": 500.0}, layers=2)
    assert (config.dim, config.layers, kind_of(config.position)[0]) == (768, 2, "rotary")
    assert resolve({"preset": "gpt2", "vocab_size": 7}, vocab_size=99).vocab_size == 99


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"preset": "gtp2"}, r"unknown preset 'gtp2'; did you mean 'gpt2'\?"),
        (
            {"family": "transfomer"},
            "unknown model family 'transfomer'; did you mean 'transformer'",
        ),
        (
            {"preset": "gpt2", "layer": 3},
            r"model.layer: unknown key 'layer'; did you mean 'layers'",
        ),
        ({"preset": "lstm", "heads": 3}, "model.heads: unknown key 'heads'"),
        ({"family": "transformer"}, "model.vocab_size is missing"),
    ],
)
def test_a_wrong_model_is_refused(table, message):
    with pytest.raises(ConfigError, match=message):
        resolve(table)


def test_no_name_stands_in_two_places():
    """So that one that is given without its table can be told where it belongs."""
    places = [names_of(RunConfig), *(names for names, _ in TABLES.values())]
    assert len(set().union(*places)) == sum(map(len, places))
    assert TABLES["model"][0] - {"preset", "family"} <= names_of(TransformerConfig)


def names_of(config):
    return {each.name for each in dataclasses.fields(config)}


# Errors


@pytest.mark.parametrize(
    ("error", "code", "builtin"),
    [
        (ConfigError("x"), 2, ValueError),
        (ShapeError("x"), 2, ConfigError),
        (DataError("x"), 3, ValueError),
        (CheckpointError("x"), 4, OSError),
        (DivergedError("x"), 5, ArithmeticError),
        (TrainingStopped("x"), 75, RegardError),
        (TrainingStopped("x", 130), 130, RegardError),
    ],
)
def test_an_error_carries_its_exit_code_and_refines_a_builtin(error, code, builtin):
    assert error.exit_code == code
    assert isinstance(error, RegardError)
    assert isinstance(error, builtin)
    assert str(error) == "x"


def test_an_unknown_name_far_from_all_lists_them():
    assert (
        unknown("sampler", "zzz", ["top_p", "top_k"])
        == "unknown sampler 'zzz'; known: top_k, top_p"
    )


@pytest.mark.parametrize("words", [["a=x", "a.b=2"], ["a.b=2", "a=x"]])
def test_a_choice_and_its_options_may_come_in_any_order(words):
    assert parse_overrides(words) == {"a": {"kind": "x", "b": 2}}


def test_the_words_that_are_allowed_are_named_beside_other_types():
    with pytest.raises(ConfigError, match=r"must be true or false or 'qkv' .*, not 'all'"):
        preset("gpt2", bias="all")


def test_a_name_that_differs_in_case_alone_is_found():
    with pytest.raises(ConfigError, match="did you mean 'gpt2'"):
        preset("GPT2")


def test_a_long_table_is_not_told_whole():
    names = [f"name{n}" for n in range(100)]
    assert unknown("thing", "zzz", names).endswith("… (100 in all)")
    assert "name99" not in unknown("thing", "zzz", names)


def test_a_whole_number_in_scientific_notation_is_an_integer():
    steps = build(TrainConfig, parse_overrides(["steps=1e3"])).steps
    assert (steps, type(steps)) == (1000, int)
    for value, message in ((1.5, "must be an integer, not 1.5"), (1e30, "must lie between")):
        with pytest.raises(ConfigError, match=message):
            build(TrainConfig, {"steps": value})
