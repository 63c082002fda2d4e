"""Tasks: the batches, losses and metrics with which models are trained and evaluated."""

from regard.tasks.base import Task
from regard.tasks.caption import Caption
from regard.tasks.causal import Causal
from regard.tasks.cbow import CBOWTask
from regard.tasks.contrastive import Contrastive
from regard.tasks.forecast import Forecast
from regard.tasks.handwriting import Handwriting
from regard.tasks.image_classification import ImageClassification
from regard.tasks.instruct import Instruct
from regard.tasks.masked import Masked
from regard.tasks.seq2seq import Seq2Seq
from regard.tasks.span import Span
from regard.tasks.tag import Tag
from regard.tasks.text_classification import TextClassification
from regard.tasks.text_regression import TextRegression

# Tasks by the name that `task` takes.
TASKS: dict[str, type[Task]] = {
    "causal": Causal,
    "instruct": Instruct,
    "masked": Masked,
    "cbow": CBOWTask,
    "seq2seq": Seq2Seq,
    "contrastive": Contrastive,
    "image_classification": ImageClassification,
    "text_classification": TextClassification,
    "text_regression": TextRegression,
    "tag": Tag,
    "span": Span,
    "caption": Caption,
    "forecast": Forecast,
    "handwriting": Handwriting,
}

__all__ = [
    "TASKS",
    "CBOWTask",
    "Caption",
    "Causal",
    "Contrastive",
    "Forecast",
    "Handwriting",
    "ImageClassification",
    "Instruct",
    "Masked",
    "Seq2Seq",
    "Span",
    "Tag",
    "Task",
    "TextClassification",
    "TextRegression",
]
