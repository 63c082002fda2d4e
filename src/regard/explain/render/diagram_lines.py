"""The lines and boxes of a model's diagram."""

import textwrap
from collections.abc import Sequence

WIDTH, NARROW, GAP = 60, 36, 5  # width of a single column, of one of two columns, of their gap
STREAM = 3  # column of the residual stream

Part = str  # a module: its name, and after a colon its details
TextLines = list[str]


def stacked_boxes(parts: Sequence[Part], width: int) -> TextLines:
    """A box for each part, one under the other."""
    rule = "─" * (width - 2)
    lines = [f"┌{rule}┐"]
    for index, part in enumerate(parts):
        lines += [f"├{rule}┤"] if index else []
        name, colon, details = part.partition(": ")
        text = (
            [name, *textwrap.wrap(details, width - 4)] if colon else textwrap.wrap(part, width - 4)
        )
        lines += [f"│ {pad(line, width - 4)} │" for line in text]
    return [*lines, f"└{rule}┘"]


def residual_branch(box: TextLines, width: int) -> TextLines:
    """A residual branch: a box to the right of the stream, with arrows out and back."""
    margin = " " * (STREAM - 1)
    first, *middle, last = box
    lines = [f"{margin}├──▶{first}", *(f"{margin}│   {line}" for line in middle)]
    return [pad(line, width) for line in [*lines, f"{margin}⊕◀──{last}"]]


def in_stream(parts: Sequence[Part], width: int, column: int = STREAM) -> TextLines:
    """Modules that process the residual stream itself, as boxes on it."""
    first, *middle, last = stacked_boxes(parts, width)
    return [
        f"{first[:column]}┴{first[column + 1 :]}",
        *middle,
        f"{last[:column]}┬{last[column + 1 :]}",
    ]


def repeat_frame(inside: TextLines, count: int, width: int, note: str = "") -> TextLines:
    """A frame around repeated layers."""
    title = f" {count} ×{note} "
    rule = "─" * (width - 2)
    top = f"╭{rule[: -len(title) - 1]}{title}─╮"
    framed = [f"│{pad(line, width - 2)}│" for line in inside]
    return [
        f"{top[:STREAM]}┼{top[STREAM + 1 :]}",
        *framed,
        f"╰{rule[: STREAM - 1]}┼{rule[STREAM:]}╯",
    ]


def input_line(name: str) -> TextLines:
    """The input of the model, above the residual stream."""
    return [f"{' ' * STREAM}{name}", f"{' ' * STREAM}│"]


def output_line(name: str) -> TextLines:
    """The output of the model, below an arrow."""
    return [f"{' ' * STREAM}▼", f"{' ' * STREAM}{name}"]


def pad(line: str, width: int) -> str:
    """A line padded with spaces to a width."""
    return line + " " * (width - len(line))


def side_by_side(encoder: TextLines, decoder: TextLines) -> TextLines:
    """Encoder and decoder side by side, with an arrow from the memory to cross-attention."""
    target = next(n for n, line in enumerate(decoder) if "cross-attention" in line)
    start = len(encoder) - 1
    height = max(len(encoder), len(decoder))
    lines = []
    for index in range(height):
        left = pad(encoder[index] if index < len(encoder) else "", NARROW)
        right = decoder[index] if index < len(decoder) else ""
        if index == target and right[STREAM] == "│":  # under frame and stream, into the box
            right = f"│{'─' * (STREAM - 1)}│──▶{right[STREAM + 4 :]}"
        lines.append(left + _connector(index, start, target) + right)
    name = encoder[start].rstrip()
    rule = "─" * (NARROW - len(name) - 1)
    lines[start] = f"{name} {rule}{lines[start][NARROW:]}"
    return lines


def _connector(row: int, start: int, target: int) -> str:
    """The part of the memory arrow between the columns in one row."""
    first, last = sorted((start, target))
    if row == start:
        return "──┘  " if start > target else "──┐  "
    if row == target:
        return "  ┌──" if start > target else "  └──"
    return "  │  " if first < row < last else " " * GAP
