"""Comments as docstrings of attributes: `steps: int = 1000  # optimizer steps`."""

import re
from typing import Any

import griffe


class AttributeComments(griffe.Extension):
    """Use the comment after an attribute, or above it, as docstring if the attribute has none."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Read the comment from the source."""
        if attr.docstring is None and attr.lineno and (comment := _comment(attr)):
            attr.docstring = griffe.Docstring(comment, parent=attr)


def _comment(attr: griffe.Attribute) -> str:
    trailing = re.search(r"#\s+(.+)$", attr.source)
    if trailing:
        return "" if trailing[1].startswith(("type:", "noqa")) else trailing[1]
    above: list[str] = []
    for line in reversed(attr.lines_collection[attr.filepath][: attr.lineno - 1]):
        if not line.lstrip().startswith("# "):
            break
        above.insert(0, line.strip()[2:])
    return " ".join(above)
