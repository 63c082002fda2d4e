"""Create matplotlib figures in our style, and write them as files; imports matplotlib on demand."""

import hashlib
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
CONTENT_SECURITY_POLICY = (  # the page requests nothing
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
)
FIGURE_SUFFIXES = (".svg", ".png", ".pdf", ".html")
# the title for screen readers; a figure shows its own
HEADING_STYLE = "h1 { position: absolute; width: 1px; height: 1px; overflow: hidden }"
PAGE_STYLE = """body { font: 14px sans-serif; margin: 2em; color: #222; background: #fff }
table { border-collapse: collapse; margin-top: 1em }
th, td { text-align: right; padding: 2px 14px 2px 0 }
th:first-child, td:first-child { text-align: left }
main, pre { overflow-x: auto }
svg { max-width: max(100%, 560px); height: auto }
@media (max-width: 600px) { body { margin: 0.7em } }
@media (prefers-color-scheme: dark) { body { color: #dde1e7; background: #14171c } }"""


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
    element = re.sub(r"<metadata>.*?</metadata>", "", element, flags=re.DOTALL)  # it has links only
    element = _unique_ids(element)
    return element.replace(">", f"><title>{escape(str(figure.get_label()))}</title>", 1)


def _unique_ids(element: str) -> str:
    """An SVG element whose ids no other figure of the same page has.

    Their prefix is a hash of the element; ids that nothing refers to are left out.
    """
    prefix = hashlib.sha256(element.encode()).hexdigest()[:12]
    reference = re.compile(r'(url\(#|href="#)([^)"]+)')
    referenced = {match[2] for match in reference.finditer(element)}

    def rename(tag: re.Match[str]) -> str:
        renamed = reference.sub(rf"\g<1>{prefix}-\2", tag[0])
        return re.sub(
            r' id="([^"]*)"',
            lambda match: f' id="{prefix}-{match[1]}"' if match[1] in referenced else "",
            renamed,
        )

    return re.sub(r"<[^>]+>", rename, element)  # not in texts, which are tokens


def page(title: str, body: str, css: str = PAGE_STYLE) -> str:
    """A self-contained HTML page; `body` is HTML. A browser requests nothing else for it."""
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_SECURITY_POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>\n{HEADING_STYLE}\n{css}\n</style>\n"
        f"<main>\n<h1>{escape(title)}</h1>\n{body}\n</main>\n</html>\n"
    )


def check_suffix(suffix: str) -> None:
    """Raise if figures cannot be written with this suffix."""
    if suffix not in FIGURE_SUFFIXES:
        raise ConfigError(f"figures are written as {', '.join(FIGURE_SUFFIXES)}, not {suffix!r}")


def save(content: bytes, path: Path | str) -> None:
    """Write a file atomically: completely or not at all."""
    with atomic_file(Path(path), sync=False) as temporary:
        temporary.write_bytes(content)
