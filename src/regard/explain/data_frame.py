"""Tables for pandas, which is imported when a table is made."""

from typing import TYPE_CHECKING, Any

from regard.errors import ConfigError

if TYPE_CHECKING:
    from pandas import DataFrame


def data_frame(rows: Any, **options: Any) -> "DataFrame":
    """A `pandas.DataFrame`; without pandas, an error that says how to install it."""
    try:
        import pandas
    except ModuleNotFoundError:
        raise ConfigError("to_pandas needs pandas: pip install pandas") from None
    return pandas.DataFrame(rows, **options)
