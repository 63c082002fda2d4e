"""Structure and cost of a model, and the differences between two models."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regard.api.overrides import read_overrides
from regard.config import (
    RunConfig,
    build,
    check_not_study,
    kind_of,
    merge,
    read_toml,
    to_table,
)
from regard.errors import ConfigError, unknown
from regard.explain.render.diagram import diagram
from regard.html import html_table
from regard.hub.external_checkpoint import is_external_checkpoint, open_checkpoint
from regard.models.build import (
    build_on_meta,
    config_table,
    family_of,
    is_fitted_without_gradients,
    resolve,
)
from regard.models.compatibility import VECTOR_HEADS, is_tied, with_defaults
from regard.models.cost import Cost, cost
from regard.models.presets import PRESETS, PUBLISHED, ModelConfig
from regard.models.presets.published import Published
from regard.nn.head import HEADS
from regard.nn.init import INITS
from regard.nn.position import POSITIONS
from regard.nn.score import SCORES
from regard.tasks import TASKS
from regard.training.baseline import read_baselines
from regard.training.fine_tuning import count_trainable, tuning
from regard.training.setup.configure import RECIPES, recipes
from regard.training.storage.evaluation import Evaluation
from regard.training.storage.run_folder import RunFolder
from regard.training.tracking.history import stored_parameters

SIZES = (
    *("dim", "layers", "encoder_layers", "heads", "encoder_heads", "kv_heads", "head_dim"),
    *("ffn_dim", "encoder_ffn_dim", "embed_dim"),
    *("window", "global_every", "global_layers", "vocab_size", "source_vocab_size", "context"),
    *("segments", "image_size", "patch_size", "channels"),
)
TABLES: dict[str, Mapping[str, Any]] = {  # settings whose options have defaults
    "score": SCORES,
    "position": POSITIONS,
    "init": INITS,
    "head": HEADS,
}

Values = tuple[Any, ...]  # values of one setting, one for each model that is compared

NOT_EVALUATED = Evaluation(metrics={})


@dataclass(frozen=True, slots=True, repr=False)
class ModelInfo:
    """A model's configuration, its cost, and where it comes from."""

    name: str
    kind: str  # "preset", "recipe", "run", "checkpoint" or "configuration"
    config: Any  # the model's configuration dataclass
    cost: Cost
    parameters: int  # fitted without gradients: the values stored in the run, or 0
    published: Published | None = None  # the published size of a preset
    metrics: dict[str, float] = field(default_factory=dict)  # validation metrics of a run
    evaluated_on: str = ""  # the targets of the metrics, such as "all 3,000 tokens"
    unit: str = ""  # unit of the metrics, where it is not obvious
    baselines: dict[str, dict[str, float]] = field(default_factory=dict)  # of a run, by name
    # of a run that starts from another or does not train all parameters: `train.start`,
    # `train.tune` with its options, and the number of parameters that are trained
    fine_tuning: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"ModelInfo({self.name!r}: {self.family}, {self.parameters:,} parameters)"

    def _repr_html_(self) -> str:
        rows = [("parameters", f"{self.parameters:,}"), *self.metrics.items()]
        rows += [
            (f"{name}: {metric}", value)
            for name, metrics in self.baselines.items()
            for metric, value in metrics.items()
        ]
        rows += self.fine_tuning.items()
        return html_table([*rows, *self.settings.items()], header=(self.name, self.unit))

    @property
    def family(self) -> str:
        """The family of models: transformer, recurrent, ngram, …"""
        return family_of(self.config)

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting of the model."""
        return config_table(self.config)

    @property
    def applicable_settings(self) -> dict[str, Any]:
        """The settings that apply and are not None or False."""
        return {key: v for key, v in _applicable(self.config).items() if v not in (None, False)}

    @property
    def published_difference(self) -> float | None:
        """(our parameters - published parameters) / published parameters."""
        if self.published is None:
            return None
        return self.parameters / self.published.count - 1

    @property
    def position_name(self) -> str:
        """The word for a position of the input: "token", or "position" if a model reads vectors."""
        return "position" if _has_vector_head(self.config) else "token"

    def diagram(self, *, ascii: bool = False) -> list[str]:
        """The model drawn with box characters, at most 80 columns wide."""
        return diagram(self.family, self.config, ascii=ascii)


@dataclass(frozen=True, slots=True, repr=False)
class ModelDiff:
    """The settings and the parameter counts in which two models differ."""

    names: tuple[str, str]
    sizes: dict[str, Values]
    settings: dict[str, Values]  # the other settings
    parameters: dict[str, Values]

    def __repr__(self) -> str:
        settings = {**self.sizes, **self.settings}
        values = (f"{key} {first!r} → {second!r}" for key, (first, second) in settings.items())
        return f"ModelDiff({', '.join(self.names)}: {', '.join(values) or 'equal'})"

    def _repr_html_(self) -> str:
        rows = {**self.sizes, **self.settings}
        rows |= {f"parameters of {part}": values for part, values in self.parameters.items()}
        return html_table([(key, *values) for key, values in rows.items()], ("", *self.names))

    @property
    def is_equal(self) -> bool:
        """Whether the two models are equal."""
        return not (self.sizes or self.settings or self.parameters)


def presets() -> list[str]:
    """The names of all presets."""
    return list(PRESETS)


def info(
    name_or_config: str | Path | ModelConfig,
    *overrides: str,
    model: Mapping[str, Any] | None = None,
) -> ModelInfo:
    """The model of a preset, run, recipe, checkpoint or configuration, and its cost.

    `name_or_config` is the name of a preset or recipe, the path of a run or checkpoint, or a
    configuration. No weights are loaded. `overrides` and `model` change settings of the model.

    >>> f"{regard.info('gpt2', 'model.layers=24').parameters:,}"
    '209,494,272'
    >>> regard.info(regard.preset("gpt2", layers=24)).family
    'transformer'
    """
    table = read_overrides(overrides, {"model": model})
    kind, config, evaluation, notes = _find(name_or_config, table)
    name = _name(name_or_config)
    model_cost = cost(config)
    stored = stored_parameters(RunFolder(name)) if kind == "run" and not table else 0
    about_run = _about_run(RunFolder(name), config) if kind == "run" else {}
    return ModelInfo(
        name=name,
        kind=kind,
        config=config,
        cost=model_cost,
        parameters=model_cost.parameters or stored,
        published=PUBLISHED.get(name) if kind == "preset" and not table else None,
        metrics=evaluation.metrics,
        evaluated_on=evaluation.evaluated_on,
        notes=notes,
        **about_run,
    )


def _about_run(folder: RunFolder, model: ModelConfig) -> dict[str, Any]:
    """The fields `unit`, `baselines` and `fine_tuning` of a run."""
    run = folder.load_config()
    settings, task = run.train, TASKS.get(kind_of(run.task)[0])
    kind = kind_of(settings.tune)[0]
    fine_tuning: dict[str, Any] = {}
    uses_gradients = not is_fitted_without_gradients(family_of(model))
    if uses_gradients and (settings.start is not None or kind != "all"):
        method, meta_model = tuning(settings.tune), build_on_meta(model)
        method.prepare(meta_model, settings.steps)
        trainable, total = count_trainable(meta_model)
        fine_tuning = {
            "start": settings.start,
            "tune": kind,
            **method.options(meta_model),
            "trainable": trainable,
            "parameters": total,
        }
    return {
        "unit": "" if task is None else task.unit,
        "baselines": read_baselines(folder),
        "fine_tuning": fine_tuning,
    }


def diff(first: str | Path | ModelConfig, second: str | Path | ModelConfig) -> ModelDiff:
    """The settings in which two models differ: presets, runs, recipes, checkpoints, configurations.

    >>> regard.diff("gpt2", "gpt2-medium").sizes["layers"]
    (12, 24)
    """
    models = [_find(source, {})[1] for source in (first, second)]
    settings = differences(*map(full_settings, models))
    costs = [cost(model) for model in models]
    parameters = differences(costs[0].parts, costs[1].parts, missing=0)
    parameters |= differences(*({"total": model_cost.parameters} for model_cost in costs))
    return ModelDiff(
        names=(_name(first), _name(second)),
        sizes={key: values for key, values in settings.items() if key in SIZES},
        settings={key: values for key, values in settings.items() if key not in SIZES},
        parameters=parameters,
    )


def full_settings(config: Any) -> dict[str, Any]:
    """The settings of a model, with the sizes that are derived from others filled in."""
    settings = _applicable(config)
    if "kv_heads" in settings:
        settings["kv_heads"] = settings["kv_heads"] or settings["heads"]
        settings["head_dim"] = settings["head_dim"] or settings["dim"] // settings["heads"]
        settings["ffn_dim"] = config.resolved_ffn_dim
    return settings


def _applicable(config: Any) -> dict[str, Any]:
    """The settings of a model; `tied` is False where the widths or the head do not allow it.

    `factorize_positions` is left out if the embeddings are not factorized, `vocab_size` if the
    model reads and predicts vectors.
    """
    settings = config_table(config)
    if "tied" in settings:
        settings["tied"] = is_tied(config)
    unused = [] if settings.get("embed_dim") else ["factorize_positions"]
    unused += ["vocab_size"] if _has_vector_head(config) else []
    return {key: value for key, value in settings.items() if key not in unused}


def _has_vector_head(config: Any) -> bool:
    """Whether a model reads and predicts vectors (a series, strokes), so that it has no tokens."""
    return kind_of(getattr(config, "head", "linear"))[0] in VECTOR_HEADS


def differences(*tables: Mapping[str, Any], missing: Any = None) -> dict[str, Values]:
    """The keys whose values differ between tables, with the value of each table.

    A missing setting equals one that is None, False or 0.
    """
    keys = dict.fromkeys(key for table in tables for key in table)
    rows = {key: tuple(table.get(key, missing) for table in tables) for key in keys}
    return {
        key: values
        for key, values in rows.items()
        if any(values) and not all(_equal(key, values[0], value) for value in values[1:])
    }


def _equal(key: str, first: Any, second: Any) -> bool:
    """Whether two values are equal, or two choices after their defaults are filled in."""
    if first == second:
        return True
    table = TABLES.get(key.removeprefix("model."))
    if table is None or not all(isinstance(value, str | Mapping) for value in (first, second)):
        return False  # parameter counts have the same keys
    return with_defaults(first, table) == with_defaults(second, table)


def _name(name_or_config: str | Path | ModelConfig) -> str:
    if isinstance(name_or_config, str | Path):
        return str(name_or_config)
    return family_of(name_or_config)


def _find(
    name_or_config: str | Path | ModelConfig, overrides: dict[str, Any]
) -> tuple[str, Any, Evaluation, list[str]]:
    """The kind of a name or configuration, the model's configuration, its evaluation, and notes."""
    changes = overrides.get("model", {})
    if not isinstance(name_or_config, str | Path):
        _check_overrides(overrides)
        model = resolve(merge(config_table(name_or_config), changes))
        return "configuration", model, NOT_EVALUATED, []
    name = str(name_or_config)
    is_recipe = name not in PRESETS and (name.endswith(".toml") or name in recipes())
    _check_overrides(overrides, is_recipe=is_recipe)
    if name in PRESETS:
        return "preset", resolve({"preset": name, **changes}), NOT_EVALUATED, []
    if is_recipe:
        config, notes = _recipe_model(name, overrides)
        return "recipe", config, NOT_EVALUATED, notes
    if not Path(name).is_dir() and "/" not in name:
        raise ConfigError(_unknown_name(name, [*PRESETS, *recipes()]))
    if is_external_checkpoint(Path(name)):
        if overrides:
            raise ConfigError(
                f"{name} is a checkpoint; import it with regard import to change its settings"
            )
        return "checkpoint", open_checkpoint(Path(name)).config, NOT_EVALUATED, []
    folder = RunFolder(name)
    run = build(RunConfig, merge(to_table(folder.load_config()), overrides))
    evaluation = folder.load_evaluation()
    notes = [] if evaluation.metrics else ["not evaluated yet"]
    return "run", resolve(run.model), evaluation, notes


def _check_overrides(overrides: Mapping[str, Any], *, is_recipe: bool = False) -> None:
    """Raise for settings on which the model does not depend.

    The model of a recipe also depends on `data.tokenizer`, which gives its vocabulary size.
    """
    others = [key for key in overrides if key not in ("model", "data")]
    data = [key for key in overrides.get("data", {}) if key != "tokenizer" or not is_recipe]
    others += [f"data.{key}" for key in data]
    if others:
        raise ConfigError(
            f"{', '.join(others)}: only settings of the model can be changed here, as in "
            "model.layers=4"
        )


def _recipe_model(name: str, overrides: dict[str, Any]) -> tuple[Any, list[str]]:
    """The model of a recipe; its vocabulary size is known only after the tokenizer is trained."""
    path = Path(name) if name.endswith(".toml") else RECIPES / f"{name}.toml"
    table = {"name": path.stem, **read_toml(path)}
    check_not_study(table)
    run = build(RunConfig, merge(table, overrides))
    options = kind_of(run.data.tokenizer)[1]
    size = options.get("vocab_size")
    note = "vocab_size depends on the trained tokenizer; shown here: "
    if size is not None:
        source = None if options.get("shared", True) else size
        model = resolve(run.model, vocab_size=size, source_vocab_size=source)
        return model, [f"{note}the tokenizer's maximum"]
    if "preset" in run.model:
        model = resolve(run.model)
        return model, [f"{note}the preset's"] if hasattr(model, "vocab_size") else []
    return resolve({"vocab_size": 256, **run.model}), [f"{note}256, an assumption"]


def _unknown_name(name: str, known: list[str]) -> str:
    completions = sorted(full for full in known if full.startswith(name))
    if len(completions) > 1:
        return f"{name!r} is ambiguous; it could be: {', '.join(completions)}"
    return unknown("preset, run or recipe", name, known)
