"""Series of numbers: what a table holds, what is left out, and what is refused."""

import gzip
import math

import numpy as np
import pytest

from regard.data.series import Series
from regard.errors import ConfigError, DataError
from regard.pipelines import open_data

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
    assert opened.description == "series, 3 rows, 2 columns; left out: date"
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
