"""HTML tables, as notebooks show them (`_repr_html_`); every text is escaped."""

from collections.abc import Iterable, Sequence
from html import escape


def html_table(rows: Iterable[Sequence[object]], header: Sequence[object] = ()) -> str:
    """A table with left-aligned cells; `None` is shown as a dash.

    >>> html_table([("<b>", 1)], header=("name", "value"))
    '<table><tr><th>name</th><th>value</th></tr><tr><td>&lt;b&gt;</td><td>1</td></tr></table>'
    """
    head = [_row("th", header)] if header else []
    return f"<table>{''.join([*head, *(_row('td', row) for row in rows)])}</table>"


def _row(tag: str, cells: Sequence[object]) -> str:
    texts = ("-" if cell is None else escape(str(cell)) for cell in cells)
    return f"<tr>{''.join(f'<{tag}>{text}</{tag}>' for text in texts)}</tr>"
