"""Tasks: what a model is trained for and how it is judged."""

from regard.tasks.base import Objective, Task
from regard.tasks.causal import Causal
from regard.tasks.classify import Classify
from regard.tasks.masked import Masked
from regard.tasks.seq2seq import Seq2Seq

TASKS: dict[str, type[Task]] = {
    "causal": Causal,
    "masked": Masked,
    "seq2seq": Seq2Seq,
    "classify": Classify,
}

__all__ = ["TASKS", "Causal", "Classify", "Masked", "Objective", "Seq2Seq", "Task"]
