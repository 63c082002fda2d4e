"""The request bodies of the page, and their limits."""

import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, field_validator

from regard.serve.schema import Sampling, list_length
from regard.serve.studio.trainer import SUFFIXES

Name = Annotated[str, Field(max_length=64)]
ShortText = Annotated[str, Field(max_length=4096)]
Word = Annotated[str, Field(max_length=200)]
# Settings that the page may give; none of them names a file.
SETTINGS = (
    "minutes",
    "model.*",
    "data.tokenizer",
    *(f"train.{key}" for key in ("steps", "batch", "lr", "seed", "patience", "evaluate_every")),
)
SETTING = re.compile("|".join(re.escape(name).replace(r"\*", "[a-z_.]+") for name in SETTINGS))


class StudioBody(BaseModel):
    """A body that refuses unknown fields."""

    model_config = ConfigDict(extra="forbid")

    @field_validator("*", mode="after")
    @classmethod
    def _check_text(cls, value: object) -> object:
        if isinstance(value, str):
            value.encode()  # a lone surrogate raises UnicodeEncodeError, a ValueError
        return value


class TrainBody(StudioBody):
    """A run to train: on a text or by a recipe."""

    name: Name
    text: str | None = None  # its length is limited by that of the body
    suffix: Literal[SUFFIXES] = ".txt"  # type: ignore[valid-type]
    recipe: Word | None = None
    settings: Annotated[list[Word], list_length(32, at_least=0)] = []


class ResumeBody(StudioBody):
    """A run to continue; `steps` extends it."""

    name: Name
    steps: Annotated[StrictInt, Field(ge=1, le=10_000_000)] | None = None


class DistributionBody(Sampling):
    """A text whose next token is sampled."""

    text: ShortText
    chat: StrictBool = False  # the text is the message of a user
    top: Annotated[StrictInt, Field(ge=1, le=40)] = 12


class AttentionBody(StudioBody):
    """A text, or two for a run that reads two, whose attention maps are shown."""

    name: Name
    text: Annotated[str, Field(min_length=1, max_length=4096)]
    second_text: Annotated[str, Field(min_length=1, max_length=20_000)] | None = None


class FigureBody(StudioBody):
    """A figure of the lectures for a run and a text."""

    figure: Word
    name: Name | None = None
    text: Annotated[str, Field(max_length=20_000)] | None = None
