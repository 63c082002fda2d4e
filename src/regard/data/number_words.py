"""Numbers in words, in English and in French, up to 999,999."""

_ENGLISH = str.split(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
)
_ENGLISH_TENS = str.split(". ten twenty thirty forty fifty sixty seventy eighty ninety")
_FRENCH = str.split(
    "zéro un deux trois quatre cinq six sept huit neuf dix onze douze treize quatorze quinze "
    "seize dix-sept dix-huit dix-neuf"
)
_FRENCH_TENS = str.split(". dix vingt trente quarante cinquante soixante")


def english(number: int) -> str:
    """A number in American English: no "and", a hyphen between tens and units.

    >>> english(999_201)
    'nine hundred ninety-nine thousand two hundred one'
    """
    if number < 20:
        return _ENGLISH[number]
    if number < 100:
        tens, units = divmod(number, 10)
        return _ENGLISH_TENS[tens] + (f"-{_ENGLISH[units]}" if units else "")
    base, word = (1000, "thousand") if number >= 1000 else (100, "hundred")
    count, remainder = divmod(number, base)
    return f"{english(count)} {word}" + (f" {english(remainder)}" if remainder else "")


def french(number: int) -> str:
    """A number in the traditional French spelling.

    "et" joins 21, 31, 41, 51, 61 and 71; other tens and units have a hyphen; `vingt` and `cent`
    take an s when multiplied and last, but not before `mille`; `mille` never changes and has
    no "un" before it.

    >>> french(80), french(81), french(80_000), french(1071)
    ('quatre-vingts', 'quatre-vingt-un', 'quatre-vingt mille', 'mille soixante et onze')
    """
    if number >= 1000:
        count, remainder = divmod(number, 1000)
        thousands = "mille" if count == 1 else f"{_french_below_1000(count)} mille"
        return f"{thousands} {french(remainder)}" if remainder else thousands
    words = _french_below_1000(number)
    plural = number % 100 == 80 or (number > 100 and number % 100 == 0)
    return words + "s" if plural else words


def _french_below_1000(number: int) -> str:
    """A number below 1000 in French words, without the plural s."""
    if number >= 100:
        count, remainder = divmod(number, 100)
        hundreds = "cent" if count == 1 else f"{_FRENCH[count]} cent"
        return f"{hundreds} {_french_below_1000(remainder)}" if remainder else hundreds
    if number < 20:
        return _FRENCH[number]
    if number >= 80:
        return "quatre-vingt" + (f"-{_FRENCH[number - 80]}" if number > 80 else "")
    tens = min(number // 10, 6)  # 70 to 79 count on from sixty: sixty-ten, sixty and eleven
    units = number - 10 * tens
    if units == 0:
        return _FRENCH_TENS[tens]
    return _FRENCH_TENS[tens] + (" et " if units in (1, 11) else "-") + _FRENCH[units]
