"""Series of numbers: what a table holds, what is left out, and what is refused."""

import gzip
import json
import math
from datetime import date, timedelta

import numpy as np
import pytest

from regard.config import RunConfig, build
from regard.data.series import Series, from_columns
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
        # dates in other forms than ISO
        ("day,x\n12/30/2016,1\n12/31/2016,2\n12/31/2016,3\n", "line 4: '12/31/2016' has the same"),
        ("day,x\n30/12/2016,1\n31/12/2016,2\n12/31/2016,3\n", "line 4: day is '12/31/2016', not a"),
        ("year,x\n1990,1\n1991,2\n1991,3\n", "line 4: '1991' has the same date as .*, line 3"),
        ("month,x\n1990-02,1\n1990-01,2\n", "line 3: '1990-01' is earlier than"),
        ("time,x\n1500000000,1\n1500000000,2\n1500000060,2\n", "line 3: '1500000000' has the same"),
        ("date,x\n,1\n2016-07-02,2\n2016-07-03,3\n", "line 2: date is '', not a date"),
        # many missing values
        (
            "date,x\n"
            + "".join(f"2016-07-{n},{'NA' if n % 3 == 1 else n}\n" for n in range(10, 31)),
            r"line 2: x is 'NA', not a number \(as 7 of its 21 cells\)",
        ),
        (
            "date,x\n" + "".join(f"2016-07-{n},{'null' if n % 5 else n}\n" for n in range(10, 31)),
            r"line 3: x is 'null', not a number \(as 16 of its 21 cells\)",
        ),
        (
            "year,x\n" + "".join(f"{n},{'NA' if n % 5 else n / 8}\n" for n in range(1900, 1950)),
            "line 3: x is 'NA'",
        ),
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
        ("date,x\n2020-02-17,1\n2020-03-16,2\n", "one row every 4 weeks", None, "2020-04-13"),
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
            "one row every 15 minutes with 1 gap, the first after line 4; the rows are "
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


@pytest.mark.parametrize(
    ("rows", "told", "after"),
    [
        ("year,x\n1999,1\n2000,4\n2001,2\n", "; year: 1999 to 2001, one row per year", "2002"),
        (
            "year,month,x\n1999,11,1\n1999,12,4\n2000,1,2\n",
            "; month, year: 1999-11 to 2000-01, one row per month",
            "2000-02",
        ),
        (
            "year,month,day,hour,x\n1999,12,31,23,1\n2000,1,1,0,2\n",
            "; day, month, year, hour: 1999-12-31 23:00:00 to 2000-01-01 00:00:00, one row every",
            "2000-01-01 01:00:00",
        ),
        ("m,x\n1999-11,1\n1999-12,4\n2000-01,2\n", "; m: 1999-11 to 2000-01, one row", "2000-02"),
        ("m,x\n1999-01,1\n1999-07,4\n2000-01,2\n", "one row every 6 months", "2000-07"),
        ("year,x\n1980,1\n1990,4\n2000,2\n", "one row every 10 years", "2010"),
        ("d,x\n30/12/1999,1\n31/12/1999,4\n", "; d (day/month/year): 1999-12-30", "2000-01-01"),
        ("d,x\n12/30/1999,1\n12/31/1999,4\n", "; d (month/day/year): 1999-12-30", "2000-01-01"),
        ("d,x\n30-12-1999,1\n31-12-1999,4\n", "; d (day/month/year): 1999-12-30", "2000-01-01"),
        ("d,x\n1999/12/30,1\n1999/12/31,4\n", "; d: 1999-12-30 to 1999-12-31", "2000-01-01"),
        (  # both orders are dates, and only in one the rows are in order
            "d,x\n1/2/1999,1\n2/1/1999,4\n2/2/1999,4\n",
            "; d (month/day/year, since the rows are then in order): 1999-01-02",
            None,
        ),
        (  # the first of each month, or twelve days of January in each year
            "d,x\n" + "".join(f"01/{1 + n % 12:02}/{1999 + n // 12},{n % 5}\n" for n in range(24)),
            "; d (day/month/year, since fewer rows are then missing): 1999-01-01 to 2000-12-01",
            "2001-01-01",
        ),
        (
            "d,x\n01/02/1999,1\n01/03/1999,4\n01/04/1999,2\n",
            "; left out: d (01/02/1999 may be day/month/year or month/day/year: write 2016-12-31)",
            None,
        ),
        (
            "timestamp,x\n1500000000,1\n1500003600,4\n1500007200,2\n",
            "; timestamp (seconds since 1970): 2017-07-14 02:40:00 to",
            "2017-07-14 05:40:00",
        ),
        (
            "when,x\n1500000000000,1\n1500003600000,4\n1500007200000,2\n",
            "; when (milliseconds since 1970): 2017-07-14 02:40:00 to",
            "2017-07-14 05:40:00",
        ),
        ("date,x\n19991230,1\n19991231,4\n", "; date (YYYYMMDD): 1999-12-30", "2000-01-01"),
        (
            "Date;Time;x\n31/12/1999;23:30:00;1\n31/12/1999;23:45:00;1\n01/01/2000;00:00:00;2\n",
            "; Date, Time (day/month/year): 1999-12-31 23:30:00",
            "2000-01-01 00:15:00",
        ),
    ],
)
def test_dates_are_read_in_many_forms(tmp_path, rows, told, after):
    opened = open_data(write_file(tmp_path / "a.csv", rows))
    assert opened.forecast_columns == ["x"]
    assert "rows, 1 column; " in opened.description
    assert told in opened.description
    if after is not None:
        assert opened.dates.next_dates(1) == [after]


@pytest.mark.parametrize(
    ("rows", "left_out"),
    [
        (",x\n0,3\n1,2\n2,4\n", "1 (has no name and counts the rows)"),
        ("1,3\n2,2\n3,4\n", "1 (has no name and counts the rows)"),
        ("id,x\n1,3\n2,2\n3,4\n", "id (counts the rows)"),
        ("Unnamed: 0,date,x\n0,1999-12-30,3\n1,1999-12-31,2\n", "Unnamed: 0 (counts the rows)"),
        ("index,x\n3,3\n7,2\n8,4\n", "index (increases from row to row, as an index)"),
        (
            "year,x\n1999.25,3\n1999.5,2\n1999.75,4\n",
            "year (increases from row to row, as an index)",
        ),
        (
            "year,week,x\n" + "".join(f"1999,{5 - n % 3},{n % 4}\n" for n in range(9)),
            "year (repeats, so it is not the date of a row)",
        ),
        (
            "date,end,x\n1999-12-30,1999-12-31,3\n1999-12-31,2000-01-01,2\n",
            "end (dates as in date)",
        ),
        ("date,place,x\n1999-12-30,a,3\n1999-12-31,a,2\n", "place (text: 'a' in line 2)"),
        (
            "date,x\n12/30/1999 01:00 PM,3\n12/30/1999 02:00 PM,2\n",
            "date (not a date that is understood: '12/30/1999 01:00 PM' in line 2)",
        ),
        (
            "date,y,x\n"
            + "".join(f"1999-12-{n},{'NA' if n % 4 else n},{n}\n" for n in range(10, 30)),
            "y (15 of 20 values are missing)",
        ),
    ],
)
def test_columns_that_are_left_out_are_named_with_the_reason(tmp_path, rows, left_out):
    opened = open_data(write_file(tmp_path / "a.csv", rows))
    assert f"; left out: {left_out}" in opened.description
    assert left_out.split(" (")[0] not in opened.forecast_columns


def test_dates_as_numbers_and_row_numbers_are_forecast_if_they_are_named(tmp_path):
    """As in runs of earlier versions, whose data must not change."""
    rows = "".join(f"{n},{1900 + n},{n % 7}\n" for n in range(40))
    path = write_file(tmp_path / "a.csv", "id,year,x\n" + rows)
    opened = open_data(path)
    assert opened.column_names == ("id", "year", "x")
    assert opened.forecast_columns == ["x"]
    np.testing.assert_array_equal(opened.column("year"), np.arange(1900, 1940))
    only = open_data(write_file(tmp_path / "b.csv", "id\n1\n2\n3\n"))
    assert only.forecast_columns == ["id"]  # there is nothing else to forecast
    both = open_data(write_file(tmp_path / "d.csv", "id,step\n1,2\n2,4\n3,6\n"))
    assert both.forecast_columns == ["id", "step"]
    counter = open_data(
        write_file(tmp_path / "c.csv", "date,total\n1999-01-01,1500000000\n1999-01-02,1500000060\n")
    )
    assert counter.forecast_columns == ["total"]  # the rows have dates already


@pytest.mark.parametrize("name", ["runtime_ns", "response_time", "year"])
def test_numbers_without_order_are_values_although_their_name_is_that_of_a_time(tmp_path, name):
    scale = 1 if name == "year" else 10**6
    values = [(1900 + 7 * n % 20) * scale for n in range(20)]
    rows = "".join(f"2020-01-{10 + n},{value},{n % 3}\n" for n, value in enumerate(values))
    opened = open_data(write_file(tmp_path / "a.csv", f"date,{name},x\n{rows}"))
    assert opened.forecast_columns == [name, "x"]
    if name != "year":  # the years of rows without other dates must be in order
        rows = "".join(f"{value},{n % 3}\n" for n, value in enumerate(values))
        opened = open_data(write_file(tmp_path / "b.csv", f"{name},x\n{rows}"))
        assert opened.forecast_columns == [name, "x"]
        assert opened.dates is None


@pytest.mark.parametrize(
    ("milliseconds", "step"),
    [
        ([700 * n for n in range(30)], None),  # to the second, most would be one second apart
        ([1500 * n for n in range(30)], None),
        ([1000 * n + 40 * (n * n % 5) for n in range(30)], 1),  # a second, not measured exactly
        ([60_000 * n + 100 * (n * n % 5) for n in range(30)], 60),
    ],
)
def test_a_step_is_in_whole_seconds_or_not_known(tmp_path, milliseconds, step):
    rows = "".join(f"{1_500_000_000_000 + ms},{n % 7}\n" for n, ms in enumerate(milliseconds))
    opened = open_data(write_file(tmp_path / "a.csv", f"timestamp,x\n{rows}"))
    assert opened.dates.step == step
    assert not step or not len(opened.dates.gaps)


def test_a_gap_is_located_in_its_file(tmp_path):
    days = [date(2020, 1, 1) + timedelta(days=n) for n in range(60) if n != 20]
    records = [{"date": str(day), "sales": day.day} for day in days]
    opened = open_data(write_file(tmp_path / "a.json", json.dumps(records)))
    assert "with 1 gap, the first after row 20; " in opened.description
    folder = tmp_path / "parts"
    folder.mkdir()
    for name, part in (("a.csv", days[:10]), ("b.csv", days[10:])):
        write_file(folder / name, "date,sales\n" + "".join(f"{day},{day.day}\n" for day in part))
    opened = open_data(str(folder))
    assert f"with 1 gap, the first after {folder / 'b.csv'}, line 11; " in opened.description


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
    train, validation = opened.split_by_sizes([30, 10, 5])
    assert validation.description.endswith("5 rows for testing; the last 5 rows are not used")
    for parts, told in (
        [[0.5], "two or three"],
        [[30, 30], r"data.split=\[30, 30\] needs 60 rows, and sines has 50;\ngive fewer"],
    ):
        with pytest.raises(ConfigError, match=told):
            opened.split_by_sizes(parts)


@pytest.mark.parametrize(
    ("rows", "sizes", "told"),
    [
        (17_420, [8640, 2880, 2880], ", the usual split of ETT"),
        (69_680, [34_560, 11_520, 11_520], ", the usual split of ETT"),
        (1500, [900, 300, 300], ", 60 %, since these are not the 17,420 or 69,680 rows of ETT"),
        (1503, [902, 301, 300], ", 60 %"),  # rounded, 301 rows for testing would be one too many
    ],
)
def test_the_split_of_ett_is_in_proportion_for_other_tables(rows, sizes, told):
    data = {"path": {"kind": "sines", "examples": rows}, "split": "ett"}
    config = build(RunConfig, {"name": "x", "task": "forecast", "data": data})
    train, validation = open_split(config)
    assert [len(train), len(validation), len(validation.test)] == sizes
    assert told in train.description
    with pytest.raises(ConfigError, match=r"data.split must be a list or 'ett', not 'etth'"):
        build(RunConfig, {"name": "x", "data": {"split": "etth"}})


@pytest.mark.parametrize("size", [float("nan"), float("inf"), 0.0])
def test_the_sizes_of_a_split_are_finite_numbers_above_0(size):
    series = from_columns("s", "", {"x": range(40)})
    for sizes in ([size, 0.2], [0.5, 0.2, size]):
        with pytest.raises(ConfigError, match="must be two or three numbers above 0"):
            series.split_by_sizes(sizes)
