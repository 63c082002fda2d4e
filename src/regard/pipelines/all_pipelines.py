"""`PIPELINES`: one pipeline for each kind of data."""

from regard.pipelines.base import Pipeline
from regard.pipelines.captions import CaptionsPipeline
from regard.pipelines.dialogues import DialoguesPipeline
from regard.pipelines.images import ImagesPipeline
from regard.pipelines.labels import LabelsPipeline, TagsPipeline
from regard.pipelines.pairs import PairsPipeline
from regard.pipelines.scores import ScoresPipeline
from regard.pipelines.sentences import SentencesPipeline
from regard.pipelines.series import SeriesPipeline
from regard.pipelines.spans import SpansPipeline
from regard.pipelines.strokes import StrokesPipeline
from regard.pipelines.text import TextPipeline

# `detect` calls `recognizes` from the last entry to the first: text accepts every file, so it is
# the first, and pipelines that a user adds have priority.
PIPELINES: dict[str, Pipeline] = {
    "text": TextPipeline(),
    "pairs": PairsPipeline(),
    "series": SeriesPipeline(),
    "labels": LabelsPipeline(),
    "scores": ScoresPipeline(),
    "images": ImagesPipeline(),
    "strokes": StrokesPipeline(),
    "tags": TagsPipeline(),
    "spans": SpansPipeline(),
    "captions": CaptionsPipeline(),
    "dialogues": DialoguesPipeline(),
    "sentences": SentencesPipeline(),
}
