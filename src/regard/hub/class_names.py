"""Class names of classifiers and taggers: id2label and label2id of config.json."""

from collections.abc import Sequence
from typing import Any

from regard.errors import ConfigError
from regard.files.untrusted import quote
from regard.hub.model_type import ConfigDict


def read_class_count(hf: ConfigDict) -> int:
    """The number of class names, or `num_labels`, or 2, the default of transformers."""
    labels = _names(hf, "id2label") or _names(hf, "label2id")
    count = hf.get("num_labels", 2) if labels is None else len(labels)
    if type(count) is not int or count < 1:
        raise ConfigError(f"num_labels={quote(count)} must be an integer of at least 1")
    return count


def read_class_names(hf: ConfigDict) -> list[str]:
    """The names of the classes by index; LABEL_0, LABEL_1, … if there are none.

    >>> read_class_names({"label2id": {"good": 1, "bad": 0}})
    ['bad', 'good']
    """
    labels, inverse = _names(hf, "id2label"), _names(hf, "label2id")
    if not labels and inverse:
        labels = {str(index): name for name, index in inverse.items()}
    if not labels:
        return [f"LABEL_{index}" for index in range(read_class_count(hf))]
    indices = [str(index) for index in range(len(labels))]
    if labels.keys() != {*indices}:
        raise ConfigError("id2label must name the classes 0, 1, 2, … without gaps")
    return [str(labels[index]) for index in indices]


def _names(hf: ConfigDict, key: str) -> dict[str, Any] | None:
    names = hf.get(key)
    if names is not None and not isinstance(names, dict):
        raise ConfigError(f"{key}={quote(names)} must be an object of classes and their indices")
    return names


def write_class_names(names: Sequence[str]) -> ConfigDict:
    """The names as settings of config.json, in both directions."""
    id2label = {str(index): name for index, name in enumerate(names)}
    return {"id2label": id2label, "label2id": {name: int(n) for n, name in id2label.items()}}
