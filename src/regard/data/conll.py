"""CoNLL files: a word on each line with its tag, in columns, and empty lines between texts."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from regard.data.text_files import preview, read_lines, scan
from regard.errors import ConfigError, DataError

CONLL_SUFFIXES = (".conll", ".conllu", ".conll2003", ".bio", ".iob", ".iob2", ".bilou")
CONLL_U_COLUMNS = 10  # of Universal Dependencies; column 4 is the part of speech (UPOS)
_COMMENT = re.compile(r"#\s*[\w.]+\s+=(\s|$)")
_NOT_A_WORD = re.compile(r"\d+[-.]\d+")  # the index of a multi-word token or an empty node

Line = tuple[int, list[str]]  # line number, cells


@dataclass(frozen=True, slots=True)
class ConllFile:
    """The texts of a file: the line each begins at, its words and its tags."""

    rows: list[tuple[int, list[str], list[str]]]
    description: str
    hint: str  # how to choose other columns


def read_conll(path: Path, columns: Sequence[int] = ()) -> ConllFile:
    """Read words and tags from two `columns`, which are numbered from 1.

    By default, words are in the first column, or the second if the first counts the words of each
    text, and tags are in the last; in CoNLL-U (ten columns) tags are in the fourth. Cells are
    separated by tabs, or by spaces if there are no tabs. Skipped and counted: comments (lines with
    # that do not have the columns of the others), -DOCSTART-, and the lines of CoNLL-U for
    multi-word tokens (1-2) and empty nodes (1.1).
    """
    texts, skipped = _texts(path, same_width=not columns)
    first = texts[0][0][1]
    width = len(first)
    indexed = all(map(_is_indexed, texts)) and any(len(text) > 1 for text in texts)
    if columns:
        word_column, tag_column = _check_columns(columns)
    else:
        word_column = 2 if indexed and width > 2 else 1
        tag_column = 4 if indexed and width == CONLL_U_COLUMNS else width
    rows = []
    for text in texts:
        lines = [line for line in text if not (indexed and _NOT_A_WORD.fullmatch(line[1][0]))]
        skipped["multi-word tokens and empty nodes"] += len(text) - len(lines)
        for number, cells in lines:
            if len(cells) < (last := max(word_column, tag_column)):
                raise DataError(
                    f"{path}, line {number} has {len(cells)} columns, and data.columns names "
                    f"column {last}: {preview(' '.join(cells))}"
                )
        if lines:
            words = [cells[word_column - 1] for _, cells in lines]
            rows.append((lines[0][0], words, [cells[tag_column - 1] for _, cells in lines]))
    description = "one word per line"
    if width > 2 or columns:
        description += f", words in column {word_column}, tags in column {tag_column} of {width}"
    skipped_note = ", ".join(f"{count:,} {kind}" for kind, count in skipped.items() if count)
    description += f"; skipped: {skipped_note}" if skipped_note else ""
    first_line = ", ".join(f"{n} {preview(cell)}" for n, cell in enumerate(first, 1))
    hint = (
        f"its first line: {first_line}\n"
        f"the columns that were read are data.columns=[{word_column},{tag_column}]; give those of "
        "words and tags"
    )
    return ConllFile(rows, description, hint)


def _texts(path: Path, same_width: bool) -> tuple[list[list[Line]], Counter[str]]:
    """The texts of a file as lines of cells, and the number of skipped lines of each kind.

    `same_width` refuses a line with more or fewer columns than most lines have.
    """
    scanned = scan(path)
    filled = [line for line in read_lines(path, scanned) if line.strip()]
    tab_separated = 2 * sum("\t" in line for line in filled if not line.startswith("#")) >= sum(
        not line.startswith("#") for line in filled
    )

    def split_cells(line: str) -> list[str]:
        return line.split("\t") if tab_separated else line.split()

    widths = Counter(len(split_cells(line)) for line in filled if not line.startswith("#"))
    width = max(widths, key=lambda width: (widths[width], width), default=2)
    skipped: Counter[str] = Counter()
    texts: list[list[Line]] = [[]]
    for number, line in enumerate(read_lines(path, scanned), 1):
        cells = split_cells(line)
        if not line.strip():
            texts.append([])
        elif line.startswith("#") and (len(cells) != width or _COMMENT.match(line)):
            skipped["comments"] += 1
        elif line.startswith("-DOCSTART-"):
            skipped["-DOCSTART-"] += 1
        elif len(cells) < 2:
            raise DataError(
                f"{path}, line {number} has one column: {preview(line)}"
                "\neach line needs a word and, in its last column, the tag"
            )
        elif same_width and len(cells) != width:
            raise DataError(
                f"{path}, line {number} has {len(cells)} columns, most lines {width}: "
                f"{preview(line)}\nset the columns of words and tags, as in data.columns=[1,2]"
            )
        else:
            texts[-1].append((number, cells))
    texts = [text for text in texts if text]
    if not texts:
        raise DataError(f"{path} has no line with a word and its tag")
    return texts, skipped


def _is_indexed(text: Sequence[Line]) -> bool:
    """Whether the first column counts the words of a text, from 0 or 1."""
    indices = [cells[0] for _, cells in text if not _NOT_A_WORD.fullmatch(cells[0])]
    if not all(map(str.isdecimal, indices)) or not indices or int(indices[0]) > 1:
        return False
    return all(int(after) == int(before) + 1 for before, after in pairwise(indices))


def _check_columns(columns: Sequence[int]) -> tuple[int, int]:
    if len(columns) != 2 or min(columns) < 1 or columns[0] == columns[1]:
        raise ConfigError(
            f"data.columns={list(columns)} must be two different column numbers, from 1: of words "
            "and of tags"
        )
    return columns[0], columns[1]
