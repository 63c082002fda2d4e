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
    is_data_set_name,
    open_data,
    run_name,
)
from regard.tasks import TASKS
from regard.training.setup.device import pick_device
from regard.training.setup.fit_to_minutes import fit_to_minutes
from regard.training.setup.setting_checks import check_train_config
from regard.training.setup.start_settings import start_from
from regard.training.storage.start import open_start

# The settings in `train` of models without training steps.
USED_WITHOUT_GRADIENTS = ("seed", "threads", "evaluate_stride", "baseline")
RECIPES = Path(__file__).parents[2] / "recipes"


def recipes() -> list[str]:
    """The names of the recipes that come with the library."""
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def configure(
    what: str | None,
    overrides: dict[str, Any] | None = None,
    *,
    started: float | None = None,
    on_measure: Callable[[], object] | None = None,
) -> RunConfig:
    """The settings of a run: of a recipe, a .toml file, or chosen for the user's data.

    `overrides` is a nested table; `minutes` in it chooses model size and steps for this machine,
    and counts from `started` on; `on_measure` is called before (see `fit_to_minutes`).
    Without `what`, `overrides["data"]` names the data, such as two parallel files.
    """
    over = dict(overrides or {})
    check_overrides(over)
    file = _recipe(what)
    if file is not None:
        base = read_recipe(file)
        check_not_study(base)
    else:
        base, class_names = _default_settings(what, over)
        start = over.get("train", {}).get("start")
        if start is not None and not {"family", "preset"} & set(over.get("model", {})):
            opened = open_start(_absolute(start))
            base = start_from(base, opened.config, class_names, opened.template)
        if overlay(base, over).get("model", {}).get("norm") == "batch":
            base.get("train", {}).pop("ema", None)  # refused with BatchNorm
        if "task" in over:
            over["task"] = _with_options(over["task"], base["task"])
    return _combine(base, over, file, started, on_measure)


def _with_options(task: Choice, default: Choice) -> Choice:
    """The task that the user names, with the options of the default task if it is of that kind.

    >>> _with_options("tag", {"kind": "tag", "word_dropout": 0.25})
    {'kind': 'tag', 'word_dropout': 0.25}
    """
    if not isinstance(task, str) and "kind" not in task:
        return task  # options alone, which are merged into the default
    (default_kind, options), (kind, given) = kind_of(default), kind_of(task)
    return {"kind": kind, **options, **given} if options and kind == default_kind else task


def without_effect(config: RunConfig, overrides: Mapping[str, Any]) -> list[str]:
    """A line that names the settings given for training steps, if the model takes none."""
    family = family_of(resolve(config.model, vocab_size=1))
    if not is_fitted_without_gradients(family):
        return []
    given = [
        f"train.{name}" for name in overrides.get("train", {}) if name not in USED_WITHOUT_GRADIENTS
    ]
    given += ["minutes"] if overrides.get("minutes") is not None else []
    if not given:
        return []
    return [
        f"no effect  {', '.join(given)}: model.family={family} is fitted without training steps"
    ]


def configure_study(
    what: str | None, overrides: dict[str, Any] | None = None
) -> dict[str, RunConfig]:
    """The settings of each run of a study by name; empty if `what` is not a study."""
    over = dict(overrides or {})
    check_overrides(over)
    file = _recipe(what)
    runs = {} if file is None else study_runs(read_recipe(file))
    if runs and "minutes" in over:
        raise ConfigError(
            f"minutes applies to one run, and {what} has {len(runs)}; set train.steps"
        )
    return {name: _combine(base, over, file) for name, base in runs.items()}


def configure_report(what: str | None) -> list[Choice]:
    """The data on which a study is evaluated by length at its end; empty: none."""
    file = _recipe(what)
    return [] if file is None else study_report(read_recipe(file))


def _recipe(what: str | None) -> Path | None:
    """The file of a recipe; None if `what` is not a recipe."""
    if what is not None and what.endswith(".toml"):
        return Path(what)
    if what is not None and what in recipes() and not Path(what).exists():
        return RECIPES / f"{what}.toml"
    return None


def _combine(
    base: dict[str, Any],
    over: dict[str, Any],
    file: Path | None,
    started: float | None = None,
    on_measure: Callable[[], object] | None = None,
) -> RunConfig:
    """Merge the user's overrides into the settings of a recipe or those chosen for the data."""
    over = dict(over)
    data = merge(base.get("data", {}), over.get("data", {}))
    for key in ("path",) if data.get("path") else ("source", "target"):
        if isinstance(data.get(key), str) and not is_data_set_name(data[key]):
            data[key] = _absolute(data[key])
        elif isinstance(data.get(key), Mapping) and data[key].get("file"):
            data[key] = {**data[key], "file": _absolute(data[key]["file"])}
    if data.get("validation"):
        paths = [data["validation"]] if isinstance(data["validation"], str) else data["validation"]
        data["validation"] = [path if is_data_set_name(path) else _absolute(path) for path in paths]
    over = merge(over, {"data": data})
    if over.get("train", {}).get("start") is not None:
        over = merge(over, {"train": {"start": _absolute(over["train"]["start"])}})
    config = build(RunConfig, overlay(base, over))
    if file is not None and not {"model", "train"} & set(over):
        _check_file(file, config)
    minutes = config.minutes
    if minutes is None:
        return config
    if "steps" in over.get("train", {}):
        raise ConfigError("set minutes or train.steps, not both")
    sizes = {"dim", "layers", "encoder_layers", "heads", "kv_heads", "head_dim", "ffn_dim"}
    pinned = {"preset", "family", *sizes} & set(over.get("model", {}))
    return fit_to_minutes(
        config,
        choose_model=not pinned and config.train.start is None,
        started=started,
        keep=over.get("train", {}),
        on_measure=on_measure,
    )


def _check_file(file: Path, config: RunConfig) -> None:
    """Check the settings of a file; an error names the file."""
    try:
        check_train_config(config.train)
        resolve(config.model, vocab_size=1)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def _absolute(path: str) -> str:
    """An absolute path, which is still right when the run is resumed from another folder."""
    full = os.path.expandvars(path)
    if "$" in full:
        name = full[full.index("$") :].split("/")[0]
        raise ConfigError(
            f"{path}: the environment variable {name} is not set; set it to the data's folder"
        )
    return str(Path(os.path.expanduser(full)).absolute())


def _default_settings(
    what: str | None, over: dict[str, Any]
) -> tuple[dict[str, Any], Sequence[str] | None]:
    """The default settings for data, and the names of its classes if it has classes."""
    data_settings = over.get("data", {})
    where: dict[str, Any]
    if what is None:
        where = {
            key: data_settings[key] for key in ("path", "source", "target") if key in data_settings
        }
        if not where:
            raise ConfigError(
                "no data to train on; give a recipe, a file or a folder first, "
                "or data.source=… and data.target=…"
            )
    else:
        where = {"path": what}
        looks_like_a_path = os.sep in what or Path(what).suffix  # if missing, open_data says so
        if not looks_like_a_path and not Path(what).exists() and what not in BUILTINS:
            if what in PRESETS:
                raise ConfigError(
                    f"{what!r} is a preset, not data; give the data to train on:\n"
                    f"regard train DATA model.preset={what}"
                )
            known = {*recipes(), *BUILTINS}
            raise ConfigError(
                f"{unknown('recipe, file or built-in data set', what, known)}\n"
                "give a recipe's name, a .toml file, or the path of your data"
            )
    task = merge({"task": "causal"}, over)["task"]
    given = over.get("task", {})
    named = isinstance(given, str) or "kind" in given  # not options of the default task alone
    task_class = TASKS.get(kind_of(task)[0]) if named else None
    names = ("source", "target", "text", "text2", "label", "tags", "columns")
    columns = {name: data_settings[name] for name in names if name in data_settings} | where
    data = open_data(
        where.get("path"),
        where.get("source"),
        where.get("target"),
        lower=data_settings.get("lower", False),
        kind=None if task_class is None else task_class.data_kind,
        columns=column_settings(build(DataConfig, columns)),
    )
    if task_class is not None:
        check_data_kind(kind_of(task)[0], data)
    device = pick_device(over.get("device", "auto"))
    model = over.get("model", {})
    chosen = default_settings(data, where, gpu=device.type == "cuda", task=task)
    if {"family", "preset"} & set(model):
        chosen["model"] = {}  # the sizes chosen were those of another model
        chosen["train"] = {**chosen.get("train", {}), **PIPELINES[data.kind].train_defaults(model)}
    if {"family", "preset"} & set(model) or "start" in over.get("train", {}):
        kind, options = kind_of(chosen["task"])
        unsuitable = PIPELINES[data.kind].model_task_options
        options = {name: value for name, value in options.items() if name not in unsuitable}
        chosen["task"] = {"kind": kind, **options} if options else kind
    settings = {"name": run_name(where.get("path"), where.get("source")), **chosen}
    return settings, getattr(data, "class_names", None)
