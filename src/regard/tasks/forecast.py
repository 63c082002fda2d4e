"""Forecasting: the next number of a series, and then the next from that."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn

from regard.data.batch import SeriesBatch
from regard.errors import ConfigError, DataError
from regard.tasks.base import Learns


@dataclass(frozen=True, kw_only=True)
class Forecast:
    r"""How far the next number is from what was said, and the next that is made from that.

        one step ahead   x̂_t+1 = f(x_t, x_t-1, …)
        fed back         x̂_t+h = f(x̂_t+h-1, …, x̂_t+1, x_t, …),     h = 1 … horizon

    `loss` and `mae` are the squared and the absolute error one step ahead, `fed_back` is the
    squared error over the horizon, and `fed_back_h` that of step h: it shows how errors
    accumulate. All are in units of the deviation of what was learned from: 1 is as good as
    always to say the mean.
    """

    learns: ClassVar[Learns] = "series"
    verb: ClassVar[str] = "predict"
    measures: ClassVar[tuple[str, ...]] = ("loss", "mae", "fed_back")
    column: str | None = None  # which to foretell; None: the last
    horizon: int = 96
    mean: float | None = None  # of what is learned from; None: not known yet
    std: float | None = None

    def __post_init__(self) -> None:
        if self.horizon < 1:
            raise ConfigError(f"task.horizon={self.horizon} must be at least 1")

    def collate(self, examples: NDArray[np.float64], generator: torch.Generator) -> SeriesBatch:
        """The numbers, centred and scaled."""
        assert self.mean is not None
        assert self.std is not None
        return SeriesBatch(torch.from_numpy((examples - self.mean) / self.std))

    def loss(self, model: nn.Module, batch: SeriesBatch) -> Float[Tensor, ""]:
        """Summed squared error, one step ahead."""
        return _ahead(model, batch).square().sum()

    def count(self, batch: SeriesBatch) -> Int[Tensor, ""]:
        """How many numbers there are to foretell, the first among them."""
        return torch.tensor(batch.series.numel())

    @torch.no_grad()
    def metrics(self, model: nn.Module, batches: Iterable[SeriesBatch]) -> dict[str, float]:
        """Errors one step ahead, and those of what is fed back, by how far ahead it is."""
        near, far = [], []
        seen: int = model.context  # type: ignore[assignment]
        for batch in batches:
            if batch.series.shape[1] < seen + self.horizon:
                raise DataError(
                    f"the held-out series has {batch.series.shape[1]:,} numbers; to look at {seen} "
                    f"and foretell {self.horizon}, it needs {seen + self.horizon};\n"
                    "hold out more (data.validation_fraction), or lower task.horizon or model.order"
                )
            near.append(_ahead(model, batch).flatten())
            # every place from which there are `horizon` numbers to come: (places, seen + horizon)
            windows = batch.series.unfold(1, seen + self.horizon, 1).flatten(0, 1)
            told = model.forecast(windows[:, :seen], self.horizon)  # type: ignore[operator]
            far.append((told - windows[:, seen:]).square())
        error, steps = torch.cat(near), torch.cat(far).mean(0)
        halves = [1 << power for power in range(self.horizon.bit_length())]
        return {
            "loss": float(error.square().mean()),
            "mae": float(error.abs().mean()),
            "fed_back": float(steps.mean()),
            **{f"fed_back_{h}": float(steps[h - 1]) for h in sorted({*halves, self.horizon})},
        }

    def told(self, values: Tensor) -> list[float]:
        """Scaled numbers as they were."""
        assert self.mean is not None
        assert self.std is not None
        found: list[float] = (values * self.std + self.mean).tolist()
        return found


def _ahead(model: Any, batch: SeriesBatch) -> Float[Tensor, "batch places"]:
    """What was said less what came, wherever there is enough to look back at."""
    error: Tensor = model(batch.series[:, :-1]) - batch.series[:, model.context :]
    return error
