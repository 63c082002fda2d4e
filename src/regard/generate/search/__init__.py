"""The table of searches, and how one is written on the command line."""

from collections.abc import Callable

from regard.config import parse_entry
from regard.errors import ConfigError, unknown
from regard.generate.search.beam_search import BeamSearch
from regard.generate.search.contrastive_search import ContrastiveSearch
from regard.generate.search.protocol import Search

SEARCHES: dict[str, Callable[..., Search]] = {"beam": BeamSearch, "contrastive": ContrastiveSearch}


def parse_search(word: str) -> Search:
    """Make a search from its name, or from a word like `beam=5`.

    The value goes to the first setting; a TOML table names several.

    >>> parse_search("contrastive={k=4, alpha=0.5}")
    ContrastiveSearch(k=4, alpha=0.5)
    >>> parse_search("beam=3").width
    3
    """
    name, equals, _ = word.partition("=")
    if name not in SEARCHES:
        raise ConfigError(unknown("search", name, SEARCHES))
    return parse_entry(word, SEARCHES[name]) if equals else SEARCHES[name]()
