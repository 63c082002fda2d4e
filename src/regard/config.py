"""Settings: frozen dataclasses, parsed strictly from TOML, JSON and `key=value` arguments.

A *choice* is a name or a table: `position = "rotary"` or `{ kind = "rotary", base = 500000 }`.
The names are keys of dicts in other modules, such as `nn.position.POSITIONS`.
"""

import inspect
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from datetime import date, time
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from regard.errors import ConfigError, unknown
from regard.html import html_table
from regard.renamed import OTHER_LIBRARIES, current_names

Choice = str | Mapping[str, Any]
T = TypeVar("T")
INTEGER_LIMIT = 1 << 63  # exclusive bound of integer settings
# a table and two of its settings, of which only one can be set
ALTERNATIVES = (
    ("train", "batch", "tokens"),
    ("model", "preset", "family"),
    ("data", "validation", "validation_fraction"),
)
_DECIMAL = re.compile(r"^([+-]?)(\.\d+(?:e[+-]?\d+)?)$", re.I)  # .9, in TOML 0.9
_WORD = re.compile(r"[^\s\[\]{}\"'=]+")  # of a list without quotes
FOLDER_NAME = r"\w[\w.-]*"


class Settings:
    """Base class of the configurations; the repr shows the fields that differ from the defaults.

    >>> TrainConfig(steps=7)
    TrainConfig(steps=7)
    """

    __slots__ = ()

    def __repr__(self) -> str:
        changed = (f"{name}={value!r}" for name, value in changed_fields(self).items())
        return f"{type(self).__name__}({', '.join(changed)})"

    def _repr_html_(self) -> str:
        changed = changed_fields(self)
        names = [f.name for f in fields(self)]  # type: ignore[arg-type]
        defaults = [(name, getattr(self, name)) for name in names if name not in changed]
        return (
            f"{html_table(changed.items(), header=(type(self).__name__, ''))}"
            f"<details><summary>{len(defaults)} defaults</summary>{html_table(defaults)}</details>"
        )


def changed_fields(config: Any) -> dict[str, Any]:
    """The fields of a dataclass whose value is not the default.

    >>> changed_fields(TrainConfig(steps=7))
    {'steps': 7}
    """
    values = {f.name: getattr(config, f.name) for f in fields(config)}
    return {
        f.name: values[f.name]
        for f in fields(config)
        if (f.default_factory is MISSING and values[f.name] != f.default)
        or (f.default_factory is not MISSING and values[f.name] != f.default_factory())
    }


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class DataConfig(Settings):
    """Where the examples come from and how they are tokenized."""

    path: Choice | None = None  # a file, a folder, or a built-in dataset (data.builtin.BUILTINS)
    # the file of source lines, parallel to `target`; with `path`, a column of the table
    source: str | int | None = None
    # the file of target lines, parallel to `source`; with `path`, a column of the table
    target: str | int | None = None
    text: str | int | None = None  # the column of texts of a table, by name or number from 1
    # for pairs of texts: the column of the second texts of a table, by name or number from 1
    text2: str | int | None = None
    # the column of classes of a table, or of numbers for text regression, by name or number from 1
    label: str | int | None = None
    tags: str | int | None = None  # the column of tags of a table, by name or number from 1
    # the columns of words and of tags of CoNLL files, by number from 1
    columns: list[int] = field(default_factory=list)
    # validation data: a path, or two for parallel files
    validation: list[str] = field(default_factory=list)
    # for a time series: the sizes of the training, validation and (optional) test splits, in rows
    # or as fractions; ett: 12, 4 and 4 months of the ETT tables, 60, 20 and 20 % of other tables
    split: list[float] | Literal["ett"] = field(default_factory=list)
    validation_fraction: float = 0.1  # fraction of the data for validation if `validation` is empty
    tokenizer: Choice = "bpe"  # the tokenizer that is trained on the data (text.TOKENIZERS)
    lower: bool = False  # lowercase all text


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class TrainConfig(Settings):
    """How a model is trained."""

    steps: int = 1000  # optimizer steps
    batch: int | None = None  # batch size: rows per step; instead of `tokens`
    tokens: int | None = None  # target tokens per step, padding included; instead of `batch`
    accumulate: int = 1  # gradient accumulation: micro-batches per step
    lr: float = 1e-3  # the learning rate, before the schedule
    optimizer: Choice = "adamw"  # the optimizer (training.optim.OPTIMIZERS)
    # the learning-rate schedule: a factor of `lr` at each step (training.optim.SCHEDULES)
    schedule: Choice = "cosine"
    max_grad_norm: float = 1.0  # gradient clipping: the maximum norm; 0: off
    ema: float = 0.0  # decay of the exponential moving average of the weights; 0: off
    seed: int = 1  # seed of all random numbers: weights, batches, dropout, data split
    # steps between two evaluations; None: evaluate at step 0 and ten times in the run, fewer times
    # in a short run
    evaluate_every: int | None = None
    # validation targets per evaluation during training; None: chosen so that all evaluations
    # together cost about a tenth of the run
    evaluate_targets: int | None = None
    # for language models, the stride of the evaluation windows in tokens; None: three quarters of
    # the context, so that a token is predicted from at least a quarter of it
    evaluate_stride: int | None = None
    # steps between two checkpoints; None: `evaluate_every`, or a tenth of `steps`
    save_every: int | None = None
    keep_checkpoints: int = 3  # how many of the newest checkpoints to keep, besides the best one
    # early stopping: end after this many evaluations without improvement
    patience: int | None = None
    # the validation metric that selects the weights of model.safetensors; None: the task's default,
    # such as accuracy or F1; "last": always the newest weights
    best_metric: str | None = None
    # fine-tuning: a run folder or a Hugging Face folder whose weights initialize the model
    start: str | None = None
    # fine-tuning: which parameters are trained (training.fine_tuning.TUNINGS)
    tune: Choice = "all"
    # layer-wise learning-rate decay: each layer further from the output multiplies the learning
    # rate by this factor
    layer_decay: float = 1.0
    # evaluate baselines before training: an n-gram model for text; for a time series, naive and
    # seasonal naive forecasts, AR(p) and a linear layer; for text regression, the mean
    baseline: bool = True
    # hook points whose activations are logged (mean, norm, fraction of zeros), by glob patterns
    log: list[str] = field(default_factory=list)
    # mixed precision (autocast); auto: bfloat16 on CUDA, float32 elsewhere; float8: bfloat16 with
    # the large matmuls of wide blocks and of the loss over a vocabulary in FP8
    precision: Literal["auto", "float32", "bfloat16", "float8"] = "auto"
    compile: Literal["auto", "on", "off"] = "auto"  # use torch.compile; auto: on CUDA only
    activation_checkpointing: bool = False  # recompute blocks in the backward pass, to save memory
    # CPU threads; None: at most the usable cores, and fewer on a busy machine where that is faster
    threads: int | None = None
    # shard weights, gradients and optimizer state over the ranks (FSDP); auto: if they are large
    shard: Literal["auto", "none", "full"] = "auto"
    timeout: int = 600  # seconds that ranks wait for each other
    # experiment trackers to log to (training.tracking.trackers.TRACKERS)
    trackers: list[Choice] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class RunConfig(Settings):
    """All settings of a run; saved in full as `config.json`, so defaults may change later."""

    name: str  # name of the run and of its folder in runs/
    task: Choice = "causal"  # the training objective (tasks.TASKS)
    data: DataConfig = field(default_factory=DataConfig)
    model: dict[str, Any] = field(default_factory=dict)  # a preset or a family, and its settings
    train: TrainConfig = field(default_factory=TrainConfig)
    # time budget of the whole command: chooses the size of the model for this machine, and fits
    # train.steps, warm-up, EMA and evaluations to the time; None: train for train.steps
    minutes: float | None = None
    # the device on which the model runs; auto: the fastest
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"


TABLES = {  # the common settings of each table, and one of them as an example
    "data": ({f.name for f in fields(DataConfig)}, "path"),
    "model": (
        {"preset", "family", "dim", "layers", "heads", "kv_heads", "ffn", "ffn_dim", "context"}
        | {"dropout", "position", "norm", "window", "tied"},
        "preset",
    ),
    "train": ({f.name for f in fields(TrainConfig)}, "steps"),
}


def kind_of(choice: Choice) -> tuple[str, dict[str, Any]]:
    """Split a choice into its name and its options.

    >>> kind_of({"kind": "rotary", "base": 500000})
    ('rotary', {'base': 500000})
    """
    if isinstance(choice, str):
        return choice, {}
    options = dict(choice)
    if "kind" not in options:
        raise ConfigError(f"a choice that is a table needs a 'kind': {dict(choice)}")
    return str(options.pop("kind")), options


def make(choice: Choice, kinds: Mapping[str, Callable[..., T]], what: str, **provided: Any) -> T:
    """Build the entry of `kinds` that `choice` names, with its options.

    `provided` are arguments of the caller, such as sizes; those that the entry accepts are passed.
    """
    kind, options = kind_of(choice)
    if kind not in kinds:
        raise ConfigError(unknown(what, kind, kinds))
    signature = inspect.signature(kinds[kind])
    parameters = [  # without *args and **kwargs, those of a class that defines no __init__
        name
        for name, parameter in signature.parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    for name in options:
        if name not in parameters or name in provided:
            known = [parameter for parameter in parameters if parameter not in provided]
            raise ConfigError(f"{what} {kind!r}: {unknown('option', name, known)}")
    hints = _type_hints(kinds[kind])
    options = {
        name: _coerce(hints[name], value, f"{what} {kind!r}: {name}") if name in hints else value
        for name, value in options.items()
    }
    arguments = {k: v for k, v in provided.items() if k in parameters} | options
    try:
        signature.bind(**arguments)
    except TypeError as error:  # "missing a required argument: 'factor'"
        raise ConfigError(f"{what} {kind!r}: {error}") from None
    return kinds[kind](**arguments)


def _type_hints(entry: Any) -> dict[str, Any]:
    """The type hints of the arguments of a class, a function or a partial."""
    entry = entry.func if isinstance(entry, partial) else entry
    function = vars(entry).get("__init__", entry) if inspect.isclass(entry) else entry
    return typing.get_type_hints(function)


def build(cls: type[T], table: Mapping[str, Any], where: str = "") -> T:
    """Make a config dataclass from a plain table; unknown keys and wrong types are errors."""
    hints = typing.get_type_hints(cls)
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    values = {}
    for name, value in table.items():
        path = f"{where}.{name}" if where else name
        if name not in known:
            raise ConfigError(f"{path}: {_unknown_key(name, known, where)}")
        values[name] = _coerce(hints[name], value, path)
    for name, f in known.items():
        if name not in values and f.default is MISSING and f.default_factory is MISSING:
            raise ConfigError(f"{where + '.' if where else ''}{name} is missing")
    return cls(**values)


def _unknown_key(name: str, known: Iterable[str], where: str) -> str:
    """The message for an unknown key, which may belong to another table, as in train.device."""
    message = unknown("key", name, known)
    places = [table for table, (names, _) in TABLES.items() if name in names and table != where]
    if where in TABLES and "; known: " in message:  # there is no suggestion yet
        if name in {f.name for f in fields(RunConfig)}:
            return f"unknown key {name!r}; it is a top-level setting: {name}=…"
        if places:
            return f"unknown key {name!r}; did you mean '{places[0]}.{name}'?"
    return message


def _coerce(hint: Any, value: Any, path: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(value, int) and abs(value) >= INTEGER_LIMIT:
        # the value may be too long for a message
        raise ConfigError(f"{path} must lie between -2^63 and 2^63")
    if isinstance(value, str) and not _is_savable(value):
        raise ConfigError(f"{path} must be valid UTF-8 without NUL, not {value!r}")
    if hint is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        if type(None) in arguments and (value is None or value == "none"):
            return None
        members = [a for a in arguments if a is not type(None)]
        for member in members:
            try:
                return _coerce(member, value, path)
            except ConfigError as error:
                last_error = error
        if len(members) == 1:
            raise last_error
        raise ConfigError(f"{path} must be {' or '.join(map(_type_name, members))}, not {value!r}")
    if origin is Literal:
        if value not in arguments:
            raise ConfigError(f"{path}: {unknown('value', str(value), map(str, arguments))}")
        return value
    if is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path} must be a table of settings, not {value!r}")
        return build(typing.cast(type[Any], hint), value, path)
    if origin in (list, tuple):
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list | tuple):
            raise ConfigError(f"{path} must be a list, not {value!r}")
        return origin(_coerce(arguments[0], item, path) for item in items)
    expected_type = origin or hint
    if expected_type is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if expected_type is int and isinstance(value, float) and value.is_integer():  # 1e3
        return _coerce(hint, int(value), path)
    if expected_type is Mapping or expected_type is dict:
        expected_type = Mapping
    if not isinstance(value, expected_type) or (
        expected_type in (int, float) and isinstance(value, bool)
    ):
        raise ConfigError(f"{path} must be {_type_name(hint)}, not {value!r}")
    return dict(value) if expected_type is Mapping else value


def _is_savable(text: str) -> bool:
    """Whether a string can be saved: it has no lone surrogate and no NUL."""
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def _type_name(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return " or ".join(map(repr, typing.get_args(hint)))
    if typing.get_origin(hint) is list:
        return "a list"
    names = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
    return names.get(hint, "a table")


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file; an error names the file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no recipe at {path}; give the path of a .toml file") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, or too long a number
        raise ConfigError(f"{path} is not a TOML file: {error}") from None


STUDY_KEYS = ("study", "report")  # keys of a recipe of several runs


def read_recipe(path: Path) -> dict[str, Any]:
    """Read a recipe and check its keys and types; an error names the file.

    A recipe may be a study of several runs (`study_runs`) that ends with a report (`study_report`).
    """
    table = {"name": path.stem, **read_toml(path)}
    runs = table.get("study", {})
    try:
        build(RunConfig, {k: value for k, value in table.items() if k not in STUDY_KEYS})
        study_report(table)
        if not isinstance(runs, Mapping) or not all(isinstance(t, Mapping) for t in runs.values()):
            raise ConfigError("study holds a table of settings for each run, as in [study.NAME]")
        for name, run in runs.items():
            if not re.fullmatch(FOLDER_NAME, name):
                raise ConfigError(f"study.{name}: {name!r} cannot name a folder")
            build(RunConfig, {"name": name, **run}, f"study.{name}")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return table


def study_runs(recipe: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The runs of a study by name: each table under `study`, merged into the rest of the recipe.

    >>> study_runs({"train": {"steps": 9}, "study": {"gru": {"train": {"lr": 0.1}}}})
    {'gru': {'train': {'steps': 9, 'lr': 0.1}, 'name': 'gru'}}
    """
    common = {key: value for key, value in recipe.items() if key not in STUDY_KEYS}
    runs = recipe.get("study", {})
    return {name: overlay(common, {"name": name, **run}) for name, run in runs.items()}


def study_report(recipe: Mapping[str, Any]) -> list[Choice]:
    """The data of the evaluation by length at the end of a study; empty: no evaluation.

    >>> study_report({"study": {}, "report": {"by_length": {"kind": "parentheses"}}})
    [{'kind': 'parentheses'}]
    """
    report = recipe.get("report")
    if report is None:
        return []
    if "study" not in recipe or not isinstance(report, Mapping) or {*report} != {"by_length"}:
        raise ConfigError(
            "report is for a study and has one key, by_length: the data of an evaluation by "
            "length, as a name, a path or a table"
        )
    data = report["by_length"]
    return list(data) if isinstance(data, list) else [data]


def check_not_study(recipe: Mapping[str, Any]) -> None:
    """Raise if a recipe is a study and not a single run."""
    if "study" in recipe:
        raise ConfigError(
            f"{recipe['name']} is a study of several runs: {', '.join(recipe['study'])};\n"
            "`regard train` trains them all; then use the folder of one run"
        )


def overlay(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Merge settings; an override of one of two `ALTERNATIVES` removes the other.

    >>> overlay({"train": {"batch": 8, "lr": 0.1}}, {"train": {"tokens": 4096}})
    {'train': {'lr': 0.1, 'tokens': 4096}}
    """
    result = merge(base, overrides)
    for table, one, other in ALTERNATIVES:
        table_overrides = overrides.get(table, {})
        for new, old in ((one, other), (other, one)):
            if new in table_overrides and old not in table_overrides and old in result[table]:
                result[table] = {k: v for k, v in result[table].items() if k != old}
    return result


def check_overrides(table: Mapping[str, Any]) -> None:
    """Raise on unknown keys and wrong types, before torch is imported."""
    for key, (names, example) in TABLES.items():
        if not isinstance(table.get(key, {}), dict):
            raise ConfigError(f"{key} is a table, set as in {key}.{example}=…, not {table[key]!r}")
        for top_key in table:
            for name in (top_key, *current_names(top_key), OTHER_LIBRARIES.get(top_key, "")):
                if name.partition(".")[0] in names:
                    raise ConfigError(f"unknown key {top_key!r}; did you mean '{key}.{name}'?")
    build(RunConfig, {"name": "", **table})


def _parse_value(text: str) -> Any:
    """A TOML value, a list of words as a shell leaves it (`[a, b]`), or else the text."""
    try:
        toml = _DECIMAL.sub(r"\g<1>0\2", text)
        parsed = tomllib.loads(f"value = {toml}")
    except (ValueError, RecursionError):
        words = [word.strip() for word in text[1:-1].split(",")]
        is_list = (text[:1], text[-1:]) == ("[", "]") and all(map(_WORD.fullmatch, words))
        return list(map(_parse_value, words)) if is_list else text
    # no setting is a date; further lines of a text may parse as further keys
    value = parsed["value"]
    return text if isinstance(value, date | time) or len(parsed) > 1 else value


def is_override(argument: str) -> bool:
    """Whether an argument in the place of the data is a setting, as in `data.source=train.en`."""
    return "=" in argument and not Path(argument).exists()


def parse_overrides(arguments: Iterable[str]) -> dict[str, Any]:
    """Parse `key=value` arguments into a nested table; values are TOML, or else strings.

    >>> parse_overrides(["model.dim=128", "train.lr=1e-3", "data.tokenizer=char"])
    {'model': {'dim': 128}, 'train': {'lr': 0.001}, 'data': {'tokenizer': 'char'}}
    >>> parse_overrides(["top_p=.9", "task.covariates=[rain, wind]"])
    {'top_p': 0.9, 'task': {'covariates': ['rain', 'wind']}}
    """
    result: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals or not key:
            raise ConfigError(f"{argument!r} is not key=value, as in train.steps=2000")
        value = _parse_value(text)
        *path, last = key.split(".")
        table = result
        for part in path:
            if isinstance(table.get(part), str):  # task=masked task.mask_fraction=0.2
                table[part] = {"kind": table[part]}
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise ConfigError(f"{key}: {part!r} already has a value")
        if isinstance(table.get(last), dict) and isinstance(value, str):
            table[last]["kind"] = value  # task.mask_fraction=0.2 task=masked
        else:
            table[last] = value
    return result


def parse_entry(
    argument: str,
    cls: Callable[..., T],
    adapt: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> T:
    """Make a dataclass from `name=value`; the value is its first field, or a TOML table of fields.

    `adapt` may change the table of fields before it is checked.

    >>> parse_entry("data={validation_fraction=0.2, lower=true}", DataConfig).lower
    True
    """
    ((name, value),) = parse_overrides([argument]).items()
    if not isinstance(value, dict):
        value = {next(iter(inspect.signature(cls).parameters)): value}
    return build(cls, adapt(value), name)  # type: ignore[arg-type]


def merge(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Merge one nested table into another; a choice of another kind replaces the whole choice.

    >>> merge({"train": {"steps": 10, "lr": 0.1}}, {"train": {"steps": 20}})
    {'train': {'steps': 20, 'lr': 0.1}}
    """
    result = dict(base)
    for key, value in overrides.items():
        old = result.get(key)
        if isinstance(value, Mapping) and isinstance(old, str) and "kind" not in value:
            old = {"kind": old}  # schedule = "cosine", then schedule.warmup = 10
        if isinstance(value, Mapping) and isinstance(old, Mapping) and "kind" not in value:
            result[key] = merge(old, value)
        else:
            result[key] = value
    return result


def flatten(table: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting by its dotted name; the task becomes its kind and its options.

    >>> dict(flatten({"task": "causal", "train": {"steps": 10}}))
    {'task.kind': 'causal', 'train.steps': 10}
    """
    for key, value in table.items():
        if key == "task":
            kind, options = kind_of(value)
            value = {"kind": kind, **options}
        if isinstance(value, Mapping):
            yield from flatten(value, f"{where}{key}.")
        else:
            yield f"{where}{key}", value


def to_table(config: Any) -> Any:
    """Convert a config to a plain table, from which `build` makes an equal config."""
    if is_dataclass(config):
        return {f.name: to_table(getattr(config, f.name)) for f in fields(config)}
    if isinstance(config, Mapping):
        return {key: to_table(value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [to_table(value) for value in config]
    return config
