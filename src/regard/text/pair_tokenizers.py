"""Tokenizers for source and target: one joint tokenizer, or one for each side."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from regard.config import Choice, kind_of
from regard.errors import CheckpointError, ConfigError
from regard.text.tokenizer import Tokenizer
from regard.text.trainers import train_tokenizer

JOINT, SOURCE, TARGET = "tokenizer.json", "tokenizer.source.json", "tokenizer.target.json"


@dataclass(frozen=True)
class PairTokenizers:
    """The tokenizers of source and target; the same object if the vocabulary is joint.

    joint       tokenizer.json
    separate    tokenizer.source.json, tokenizer.target.json

    Special tokens are saved next to each, as in tokenizer_config.source.json.
    """

    source: Tokenizer
    target: Tokenizer

    @property
    def kind(self) -> str:
        """The kind of both tokenizers."""
        return self.target.kind

    @property
    def joint(self) -> bool:
        """Whether both sides share one vocabulary."""
        return self.source is self.target

    @property
    def shares_ids(self) -> bool:
        """Whether an id means the same on both sides (Marian: two sets of pieces, shared ids)."""
        return (
            self.joint or self.source.has_decode_only_pieces or self.target.has_decode_only_pieces
        )

    def save(self, folder: Path | str) -> None:
        """Write one file if joint, else two."""
        if self.joint:
            self.source.save(Path(folder, JOINT))
        else:
            self.source.save(Path(folder, SOURCE))
            self.target.save(Path(folder, TARGET))

    @classmethod
    def load(cls, folder: Path | str) -> Self:
        """Read the tokenizer files in a folder."""
        joint, source, target = (Path(folder, name) for name in (JOINT, SOURCE, TARGET))
        separate = source.exists() or target.exists()
        if joint.exists() and separate:
            raise CheckpointError(
                f"{folder} has both {JOINT} and files for source and target; remove one kind"
            )
        if separate:
            return cls(Tokenizer.load(source), Tokenizer.load(target))
        both = Tokenizer.load(joint)
        return cls(both, both)


def train_pair(choice: Choice, rows: Callable[[], Iterator[tuple[str, str]]]) -> PairTokenizers:
    """Train the tokenizers of a parallel text; each call of `rows()` iterates from the start.

    The vocabulary is joint unless the choice says `{ kind = "bpe", shared = false }`.
    """
    kind, options = kind_of(choice)
    shared = options.pop("shared", True)
    if not isinstance(shared, bool):
        raise ConfigError(f"tokenizer shared={shared!r} must be true or false")
    choice = {"kind": kind, **options}
    if shared:
        both = train_tokenizer(choice, (text for row in rows() for text in row))
        return PairTokenizers(both, both)
    return PairTokenizers(
        train_tokenizer(choice, (source for source, _ in rows())),
        train_tokenizer(choice, (target for _, target in rows())),
    )
