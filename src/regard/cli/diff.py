"""`regard diff`."""

import sys
import textwrap
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Annotated, Any

from typer import Argument

from regard.cli.info import find, said
from regard.cli.options import Json
from regard.cli.output import aligned, bold, print_json, working

SIZES = (
    *("dim", "layers", "encoder_layers", "heads", "kv_heads", "head_dim", "ffn_dim", "embed_dim"),
    *("window", "global_every", "vocab_size", "source_vocab_size", "context", "segments"),
    *("image_size", "patch", "channels"),
)
ROOM = 26  # cells for a value; what is longer goes on in the next line

Values = tuple[Any, ...]  # of one setting, one for each that is compared


def _what(which: str) -> Any:
    return Argument(metavar=which, help="A preset, a run folder, a recipe.", show_default=False)


def diff(
    first: Annotated[str, _what("A")],
    second: Annotated[str, _what("B")],
    as_json: Json = False,
) -> None:
    """Tell what two models have chosen differently, and nothing else.

    \b
    regard diff gpt2 llama
    regard diff bert-base roberta-base --json
    regard diff runs/my tiny-decoder
    """
    with working("comparing"):
        from regard.models.cost import cost

        models = [find(what, {})[1] for what in (first, second)]
        tables = [resolved(model) for model in models]
        counts = [cost(model) for model in models]
    found = differing(*tables)
    sizes = {key: pair for key, pair in found.items() if key in SIZES}
    chosen = {key: pair for key, pair in found.items() if key not in SIZES}
    counted = differing(counts[0].parts, counts[1].parts, missing=0)
    counted |= differing(*({"total": each.parameters} for each in counts))
    groups = {"sizes": sizes, "choices": chosen, "parameters": counted}
    if as_json:
        print_json({"models": [first, second], **groups})
        return
    if not any(groups.values()):
        print(f"{first} and {second} are the same model")
        return
    print_beside([first, second], {title: wrapped(each) for title, each in groups.items()})


def print_beside(names: Sequence[str], groups: Mapping[str, Sequence[Sequence[str]]]) -> None:
    """Rows under titles, their columns aligned over all of them, the names above."""
    lines = iter(aligned([("", *names), *(row for rows in groups.values() for row in rows)]))
    print(f"  {bold(next(lines), sys.stdout)}")
    for title, rows in groups.items():
        if rows:
            print(f"\n{bold(title, sys.stdout)}")
        for _ in rows:
            print(f"  {next(lines)}")


def resolved(model: Any) -> dict[str, Any]:
    """A description of a model in which what follows from other sizes is written out."""
    from regard.models.build import describe

    filled = describe(model)
    if "kv_heads" in filled:
        filled["kv_heads"] = filled["kv_heads"] or filled["heads"]
        filled["head_dim"] = filled["head_dim"] or filled["dim"] // filled["heads"]
        filled["ffn_dim"] = model.width
    return filled


def differing(*tables: Mapping[str, Any], missing: Any = None) -> dict[str, Values]:
    """The values of all under every key where they are not equal.

    To lack a setting and to have it switched off is the same.
    """
    keys = dict.fromkeys(key for table in tables for key in table)
    rows = {key: tuple(table.get(key, missing) for table in tables) for key in keys}
    return {
        key: values
        for key, values in rows.items()
        if any(values) and not all(_same(key, values[0], each) for each in values[1:])
    }


def _same(key: str, first: Any, second: Any) -> bool:
    """Whether two values are equal, or choices of which one says what the other leaves out."""
    if first == second:
        return True
    key = key.removeprefix("model.")
    from regard.models.compatibility import with_defaults
    from regard.nn.head import HEADS
    from regard.nn.init import INITS
    from regard.nn.position import POSITIONS
    from regard.nn.score import SCORES

    tables: dict[str, Mapping[str, Any]] = {
        "score": SCORES,
        "position": POSITIONS,
        "init": INITS,
        "head": HEADS,
    }
    if key not in tables or not all(isinstance(each, str | Mapping) for each in (first, second)):
        return False  # there are also counts of parameters by these names
    return with_defaults(first, tables[key]) == with_defaults(second, tables[key])


def wrapped(found: Mapping[str, Values]) -> list[tuple[str, ...]]:
    """A line for each setting, or several where a value is long."""
    rows = []
    for key, values in found.items():
        sides = [
            textwrap.wrap(said(each), ROOM, break_long_words=False) or ["-"] for each in values
        ]
        beside = zip_longest(*sides, fillvalue="")
        rows += [("" if n else key, *line) for n, line in enumerate(beside)]
    return rows
