"""Time series forecasting, one step ahead and several steps ahead."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn

from regard.data.batch import WindowBatch
from regard.errors import ConfigError, DataError, unknown
from regard.models.presets import ModelConfig
from regard.tasks.base import Task
from regard.tasks.metrics import evaluation_mode

EPS = 1e-5  # added to the variance of a window
Window = Float[Tensor, "batch time input_dim"]


@dataclass(frozen=True, kw_only=True)
class Forecast(Task):
    r"""Squared error of the next values of a series.

        direct      (x̂_{t+1}, …, x̂_{t+H}) = f(x_t, …, x_{t-L+1})
        recursive   x̂_{t+h} = f(x̂_{t+h-1}, …, x̂_{t+1}, x_t, …),     h = 1 … H

    L is `context`, H is `horizon`. `mse` and `mae` are the mean squared and absolute errors of all
    H steps and columns, `mse_h` is the mean squared error of step h, which shows how errors grow.
    Columns are scaled to standard deviation 1 in the training data: always predicting their mean
    has an `mse` of 1. `loss` is the training loss: the `mse` of a direct model, the squared error
    one step ahead of a recursive (autoregressive) model.

    A network reads each window normalized (`normalize`): relative to its last value, or by its mean
    and standard deviation (RevIN, Kim et al. 2022). The output of the network is transformed back.
    With `patch_length`, a position is that many consecutive rows, and with `channel_independent`
    each column is a separate sequence, read with shared weights (PatchTST, Nie et al. 2023).
    """

    data_kind: ClassVar[str] = "series"
    target_name: ClassVar[str] = "values"
    loss_unit: ClassVar[str] = "squared error of scaled columns"
    unit: ClassVar[str] = "columns scaled to standard deviation 1"
    architectures: ClassVar[tuple[str, ...]] = ("linear", "decoder", "encoder")
    # series: models with `fit`; text: networks, which read vectors instead if `input_dim` is set
    input_kinds: ClassVar[tuple[str, ...]] = ("series", "text")
    methods: ClassVar[tuple[str, ...]] = ("predict", "forecast")
    metric_names: ClassVar[tuple[str, ...]] = ("loss", "mse", "mae")
    best_metric: ClassVar[str] = "mse"
    # the column to forecast, or several; None: all columns
    column: str | list[str] | None = None
    # further columns (exogenous variables) that are read and not forecast
    covariates: list[str] = field(default_factory=list)
    # rows that are read; None: 336 for a linear layer, 96 for a network, less for a short series
    context: int | None = None
    horizon: int = 96  # rows that are forecast
    # whether a network forecasts all rows at once (direct), or row by row, reading each forecast as
    # its next input (recursive); None: direct
    direct: bool | None = None
    # how a window is normalized for a network: not at all, relative to its last value, or by its
    # mean and standard deviation (RevIN); None: last if direct, else off
    normalize: Literal["off", "last", "window"] | None = None
    # whether each column is a separate sequence, read with shared weights (PatchTST)
    channel_independent: bool = False
    patch_length: int = 1  # consecutive rows that are one position of a network
    patch_stride: int | None = None  # rows between two patches; None: `patch_length`
    # rows after which the series repeats, for the seasonal naive baseline; None: by the dates, or
    # the autocorrelation
    seasonal_period: int | None = None
    # mean of each column; None: that of the training data
    mean: float | list[float] | None = None
    # standard deviation of each column; None: that of the training data
    std: float | list[float] | None = None

    def __post_init__(self) -> None:
        for name in ("horizon", "context", "patch_length", "patch_stride", "seasonal_period"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"task.{name}={value} must be at least 1")
        if self.context is not None and self.patch_length > self.context:
            raise ConfigError(
                f"task.patch_length={self.patch_length} must be at most task.context={self.context}"
            )
        if self.covariates and self.column is None:
            raise ConfigError(
                "task.covariates are columns that are read and not forecast, but by default all "
                "are forecast; also set task.column"
            )
        if self.covariates and self.channel_independent:
            raise ConfigError(
                "task.channel_independent reads each column alone, so task.covariates would not be "
                "used; leave one of them out"
            )
        if self.covariates and self.direct is False:
            raise ConfigError(
                "task.covariates are not forecast, so a recursive forecast cannot read them; "
                "set task.direct=true, or forecast them too"
            )

    @property
    def columns(self) -> list[str]:
        """The columns to forecast; known after the data was read."""
        assert self.column is not None
        return [self.column] if isinstance(self.column, str) else self.column

    @property
    def read_columns(self) -> list[str]:
        """The columns that are read: those to forecast come first."""
        return [*self.columns, *(name for name in self.covariates if name not in self.columns)]

    @property
    def is_direct(self) -> bool:
        """Whether a network forecasts all rows at once."""
        return self.direct is not False

    @property
    def normalization(self) -> str:
        """How windows are normalized for a network."""
        return self.normalize or ("last" if self.is_direct else "off")

    @property
    def positions(self) -> int:
        """The number of patches of a window."""
        assert self.context is not None
        return (self.context - self.patch_length) // (self.patch_stride or self.patch_length) + 1

    @property
    def scale(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean and standard deviation of each column that is read."""
        return np.atleast_1d(np.array(self.mean)), np.atleast_1d(np.array(self.std))

    def forecast_method(self, model: nn.Module, steps: int) -> str:
        """How a forecast of this many steps is computed, for a legend: direct or recursive."""
        rows_per_pass = getattr(model, "horizon", 1) if has_fit(model) else self.horizon
        return "direct" if self.is_direct and steps <= rows_per_pass else "recursive"

    def can_forecast_recursively(self, model: nn.Module, steps: int) -> bool:
        """Whether steps that a model forecasts directly can also be forecast recursively."""
        has_covariates = len(self.read_columns) > len(self.columns)  # they are not forecast
        return steps > 1 and self.forecast_method(model, steps) == "direct" and not has_covariates

    def column_index(self, column: str | None) -> int:
        """The index of a column among those that are forecast, by default the first."""
        if column is None:
            return 0
        if column not in self.columns:
            raise ConfigError(unknown("column", column, self.columns))
        return self.columns.index(column)

    def model_settings(self) -> dict[str, Any]:
        """The fields of a model's configuration that follow from the task."""
        outputs = 1 if self.channel_independent else len(self.columns)
        inputs = 1 if self.channel_independent else len(self.read_columns)
        horizon = self.horizon if self.is_direct else 1
        return {
            "vocab_size": 1,
            "input_dim": self.patch_length * inputs,
            "head": {"kind": "forecast", "horizon": horizon, "outputs": outputs},
        }

    def check_model(self, model: ModelConfig) -> None:
        """Raise `ConfigError` also if the model reads ids only or a setting does not apply."""
        super().check_model(model)
        without_gradients = getattr(model, "input_kind", None) == "series"
        if not without_gradients and not hasattr(model, "input_dim"):
            raise ConfigError(
                "needs a model that reads vectors or series; set model.family to recurrent, "
                "convolution, transformer, linear or autoregression"
            )
        token_settings = [name for name in ("segments", "embed_dim") if getattr(model, name, None)]
        if token_settings:
            off = {"segments": "model.segments=0", "embed_dim": "model.embed_dim=none"}
            settings = " and ".join(
                f"model.{name}={getattr(model, name)}" for name in token_settings
            )
            raise ConfigError(
                f"only an embedding of tokens uses {settings}, and a series has rows of numbers "
                f"instead; set {' '.join(off[name] for name in token_settings)}, or choose another "
                "model, as in model.preset=tiny-encoder"
            )
        if getattr(model, "architecture", None) == "encoder" and not self.is_direct:
            raise ConfigError(
                "task.direct=false predicts the next row at every position, but an encoder also "
                "reads the rows after it; leave it out, or choose a decoder"
            )
        if without_gradients:
            choose_network = "; choose one, as in model.preset=gru, or leave the setting out"
            for name in ("direct", "normalize", "patch_stride", "covariates"):
                if getattr(self, name) not in (None, []):
                    raise ConfigError(f"task.{name} is for networks{choose_network}")
            if self.patch_length > 1 or self.channel_independent:
                raise ConfigError(
                    "task.patch_length and task.channel_independent are for networks"
                    f"{choose_network}"
                )

    def collate(
        self,
        examples: tuple[Float[Tensor, "batch time input_dim"], int],
        generator: torch.Generator,
    ) -> WindowBatch:
        """Scaled windows, cut into the rows that are read and those to forecast."""
        windows, context = examples
        return WindowBatch(windows[:, :context], windows[:, context:, : len(self.columns)])

    def standardize(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Values of the columns that are read, centred and scaled."""
        mean, std = self.scale
        return (values - mean) / std

    def unstandardize(self, values: Tensor) -> NDArray[np.float64]:
        """Undo `standardize`, for the columns that are forecast."""
        mean, std = (values[: len(self.columns)] for values in self.scale)
        unstandardized: NDArray[np.float64] = values.double().cpu().numpy() * std + mean
        return unstandardized

    def loss(self, model: nn.Module, batch: WindowBatch) -> Float[Tensor, ""]:
        """Summed squared error of the forecast rows, or of the next row at every position."""
        if has_fit(model) or not self._scores_every_position:
            forecast = self.forecast_once(model, batch.series)
            targets = batch.targets[:, : forecast.shape[1]]
            return (forecast - targets).square().sum()
        columns = batch.targets.shape[2]
        series = batch.series
        targets = torch.cat([series[:, 1:, :columns], batch.targets[:, :1]], 1)
        if self.channel_independent:
            series, targets = (x.mT.flatten(0, 1).unsqueeze(2) for x in (series, targets))
        predicted = model.head.project(model(series)).squeeze(2)  # type: ignore[operator, union-attr]
        error: Tensor = predicted - targets
        return error.square().sum()

    def count(self, batch: WindowBatch) -> Int[Tensor, ""]:
        """How many values are scored."""
        if self.is_direct:
            return torch.tensor(batch.targets.numel())
        rows, time, _ = batch.series.shape
        scored = time if self._scores_every_position else 1
        return torch.tensor(rows * batch.targets.shape[2] * scored)

    def evaluation_count(self, batch: WindowBatch) -> int:
        """All values that are forecast."""
        return batch.targets.numel()

    @property
    def _scores_every_position(self) -> bool:
        """Whether every position of a window predicts the next row (teacher forcing)."""
        reads_each_row = self.patch_length == 1 and self.patch_stride in (None, 1)
        return not self.is_direct and self.normalization == "off" and reads_each_row

    def metrics(self, model: nn.Module, batches: Iterable[WindowBatch]) -> dict[str, float]:
        """Errors over the horizon and by step."""
        squares = torch.zeros(self.horizon, dtype=torch.float64)
        absolute, count, losses, scored = 0.0, 0, 0.0, 0
        one_step = not self.is_direct and not has_fit(model)
        with evaluation_mode(model):
            for batch in batches:
                error = (self.rollout(model, batch.series, self.horizon) - batch.targets).double()
                squares += error.square().sum((0, 2)).cpu()
                absolute += float(error.abs().sum())
                count += error.numel()
                if one_step:
                    losses += float(self.loss(model, batch))
                    scored += int(self.count(batch))
        if not count:
            raise DataError("nothing to evaluate: the validation data has no window to forecast")
        mse = float(squares.sum() / count)
        return {
            "loss": losses / scored if one_step else mse,
            "mse": mse,
            "mae": absolute / count,
            **self.errors_by_step(squares * self.horizon / count),
        }

    def mse_by_step(self, model: nn.Module, batches: Iterable[WindowBatch]) -> list[float]:
        """The mean squared error of every step, of which `metrics` has a few."""
        squares, count = torch.zeros(self.horizon, dtype=torch.float64), 0
        with evaluation_mode(model):
            for batch in batches:
                error = (self.rollout(model, batch.series, self.horizon) - batch.targets).double()
                squares += error.square().sum((0, 2)).cpu()
                count += error.shape[0] * error.shape[2]
        return (squares / count).tolist()

    def errors_by_step(self, errors: Float[Tensor, " horizon"]) -> dict[str, float]:
        """`mse_h` of the steps 1, 2, 4, … and of the last one."""
        powers = [1 << power for power in range(self.horizon.bit_length())]
        return {f"mse_{h}": float(errors[h - 1]) for h in sorted({*powers, self.horizon})}

    def forecast_once(
        self, model: nn.Module, series: Window
    ) -> Float[Tensor, "batch steps variables"]:
        """The rows after a window that one forward pass of the model forecasts."""
        if has_fit(model):
            batch = len(series)
            rows = series.mT.flatten(0, 1)  # each column alone
            steps: int = getattr(model, "horizon", 1)
            forecast: Tensor = model.forecast(rows, steps)  # type: ignore[operator]
            return forecast.unflatten(0, (batch, -1)).mT
        shift, scale = _window_statistics(series, self.normalization)
        x = (series - shift) / scale
        if self.channel_independent:
            x = x.mT.flatten(0, 1).unsqueeze(2)  # (batch * columns, time, 1)
        if self.patch_length > 1 or self.patch_stride is not None:
            stride = self.patch_stride or self.patch_length
            skipped = (x.shape[1] - self.patch_length) % stride  # the oldest rows, if any
            x = x[:, skipped:].unfold(1, self.patch_length, stride).flatten(2)
        y: Tensor = model.head(model(x))  # type: ignore[operator]
        if self.channel_independent:
            y = y.squeeze(2).unflatten(0, (len(series), -1)).mT  # (batch, steps, columns)
        columns = y.shape[2]
        return y * scale[..., :columns] + shift[..., :columns]

    def rollout(
        self, model: nn.Module, series: Window, steps: int, *, rows_per_pass: int | None = None
    ) -> Float[Tensor, "batch steps variables"]:
        """The next `steps` rows, recursively: each forecast is read as input of the next one.

        The model always reads the last `context` rows. Of the rows that one forward pass forecasts,
        the first `rows_per_pass` are used, by default all.
        """
        context, forecasts, num_rows = series.shape[1], [], 0
        while num_rows < steps:
            forecasts.append(self.forecast_once(model, series)[:, :rows_per_pass])
            num_rows += forecasts[-1].shape[1]
            if num_rows < steps and len(self.read_columns) > len(self.columns):
                raise ConfigError(
                    f"{steps} steps exceed task.horizon={self.horizon}, and task.covariates are "
                    "not forecast, so a recursive forecast cannot read them; forecast fewer steps"
                )
            if num_rows < steps:
                series = torch.cat([series, forecasts[-1].to(series)], 1)[:, -context:]
        return torch.cat(forecasts, 1)[:, :steps]


def has_fit(model: nn.Module) -> bool:
    """Whether a model is fitted by its method `fit`, without gradients."""
    return hasattr(model, "fit")


def _window_statistics(series: Window, normalize: str) -> tuple[Tensor, Tensor]:
    """The shift that is subtracted from each window, and the scale that it is divided by."""
    if normalize == "last":
        return series[:, -1:].detach(), torch.ones_like(series[:, :1])
    if normalize == "window":
        mean = series.mean(1, keepdim=True)
        variance = series.var(1, keepdim=True, correction=0)
        return mean, (variance + EPS).sqrt()
    return torch.zeros_like(series[:, :1]), torch.ones_like(series[:, :1])
