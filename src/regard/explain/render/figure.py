"""Figures: matplotlib with our style, imported when something is drawn, and files of them."""

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from regard.errors import ConfigError
from regard.files.atomic import atomic_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = Path(__file__).with_name("regard.mplstyle")
POLICY = (  # nothing from outside
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
)
SUFFIXES = (".svg", ".png", ".pdf", ".html")
PAGE_STYLE = """body { font: 14px sans-serif; margin: 2em; color: #222; background: #fff }
table { border-collapse: collapse; margin-top: 1em }
th, td { text-align: right; padding: 2px 14px 2px 0 }
th:first-child, td:first-child { text-align: left }"""


@contextmanager
def style() -> Iterator[None]:
    """A context in which figures are made and saved in our style."""
    try:
        from matplotlib import style as styles
    except ModuleNotFoundError:
        raise ConfigError(
            "a figure needs matplotlib: pip install 'regard[plot]'; attention maps can be "
            "written as .html without it"
        ) from None
    with styles.context(STYLE), warnings.catch_warnings():
        # A character that the font lacks is drawn as a box in .png and .pdf; SVG keeps the text.
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        yield


def new_figure(width: float, height: float, *, constrained: bool = True) -> "Figure":
    """An empty figure, in inches; if constrained, matplotlib keeps labels and legends inside."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained" if constrained else None)


def encode(figure: "Figure", suffix: str) -> bytes:
    """The bytes of a file with this suffix: .svg, .png, .pdf, or .html with the figure in it."""
    check_suffix(suffix)
    if suffix == ".html":
        return page(str(figure.get_label()), to_svg(figure)).encode()
    with style():
        out = io.BytesIO()
        metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(suffix)
        figure.savefig(out, format=suffix[1:], metadata=metadata)
    return out.getvalue()


def to_svg(figure: "Figure") -> str:
    """The figure as an SVG element for an HTML page, with its description for screen readers."""
    element = encode(figure, ".svg").decode()
    element = element[element.index("<svg") :]
    element = re.sub(r"<metadata>.*?</metadata>", "", element, flags=re.DOTALL)  # only links
    return element.replace(">", f"><title>{escape(str(figure.get_label()))}</title>", 1)


def page(title: str, body: str, css: str = PAGE_STYLE) -> str:
    """A self-contained HTML page; `body` is HTML. A browser requests nothing else for it."""
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>\n{css}\n</style>\n{body}\n</html>\n"
    )


def check_suffix(suffix: str) -> None:
    """Raise if figures are not written with this suffix."""
    if suffix not in SUFFIXES:
        raise ConfigError(f"a figure is a file that ends in {', '.join(SUFFIXES)}, not {suffix!r}")


def save(content: bytes, path: Path | str) -> None:
    """Write a figure completely or not at all."""
    with atomic_file(Path(path), sync=False) as temporary:
        temporary.write_bytes(content)
