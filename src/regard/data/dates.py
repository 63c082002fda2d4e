"""Dates of the rows of a series: their order, their step, and the dates that come next."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from regard.units import count_noun

MINUTE, HOUR, DAY, WEEK = 60, 3600, 86400, 7 * 86400  # seconds
STEP_NAMES = {WEEK: "week", DAY: "day", HOUR: "hour", MINUTE: "minute", 1: "second"}
MONTH_STEP_NAMES = {1: "month", 3: "quarter", 12: "year"}  # steps in months
SHORTEST_MONTH = 28 * DAY
WEEKDAYS = str.split("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MIN_WEEKS = 4  # of daily rows, from which a weekday without any row is absent, not a gap
MAX_JITTER = 0.01  # of a step in whole seconds
# characters of an ISO date up to its year, month, day and time
YEAR_LENGTH, MONTH_LENGTH, DATE_LENGTH, TIME_LENGTH = 4, 7, 10, 19


@dataclass(frozen=True, slots=True)
class Dates:
    """A date for each row, in increasing order."""

    columns: tuple[str, ...]  # the columns that they were read from
    values: NDArray[np.datetime64]  # (time), to the millisecond
    # the location of a row in its file, by its index, for messages
    location: Callable[[int], str] = field(default="row {}".format, repr=False)
    cell_format: str = ""  # of the cells, if it is ambiguous: "day/month/year"
    # characters of an ISO date that are shown, if the cells have no day: YEAR_LENGTH or
    # MONTH_LENGTH
    iso_length: int | None = None

    @property
    def step(self) -> int | None:
        """The most frequent difference between consecutive rows, in seconds.

        None if the step is in months or not in whole seconds, or if there is one row only.
        """
        if len(self.values) < 2 or self.step_in_months:
            return None
        median = float(np.median(np.diff(self.values) / np.timedelta64(1, "s")))
        if abs(median - round(median)) > MAX_JITTER * median:
            return None
        steps, counts = np.unique(self._differences, return_counts=True)
        return int(steps[counts.argmax()]) or None

    @property
    def step_in_months(self) -> int | None:
        """The step in months if the rows have the same day of the month, else None.

        A month, a quarter and a year may also begin on other days, as in dates of working days, but
        not if the step is fixed, such as four weeks.
        """
        steps, counts = np.unique(self._month_differences, return_counts=True)
        step = int(steps[counts.argmax()]) if len(steps) else 0
        if step < 1 or steps[0] < 1 or (steps % step).any():
            return None
        same_day = (self._dates_in(self.values.astype("datetime64[M]")) == self.values).all()
        differences = self._differences
        regular = (
            step in MONTH_STEP_NAMES
            and len(steps) == 1
            and differences.min() >= step * SHORTEST_MONTH
        )
        fixed = len(set(differences.tolist())) == 1
        return step if same_day or (regular and not fixed) else None

    def _dates_in(self, months: NDArray[np.datetime64]) -> NDArray[np.datetime64]:
        """A date in each of these months, on the day of the month that the rows have.

        In a shorter month, it is the last day.
        """
        starts = self.values.astype("datetime64[M]")
        days = self.values.astype("datetime64[D]")
        at_ends = ((days + 1).astype("datetime64[M]") != starts).all()
        offset = (days - starts.astype("datetime64[D]")).max()  # 0 for the first of the month
        ends = (months + 1).astype("datetime64[D]") - 1
        dates = ends if at_ends else np.minimum(months.astype("datetime64[D]") + offset, ends)
        return dates.astype("datetime64[s]") + (self.values[-1] - days[-1])

    @property
    def _differences(self) -> NDArray[np.int64]:
        """The differences between consecutive rows, rounded to seconds."""
        return np.rint(np.diff(self.values) / np.timedelta64(1, "s")).astype(np.int64)

    @property
    def _month_differences(self) -> NDArray[np.int64]:
        return np.diff(self.values.astype("datetime64[M]")).astype(np.int64)

    @property
    def _weekmask(self) -> list[bool]:
        """Whether daily rows have each weekday, from Monday; all if there are too few rows to tell.

        Sales may have no Sundays, and prices no weekends.
        """
        if self.values[-1] - self.values[0] < np.timedelta64(MIN_WEEKS * WEEK, "s"):
            return [True] * len(WEEKDAYS)
        weekdays = (self._days.astype(np.int64) + 3) % 7  # 1970-01-01 was a Thursday
        return np.isin(np.arange(7), weekdays).tolist()

    @property
    def _days(self) -> NDArray[np.datetime64]:
        return self.values.astype("datetime64[D]")

    @property
    def seasonal_period(self) -> int | None:
        """Number of rows in a day, a week or a year: the shortest of these longer than the step."""
        step, months = self.step, self.step_in_months
        if months:
            return 12 // months if months < 12 and 12 % months == 0 else None
        if step is None:
            return None
        if step < DAY:
            return DAY // step if DAY % step == 0 else None
        return sum(self._weekmask) if step == DAY else {WEEK: 52}.get(step)

    @property
    def gaps(self) -> NDArray[np.intp]:
        """The rows after which rows are missing."""
        step, months = self.step, self.step_in_months
        if months:
            return np.flatnonzero(self._month_differences != months)
        if step == DAY:
            counts = np.busday_count(self._days[:-1], self._days[1:], weekmask=self._weekmask)
            return np.flatnonzero(counts != 1)
        return np.flatnonzero(self._differences != (step or 0))

    @property
    def note(self) -> str:
        """The range and the step, and gaps, for a description."""
        first, last = self.format(self.values[[0, -1]])
        form = f" ({self.cell_format})" if self.cell_format else ""
        span = f"; {', '.join(self.columns)}{form}: {first} to {last}"
        frequency, gaps = self._frequency, self.gaps
        if not frequency:
            return span
        if not len(gaps):
            return f"{span}, {frequency}"
        return (
            f"{span}, {frequency} with {count_noun(len(gaps), 'gap')}, the first after "
            f"{self.location(int(gaps[0]))}; the rows are treated as consecutive"
        )

    @property
    def _frequency(self) -> str:
        """The step in words; "" if it is not known."""
        step, months = self.step, self.step_in_months
        if months:
            count, name = (months // 12, "year") if months % 12 == 0 else (months, "month")
            name = MONTH_STEP_NAMES.get(months, f"{count} {name}s")
            return f"one row {'per' if months in MONTH_STEP_NAMES else 'every'} {name}"
        if step is None:
            return ""
        unit = next(unit for unit in STEP_NAMES if step % unit == 0)
        name = STEP_NAMES[unit] if step == unit else f"{step // unit:,} {STEP_NAMES[unit]}s"
        present = zip(WEEKDAYS, self._weekmask, strict=True)
        absent = [day for day, has_rows in present if not has_rows] if step == DAY else []
        return f"one row every {name}" + (f" except {', '.join(absent)}" if absent else "")

    def next_values(self, steps: int) -> NDArray[np.datetime64]:
        """The dates of the next rows; empty if the step is not known."""
        last, step, months = self.values[-1], self.step, self.step_in_months
        counts = np.arange(1, steps + 1)
        if months:
            return self._dates_in(last.astype("datetime64[M]") + months * counts)
        if step == DAY:
            days = np.busday_offset(self._days[-1], counts, weekmask=self._weekmask)
            return np.asarray(days + (last - self._days[-1]))
        if step is None:
            return self.values[:0]
        return np.asarray(last + (step * counts).astype("timedelta64[s]"))

    def next_dates(self, steps: int) -> list[str]:
        """The dates of the next rows, formatted; an empty list if the step is not known."""
        return self.format(self.next_values(steps))

    def format(self, dates: Iterable[np.datetime64]) -> list[str]:
        """Dates in ISO format; without the time where all rows are at midnight."""
        whole_days = (self.values == self._days).all()
        length = self.iso_length or (DATE_LENGTH if whole_days else TIME_LENGTH)
        return [str(date)[:length].replace("T", " ") for date in dates]
