"""Windows of a series: the rows that a model reads, and those that it forecasts."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from regard.data.batch import Batch
from regard.data.series import Series
from regard.errors import DataError
from regard.pipelines.batching import evenly_spaced_indices
from regard.tasks import Forecast

EVALUATION_ROWS = 256  # windows of a batch of validation data


@dataclass(frozen=True)
class SeriesWindows:
    """The scaled rows of a split of a series, and the windows in them."""

    values: Float[Tensor, "time input_dim"]
    context: int
    horizon: int
    starts: NDArray[np.int64]  # the first row of each window

    @classmethod
    def from_series(
        cls, series: Series, task: Forecast, *, stride: int = 1, double: bool = False
    ) -> "SeriesWindows":
        """All windows whose forecast rows are in the split; rows before the split may be read."""
        assert task.context is not None
        rows = series.values
        if series.history is not None:
            rows = np.concatenate([series.history[-task.context :], rows])
        size = task.context + task.horizon
        if len(rows) < size:
            raise DataError(
                f"{series.name}: {series.description}; {len(rows):,} rows are too few for a window "
                f"that reads {task.context} rows and forecasts {task.horizon};\nadd data, enlarge "
                "the split (data.split, data.validation_fraction), or lower task.horizon or "
                "task.context"
            )
        values = task.standardize(rows[:, series.indices(task.read_columns)])
        tensor = torch.from_numpy(values).to(torch.float64 if double else torch.float32)
        return cls(tensor, task.context, task.horizon, np.arange(0, len(rows) - size + 1, stride))

    def __len__(self) -> int:
        return len(self.starts)

    def read(self, indices: NDArray[np.int64]) -> Float[Tensor, "batch time input_dim"]:
        """Windows by their indices."""
        offsets = np.arange(self.context + self.horizon)
        return self.values[torch.from_numpy(self.starts[indices][:, None] + offsets)]

    def batches(self, task: Forecast, limit: int | None) -> Iterator[Batch]:
        """All windows, or evenly spaced ones with about `limit` values to forecast."""
        values = self.horizon * len(task.columns)
        indices = evenly_spaced_indices(
            len(self), None if limit is None else max(1, limit // values)
        )
        for start in range(0, len(indices), EVALUATION_ROWS):
            windows = self.read(indices[start : start + EVALUATION_ROWS])
            yield task.collate((windows, self.context), torch.Generator())
