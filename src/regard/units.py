"""Numbers with SI prefixes."""

PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def with_prefix(value: float, unit: str) -> str:
    """A number with an SI prefix and one decimal.

    >>> with_prefix(497_759_232, "B"), with_prefix(24, "B")
    ('497.8 MB', '24 B')
    """
    for factor, prefix in PREFIXES:
        if value >= factor:
            return f"{value / factor:,.1f} {prefix}{unit}"
    return f"{value:.0f} {unit}".rstrip()


def count_noun(count: int, noun: str) -> str:
    """A number and a noun, in the plural unless the number is 1.

    >>> count_noun(1, "row"), count_noun(2000, "row")
    ('1 row', '2,000 rows')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def count_are(count: int, noun: str) -> str:
    """A number and a noun with the form of "to be" that follows them.

    >>> count_are(1, "row"), count_are(2000, "row")
    ('1 row is', '2,000 rows are')
    """
    return f"{count_noun(count, noun)} {'is' if count == 1 else 'are'}"


def format_bytes(size: int) -> str:
    """A number of bytes for a message.

    >>> format_bytes(1_115_394), format_bytes(24)
    ('1.1 MB', '24 bytes')
    """
    return count_noun(size, "byte") if size < 1000 else with_prefix(size, "B")
