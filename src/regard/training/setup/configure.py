"""The settings of a run: from a recipe, a .toml file, or chosen for the user's data."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from regard.config import (
    Choice,
    DataConfig,
    RunConfig,
    build,
    check_not_study,
    check_overrides,
    kind_of,
    merge,
    overlay,
    read_recipe,
    study_report,
    study_runs,
)
from regard.data.builtin import BUILTINS
from regard.errors import ConfigError, unknown
from regard.models.build import family_of, is_fitted_without_gradients, resolve
from regard.models.presets import PRESETS
from regard.pipelines import (
    PIPELINES,
    check_data_kind,
    column_settings,
    default_settings,
    is_dataset_name,
    open_data,
    run_name,
)
from regard.tasks import TASKS
from regard.training.setup.device import pick_device
from regard.training.setup.fit_to_minutes import fit_to_minutes
from regard.training.setup.setting_checks import check_train_config
from regard.training.setup.start_settings import settings_from
from regard.training.storage.initial_weights import open_initial_run

# The settings of `train` that affect models that are fitted without gradients.
USED_WITHOUT_GRADIENTS = ("seed", "threads", "evaluate_stride", "baseline")
RECIPES = Path(__file__).parents[2] / "recipes"


def recipes() -> list[str]:
    """The names of the recipes that come with the library."""
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def configure(
    data_or_recipe: str | None,
    overrides: dict[str, Any] | None = None,
    *,
    started: float | None = None,
    on_timing: Callable[[], object] | None = None,
) -> RunConfig:
    """The settings of a run: those of a recipe or a .toml file, or defaults for the user's data.

    `data_or_recipe` names a recipe, a .toml file or data; if it is None, `overrides["data"]` names
    the data, such as two parallel files. `overrides` is a nested table. `minutes` in it chooses the
    model size and the steps for this machine, and counts from `started` on; `on_timing` is called
    before the first step is timed (see `fit_to_minutes`).
    """
    overrides = dict(overrides or {})
    check_overrides(overrides)
    file = _recipe_file(data_or_recipe)
    if file is not None:
        base = read_recipe(file)
        check_not_study(base)
    else:
        base, class_names = _default_settings(data_or_recipe, overrides)
        train = overrides.get("train", {})
        start = train.get("start")
        if start is not None and not {"family", "preset"} & set(overrides.get("model", {})):
            initial_run = open_initial_run(_absolute_path(start))
            tune = merge({"tune": "all"}, train)["tune"]
            base = settings_from(base, initial_run.config, class_names, initial_run.template, tune)
        if overlay(base, overrides).get("model", {}).get("norm") == "batch":
            base.get("train", {}).pop("ema", None)  # refused with BatchNorm
        if "task" in overrides:
            overrides["task"] = _with_default_options(overrides["task"], base["task"])
    return _combine(base, overrides, file, started, on_timing)


def _with_default_options(task: Choice, default: Choice) -> Choice:
    """The task that the user names; if it is the default task, with the default options.

    >>> _with_default_options("tag", {"kind": "tag", "word_dropout": 0.25})
    {'kind': 'tag', 'word_dropout': 0.25}
    """
    if not isinstance(task, str) and "kind" not in task:
        return task  # options alone, which are merged into the default
    default_kind, default_options = kind_of(default)
    kind, options = kind_of(task)
    if kind != default_kind or not default_options:
        return task
    return {"kind": kind, **default_options, **options}


def unused_overrides(config: RunConfig, overrides: Mapping[str, Any]) -> list[str]:
    """A line that names the overrides without effect, if the model is fitted without gradients."""
    family = family_of(resolve(config.model, vocab_size=1))
    if not is_fitted_without_gradients(family):
        return []
    names = [
        f"train.{name}" for name in overrides.get("train", {}) if name not in USED_WITHOUT_GRADIENTS
    ]
    names += ["minutes"] if overrides.get("minutes") is not None else []
    if not names:
        return []
    return [
        f"no effect  {', '.join(names)}: model.family={family} is fitted without training steps"
    ]


def configure_study(
    data_or_recipe: str | None, overrides: dict[str, Any] | None = None
) -> dict[str, RunConfig]:
    """The settings of each run of a study by name; empty if it is not a study."""
    overrides = dict(overrides or {})
    check_overrides(overrides)
    file = _recipe_file(data_or_recipe)
    runs = {} if file is None else study_runs(read_recipe(file))
    if runs and "minutes" in overrides:
        raise ConfigError(
            f"minutes applies to one run, and {data_or_recipe} has {len(runs)}; set train.steps"
        )
    return {name: _combine(base, overrides, file) for name, base in runs.items()}


def configure_report(recipe: str) -> list[Choice]:
    """The data of the evaluation by length at the end of a study; empty: no evaluation."""
    file = _recipe_file(recipe)
    return [] if file is None else study_report(read_recipe(file))


def _recipe_file(name: str | None) -> Path | None:
    """The file of a recipe; None if the name is not that of a recipe."""
    if name is not None and name.endswith(".toml"):
        return Path(name)
    if name is not None and name in recipes() and not Path(name).exists():
        return RECIPES / f"{name}.toml"
    return None


def _combine(
    base: dict[str, Any],
    overrides: dict[str, Any],
    file: Path | None,
    started: float | None = None,
    on_timing: Callable[[], object] | None = None,
) -> RunConfig:
    """Merge the user's overrides into the settings of a recipe or those chosen for the data."""
    overrides = dict(overrides)
    if file is not None:
        base = _with_initial_tokenizer(base, overrides)
    tables = [overrides] if file is None else [overrides, base]
    has_tokenizer_setting = any("tokenizer" in table.get("data", {}) for table in tables)
    base_data, data_overrides = ({"data": t.get("data", {})} for t in (base, overrides))
    data = overlay(base_data, data_overrides)["data"]
    for key in ("path",) if data.get("path") else ("source", "target"):
        if isinstance(data.get(key), str) and not is_dataset_name(data[key]):
            data[key] = _absolute_path(data[key])
        elif isinstance(data.get(key), Mapping) and data[key].get("file"):
            data[key] = {**data[key], "file": _absolute_path(data[key]["file"])}
    if data.get("validation"):
        paths = [data["validation"]] if isinstance(data["validation"], str) else data["validation"]
        data["validation"] = [
            path if is_dataset_name(path) else _absolute_path(path) for path in paths
        ]
    overrides = merge(overrides, {"data": data})
    if overrides.get("train", {}).get("start") is not None:
        overrides = merge(
            overrides, {"train": {"start": _absolute_path(overrides["train"]["start"])}}
        )
    config = build(RunConfig, overlay(base, overrides))
    if has_tokenizer_setting:
        _check_tokenizer(config)
    if file is not None and not {"model", "train"} & set(overrides):
        _check_file(file, config)
    minutes = config.minutes
    if minutes is None:
        return config
    if "steps" in overrides.get("train", {}):
        raise ConfigError("set minutes or train.steps, not both")
    sizes = {"dim", "layers", "encoder_layers", "heads", "kv_heads", "head_dim", "ffn_dim"}
    chosen_by_user = {"preset", "family", *sizes} & set(overrides.get("model", {}))
    return fit_to_minutes(
        config,
        choose_model=not chosen_by_user and config.train.start is None,
        started=started,
        keep=overrides.get("train", {}),
        on_timing=on_timing,
    )


def _with_initial_tokenizer(recipe: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a recipe, with the tokenizer of `train.start` if `overrides` sets it."""
    start, data = overrides.get("train", {}).get("start"), recipe.get("data", {})
    if start is None or "tokenizer" not in data or "tokenizer" in overrides.get("data", {}):
        return recipe
    initial_run = open_initial_run(_absolute_path(start))
    if initial_run.tokenizers is None:
        return recipe
    return {**recipe, "data": {**data, "tokenizer": initial_run.config.data.tokenizer}}


def _check_tokenizer(config: RunConfig) -> None:
    """Raise if `data.tokenizer` is not used: the data has no text, or `train.start` has one.

    A tokenizer equal to that of `train.start` is accepted.
    """
    kind = kind_of(config.task)[0]
    data_kind = TASKS[kind].data_kind if kind in TASKS else None
    if data_kind is not None and PIPELINES[data_kind].tokenizer_type is None:
        raise ConfigError(f"data.tokenizer is for text; task={kind!r} learns from {data_kind}")
    if config.train.start is None:
        return
    initial = open_initial_run(config.train.start)
    if initial.tokenizers is not None and config.data.tokenizer != initial.config.data.tokenizer:
        raise ConfigError(
            f"train.start={config.train.start} has a tokenizer, which the run uses; "
            "leave out data.tokenizer"
        )


def _check_file(file: Path, config: RunConfig) -> None:
    """Check the settings of a file; an error names the file."""
    try:
        check_train_config(config.train)
        resolve(config.model, vocab_size=1)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def _absolute_path(path: str) -> str:
    """The absolute path, so that the run can be resumed from another working directory."""
    expanded = os.path.expandvars(path)
    if "$" in expanded:
        name = expanded[expanded.index("$") :].split("/")[0]
        raise ConfigError(
            f"{path}: the environment variable {name} is not set; set it to the data's folder"
        )
    return str(Path(os.path.expanduser(expanded)).absolute())


def _default_settings(
    path: str | None, overrides: dict[str, Any]
) -> tuple[dict[str, Any], Sequence[str] | None]:
    """The default settings for data, and the names of its classes if it has classes."""
    data_settings = overrides.get("data", {})
    location: dict[str, Any]
    if path is None:
        location = {
            key: data_settings[key] for key in ("path", "source", "target") if key in data_settings
        }
        if not location:
            raise ConfigError(
                "no data to train on; give a recipe, a file or a folder first, "
                "or data.source=… and data.target=…"
            )
    else:
        location = {"path": path}
        is_path = os.sep in path or Path(path).suffix  # `open_data` reports it if it is missing
        if not is_path and not Path(path).exists() and path not in BUILTINS:
            if path in PRESETS:
                raise ConfigError(
                    f"{path!r} is a preset, not data; give the data to train on:\n"
                    f"regard train DATA model.preset={path}"
                )
            known = {*recipes(), *BUILTINS}
            raise ConfigError(
                f"{unknown('recipe, file or built-in dataset', path, known)}\n"
                "give a recipe's name, a .toml file, or the path of your data"
            )
    task = merge({"task": "causal"}, overrides)["task"]
    override = overrides.get("task", {})
    is_named = isinstance(override, str) or "kind" in override  # not only options of the default
    task_class = TASKS.get(kind_of(task)[0]) if is_named else None
    names = ("source", "target", "text", "text2", "label", "tags", "columns")
    columns = {name: data_settings[name] for name in names if name in data_settings} | location
    data = open_data(
        location.get("path"),
        location.get("source"),
        location.get("target"),
        lower=data_settings.get("lower", False),
        kind=None if task_class is None else task_class.data_kind,
        columns=column_settings(build(DataConfig, columns)),
    )
    if task_class is not None:
        check_data_kind(kind_of(task)[0], data)
    device = pick_device(overrides.get("device", "auto"))
    model = overrides.get("model", {})
    defaults = default_settings(data, location, gpu=device.type == "cuda", task=task)
    if {"family", "preset"} & set(model):
        defaults["model"] = {}  # the default sizes are those of another model
        train = PIPELINES[data.kind].train_defaults(model)
        defaults["train"] = {**defaults.get("train", {}), **train}
    if {"family", "preset"} & set(model) or "start" in overrides.get("train", {}):
        kind, options = kind_of(defaults["task"])
        unsuitable = PIPELINES[data.kind].model_task_options
        options = {name: value for name, value in options.items() if name not in unsuitable}
        defaults["task"] = {"kind": kind, **options} if options else kind
    settings = {"name": run_name(location.get("path"), location.get("source")), **defaults}
    return settings, getattr(data, "class_names", None)
