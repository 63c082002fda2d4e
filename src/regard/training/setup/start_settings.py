"""The settings of a run whose initial weights are those of another (`train.start`)."""

from collections.abc import Sequence
from typing import Any

from regard.config import Choice, RunConfig, kind_of
from regard.hub.config_json import find_head
from regard.models.build import resolve
from regard.tasks import TASKS
from regard.training.fine_tuning import TUNINGS, Tuning

DATA_OPTIONS = {"paired", "class_weights", "no_answer"}  # options derived from the training data


def settings_from(
    settings: dict[str, Any],
    start: RunConfig,
    class_names: Sequence[str] | None,
    template: str | None = None,
    tune: Choice = "all",
) -> dict[str, Any]:
    """The settings for data whose classes are `class_names`, with the model of the run `start`.

    If the task is that of `start` and its classes are among those of the model, the head is kept.
    Otherwise the model gets the head that its Hugging Face model type has for the task, if any. A
    task on dialogues gets the chat `template` of the model. The learning rate depends on `tune`,
    the setting `train.tune`.
    """
    task = settings["task"]
    kind = kind_of(task)[0]
    start_kind, options = kind_of(start.task)
    if kind == start_kind:
        known = options.get("class_names", [])
        same_classes = class_names is not None and {*class_names} <= {*known}
        dropped = DATA_OPTIONS if same_classes else {*DATA_OPTIONS, "class_names"}
        task = _merge(task, {k: v for k, v in options.items() if k not in dropped})
    elif kind == "instruct" and template is not None:
        task = _merge(task, {"chat_template": template})
    lr = TUNINGS.get(kind_of(tune)[0], Tuning).default_lr
    return {
        **settings,
        "task": task,
        "model": {**start.model, **_head(start.model, kind)},
        "data": {**settings.get("data", {}), "tokenizer": start.data.tokenizer},
        "train": {**settings.get("train", {}), "lr": lr, "optimizer": "adamw"},
    }


def _head(model: dict[str, Any], task: str) -> dict[str, Choice]:
    """The setting `head` for a task that the head of the model does not fit; else empty."""
    kinds = getattr(TASKS.get(task), "heads", ())
    if "head" not in model or not kinds or kind_of(model["head"])[0] in kinds:
        return {}
    head = find_head(resolve(model), kinds[0])
    return {} if head is None else {"head": head}


def _merge(task: Choice, options: dict[str, Any]) -> Choice:
    kind, task_options = kind_of(task)
    merged = {**options, **task_options}
    return {"kind": kind, **merged} if merged else kind
