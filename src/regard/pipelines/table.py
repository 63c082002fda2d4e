"""The table of pipelines: one entry for each kind of data."""

from regard.pipelines.base import Pipeline
from regard.pipelines.images import ImagesPipeline
from regard.pipelines.labels import LabelsPipeline, TagsPipeline
from regard.pipelines.pairs import PairsPipeline
from regard.pipelines.series import SeriesPipeline
from regard.pipelines.text import TextPipeline

# In the order in which they are asked whether they recognize a path, from the last to the first:
# text accepts every file, so it comes first, and what a user adds is asked before the others.
PIPELINES: dict[str, Pipeline] = {
    "text": TextPipeline(),
    "pairs": PairsPipeline(),
    "series": SeriesPipeline(),
    "labels": LabelsPipeline(),
    "images": ImagesPipeline(),
    "tags": TagsPipeline(),
}
