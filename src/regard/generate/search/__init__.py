"""Searches: beam search and contrastive search, by the names that `--search` uses."""

from collections.abc import Callable

from regard.config import parse_entry
from regard.errors import ConfigError, unknown
from regard.generate.search.beam_search import BeamSearch
from regard.generate.search.contrastive_search import ContrastiveSearch
from regard.generate.search.protocol import Search

__all__ = ["SEARCHES", "BeamSearch", "ContrastiveSearch", "parse_search"]

# Searches by the name that `--search` takes.
SEARCHES: dict[str, Callable[..., Search]] = {"beam": BeamSearch, "contrastive": ContrastiveSearch}


def parse_search(spec: str) -> Search:
    """Make a search from its name, or from a spec such as `beam=5`.

    The value sets the first setting; a TOML table sets several.

    >>> parse_search("contrastive={k=4, alpha=0.5}")
    ContrastiveSearch(k=4, alpha=0.5)
    >>> parse_search("beam=3").width
    3
    """
    name, equals, _ = spec.partition("=")
    if name not in SEARCHES:
        raise ConfigError(unknown("search", name, SEARCHES))
    return parse_entry(spec, SEARCHES[name]) if equals else SEARCHES[name]()
