"""The reference of all settings, read from the dataclasses and from the comments of their fields.

The comment of a field, at the end of its line or on the lines before it, is its description; a
comment names a table of choices in parentheses, as in `(nn.score.SCORES)`.
"""

import ast
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from fnmatch import fnmatchcase
from functools import cache, partial
from importlib import import_module
from typing import Any, Literal

from regard.config import Choice, DataConfig, RunConfig, TrainConfig, read_recipe
from regard.data.builtin import BUILTINS
from regard.data.columns import ROLES
from regard.errors import ConfigError, unknown
from regard.models.build import FAMILIES, is_fitted_without_gradients
from regard.models.presets import PRESETS
from regard.nn.position import SCALINGS
from regard.pipelines import PIPELINES, default_settings
from regard.tasks import TASKS
from regard.text import TOKENIZERS
from regard.training.fine_tuning import TUNINGS
from regard.training.setup.configure import RECIPES, USED_WITHOUT_GRADIENTS, recipes

TABLE = re.compile(r" \(((?:\w+\.)+[A-Z_]+)\)")  # in a field's comment
PROVIDED_ARGUMENTS = {  # arguments of table entries that the library provides: not options
    *("dim", "dim_in", "dim_out", "heads", "head_dim", "context", "causal", "vocab_size", "order"),
    *("embed_dim", "tied", "norm", "model", "layers", "parameters", "lr", "steps", "texts"),
    *("folder", "config", "start", "frequency", "length"),
}
PROVIDED_TO_TASK = {  # fields of tasks that are taken from the tokenizers or the data
    *("tokenizer", "bytes_per_token", "packs_documents", "bos_id", "eos_id", "source_eos_id"),
    *("windows", "paired", "prefix_ids", "source_prefix_ids"),
}
WITHOUT_OPTIONS = ("task", "model.norm", "model.ffn")  # the options of a task have their own rows
HEAD_OF = {"masked": "masked", "span": "span"}  # heads of tasks whose class names none
OLD_FAMILIES = ("lstm",)  # for runs of earlier versions
TYPES = {int: "integer", float: "number", str: "string", bool: "true or false"}
PAGE_HEAD = """# Settings

Every setting of a run, its type, its default and its choices; written by `make settings`, not by \
hand. `regard settings PATTERN` prints the same in a terminal, `regard.settings(pattern)` returns \
it in Python.

A setting is given as `key=value` to `regard train`, as in `train.lr=3e-4`, or in a recipe. A \
choice is a name, or a table of a name and its options: `model.position=rotary`, \
`model.position={kind="rotary", base=500000}`, or `model.position.base=500000` where the kind is \
already rotary. `regard train DATA --dry-run` prints the settings that a run would have.
"""
TITLES = {
    "run": "Run",
    "data": "data: training and validation data",
    "task": "task: the training objective",
    "model": "model: the architecture",
    "train": "train: the training",
}


def settings(pattern: str = "") -> list[dict[str, Any]]:
    """All settings of a run, or those that match a pattern, as rows for a table.

    `pattern` is a part of a key, a glob, or the name of a choice or of an option. A key has one
    row for each of its meanings, as `model.dim` in different models. A row has `key`, `type`,
    `default`, `derived` (from the data), `choices`, `description`, and the names of the `tasks`
    and `models` that use it; `choices` has the description and the options of each.

    >>> [row["default"] for row in settings("train.lr")]
    [0.001]
    """
    rows = _rows()
    if not pattern:
        return list(rows)
    matches = [row for row in rows if row["key"] == pattern]
    matches = matches or [row for row in rows if fnmatchcase(row["key"], pattern)]
    matches = matches or [row for row in rows if pattern in row["key"]]
    matches = matches or [row for row in rows if pattern in _choice_words(row)]
    setting, _, option = pattern.rpartition(".")  # as in model.position.base
    matches = matches or [
        row for row in rows if row["key"].endswith(setting) and option in _choice_words(row)
    ]
    if not matches:
        known = {word for row in rows for word in (row["key"], *_choice_words(row))}
        known |= {row["key"].rpartition(".")[2] for row in rows}
        raise ConfigError(f"{unknown('setting', pattern, known)}\n`regard settings` lists all")
    return matches


def other_defaults(key: str) -> dict[str, Any]:
    """The values that recipes give a setting, by recipe, and `DATA` if data changes its default.

    >>> other_defaults("train.lr")["quickstart"]
    0.003
    """
    tables = {name: read_recipe(RECIPES / f"{name}.toml") for name in recipes()}
    values = {
        name: value for name, table in tables.items() if (value := _lookup(table, key)) is not None
    }
    for name in ("reversal", "parentheses"):  # pairs and labels; other kinds set the same keys
        data = BUILTINS[name](examples=8)
        defaults = default_settings(data, {}, gpu=False)
        if _lookup(defaults, key) is not None:
            values["DATA"] = None
    return values


def _lookup(table: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key in nested tables; None if there is none."""
    for part in key.split("."):
        table = table.get(part) if isinstance(table, Mapping) else None  # type: ignore[assignment]
    return table


def settings_page() -> str:
    """The page docs/settings.md."""
    lines = [PAGE_HEAD]
    for table, title in TITLES.items():
        lines += [f"## {title}", ""]
        rows = [row for row in _rows() if _table_of(row["key"]) == table]
        lines += ["| key | type | default | description | used by |", "|---|---|---|---|---|"]
        for row in rows:
            default = format_default(row["default"])
            default = "from the data" if row["derived"] else f"`{default}`"
            kind, description = type_or_names(row), sentence(row["description"])
            cells = [f"`{row['key']}`", kind, default, description, used_by(row)]
            lines.append(f"| {' | '.join(map(_escape, cells))} |")
        lines.append("")
        listed: list[Any] = []
        for row in rows:
            if any(
                choice["options"] or choice["description"] for choice in row["choices"].values()
            ):
                if row["choices"] in listed:
                    continue
                listed.append(row["choices"])
                models = f" ({', '.join(row['models'])})" if _choices_vary(rows, row) else ""
                lines += [f"### Choices of `{row['key']}`{models}", ""]
                lines += ["| name | description | options |", "|---|---|---|"]
                for name, choice in row["choices"].items():
                    options = ", ".join(f"`{o}`" for o in format_options(choice["options"]))
                    cells = [f"`{name}`", _code(choice["description"]), options]
                    lines.append(f"| {' | '.join(map(_escape, cells))} |")
                lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def format_default(value: Any) -> str:
    """A default as it is written on the command line.

    >>> format_default(None), format_default(True), format_default([]), format_default(1e-5)
    ('none', 'true', '[]', '1e-05')
    """
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value)


def format_options(options: Mapping[str, Any]) -> list[str]:
    """Options with their defaults, as `key=value`; `key=…` where there is none."""
    return [
        f"{name}={'…' if option['required'] else format_default(option['default'])}"
        for name, option in options.items()
    ]


def sentence(description: str) -> str:
    """A description with a capital letter and a full stop.

    >>> sentence("optimizer steps")
    'Optimizer steps.'
    """
    return f"{description[:1].upper()}{description[1:]}."


def type_or_names(row: Mapping[str, Any]) -> str:
    """The type of a setting, or its allowed names if they have no options."""
    names = [name for name, choice in row["choices"].items() if not choice["description"]]
    if not names or row["key"] == "model.preset":
        return str(row["type"])
    return str(row["type"]).replace("name", ", ".join(f"`{name}`" for name in names))


def used_by(row: Mapping[str, Any]) -> str:
    """The models that use a setting of `model`, or the tasks that use another setting."""
    models = [name for name in FAMILIES if name not in OLD_FAMILIES]
    tasks = "all" if row["tasks"] == list(TASKS) else ", ".join(row["tasks"])
    without_gradients = [name for name in models if is_fitted_without_gradients(name)]
    if row["key"].startswith("model.") and row["models"] != models:
        return ", ".join(row["models"])
    if row["models"] == [name for name in models if name not in without_gradients]:
        return f"{tasks}; not by {', '.join(without_gradients)}"
    return tasks


@cache
def _rows() -> tuple[dict[str, Any], ...]:
    families = [name for name in FAMILIES if name not in OLD_FAMILIES]
    with_gradients = [name for name in families if not is_fitted_without_gradients(name)]
    tasks = list(TASKS)
    rows = [
        row
        for row in _field_rows(RunConfig, "", tasks, families)
        if row["key"] not in ("data", "model", "train")
    ]
    for row in _field_rows(DataConfig, "data.", tasks, families):
        kinds = _kinds_of(row["key"].removeprefix("data."))
        matching_tasks = [name for name in tasks if TASKS[name].data_kind in kinds]
        rows.append({**row, "tasks": matching_tasks, "models": families if kinds else []})
    rows += _group(row for name in tasks for row in _task_rows(name))
    rows += _model_rows(families)
    for row in _field_rows(TrainConfig, "train.", tasks, with_gradients):
        name = row["key"].removeprefix("train.")
        row["models"] = families if name in USED_WITHOUT_GRADIENTS else with_gradients
        row["tasks"] = ["causal", "text_regression", "forecast"] if name == "baseline" else tasks
        rows.append(row)
    return tuple(rows)


def _task_rows(name: str) -> Iterator[dict[str, Any]]:
    for row in _field_rows(TASKS[name], "task.", [name], _models_of(name)):
        field = row["key"].removeprefix("task.")
        if field in ("label_smoothing", "scheduled_sampling"):
            row["models"] = [
                model for model in row["models"] if not is_fitted_without_gradients(model)
            ]
        if field not in PROVIDED_TO_TASK:
            yield row


def _model_rows(families: list[str]) -> list[dict[str, Any]]:
    tasks = list(TASKS)
    presets = {name: {"description": "", "options": {}} for name in PRESETS}
    modules = {name: FAMILIES[name][1] for name in families}
    rows = [
        _row(
            *("model.preset", str, None, "a published model, whose settings are then the defaults"),
            choices=presets,
            tasks=tasks,
            models=families,
        ),
        _row(
            *("model.family", str, "transformer", "the class of models, if there is no preset"),
            choices=_choices(modules, options=False),
            tasks=tasks,
            models=families,
        ),
    ]
    rows += _group(
        row
        for family in families
        for row in _field_rows(FAMILIES[family][0], "model.", _tasks_of(family), [family])
    )
    index = next(n for n, row in enumerate(rows) if row["key"] == "model.position")
    scaling = _row(
        *("model.position.scaling", Choice | None, None),
        "how rotary positions are scaled to longer contexts",
        choices=_choices(SCALINGS, hidden={"base"}),
        tasks=rows[index]["tasks"],
        models=rows[index]["models"],
    )
    return [*rows[: index + 1], scaling, *rows[index + 1 :]]


def _field_rows(
    cls: type[Any], prefix: str, tasks: list[str], models: list[str]
) -> Iterator[dict[str, Any]]:
    """A row for each field of a dataclass."""
    hints, comments = typing.get_type_hints(cls), field_comments(cls)
    for field in fields(cls):
        comment = comments.get(field.name, "")
        key = prefix + field.name
        table = TABLE.search(comment)
        choices = _literals(hints[field.name])
        if table is not None:
            module, _, name = table[1].rpartition(".")
            entries = getattr(import_module(f"regard.{module}"), name)
            choices = _choices(entries, options=key not in WITHOUT_OPTIONS) | choices
        default = field.default if field.default is not MISSING else None
        if field.default_factory is not MISSING:
            default = field.default_factory()
        yield _row(
            key,
            hints[field.name],
            default,
            TABLE.sub("", comment).replace("None:", "none:"),
            derived=field.default is MISSING and field.default_factory is MISSING,
            choices=choices,
            tasks=tasks,
            models=models,
        )


def _row(
    key: str,
    hint: Any,
    default: Any,
    description: str,
    *,
    derived: bool = False,
    choices: Mapping[str, Any] | None = None,
    tasks: list[str],
    models: list[str],
) -> dict[str, Any]:
    return {
        "key": key,
        "type": type_words(hint).replace("string", "name") if choices else type_words(hint),
        "default": default,
        "derived": derived,
        "choices": dict(choices or {}),
        "description": description,
        "tasks": tasks,
        "models": models,
    }


def _group(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge rows that differ only in their tasks and models; order the rows by key."""
    groups: dict[str, dict[str, Any]] = {}
    for row in rows:
        same = {name: row[name] for name in row if name not in ("tasks", "models")}
        group = groups.setdefault(repr(same), {**row, "tasks": [], "models": []})
        for name, table in (("tasks", TASKS), ("models", FAMILIES)):
            group[name] = [entry for entry in table if entry in (*group[name], *row[name])]
    order = list(dict.fromkeys(row["key"] for row in groups.values()))
    return sorted(groups.values(), key=lambda row: order.index(row["key"]))


def field_comments(cls: type[Any]) -> dict[str, str]:
    """The comments of the fields of a dataclass and its base classes, by name."""
    comments: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if "__dataclass_fields__" not in vars(base):
            continue
        source = inspect.cleandoc("\n" + inspect.getsource(base))
        lines = source.splitlines()
        (tree,) = ast.parse(source).body
        assert isinstance(tree, ast.ClassDef)
        for node in tree.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                assert node.end_lineno is not None
                first = node.lineno - 1
                while lines[first - 1].lstrip().startswith("#"):
                    first -= 1
                field_lines = lines[first : node.end_lineno]
                matches = (re.search(r"(?:^\s*|  )# (.*)", line) for line in field_lines)
                comments[node.target.id] = " ".join(match[1] for match in matches if match)
    return comments


def type_words(hint: Any) -> str:
    """A type in words.

    >>> type_words(int | None), type_words(list[str]), type_words(Choice)
    ('integer or none', 'list of strings', 'name or table')
    """
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return "name"
    if typing.get_origin(hint) in (list, tuple):
        inner = type_words(arguments[0]).split(" or ")
        return f"list of {' or '.join(f'{word}s' for word in inner)}"
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        has_table = any(map(_is_mapping, arguments))
        words = []
        for argument in arguments:
            if argument is type(None) or _is_mapping(argument):
                continue
            words.append("name" if argument is str and has_table else type_words(argument))
        words += ["table"] if has_table else []
        words += ["none"] if type(None) in arguments else []
        return " or ".join(words)
    return TYPES.get(hint, "table")


def _is_mapping(hint: Any) -> bool:
    origin = typing.get_origin(hint)
    return inspect.isclass(origin) and issubclass(origin, Mapping)


def _literals(hint: Any) -> dict[str, Any]:
    """The values of a `Literal`, or of those in a union, as choices without options."""
    if typing.get_origin(hint) is Literal:
        return {str(name): {"description": "", "options": {}} for name in typing.get_args(hint)}
    choices: dict[str, Any] = {}
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        for argument in typing.get_args(hint):
            choices |= _literals(argument)
    return choices


def _choices(
    table: Mapping[str, Any], *, options: bool = True, hidden: Iterable[str] = ()
) -> dict[str, Any]:
    """The entries of a table: the first sentence of their docstring, and their options."""
    provided = {*PROVIDED_ARGUMENTS}
    if table is TOKENIZERS:
        provided.remove("vocab_size")  # an option of a tokenizer, provided to other entries
    if table is TUNINGS:
        provided.remove("layers")  # an option of `last_layers`
    return {
        name: {
            "description": _summary(entry),
            "options": _options(entry, {*provided, *hidden}) if options else {},
        }
        for name, entry in table.items()
    }


def _summary(entry: Callable[..., Any]) -> str:
    doc = inspect.getdoc(entry.func if isinstance(entry, partial) else entry) or ""
    summary = re.sub(r" {2,}", " ", doc.partition("\n")[0])
    if isinstance(entry, partial):  # of `nn.block.FFNS`: one formula for several functions f
        return f"{summary.partition(', f =')[0]}, f = {entry.keywords['activation'].__name__}"
    return summary


def _options(entry: Callable[..., Any], hidden: set[str]) -> dict[str, Any]:
    parameters = inspect.signature(entry).parameters.values()
    factory_defaults = {
        field.name: field.default_factory()
        for field in (fields(entry) if is_dataclass(entry) else ())
        if field.default_factory is not MISSING
    }
    return {
        p.name: {
            "default": None if p.default is p.empty else factory_defaults.get(p.name, p.default),
            "required": p.default is p.empty,
        }
        for p in parameters
        if p.name not in hidden and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }


def _choice_words(row: Mapping[str, Any]) -> set[str]:
    names = row["choices"]
    return {*names, *(option for choice in names.values() for option in choice["options"])}


def _kinds_of(name: str) -> list[str]:
    """The kinds of data that a field of `DataConfig` is for."""
    if any(name in roles for roles in ROLES.values()):
        return [kind for kind, roles in ROLES.items() if name in roles]
    if name in ("columns", "split"):
        return ["tags" if name == "columns" else "series"]
    if name in ("tokenizer", "lower"):
        return [kind for kind, pipeline in PIPELINES.items() if pipeline.tokenizer_type]
    return list(PIPELINES)


def _architectures_of(family: str) -> set[str]:
    """The architectures that the models of a family can have."""
    config = FAMILIES[family][0]
    architectures = {"recurrent": {"decoder", "encoder"}, "seq2seq": {"encoder-decoder"}}
    architectures |= {"bag": {"bag"}, "cbow": {"cbow"}, "captioner": {"encoder-decoder"}}
    if family == "transformer":
        return set(_literals(typing.get_type_hints(config)["architecture"]))
    architecture = getattr(config, "architecture", "decoder")
    default = architecture if isinstance(architecture, str) else "decoder"
    return architectures.get(family, {default})


def _tasks_of(family: str) -> list[str]:
    """The tasks that the models of a family can learn."""
    rows = _field_rows(FAMILIES[family][0], "", [], [])
    heads = next((row["choices"] or [row["default"]] for row in rows if row["key"] == "head"), [])
    return [
        name
        for name, task in TASKS.items()
        if _architectures_of(family) & set(task.architectures)
        and getattr(FAMILIES[family][0], "input_kind", "text") in task.input_kinds
        and getattr(task, "head", HEAD_OF.get(name)) in (None, *heads)
    ]


def _models_of(task: str) -> list[str]:
    return [name for name in FAMILIES if name not in OLD_FAMILIES and task in _tasks_of(name)]


def _table_of(key: str) -> str:
    table, dot, _ = key.partition(".")
    return table if dot or table == "task" else "run"


def _choices_vary(rows: list[dict[str, Any]], row: Mapping[str, Any]) -> bool:
    """Whether another row of the same key has other choices."""
    return any(r["key"] == row["key"] and r["choices"] != row["choices"] for r in rows)


def _escape(cell: str) -> str:
    return cell.replace("|", "\\|")


def _code(summary: str) -> str:
    """A summary for Markdown; formulas are not read as emphasis or HTML."""
    return re.sub(r"([*_<])", r"\\\1", summary) if "`" not in summary else summary
