"""Drawings as pen strokes."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from regard.config import Choice, RunConfig, make
from regard.data.batch import Batch
from regard.data.loader import RowLoader
from regard.data.strokes import Strokes, from_npz, is_strokes
from regard.data.text_files import suffix
from regard.errors import DataError
from regard.explain.render.strokes import to_svg, to_text
from regard.models.build import config_table, resolve
from regard.models.recurrent import RecurrentConfig
from regard.models.soft_window import SoftWindowConfig
from regard.pipelines.base import (
    EvalData,
    Pipeline,
    Progress,
    TextWithSvg,
    TrainingData,
    with_task_options,
)
from regard.pipelines.batching import describe_classes, evenly_spaced_indices, rows_per_micro_batch
from regard.tasks import TASKS, Handwriting

DEFAULT_ROWS = 64  # drawings of a step, where train.batch is not set
SAMPLE_DRAWINGS, TEXT_DRAWINGS = 16, 4  # drawings per sample; drawings shown as text
SOFT_WINDOW = "soft_window"  # the family of models that read texts


class StrokesPipeline(Pipeline):
    """Drawings as pen strokes (dx, dy, lift)."""

    name: ClassVar[str] = "strokes"
    data_description: ClassVar[str] = "an .npz archive of pen strokes: arrays xyp and off"
    exclusive: ClassVar[bool] = True

    def recognizes(self, path: Path) -> bool:
        """An .npz archive with points of strokes."""
        return path.is_file() and suffix(path) == ".npz" and is_strokes(path)

    def reads_on_request(self, path: Path) -> bool:
        """False: only archives that are recognized hold strokes."""
        return False

    def open(self, path: Path) -> Strokes:
        """The drawings of an archive."""
        return from_npz(path)

    def validation_split(self, data: Strokes) -> Strokes:
        """The validation split, where the data has one."""
        return data.validation or data.test or data

    def defaults(self, data: Strokes, task: Choice, *, gpu: bool) -> dict[str, Any]:
        """An LSTM, with a soft window if drawings have texts, as in Graves 2013."""
        model = {"preset": "lstm", "dim": 400 if gpu else 192, "layers": 1}
        if data.texts is not None:
            model = {"family": SOFT_WINDOW, "dim": 256 if gpu else 128, "layers": 2}
        return {
            "task": "handwriting",
            "model": model,
            "train": {
                "steps": 10_000 if gpu else 1500,
                "batch": DEFAULT_ROWS,
                "lr": 3e-3,
                "schedule": {"kind": "cosine", "warmup": 100},
            },
        }

    def train_defaults(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """A smaller learning rate for models without recurrence."""
        recurrent = isinstance(resolve(model, vocab_size=1), RecurrentConfig | SoftWindowConfig)
        return {} if recurrent else {"lr": 1e-3}

    def training_data(
        self,
        config: RunConfig,
        train: Strokes,
        validation: Strokes,
        tokenizers: None,
        progress: Progress | None,
    ) -> TrainingData:
        """Random drawings, right-padded."""
        settings = config.train
        rows = rows_per_micro_batch(settings, DEFAULT_ROWS, "drawings")
        task = stroke_task(config.task)
        std = task.std or float(train.points[:, :2].std())
        if not std > 0:
            raise DataError(f"{train.name}: no point of the training drawings moves the pen")
        has_classes = task.conditional and train.labels is not None
        names = task.class_names or (list(train.class_names) if has_classes else [])
        points = task.max_points or int(train.lengths.max())
        derived = {"std": std, "max_points": points, "class_names": names}
        reads_texts = config.model.get("family") == SOFT_WINDOW
        if reads_texts and train.texts is None:
            raise DataError(
                f"{train.name}: drawings have no texts for model.family=soft_window; give them as "
                "an array 'text', or choose model.preset=lstm"
            )
        if reads_texts and not task.alphabet:
            derived["alphabet"] = "".join(sorted({*"".join(train.texts or ())}))
        config = replace(config, task=with_task_options(config.task, derived))
        task = stroke_task(config.task)
        model = resolve(config.model, **task.model_settings())
        config = replace(config, model=config_table(model))
        data = self.evaluation_data(config, validation, None)
        loader = RowLoader(len(train), rows, settings.seed)

        def batch(index: int) -> Batch:
            return _batch(task, train, loader.examples(index))

        truncated = int((train.lengths > points).sum())
        unread = train.texts is not None and not reads_texts
        return TrainingData(
            **vars(data),
            batch=batch,
            example_ids=loader.example_ids,
            all_batches=lambda: _batches(task, train, rows, None),
            description=[
                f"data       {train.description}"
                + (f"; {truncated:,} truncated" if truncated else ""),
                f"validation {validation.description}",
                f"dx, dy     standard deviation {std:.4g}",
                *([describe_classes(names)] if names else []),
                *([f"alphabet   {task.alphabet}"] if task.alphabet else []),
                *(["texts      not read; model.family=soft_window reads them"] if unread else []),
            ],
        )

    def evaluation_data(
        self,
        config: RunConfig,
        data: Strokes,
        tokenizers: None,
        progress: Progress | None = None,
    ) -> EvalData:
        """All validation drawings; `task.std` must be set, and `task.class_names` for classes."""
        task = stroke_task(config.task)
        known = {*task.class_names}
        classes = () if data.labels is None else data.class_names
        if known and not (classes and {*classes} <= known):
            raise DataError(
                f"{data.name}: drawings have classes {', '.join(classes[:5]) or 'none'}, "
                f"and the run was trained on {', '.join(task.class_names[:5])}"
            )
        if task.alphabet:
            if data.texts is None:
                raise DataError(
                    f"{data.name}: drawings have no texts, and the run was trained on texts"
                )
            if unknown := {*"".join(data.texts)} - {*task.alphabet}:
                raise DataError(
                    f"{data.name}: {''.join(sorted(unknown))[:20]!r} is in a text, and not in the "
                    f"alphabet of the training texts, {task.alphabet!r}"
                )
        rows = max(DEFAULT_ROWS, config.train.batch or 0)
        points = int(np.minimum(data.lengths, task.max_points or np.inf).sum())
        return EvalData(
            task=task,
            task_choice=config.task,
            tokenizers=None,
            model=resolve(config.model, **task.model_settings()),
            validation_batches=lambda limit: _batches(task, data, rows, limit),
            validation_data=data,
            validation_size=len(data),
            validation_targets=points,
        )

    def sample(self, data: EvalData, model: nn.Module, seed: int) -> str:
        """Drawings sampled from the model: some as text, all as SVG."""
        task = cast(Handwriting, data.task)
        label = 0 if task.class_names else None
        text = data.validation_data.texts[0] if task.alphabet else None
        drawings = task.draw(model, SAMPLE_DRAWINGS, label=label, text=text, seed=seed, bias=0.5)
        return TextWithSvg(to_text(drawings[:TEXT_DRAWINGS]), to_svg(drawings))


def stroke_task(choice: Choice) -> Handwriting:
    """The task of a run on drawings."""
    return cast(Handwriting, make(choice, TASKS, "task"))


def _batch(task: Handwriting, data: Strokes, rows: NDArray[np.int64]) -> Batch:
    labels = None
    if data.labels is not None and task.class_names:
        class_ids = [task.class_names.index(name) for name in data.class_names]
        labels = [class_ids[label] for label in data.labels[rows]]
    texts = [data.texts[row] for row in rows] if data.texts and task.alphabet else None
    return task.collate(([data[int(row)] for row in rows], labels, texts), torch.Generator())


def _batches(task: Handwriting, data: Strokes, rows: int, limit: int | None) -> Iterator[Batch]:
    """All drawings once, or evenly spaced ones with about `limit` points."""
    count = None if limit is None else max(1, limit * len(data) // len(data.points))
    indices = evenly_spaced_indices(len(data), count)
    for start in range(0, len(indices), rows):
        yield _batch(task, data, indices[start : start + rows])
