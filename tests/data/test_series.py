"""Series of numbers: what a table holds, what is left out, and what is refused."""

import gzip
import math
from datetime import date, timedelta

import numpy as np
import pytest

from regard.config import RunConfig, build
from regard.data.series import Series
from regard.errors import ConfigError, DataError
from regard.pipelines import open_data
from regard.pipelines.detect import open_split

TABLE = "date,load,heat\n2016-07-01,1.5,30\n2016-07-02,-2e1,31\n2016-07-03,0.25,29\n"


def write_file(path, content):
    path.write_text(content)
    return str(path)


def test_a_csv_of_numbers_is_a_series_of_its_columns(tmp_path):
    opened = open_data(write_file(tmp_path / "ett.csv", TABLE))
    assert isinstance(opened, Series)
    assert opened.column_names == ("load", "heat")
    np.testing.assert_array_equal(opened.values, [[1.5, 30], [-20, 31], [0.25, 29]])
    np.testing.assert_array_equal(opened.column(None), [30, 31, 29])
    np.testing.assert_array_equal(opened.column("load"), [1.5, -20, 0.25])
    assert opened.description == (
        "series, 3 rows, 2 columns; date: 2016-07-01 to 2016-07-03, one row every day"
    )
    with pytest.raises(ConfigError, match=r"ett.csv, line 1: unknown column 'loads'"):
        opened.index("loads")
    (tmp_path / "zip.csv.gz").write_bytes(gzip.compress(TABLE.encode()))
    assert open_data(str(tmp_path / "zip.csv.gz")).fingerprint() == opened.fingerprint()


def test_a_csv_without_numbers_is_no_series(tmp_path):
    opened = open_data(write_file(tmp_path / "a.csv", "one,two\nthree,four\n"))
    assert opened.kind == "pairs"


def test_validation_rows_come_after_training_rows():
    opened = open_data({"kind": "sines", "examples": 50})
    learned, held = opened.split(0.2)
    np.testing.assert_array_equal(np.concatenate([learned.values, held.values]), opened.values)
    assert len(held) == 10


def test_sines_are_what_they_are_called():
    wave = open_data({"kind": "sines", "examples": 400, "waves": 1, "noise": 0.0}).column(None)
    # any sine obeys x_t = 2 cos(w) x_t-1 - x_t-2
    ratio = (wave[2:] + wave[:-2])[1:] / wave[1:-1][1:]
    assert np.ptp(ratio[np.abs(wave[2:-1]) > 0.1]) < 1e-9
    period = 2 * math.pi / math.acos(np.median(ratio) / 2)
    assert 8 <= period <= 100


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (TABLE + "2016-07-04,,28\n", "line 5: load is '', not a number"),
        (TABLE + "2016-07-04,nan,28\n", "line 5: load is 'nan', not a number"),
        (TABLE + "2016-07-04,1\n", "line 5 has 2 columns, the first line 3"),
        ("a,a\n1,2\n", "two columns named 'a'"),
        (TABLE + "2016-07-03,1,28\n", "line 5: '2016-07-03' has the same date as .*, line 4"),
        (TABLE + "2016-07-01,1,28\n", "line 5: '2016-07-01' is earlier than .*, line 4"),
        (TABLE + "July,1,28\n", "line 5: date is 'July', not a date"),
        (
            "date,load\n"
            + "".join(f"2016-07-{n},{n}.5\n" for n in range(10, 31))
            + "2016-07-31,much\n",
            "line 23: load is 'much', not a number",
        ),
        ("date,load\n2016-07-01,\n2016-07-02,1\n2016-07-03,2\n", "line 2: load is ''"),
    ],
)
def test_what_is_missing_is_named_with_its_line(tmp_path, content, told):
    with pytest.raises(DataError, match=told):
        open_data(write_file(tmp_path / "holes.csv", content))


def test_a_column_that_is_not_there_gets_a_suggestion(tmp_path):
    opened = open_data(write_file(tmp_path / "ett.csv", TABLE))
    with pytest.raises(ConfigError, match="did you mean 'heat'"):
        opened.column("hest")
    with pytest.raises(ConfigError, match="holds series"):
        open_data(str(tmp_path / "ett.csv"), lower=True)


@pytest.mark.parametrize(
    ("rows", "note", "period", "after"),
    [
        ("1,1,1981,20.7\n2,1,1981,17.9\n3,1,1981,18.8\n", "one row every day", 7, "1981-01-04"),
        ("day,month,year,t\n30,1,1981,1\n31,1,1981,2\n", "one row every day", 7, "1981-02-01"),
        (
            "date,x\n2020-01-31,1\n2020-02-29,2\n2020-03-31,3\n",
            "one row per month",
            12,
            "2020-04-30",
        ),
        ("date,x\n2019-12-31,1\n2020-01-31,2\n", "one row per month", 12, "2020-02-29"),
        ("Tag;x\n30.1.1981;1,5\n31.01.1981;2,5\n", "one row every day", 7, "1981-02-01"),
        ("Zeit;x\n1.2.81 ;1\n2.2.81;2\n", "left out: Zeit", None, None),
        ("t;x\n31.12.1980 23:00;1\n01.01.1981 00:00;2\n", "every hour", 24, "1981-01-01 01:00:00"),
        ("date,x\n2020-01-30,1\n2020-02-29,2\n", "one row per month", 12, "2020-03-30"),
        ("date,x\n2020-02-17,1\n2020-03-16,2\n", "every 2,419,200 seconds", None, "2020-04-13"),
        (
            "date,x\n2020-03-31,1\n2020-06-30,2\n2020-09-30,3\n",
            "one row per quarter",
            4,
            "2020-12-31",
        ),
        (
            "date,x\n2020-01-31,1\n2020-02-29,2\n2020-04-30,3\n2020-05-31,4\n",
            "one row per month with 1 gap, the first after line 3",
            12,
            "2020-06-30",
        ),
        (
            "date,x\n2018-01-01,1\n2019-01-01,2\n2020-01-01,3\n2021-01-01,4\n",
            "one row per year",
            None,
            "2022-01-01",
        ),
        (
            "t,x\n2020-01-01 00:00:00,1\n2020-01-01 00:15:00,2\n2020-01-01 00:30:00,3\n"
            "2020-01-01 01:15:00,4\n",
            "one row every 900 seconds with 1 gap, the first after line 4; the rows are "
            "treated as consecutive",
            96,
            "2020-01-01 01:30:00",
        ),
    ],
)
def test_dates_are_read_and_continued(tmp_path, rows, note, period, after):
    opened = open_data(write_file(tmp_path / "a.csv", rows))
    assert len(opened.column_names) == 1
    assert note in opened.description
    if after is None:
        assert opened.dates is None
        return
    assert opened.dates.seasonal_period == period
    assert opened.dates.next_dates(1) == [after]


def test_weekdays_without_rows_are_no_gaps_and_have_no_forecasts(tmp_path):
    """Sales without Sundays: a week has six rows, and Monday follows Saturday."""
    days = [date(2022, 10, 1) + timedelta(days=n) for n in range(63)]  # to Friday, December 2
    rows = "".join(f"{day},{day.day}\n" for day in days if day.weekday() != 6)
    opened = open_data(write_file(tmp_path / "a.csv", "date,sales\n" + rows))
    assert opened.description.endswith("2022-12-02, one row every day except Sunday")
    assert opened.dates.seasonal_period == 6
    assert opened.dates.next_dates(3) == ["2022-12-03", "2022-12-05", "2022-12-06"]
    with_gap = rows.replace("2022-10-11,11\n", "").replace("2022-11-01,1\n", "")
    opened = open_data(write_file(tmp_path / "b.csv", "date,sales\n" + with_gap))
    assert (
        "one row every day except Sunday with 2 gaps, the first after line 9" in opened.description
    )
    short = "".join(line + "\n" for line in rows.splitlines()[:20])
    opened = open_data(write_file(tmp_path / "c.csv", "date,sales\n" + short))
    assert opened.dates.seasonal_period == 7  # too few weeks to tell
    assert "one row every day with 4 gaps" in opened.description


def test_a_series_is_split_into_rows_or_fractions():
    opened = open_data({"kind": "sines", "examples": 50})
    for parts in ([30, 10, 5], [0.6, 0.2, 0.1]):
        train, validation = opened.split_by_sizes(parts)
        assert train.description.endswith("; the first 30 rows for training")
        assert [len(train), len(validation), len(validation.test)] == [30, 10, 5]
        rebuilt = np.concatenate([validation.test.history, validation.test.values])
        np.testing.assert_array_equal(rebuilt, opened.values[:45])
        assert validation.test.training_rows == 30
    for name, value in (("validation", ["b.csv"]), ("validation_fraction", 0.3)):
        data = {"path": {"kind": "sines", "examples": 50}, "split": [30, 10], name: value}
        with pytest.raises(ConfigError, match=rf"so data.{name}=.* would not be used"):
            open_split(build(RunConfig, {"name": "x", "task": "forecast", "data": data}))
    for parts, told in ([[0.5], "two or three"], [[30, 30], "needs 60 rows; sines has 50"]):
        with pytest.raises(ConfigError, match=told):
            opened.split_by_sizes(parts)
