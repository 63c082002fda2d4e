"""Baselines of forecasting: naive, seasonal naive, AR(p) and one linear layer."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.data.batch import SeriesBatch
from regard.data.series import Series
from regard.models.autoregression import Autoregression, AutoregressionConfig
from regard.models.nlinear import NLinear, NLinearConfig
from regard.tasks import Forecast

MAX_ORDER = 24  # of AR(p)
MAX_CONTEXT = 336  # of the linear layer
MIN_AUTOCORRELATION = 0.2  # at a seasonal period that is inferred from the values
Forecaster = Callable[[Tensor, int], Tensor]  # (rows, time), steps → (rows, steps)


def evaluate_baselines(
    task: Forecast, series: Series, training: NDArray[np.float64] | None, *, stride: int = 1
) -> dict[str, dict[str, float]]:
    """`mse` and `mae` of each baseline on windows of a split, as `Forecast` computes them.

    Windows advance by `stride` rows, as in the evaluation of a network. AR(p) and the linear layer
    are fitted to the training rows, and are omitted without them.
    """
    columns = series.indices(task.columns)
    mean, std = (values[: len(columns)] for values in task.scale)

    def scale(rows: NDArray[np.float64]) -> Tensor:
        return torch.from_numpy((rows[:, columns] - mean) / std).mT  # (columns, time)

    forecasters = _forecasters(task, None if training is None else scale(training))
    context = max(needed for needed, _ in forecasters.values())
    rows_before = 0 if series.history is None else len(series.history)
    history_rows = min(context, rows_before)
    rows = series.values
    if series.history is not None:
        rows = np.concatenate([series.history[rows_before - history_rows :], rows])
    values = scale(rows)
    context = history_rows if series.history is not None else max(task.context or 1, context)
    first = max(0, (task.context or 1) - rows_before)  # the first row that the network forecasts
    offset = (first - (context - history_rows)) % stride
    metrics = {}
    for name, (needed, forecaster) in forecasters.items():
        if needed > context or values.shape[1] < context + task.horizon + offset:
            continue
        squared_errors = absolute_errors = 0.0
        count = 0
        for column in values:  # one at a time, to save memory
            windows = column[offset:].unfold(0, context + task.horizon, stride)
            forecast = forecaster(windows[:, context - needed : context], task.horizon)
            error = forecast - windows[:, context:]
            squared_errors += float(error.square().sum())
            absolute_errors += float(error.abs().sum())
            count += error.numel()
        metrics[name] = {"mse": squared_errors / count, "mae": absolute_errors / count}
    return metrics


def baseline_settings(task: Forecast, rows: int) -> dict[str, str]:
    """The settings that train each baseline that is fitted to this number of rows, by its name."""
    settings = {}
    for name, config in _fitted_models(task, rows).items():
        if isinstance(config, AutoregressionConfig):
            settings[name] = f"model.family=autoregression model.order={config.order}"
        else:
            settings[name] = f"model.family=linear task.context={config.context}"
    return settings


def _forecasters(task: Forecast, training: Tensor | None) -> dict[str, tuple[int, Forecaster]]:
    """The baselines by name, with the number of values that each reads."""
    period = task.seasonal_period
    forecasters: dict[str, tuple[int, Forecaster]] = {"naive": (1, _naive)}
    if period is not None:
        forecasters[f"seasonal naive ({period} rows)"] = (period, _seasonal_naive)
    if training is None:
        return forecasters
    for name, config in _fitted_models(task, training.shape[1]).items():
        model = (
            Autoregression(config) if isinstance(config, AutoregressionConfig) else NLinear(config)
        )
        model.fit([SeriesBatch(training)])
        forecasters[name] = (config.context, model.forecast)
    return forecasters


def _fitted_models(task: Forecast, rows: int) -> dict[str, AutoregressionConfig | NLinearConfig]:
    """The configurations of the baselines that are fitted to this number of rows, by name."""
    order = max(1, min(MAX_ORDER, rows // 20))
    models: dict[str, AutoregressionConfig | NLinearConfig] = {
        f"AR({order})": AutoregressionConfig(order=order)
    }
    context = max(1, min(MAX_CONTEXT, rows // 4))
    if context + task.horizon <= rows:
        config = NLinearConfig(context=context, horizon=task.horizon)
        models[f"linear layer, {context} values"] = config
    return models


def _naive(rows: Tensor, steps: int) -> Tensor:
    """The last value, repeated."""
    return rows[:, -1:].expand(-1, steps)


def _seasonal_naive(rows: Tensor, steps: int) -> Tensor:
    """The values of the last seasonal period, repeated."""
    return rows.repeat(1, -(-steps // rows.shape[1]))[:, :steps]


def find_seasonal_period(series: Series, column: int) -> int | None:
    """The seasonal period in rows: by the dates, or else the lag of the highest autocorrelation.

    Only lags after the first minimum are considered, up to a third of the series.
    """
    if series.dates is not None:
        return series.dates.seasonal_period
    values = series.values[:, column] - series.values[:, column].mean()
    max_lag = len(values) // 3
    if max_lag < 3 or not values.any():
        return None
    spectrum = np.fft.rfft(values, 2 * len(values))
    correlation = np.fft.irfft(np.abs(spectrum) ** 2)[: max_lag + 1]
    correlation = correlation / correlation[0]
    rising = np.flatnonzero(np.diff(correlation) > 0)
    if not len(rising):
        return None
    lag = int(rising[0] + correlation[rising[0] :].argmax())
    return lag if lag > 1 and correlation[lag] > MIN_AUTOCORRELATION else None
