"""CoNLL files: a word on each line with its tag, in columns, and empty lines between texts."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from regard.data.text_files import preview, read_lines, scan
from regard.errors import ConfigError, DataError

SUFFIXES = (".conll", ".conllu", ".conll2003", ".bio", ".iob", ".iob2", ".bilou")
CONLL_U = 10  # columns of Universal Dependencies; the 4th is the part of speech
_COMMENT = re.compile(r"#\s*[\w.]+\s+=(\s|$)")
_NO_WORD = re.compile(r"\d+[-.]\d+")  # the index of a multi-word token or an empty node

Line = tuple[int, list[str]]  # line number, cells


@dataclass(frozen=True, slots=True)
class ConllFile:
    """The texts of a file: the line each begins at, its words and its tags."""

    rows: list[tuple[int, list[str], list[str]]]
    description: str
    hint: str  # how to choose other columns


def read_conll(path: Path, columns: Sequence[int] = ()) -> ConllFile:
    """Read words and tags from `columns`, their numbers from 1.

    By default, words are in the first column, or the second if the first counts the words of each
    text, and tags are in the last; in CoNLL-U (ten columns) tags are in the fourth. Cells are
    separated by tabs, or by spaces if there are no tabs. Skipped and counted: comments (lines with
    # that do not have the columns of the others), -DOCSTART-, and the lines of CoNLL-U for
    multi-word tokens (1-2) and empty nodes (1.1).
    """
    texts, notes = _texts(path, exact=not columns)
    first = texts[0][0][1]
    width = len(first)
    indexed = all(map(_is_indexed, texts)) and any(len(text) > 1 for text in texts)
    if columns:
        word, tag = _check_columns(columns)
    else:
        word = 2 if indexed and width > 2 else 1
        tag = 4 if indexed and width == CONLL_U else width
    rows = []
    for text in texts:
        kept = [line for line in text if not (indexed and _NO_WORD.fullmatch(line[1][0]))]
        notes["multi-word tokens and empty nodes"] += len(text) - len(kept)
        for number, cells in kept:
            if len(cells) < max(word, tag):
                raise DataError(
                    f"{path}, line {number} has {len(cells)} columns, and column "
                    f"{max(word, tag)} was asked for: {preview(' '.join(cells))}"
                )
        if kept:
            words = [cells[word - 1] for _, cells in kept]
            rows.append((kept[0][0], words, [cells[tag - 1] for _, cells in kept]))
    description = "a word a line"
    if width > 2 or columns:
        description += f", words in column {word}, tags in column {tag} of {width}"
    skipped = ", ".join(f"{count:,} {what}" for what, count in notes.items() if count)
    description += f"; skipped: {skipped}" if skipped else ""
    listed = ", ".join(f"{n} {preview(cell)}" for n, cell in enumerate(first, 1))
    hint = (
        f"its first line: {listed}\n"
        f"data.columns=[{word},{tag}] was read; give the columns of words and of tags"
    )
    return ConllFile(rows, description, hint)


def _texts(path: Path, exact: bool) -> tuple[list[list[Line]], Counter[str]]:
    """The texts of a file as lines of cells, and how many lines of which kind were skipped."""
    scanned = scan(path)
    filled = [line for line in read_lines(path, scanned) if line.strip()]
    tabs = 2 * sum("\t" in line for line in filled if not line.startswith("#")) >= sum(
        not line.startswith("#") for line in filled
    )

    def cells_of(line: str) -> list[str]:
        return line.split("\t") if tabs else line.split()

    widths = Counter(len(cells_of(line)) for line in filled if not line.startswith("#"))
    width = max(widths, key=lambda number: (widths[number], number), default=2)
    notes: Counter[str] = Counter()
    texts: list[list[Line]] = [[]]
    for number, line in enumerate(read_lines(path, scanned), 1):
        cells = cells_of(line)
        if not line.strip():
            texts.append([])
        elif line.startswith("#") and (len(cells) != width or _COMMENT.match(line)):
            notes["comments"] += 1
        elif line.startswith("-DOCSTART-"):
            notes["-DOCSTART-"] += 1
        elif len(cells) < 2:
            raise DataError(
                f"{path}, line {number} has one column: {preview(line)}"
                "\na line is a word and, in the last column, its tag"
            )
        elif exact and len(cells) != width:
            raise DataError(
                f"{path}, line {number} has {len(cells)} columns, most lines {width}: "
                f"{preview(line)}\nsay which columns hold words and tags: data.columns=[1,2]"
            )
        else:
            texts[-1].append((number, cells))
    texts = [text for text in texts if text]
    if not texts:
        raise DataError(f"{path} has no line with a word and its tag")
    return texts, notes


def _is_indexed(text: Sequence[Line]) -> bool:
    """Whether the first column counts the words of a text, from 0 or 1."""
    indices = [cells[0] for _, cells in text if not _NO_WORD.fullmatch(cells[0])]
    if not all(map(str.isdecimal, indices)) or not indices or int(indices[0]) > 1:
        return False
    return all(int(after) == int(before) + 1 for before, after in pairwise(indices))


def _check_columns(columns: Sequence[int]) -> tuple[int, int]:
    if len(columns) != 2 or min(columns) < 1:
        raise ConfigError(
            f"data.columns={list(columns)} must be two numbers from 1: of words and of tags"
        )
    return columns[0], columns[1]
