"""`regard diff`."""

import sys
import textwrap
from collections.abc import Mapping
from itertools import zip_longest
from typing import Annotated, Any

from typer import Argument

from regard.cli.info import find, said
from regard.cli.options import Json
from regard.cli.talk import aligned, bold, print_json, working

SIZES = (
    *("dim", "layers", "encoder_layers", "heads", "kv_heads", "head_dim", "ffn_dim", "embed_dim"),
    *("window", "global_every", "vocab_size", "source_vocab_size", "context", "segments"),
    *("image_size", "patch", "channels"),
)
ROOM = 26  # cells for a value; what is longer goes on in the next line

Pair = tuple[Any, Any]


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
        from regard.models.build import describe
        from regard.models.cost import cost

        models = [find(what, {})[1] for what in (first, second)]
        tables = [_resolved(describe(model), model) for model in models]
        counts = [cost(model) for model in models]
    differing = {key: pair for key, pair in _differing(*tables).items() if not _same(key, *pair)}
    sizes = {key: pair for key, pair in differing.items() if key in SIZES}
    chosen = {key: pair for key, pair in differing.items() if key not in SIZES}
    counted = _differing(counts[0].parts, counts[1].parts, missing=0)
    counted |= _differing(*({"total": each.parameters} for each in counts))
    groups = {"sizes": sizes, "choices": chosen, "parameters": counted}
    if as_json:
        print_json({"models": [first, second], **groups})
        return
    if not any(groups.values()):
        print(f"{first} and {second} are the same model")
        return
    rows = {title: _rows(pairs) for title, pairs in groups.items() if pairs}
    lines = iter(aligned([("", first, second), *(row for each in rows.values() for row in each)]))
    print(f"  {bold(next(lines), sys.stdout)}")
    for title, each in rows.items():
        print(f"\n{bold(title, sys.stdout)}")
        for _ in each:
            print(f"  {next(lines)}")


def _resolved(table: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """A description in which what follows from other sizes is written out."""
    filled = dict(table)
    if "heads" in filled:
        filled["kv_heads"] = filled["kv_heads"] or filled["heads"]
        filled["head_dim"] = filled["head_dim"] or filled["dim"] // filled["heads"]
        filled["ffn_dim"] = model.width
    return filled


def _differing(
    first: Mapping[str, Any], second: Mapping[str, Any], missing: Any = None
) -> dict[str, Pair]:
    """The values of both under every key where they are not equal.

    To lack a setting and to have it switched off is the same.
    """
    keys = dict.fromkeys([*first, *second])
    pairs = {key: (first.get(key, missing), second.get(key, missing)) for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1] and (pair[0] or pair[1])}


def _same(key: str, first: Any, second: Any) -> bool:
    """Whether two choices differ only in that one of them says what the other leaves out."""
    from regard.models.rules import spelled_out
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
    if key not in tables or first is None or second is None:
        return False
    return spelled_out(first, tables[key]) == spelled_out(second, tables[key])


def _rows(pairs: Mapping[str, Pair]) -> list[tuple[str, str, str]]:
    """A line for each, or several where a value is long."""
    rows = []
    for key, pair in pairs.items():
        sides = zip_longest(*map(_wrapped, pair), fillvalue="")
        rows += [("" if n else key, left, right) for n, (left, right) in enumerate(sides)]
    return rows


def _wrapped(value: Any) -> list[str]:
    return textwrap.wrap(said(value), ROOM, break_long_words=False) or ["-"]
