"""Tasks: what a model is trained for and how it is judged."""

from regard.tasks.base import Objective, Task
from regard.tasks.causal import Causal
from regard.tasks.seq2seq import Seq2Seq

TASKS: dict[str, type[Task]] = {"causal": Causal, "seq2seq": Seq2Seq}

__all__ = ["TASKS", "Causal", "Objective", "Seq2Seq", "Task"]
